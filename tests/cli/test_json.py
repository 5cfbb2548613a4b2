"""The shapes of `--json`: programs rely on them, so a key that goes, or comes, is a decision and not an accident."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost import connect
from tests.cli.running import Folder


def words(text: str) -> set[str]:
    return set(text.split())


TASK = words(
    "task_id pool queue kind state revision state_version generation cancel_generation epoch priority available_at "
    "created_at input_digest charged_attempts max_attempts deps_remaining node_id graph_id owner_id attempt end "
    "claimed_at lease_expires_at result_commit_id park_reason unreachable depends_on input pruned_to_version"
)
EVENT = words(
    "cursor at accepted name door pool task_id state_version epoch generation cancel_generation attempt compared state "
    "outcome reason detail count"
)
ATTEMPT = words(
    "task_id generation attempt epoch cancel_generation revision owner_id started_at ended_at end error renewals usage"
)
RESULT = words(
    "task_id value result_digest result_commit_id revision generation attempt committed_at parents pruned outcome "
    "reason"
)
POOL = {"name", "epoch", "state_version", "intake", "stage", "min_protocol", "policy"}
POLICY = words("max_ttl max_claim_age max_attempts backoff_base backoff_max backoff_jitter reclaim_grace retention")
DONE = {"outcome", "task_id", "state", "state_version", "changed", "info", "reason"}
CHANGED = {"outcome", "pool", "changed", "reason"}
SUBMITTED = {"submitted", "created", "tasks", "results"}
COVERAGE = {"door", "accepted", "changes", "ratio", "incomplete"}


@pytest.fixture
async def world(folder: Folder) -> Folder:
    """One committed task with a staged rival, one that waits for it, one that is ready."""
    folder.ok("submit", "--input", '{"x": 1}', "--task-id", "a", "--priority", "-5")
    folder.ok("submit", "--input", "2", "--task-id", "b", "--depends-on", "a")
    folder.ok("submit", "--input", "3", "--task-id", "c")
    async with await connect(folder.url) as client:
        claims = await client.claim_next(owner="worker-a")
        assert isinstance(claims, list)
        assert claims[0].task_id == "a"
        await client.stage(claims[0], {"draft": 1})
        await client.checkpoint(claims[0], {"at": 1}, number=1)
        await client.commit(claims[0], {"words": 3}, usage={"tokens": 12})
    return folder


def keys(found: Any) -> set[str]:
    return set(found.keys())


async def test_the_commands_that_look(world: Folder) -> None:
    assert keys(world.json("result", "a")) == RESULT
    assert world.json("result", "a")["value"] == {"words": 3}

    page = world.json("tasks", "--limit", "2")
    assert keys(page) == {"items", "next_cursor"}
    assert [keys(task) for task in page["items"]] == [TASK, TASK]
    rest = world.json("tasks", "--limit", "2", "--cursor", page["next_cursor"])
    assert [task["task_id"] for task in page["items"] + rest["items"]] == ["a", "b", "c"]
    assert rest["next_cursor"] is None

    shown = world.json("show", "a")
    assert keys(shown) == words(
        "task attempts timeline staged result canonical conflict lineage successors truncated effects"
    )
    assert keys(shown["task"]) == TASK
    assert [keys(attempt) for attempt in shown["attempts"]] == [ATTEMPT]
    assert {frozenset(event) for event in shown["timeline"]} == {frozenset(EVENT)}
    assert {frozenset(staged) for staged in shown["staged"]} == {
        frozenset({"generation", "attempt", "digest", "state", "staged_at", "value"})
    }
    assert keys(shown["result"]) == RESULT
    assert shown["successors"] == ["b"]
    assert [event["name"] for event in shown["timeline"] if event["accepted"]][-1] == "result_committed"

    events = world.run("watch", "--once", "--json").splitlines()
    assert len(events) >= 6


async def test_the_commands_that_report(world: Folder) -> None:
    status = world.json("status")
    assert keys(status) == words(
        "at pool claims reclaim_delay renew fenced attempts_per_task discarded_compute ready_to_commit replays alarms "
        "backlog coverage coverage_left_out unserved unreachable effects"
    )
    assert {frozenset(row) for row in status["coverage"]} == {frozenset(COVERAGE)}

    audit = world.json("audit")
    assert keys(audit) == words(
        "clean at tasks events attempts results staged pools pruned_tasks checks coverage violations violation_count"
    )
    assert audit["clean"] is True
    assert {frozenset(check) for check in audit["checks"]} == {
        frozenset({"invariant", "says", "checked", "unit", "violations"})
    }

    doctor = world.json("doctor")
    assert keys(doctor) == {"ok", "checks"}
    assert {frozenset(check) for check in doctor["checks"]} == {frozenset({"name", "verdict", "says"})}
    assert doctor["ok"] is True

    assert keys(world.json("prune", "--older-than", "0")) == {"removed"}
    migration = world.json("migrate", "status")
    assert keys(migration) == {"items", "pending"}
    assert {frozenset(step) for step in migration["items"]} == {frozenset({"version", "step", "name", "applied_at"})}
    assert world.json("migrate") == {"applied": [], "dry_run": False}
    assert keys(world.json("explain", "FENCED")["items"][0]) == {"code", "kind", "what", "todo"}


async def test_the_commands_that_decide(world: Folder) -> None:
    for arguments in (
        ("cancel", "c"),
        ("reopen", "c"),
        ("revise", "c", "--input", "4"),
    ):
        assert keys(world.json(*arguments)) == DONE, arguments
    async with await connect(world.url) as client:
        claims = await client.claim_next(owner="worker-b", limit=2)
        assert isinstance(claims, list)
        await client.stage(claims[0], "draft")
        assert claims[0].generation == 1
        await client.expire("b")
    assert keys(world.json("discard", claims[0].task_id, "--generation", "1")) == DONE
    assert keys(world.json("take-over", claims[0].task_id)) == DONE

    pool = world.json("pool", "show")
    assert keys(pool) == POOL
    assert keys(pool["policy"]) == POLICY
    assert world.json("pool") == pool
    assert keys(world.json("pool", "list")) == {"items"}
    for arguments in (
        ("create", "second", "max_attempts=2"),
        ("close-intake",),
        ("raise-epoch", "--yes"),
        ("open-intake",),
        ("policy", "max_attempts=3"),
    ):
        changed = world.json("pool", *arguments)
        assert keys(changed) == CHANGED, arguments
        assert keys(changed["pool"]) == POOL
    assert keys(world.json("pool", "policy")) == POOL
    assert keys(world.json("submit", "--input", "1")) == SUBMITTED


async def test_json_before_the_commands_name_is_the_same(world: Folder) -> None:
    out = world.run("--json", "--store", world.url, "tasks")
    assert out == world.run("tasks", "--json")


def test_times_are_iso_8601_in_utc_and_bytes_are_marked(folder: Folder) -> None:
    folder.ok("submit", "--input", '"x"', "--task-id", "a")
    folder.ok("work", "--until-idle", "--result", "bytes", "--", "printf", "\\377\\001")
    found = folder.json("result", "a")
    assert found["value"] == {"$bytes": "/wE="}
    assert found["committed_at"].endswith("Z")
    assert "T" in found["committed_at"]
