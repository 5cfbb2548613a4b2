"""Prune removes bodies and journal of what ended long ago, and nothing that a late caller could still hit."""

from __future__ import annotations

import msgspec
import pytest

from fencepost.kernel.digests import encode
from fencepost.kernel.records import Checkpoint, LogEntry, Request, State, Task
from fencepost.stores import sqlite_prune
from fencepost.stores.base import REQUEST_RETENTION_US
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, event, insert, loading, result, staged, task, writes

change = msgspec.structs.replace


async def _ended(store: SQLiteStore, task_id: str, state: State, at: int) -> Task:
    """A task with everything that can hang on one, whose last event is at `at`."""
    first = task(task_id, state=int(state), state_version=2, attempt_id="x", claim_generation=1)
    made = insert(first, at=1)
    made.events[:] = [event(change(first, state_version=1), 1), event(first, at, "result_committed")]
    made.staged += [staged(task_id, 1, "one"), staged(task_id, 1, "two")]
    made.checkpoints.append(Checkpoint(task_id, 1, 1, 1, encode("cp")))
    if state == State.COMMITTED:
        made.results.append(result(first, encode("done"), at=at))
    assert await store.run(applying(made)) == [True]
    return first


async def test_a_committed_task_keeps_its_record_and_its_result_commit(store: SQLiteStore) -> None:
    before = await _ended(store, "a", State.COMMITTED, 50)
    removed = await store.prune(100, 10)
    assert removed["tasks"] == 1 and removed["events"] == 2 and removed["inputs"] == 1
    assert removed["staged"] == 2 and removed["checkpoints"] == 1
    left = await store.history("a")
    assert left is not None and left.task == change(before, pruned_to_version=2)
    assert left.events == [] and left.input is None and left.staged == [] and left.checkpoint is None
    assert left.result is not None and left.result.content is None
    assert left.result.result_digest == encode("done").digest and left.result.result_commit_id == "rc-a"
    assert (await store.prune(100, 10))["tasks"] == 0


async def test_a_cancelled_task_keeps_what_a_reopened_one_needs(store: SQLiteStore) -> None:
    await _ended(store, "a", State.CANCELLED, 50)
    assert (await store.prune(100, 10))["tasks"] == 1
    left = await store.history("a")
    assert left is not None and left.input is not None and left.checkpoint is not None
    assert left.events == [] and left.staged == []


@pytest.mark.parametrize("state", [State.READY, State.CLAIMED, State.BLOCKED, State.PARKED])
async def test_what_is_not_over_is_left_alone(store: SQLiteStore, state: State) -> None:
    before = await _ended(store, "a", state, 50)
    assert (await store.prune(100, 10))["tasks"] == 0
    left = await store.history("a")
    assert left is not None and left.task == before and len(left.events) == 2 and left.input is not None


async def test_what_ended_lately_is_left_alone_however_old_its_first_event(store: SQLiteStore) -> None:
    await _ended(store, "a", State.COMMITTED, 100)
    assert (await store.prune(100, 10))["tasks"] == 0
    assert (await store.prune(101, 10))["tasks"] == 1


async def test_at_most_so_many_tasks_at_once_and_all_of_them_in_the_end(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_prune, "STEP", 7)
    for i in range(12):
        await _ended(store, f"alive{i}", State.READY, 5)
        await _ended(store, f"over{i}", State.COMMITTED, 50)
    assert [(await store.prune(100, 5))["tasks"] for _ in range(4)] == [5, 5, 2, 0]
    assert {n.entry.task_id for n in await store.events(0, 100)} == {f"alive{i}" for i in range(12)}


async def test_log_entries_go_by_age(store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_prune, "STEP", 3)
    await store.run(applying(log=[LogEntry("usage", at, None, None, "usage") for at in range(1, 11)]))
    assert (await store.prune(9, 10))["log"] == 8
    assert [n.entry.at for n in await store.log(0, 100)] == [9, 10]


async def test_request_ids_go_once_their_ten_minutes_are_over(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_prune, "STEP", 3)
    now = await store.clock()
    made = writes()
    made.requests += [Request(f"old{i}", "o", "claim", now - 3 * REQUEST_RETENTION_US, {}) for i in range(10)]
    made.requests += [Request(f"new{i}", "o", "claim", now - REQUEST_RETENTION_US + 60_000_000, {}) for i in range(5)]
    await store.run(applying(made))
    assert (await store.prune(0, 10))["requests"] == 10
    assert len((await store.run(loading(requests=[f"new{i}" for i in range(5)]))).requests) == 5


async def test_numbers_are_never_given_twice_whatever_is_pruned(store: SQLiteStore) -> None:
    await _ended(store, "a", State.COMMITTED, 50)
    before = (await store.last_numbers())[0]
    await store.prune(100, 10)
    assert await store.events(0, 10) == []
    await store.run(applying(insert(task("b"))))
    assert [n.number for n in await store.events(0, 10)] == [before + 1]


async def test_pruning_gives_others_their_turn_between_its_transactions(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.setattr(sqlite_prune, "STEP", 2)
    await store.run(applying(log=[LogEntry("usage", 1, None, None, "usage") for _ in range(200)]))
    pruning = asyncio.create_task(store.prune(9, 10))
    turns = 0
    while not pruning.done():
        await store.run(loading())
        turns += 1
    assert (await pruning)["log"] == 200 and turns > 20
