"""A claim of many tasks, as the kernel writes it for one request: the fast way, all of them or none."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fencepost.kernel.records import Request, Task
from fencepost.kernel.writes import WriteSet
from fencepost.stores import postgres_swift as swift
from fencepost.stores.postgres import PostgresStore
from tests.postgres.conftest import Open
from tests.postgres.test_applying import claimed
from tests.stores.building import applying, event, insert, loading, task

change = msgspec.structs.replace


def claimed_together(tasks: list[Task], request_id: str, at: int, owner: str = "ow") -> WriteSet:
    made = claimed(tasks[0], request_id, at, owner=owner)
    for one in tasks[1:]:
        other = claimed(one, request_id, at, owner=owner)
        made.tasks += other.tasks
        made.events += other.events
    answer = {"claims": [[write.task.task_id, write.task.claim_generation, "x"] for write in made.tasks]}
    made.requests[0] = Request(request_id, owner, "claim", at, answer)
    return made


async def test_it_goes_the_fast_way_and_comes_back_as_it_was_written(store: PostgresStore) -> None:
    tasks = [task(f"t{i}") for i in (3, 1, 2, 0)]
    await store.run(applying(insert(*tasks)))
    now = await store.clock()
    made, alone = claimed_together(tasks[:3], "r-many", now), claimed(tasks[3], "r-one", now)
    groups, others = swift.sort([made, alone])
    assert [group.shape for group in groups] == [swift.CLAIM_MANY, swift.CLAIM] and others == []
    assert await store.run(applying(made, alone)) == [True, True]
    ids = [one.task_id for one in tasks]
    found = await store.run(loading(tasks=ids, requests=["r-many", "r-one"]))
    assert found.tasks == {write.task.task_id: write.task for write in (*made.tasks, *alone.tasks)}
    assert found.requests == {"r-many": made.requests[0], "r-one": alone.requests[0]}
    for one, written in zip(ids, (*made.events, *alone.events), strict=True):
        history = await store.history(one)
        assert history is not None and history.events[1:] == [written]


@pytest.mark.parametrize("place", [0, 2])
async def test_one_task_that_moved_loses_all_of_them(store: PostgresStore, place: int) -> None:
    tasks = [task(f"t{i}") for i in range(4)]
    await store.run(applying(insert(*tasks)))
    now = await store.clock()
    seen = [change(one, state_version=5) if i == place else one for i, one in enumerate(tasks[:3])]
    sets = [claimed_together(seen, "r-lost", now), claimed(tasks[3], "r-won", now)]
    assert await store.run(applying(*sets)) == [False, True]
    found = await store.run(loading(tasks=["t0", "t1", "t2"], requests=["r-lost", "r-won"]))
    assert found.tasks == {one.task_id: one for one in tasks[:3]} and set(found.requests) == {"r-won"}
    assert len((await store.history("t1")).events) == 1  # type: ignore[union-attr]


async def test_an_epoch_that_was_raised_loses_all_of_them(store: PostgresStore) -> None:
    tasks = [task(f"t{i}") for i in range(3)]
    await store.run(applying(insert(*tasks)))
    made = claimed_together(tasks, "r", await store.clock())
    made.epoch = 2
    assert await store.run(applying(made)) == [False]
    found = await store.run(loading(tasks=["t0", "t1", "t2"], requests=["r"]))
    assert found.tasks == {one.task_id: one for one in tasks} and found.requests == {}


@pytest.mark.parametrize("what", ["event", "owner", "steady", "version"])
async def test_a_claim_of_other_shape_goes_the_other_way_and_is_written_as_well(
    store: PostgresStore, what: str
) -> None:
    tasks = [task(f"t{i}") for i in range(3)]
    await store.run(applying(insert(*tasks)))
    now = await store.clock()
    made = claimed_together(tasks, "r", now)
    last = made.tasks[2]
    if what == "event":
        made.events[2] = change(made.events[2], at=now + 1)
    elif what == "owner":
        after = change(last.task, owner_id="else")
        made.tasks[2] = change(last, task=after)
    elif what == "steady":
        made.tasks[2] = change(last, task=change(last.task, claimed_at=now + 1))
    else:
        made.events.append(event(change(last.task, state_version=3), now, "attempt_renewed", door="claim"))
        made.tasks[2] = change(last, task=change(last.task, state_version=3))
    groups, others = swift.sort([made])
    assert groups == [] and others == [made]
    assert await store.run(applying(made)) == [True]
    found = await store.run(loading(tasks=["t2"]))
    assert found.tasks["t2"] == made.tasks[2].task


async def test_of_claims_that_share_a_task_at_once_one_wins_whole_and_the_others_write_nothing(opened: Open) -> None:
    stores = [await opened() for _ in range(3)]
    for turn in range(20):
        tasks = [task(f"t{turn}-{i}") for i in range(5)]
        await stores[0].run(applying(insert(*tasks)))
        now = await stores[0].clock()
        chosen = (tasks[:3], tasks[2:], [tasks[2], tasks[4], tasks[0]])
        sets = [claimed_together(list(some), f"r{turn}-{n}", now, f"w{n}") for n, some in enumerate(chosen)]
        answers = await asyncio.gather(*(store.run(applying(made)) for store, made in zip(stores, sets, strict=True)))
        assert sorted(answers) == [[False], [False], [True]]
        winner = sets[answers.index([True])]
        expected = {one.task_id: one for one in tasks} | {w.task.task_id: w.task for w in winner.tasks}
        found = await stores[0].run(
            loading(tasks=[one.task_id for one in tasks], requests=[f"r{turn}-{n}" for n in range(3)])
        )
        assert found.tasks == expected and set(found.requests) == {winner.requests[0].request_id}
