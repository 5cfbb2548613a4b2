"""The published numbers: each from records, journal and log, with the denominator that it states."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.service.coverage import Coverage
from fencepost.service.numbers import _spread, numbers
from fencepost.stores.base import Store, TaskFilter
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SQLiteStore
from fencepost.wire import NewTask, Outcome, Renewed
from tests.service.lives import claim, client_of, expire, live


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    yield made
    await made.close()


@pytest.fixture
async def client(store: MemoryStore) -> AsyncIterator[Client]:
    made = await client_of(store)
    yield made
    await made.close()


async def status(client: Client, **arguments: Any) -> dict[str, Any]:
    found = await client.backend.report("status", **arguments)
    assert msgspec.json.decode(msgspec.json.encode(found)), "has a JSON form"
    return dict(found)


async def test_an_empty_store_has_no_rates(client: Client) -> None:
    found = await status(client)
    assert found["claims"] == {"granted": 0, "held": 0, "conflict": 0, "contention_rate": None}
    assert found["renew"]["failure_rate"] is None
    assert found["ready_to_commit"] == {"count": 0, "p50": None, "p95": None, "p99": None, "max": None}
    assert found["backlog"] == []
    assert all(row["ratio"] is None for row in found["coverage"])


async def test_contention_is_held_and_conflict_over_all_claims_for_a_task_that_was_named(client: Client) -> None:
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(3)])
    await claim(client, "t0")
    held = await client.claim("t0", expected_state_version=2, owner="bob")
    assert held.outcome is Outcome.HELD
    for _ in range(2):
        late = await client.claim("t0", expected_state_version=1, owner="bob")
        assert late.outcome is Outcome.CONFLICT
    await client.claim_next(owner="bob")
    found = (await status(client))["claims"]
    assert found == {"granted": 2, "held": 1, "conflict": 2, "contention_rate": 3 / 5}


async def test_reclaim_delay_is_the_time_from_the_leases_end_to_the_end_of_the_attempt(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(3)])
    await claim(client, "t2", ttl=1.0)
    store.advance(9.0)
    await client.take_over("t2")  # a person did it, at a time of their own
    await claim(client, "t0", ttl=1.0)
    store.advance(4.0)
    await expire(client, "t0")  # by the loop's door
    await claim(client, "t1", ttl=1.0)
    store.advance(71.0)
    await claim(client, "t1", owner="bob")  # by a claim in passing
    await client.take_over("t1")  # no lease ran out here
    found = (await status(client))["reclaim_delay"]
    assert found["count"] == 2
    assert found["p50"] == pytest.approx(3.0, abs=0.5)
    assert found["max"] == pytest.approx(70.0, abs=0.5)
    assert [(bucket["le"], bucket["count"]) for bucket in found["histogram"] if bucket["count"]] == [
        (5.0, 1),
        (300.0, 1),
    ]


async def test_renews_are_counted_with_what_refused_them_late_ones_and_near_misses(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(2)])
    first = await claim(client, "t0", ttl=10.0)
    assert isinstance(await client.renew(first), Renewed)
    store.advance(9.0)
    await client.renew(first)  # 1 s of 10 left
    store.advance(11.0)
    await client.renew(first)  # 1 s too late, and nobody had used it
    await client.release(first)
    await client.renew(first)
    other = await claim(client, "t1")
    await client.cancel("t1")
    await client.renew(other)
    found = (await status(client))["renew"]
    assert found == {
        "renewed": 3,
        "refused": 2,
        "failure_rate": 2 / 5,
        "by_reason": {"ENDED/RELEASED": 1, "CANCELLED": 1},
        "late": 1,
        "near_misses": 1,
    }


async def test_a_renew_that_repeats_one_request_counts_once(client: Client) -> None:
    await client.submit(NewTask(1, task_id="t"))
    held = await claim(client, "t")
    for _ in range(3):
        await client.renew(held, request_id="the-same")
    found = await status(client)
    assert found["renew"]["renewed"] == 1
    assert found["replays"] == 2


async def test_fenced_is_counted_by_door_and_reason_and_ended_is_not_fenced(client: Client) -> None:
    await live(client)
    found = {(row["door"], row["reason"]): row["count"] for row in (await status(client))["fenced"]}
    # `lost`: the first owner's renew and commit; `spawned`: a renew after the raise. The cancelled one's commit is
    # CANCELLED, the revised one's renew STALE_INPUT.
    assert found == {("renew", "GENERATION"): 1, ("commit", "GENERATION"): 1, ("renew", "EPOCH"): 1}


async def test_attempts_per_task_are_a_histogram_at_commit_and_the_highest_still_open(client: Client) -> None:
    await live(client)
    for _ in range(3):
        await client.release(await claim(client, "released"))
    found = (await status(client))["attempts_per_task"]
    assert found == {"at_commit": {"1": 3, "2": 2}, "highest_open": 4, "highest_open_task": "released"}


async def test_discarded_compute_is_what_losers_reported_and_wall_time_where_they_reported_nothing(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(3)])
    silent = await claim(client, "t0")
    store.advance(5.0)
    await client.release(silent)
    told = await claim(client, "t1")
    store.advance(100.0)
    await client.fail(told, "no", usage={"tokens": 5, "usd": 0.25})
    await client.usage(told, tokens=2)  # after its end, too
    winner = await claim(client, "t2")
    await client.commit(winner, 1, usage={"tokens": 1000})
    found = (await status(client))["discarded_compute"]
    assert found["attempts"] == 2
    assert found["usage"] == {"tokens": 7, "usd": 0.25}
    assert found["unreported"] == 1
    assert found["wall"] == pytest.approx(5.0, abs=0.5)


async def test_ready_to_commit_runs_from_the_first_ready_of_the_committed_revision(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(1, task_id="parent"), NewTask(2, task_id="child", depends_on=["parent"])])
    store.advance(10.0)
    await client.commit(await claim(client, "parent"), 1)
    store.advance(2.0)
    await client.commit(await claim(client, "child"), 1)
    found = (await status(client))["ready_to_commit"]
    assert found["count"] == 2
    assert found["p50"] == pytest.approx(2.0, abs=0.5)
    assert found["p99"] == found["max"] == pytest.approx(10.0, abs=0.5)


async def test_percentiles_are_by_nearest_rank() -> None:
    found = _spread(array("q", [n * 1_000_000 for n in range(1, 101)]))
    assert (found["p50"], found["p95"], found["p99"], found["max"]) == (50.0, 95.0, 99.0, 100.0)


async def test_backlog_shows_each_lane_by_state_and_how_long_its_oldest_claimable_task_waits(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(1, task_id="a", kind="k"), NewTask(1, queue="q", delay=1000.0)])
    store.advance(7.0)
    await client.submit(NewTask(1, kind="k"))
    lanes = {(row["queue"], row["kind"]): row for row in (await status(client))["backlog"]}
    assert lanes["default", "k"]["states"] == {"READY": 2}
    assert lanes["default", "k"]["oldest_ready_age"] == pytest.approx(7.0, abs=0.5)
    assert lanes["q", "default"]["oldest_ready_age"] is None  # its time has not come


async def test_a_released_successor_has_waited_since_its_last_parent_committed(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(1, task_id="parent"), NewTask(2, task_id="child", depends_on=["parent"])])
    store.advance(50.0)
    await client.commit(await claim(client, "parent"), 1)
    store.advance(3.0)
    (lane,) = (await status(client))["backlog"]
    assert lane["oldest_ready_age"] == pytest.approx(3.0, abs=0.5)


async def test_a_kind_that_nobody_can_do_is_named_once_it_waited_long_enough(
    store: MemoryStore, client: Client
) -> None:
    await client.submit_many([NewTask(n, kind=kind) for n in range(2) for kind in ("done", "busy", "strange")])
    assert (await status(client))["unserved"] == []
    store.advance(400.0)
    (held,) = await client.claim_next(owner="ann", kinds=["done"])
    await client.commit(held, 1)
    await client.claim_next(owner="ann", kinds=["busy"], ttl=3000.0)
    (row,) = (await status(client))["unserved"]
    assert (row["kind"], row["ready"]) == ("strange", 2)
    assert row["oldest_ready_age"] == pytest.approx(400.0, abs=1.0)
    store.advance(400.0)
    assert [row["kind"] for row in (await status(client))["unserved"]] == ["done", "strange"]
    assert (await status(client, unserved_after=3600.0))["unserved"] == []


async def test_tasks_behind_a_halted_parent_are_counted_as_unreachable(client: Client) -> None:
    await live(client)
    assert (await status(client))["unreachable"] == 1
    await client.reopen("final")
    assert (await status(client))["unreachable"] == 0


async def test_coverage_is_100_percent_on_every_door_and_falls_without_one_comparison(store: MemoryStore) -> None:
    client = await client_of(store)
    await live(client, effects=True)
    assert {row["ratio"] for row in (await status(client))["coverage"]} == {1.0}
    weak = await client_of(store, Kernel().without(k.Renew, "fence:granted-under-older-epoch:fenced"))
    assert isinstance(await weak.renew(await claim(weak, "released")), Renewed)
    rows = {row["door"]: row for row in (await status(client))["coverage"]}
    assert rows["other"]["ratio"] < 1.0
    assert rows["other"]["incomplete"] == {"renew": 1}
    await weak.close()
    await client.close()


async def test_an_event_without_its_comparison_shows_even_where_more_events_than_records_were_read() -> None:
    store = MemoryStore()
    client = await client_of(store)
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(2)])
    coverage = Coverage()
    coverage.record((await store.tasks(TaskFilter(), None, 1))[0])  # the other one was submitted after this was read
    first, second = (numbered.entry for numbered in await store.events(0, 10))
    coverage.event(first)
    coverage.event(msgspec.structs.replace(second, compared=0))
    (row,) = [row for row in coverage.rows() if row.door == "submit"]
    assert (row.accepted, row.changes, row.ratio) == (1, 1, 0.0)
    await client.close()


async def test_pruned_tasks_are_on_neither_side_of_the_coverage(store: MemoryStore, client: Client) -> None:
    await live(client)
    await client.cancel("failed")
    await store.prune(await store.clock() + 1, 100)
    await client.reopen("failed")  # its later events are left, its earlier ones are not
    await client.commit(await claim(client, "failed"), 1)
    found = await status(client)
    assert found["coverage_left_out"] > 0
    assert {row["ratio"] for row in found["coverage"]} <= {1.0, None}
    assert all(row["accepted"] == row["changes"] for row in found["coverage"])


async def test_one_pool_can_be_asked_for_alone(client: Client) -> None:
    await live(client)
    await client.submit(NewTask(1, task_id="elsewhere", pool="other"))
    found = await status(client, pool="other")
    assert found["claims"]["granted"] == 0
    assert [row["pool"] for row in found["backlog"]] == ["other"]
    changes = {row["door"]: row["changes"] for row in found["coverage"]}
    assert (changes["submit"], changes["pool"]) == (1, 0)
    assert found["fenced"] == []


async def test_without_coverage_the_other_numbers_are_the_same(client: Client) -> None:
    await live(client)
    whole, quick = await status(client), await status(client, coverage=False)
    assert "coverage" not in quick
    for name in ("claims", "renew", "fenced", "attempts_per_task", "discarded_compute", "unreachable"):
        assert quick[name] == whole[name]


async def test_a_restart_loses_no_number(tmp_path: Path) -> None:
    path = str(tmp_path / "numbers.db")
    first: Store = await SQLiteStore.open(path)
    client = await client_of(first)
    await live(client)
    before = await status(client)
    await client.close()
    second = await SQLiteStore.open(path)
    after = await numbers(second)
    await second.close()
    moving = ("at", "backlog", "unserved")
    assert {name: value for name, value in after.items() if name not in moving} == {
        name: value for name, value in before.items() if name not in moving
    }


@pytest.mark.parametrize(("arguments", "field"), [({"pool": ""}, "pool"), ({"unserved_after": -1}, "unserved_after")])
async def test_a_bad_argument_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await numbers(MemoryStore(), **arguments)
    assert caught.value.field == field
