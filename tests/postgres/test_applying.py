"""Apply on PostgreSQL: each set is compared and written whole, or not at all, whichever way it is written."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import msgspec
import pytest

from fencepost.errors import Unavailable
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Checkpoint, LogEntry, Pool, Request, ResultCommit, State, Task
from fencepost.kernel.writes import FAMILIES, TaskWrite, WriteSet
from fencepost.stores import postgres_swift as swift
from fencepost.stores.base import REQUEST_RETENTION_US
from fencepost.stores.postgres import PostgresStore
from tests.postgres.conftest import Open
from tests.postgres.databases import advance
from tests.postgres.server import Server
from tests.stores.building import applying, event, insert, loading, replace, result, staged, task, writes

change = msgspec.structs.replace
TEXTS = {"graph_id", "result_commit_id", "park_reason", "trace_context"}


def claimed(before: Task, request_id: str, at: int = 5, epoch: int = 1, owner: str = "ow") -> WriteSet:
    """A claim, as the kernel writes it."""
    after = change(
        before,
        state=int(State.CLAIMED),
        state_version=before.state_version + 1,
        scheduler_epoch=epoch,
        claim_generation=before.claim_generation + 1,
        attempt_id=f"at-{before.task_id}",
        owner_id=owner,
        claimed_at=at,
        lease_expires_at=at + 100,
    )
    made = writes(before.pool, epoch)
    made.pool_version = 1
    made.tasks.append(TaskWrite(before.state_version, after, "claim"))
    made.events.append(event(after, at, "attempt_started", door="claim", detail={"owner": owner}))
    made.requests.append(Request(request_id, owner, "claim", at, {"claims": [[before.task_id, 1, "x"]]}))
    return made


def committed(before: Task, at: int = 9, value: Any = "done", parents: tuple[str, ...] = ()) -> WriteSet:
    body = encode(value)
    after = change(
        before,
        state=int(State.COMMITTED),
        state_version=before.state_version + 1,
        lease_expires_at=None,
        result_commit_id=f"rc-{before.task_id}",
        end=1,
    )
    made = writes(before.pool, 1)
    made.pool_version = 1
    made.tasks.append(TaskWrite(before.state_version, after, "commit"))
    made.events.append(event(after, at, "result_committed", door="commit"))
    found = result(after, body, at=at)
    made.results.append(change(found, attempt_id=after.attempt_id or "", parents=parents))
    made.discard_rivals.append((after.task_id, after.claim_generation, body.digest))
    return made


async def test_claims_and_commits_go_the_fast_way_and_come_back_as_they_were_written(store: PostgresStore) -> None:
    tasks = [task(f"t{i}") for i in range(6)]
    await store.run(applying(insert(*tasks)))
    claims = [claimed(one, f"r{one.task_id}", owner="" if i == 2 else f"w{i % 2}") for i, one in enumerate(tasks)]
    groups, others = swift.sort(claims)
    assert others == [] and len(groups) == 1
    now = await store.clock()
    for made in claims:
        made.requests[0] = change(made.requests[0], at=now)
        made.events[0] = change(made.events[0], at=now)
    assert await store.run(applying(*claims)) == [True] * 6
    held = [made.tasks[0].task for made in claims]
    found = await store.run(loading(tasks=[one.task_id for one in tasks], requests=["rt0", "rt5"], pools=["default"]))
    assert found.tasks == {one.task_id: one for one in held}
    assert found.requests == {"rt0": claims[0].requests[0], "rt5": claims[5].requests[0]}
    commits = [committed(one, parents=("p1", "p2") if i == 1 else ()) for i, one in enumerate(held)]
    commits[3].results[0] = change(commits[3].results[0], content=None)
    groups, others = swift.sort(commits)
    assert others == [] and len(groups) == 2
    assert await store.run(applying(*commits)) == [True] * 6
    histories = await store.histories(None, 10)
    assert [h.task for h in histories] == [made.tasks[0].task for made in commits]
    assert [h.result for h in histories] == [made.results[0] for made in commits]
    assert [h.events[1:] for h in histories] == [
        [a.events[0], b.events[0]] for a, b in zip(claims, commits, strict=True)
    ]


async def test_a_lost_set_writes_nothing_and_hurts_no_other(store: PostgresStore) -> None:
    now = await store.clock()
    before = [task(f"t{i}") for i in range(4)]
    await store.run(applying(insert(*before)))
    sets = [claimed(one, f"r-{one.task_id}", now) for one in before]
    stale = change(before[1], state_version=5)
    sets[1] = claimed(stale, "r-t1", now)
    assert await store.run(applying(*sets)) == [True, False, True, True]
    found = await store.run(loading(tasks=[f"t{i}" for i in range(4)], requests=[f"r-t{i}" for i in range(4)]))
    assert found.tasks["t1"] == before[1] and set(found.requests) == {"r-t0", "r-t2", "r-t3"}
    assert [e.state_version for e in (await store.history("t1")).events] == [1]  # type: ignore[union-attr]
    assert [e.state_version for e in (await store.history("t2")).events] == [1, 2]  # type: ignore[union-attr]


async def test_a_lost_set_of_many_tables_writes_none_of_them(store: PostgresStore) -> None:
    now = await store.clock()
    before = [task(f"t{i}") for i in range(4)]
    await store.run(applying(insert(*before)))
    sets = []
    for one in (before[0], change(before[1], state_version=5), before[2], before[3]):
        made = replace(one, change(one, state_version=one.state_version + 1, owner_id="new"), "any")
        made.inputs.append((one.task_id, 2, encode("new")))
        made.requests.append(Request(f"r-{one.task_id}", "o", "claim", now, {}))
        made.log.append(LogEntry("usage", 1, "default", one.task_id, "usage"))
        made.staged.append(staged(one.task_id, 1, "new"))
        made.checkpoints.append(Checkpoint(one.task_id, 1, 1, 1, encode("new")))
        sets.append(made)
    assert await store.run(applying(*sets)) == [True, False, True, True]
    histories = {h.task.task_id: h for h in await store.histories(None, 10)}
    assert histories["t1"].task == before[1] and histories["t1"].input == (1, encode({"n": "t1"}))
    assert histories["t1"].staged == [] and histories["t1"].checkpoint is None
    assert histories["t0"].task.owner_id == "new" and histories["t0"].input == (2, encode("new"))
    assert {n.entry.task_id for n in await store.log(0, 10)} == {"t0", "t2", "t3"}


@pytest.mark.parametrize("family", [*FAMILIES, "any"])
async def test_a_family_writes_what_it_changes(store: PostgresStore, family: str) -> None:
    before = task("a", state=int(State.CLAIMED), attempt_id="at", owner_id="ow", claimed_at=1, lease_expires_at=2)
    await store.run(applying(insert(before)))
    after = before
    for name in FAMILIES.get(family, set(before.__struct_fields__[1:]) - {"pruned_to_version"}):
        value = getattr(before, name)
        after = change(after, **{name: "x" if isinstance(value, str) or name in TEXTS else 3})
    after = change(after, state=2, state_version=2, end=1, cancel_with_parent=family == "any")
    assert await store.run(applying(replace(before, after, family))) == [True]
    assert (await store.run(loading(tasks=["a"]))).tasks["a"] == after


async def test_one_request_id_counts_once_however_many_stores_use_it_at_once(opened: Open) -> None:
    stores = [await opened() for _ in range(4)]
    tasks = [task(f"t{i}") for i in range(40)]
    await stores[0].run(applying(insert(*tasks)))
    for i in range(0, 40, 4):
        now = await stores[0].clock()
        sets = [claimed(one, f"same-{i}", now) for one in tasks[i : i + 4]]
        won = await asyncio.gather(*(s.run(applying(made)) for s, made in zip(stores, sets, strict=True)))
        assert sorted(won) == [[False], [False], [False], [True]]
    counts = await stores[0].counts()
    assert sum(row[-1] for row in counts if row[3] == State.CLAIMED) == 10


async def test_one_request_id_counts_once_within_a_batch(store: PostgresStore) -> None:
    tasks = [task(f"t{i}") for i in range(3)]
    await store.run(applying(insert(*tasks)))
    now = await store.clock()
    sets = [claimed(tasks[0], "same", now), claimed(tasks[1], "same", now), claimed(tasks[2], "other", now)]
    assert await store.run(applying(*sets)) == [True, False, True]


async def test_a_request_id_past_its_retention_may_be_used_again(
    store: PostgresStore, server: Server, database: str
) -> None:
    tasks = [task("a"), task("b")]
    await store.run(applying(insert(*tasks)))
    await store.run(applying(claimed(tasks[0], "r", await store.clock())))
    await advance(server, database, REQUEST_RETENTION_US / 1e6 + 1)
    assert (await store.run(loading(requests=["r"]))).requests == {}
    again = claimed(tasks[1], "r", await store.clock())
    assert await store.run(applying(again)) == [True]
    assert (await store.run(loading(requests=["r"]))).requests == {"r": again.requests[0]}


async def test_a_set_under_another_epoch_is_lost_and_a_raise_before_it_counts(store: PostgresStore) -> None:
    a, b, c = task("a"), task("b"), task("c")
    await store.run(applying(insert(a, b, c)))
    raised = writes(epoch=1)
    raised.pool_write = (1, Pool("default", 2, 2))
    won = await store.run(
        applying(
            replace(a, change(a, state_version=2), epoch=1),
            raised,
            replace(b, change(b, state_version=2), epoch=1),
            replace(c, change(c, state_version=2), epoch=2),
        )
    )
    assert won == [True, True, False, True]
    for fast in (claimed(b, "r1", epoch=1), claimed(b, "r2", epoch=3)):
        assert await store.run(applying(fast)) == [False]
    assert await store.run(applying(writes("nowhere", 1))) == [False]


async def test_what_was_decided_on_another_record_of_the_pool_is_lost(store: PostgresStore) -> None:
    a = task("a")
    await store.run(applying(insert(a)))
    closed = writes()
    closed.pool_write = (1, Pool("default", 2, 1, intake_open=False))
    assert await store.run(applying(closed)) == [True]
    assert await store.run(applying(claimed(a, "r"))) == [False]


async def test_staged_results_are_settled_by_a_commit(store: PostgresStore) -> None:
    one = task("a", state=int(State.CLAIMED), claim_generation=2, attempt_id="at")
    other = task("b", state=int(State.CLAIMED), claim_generation=1, attempt_id="at")
    await store.run(applying(insert(one, other)))
    for generation, value in ((1, "old"), (2, "rival"), (2, "done")):
        made = writes(epoch=1)
        made.tasks.append(TaskWrite(1, one, "compare"))
        made.staged.append(staged("a", generation, value))
        assert await store.run(applying(made)) == [True]
    assert await store.run(applying(committed(one), committed(other))) == [True, True]
    states = [s.state for s in (await store.history("a")).staged]  # type: ignore[union-attr]
    assert sorted(states) == [2, 3, 3]


async def test_a_raise_waits_for_whoever_is_at_work_and_then_names_them(
    opened: Open, server: Server, database: str
) -> None:
    store = await opened(raise_timeout=0.3)
    other = await asyncpg.connect(server.url(database), server_settings={"application_name": "a slow caller"})
    try:
        transaction = other.transaction()
        await transaction.start()
        await other.fetch("SELECT * FROM fencepost.pool WHERE name = 'default' FOR SHARE")
        raised = writes(epoch=1)
        raised.pool_write = (1, Pool("default", 2, 2))
        with pytest.raises(Unavailable, match=r"raise_timeout: after 0\.3 s .*a slow caller"):
            await store.run(applying(raised))
        assert (await store.pools())[0].epoch == 1
        waiting = asyncio.create_task(store.run(applying(raised)))
        await asyncio.sleep(0.05)
        await transaction.commit()
        assert await asyncio.wait_for(waiting, 10) == [True]
        assert (await store.pools())[0].epoch == 2
    finally:
        await other.close()


async def test_a_deadlock_between_two_stores_is_nobodys_business(opened: Open, server: Server, database: str) -> None:
    """Two callers who lock the same rows in opposite order: one of them is picked by the server, and tries again."""
    store = await opened(pool_size=2)
    a, b = task("a"), task("b")
    await store.run(applying(insert(a, b)))
    other = await asyncpg.connect(server.url(database))
    try:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT 1 FROM fencepost.task WHERE task_id = 'b' FOR UPDATE")
        both = writes(epoch=1)
        both.tasks += [
            TaskWrite(1, change(a, state_version=2, owner_id="x"), "any"),
            TaskWrite(1, change(b, state_version=2, owner_id="x"), "any"),
        ]
        running = asyncio.create_task(store.run(applying(both)))
        while not await other.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        ):
            await asyncio.sleep(0.005)
        try:
            await other.execute("SELECT 1 FROM fencepost.task WHERE task_id = 'a' FOR UPDATE")
            await transaction.commit()
        except asyncpg.DeadlockDetectedError:
            await transaction.rollback()
        assert await asyncio.wait_for(running, 20) == [True]
    finally:
        await other.close()


async def test_a_result_that_does_not_fit_the_task_takes_the_slow_way(store: PostgresStore) -> None:
    one = task("a", state=int(State.CLAIMED), claim_generation=2, attempt_id="at")
    await store.run(applying(insert(one)))
    made = committed(one)
    made.results[0] = change(made.results[0], attempt_id="another")
    assert swift.sort([made]) == ([], [made])
    assert await store.run(applying(made)) == [True]
    found = await store.result("a")
    assert isinstance(found, ResultCommit) and found.attempt_id == "another"
