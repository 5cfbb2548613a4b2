"""A commit that says what its attempt has used goes the fast way, and leaves in the log what the slow way leaves."""

from __future__ import annotations

import pytest

from fencepost.kernel.records import LogEntry
from fencepost.kernel.writes import WriteSet
from fencepost.stores import postgres_swift as swift
from fencepost.stores.postgres import PostgresStore
from tests.postgres.test_applying import change, claimed, committed
from tests.stores.building import applying, insert, task


def used(name: str, seconds: float, at: int = 9) -> tuple[WriteSet, WriteSet]:
    """A claim, and a commit with an entry of usage."""
    claim = claimed(task(name), f"r-{name}")
    commit = committed(claim.tasks[0].task, at)
    after = commit.tasks[0].task
    commit.log.append(
        LogEntry(
            "usage",
            at,
            "default",
            name,
            "usage",
            "RECORDED",
            None,
            f"short-{name}",
            after.claim_generation,
            {"usage": {"seconds": seconds}},
        )
    )
    return claim, commit


@pytest.mark.parametrize("way", ["fast", "slow"])
async def test_what_was_used_stands_in_the_log_once_for_each_that_was_won(
    store: PostgresStore, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [used(f"t{i}", i + 0.5) for i in range(4)]
    await store.run(applying(insert(*(task(f"t{i}") for i in range(4)))))
    assert all(await store.run(applying(*(claim for claim, _ in sets))))
    commits = [commit for _, commit in sets]
    groups, others = swift.sort(commits)
    assert others == [] and [group.shape for group in groups] == [swift.COMMIT_USED]
    commits[2].tasks[0] = change(commits[2].tasks[0], expected_version=7, task=change(
        commits[2].tasks[0].task, state_version=8))  # fmt: skip
    commits[2].events[0] = change(commits[2].events[0], state_version=8)
    if way == "slow":
        monkeypatch.setattr("fencepost.stores.postgres.sort", lambda sets: ([], sets))

    assert await store.run(applying(*commits)) == [True, True, False, True]

    entries = [found.entry for found in await store.log(0, 100, kinds=["usage"])]
    assert entries == [commits[i].log[0] for i in (0, 1, 3)]


@pytest.mark.parametrize("wrong", [{"reason": "R"}, {"at": 8}, {"task_id": "other"}, {"generation": 5}, {"count": 2}])
async def test_an_entry_that_does_not_fit_the_commit_takes_the_slow_way(wrong: dict[str, object]) -> None:
    _, commit = used("t", 1.0)
    commit.log[0] = change(commit.log[0], **wrong)

    assert swift.sort([commit]) == ([], [commit])
