"""Effects on PostgreSQL: the fast way and the other one write the same rows, and settling is a HOT update."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from fencepost.kernel.digests import encode
from fencepost.kernel.records import Approval, Content, Effect, EffectState, Execution, LateEvidence, Request, Task
from fencepost.kernel.writes import TaskWrite, WriteSet
from fencepost.stores import codec
from fencepost.stores import postgres_swift as swift
from fencepost.stores.base import EffectFilter
from fencepost.stores.postgres import PostgresStore
from tests.postgres.test_applying import change, claimed, committed
from tests.stores.building import applying, effect, event, insert, loading, task, writes

COMMITTED, UNKNOWN, ABSENT = int(EffectState.COMMITTED), int(EffectState.UNKNOWN), int(EffectState.ABSENT)


def _moved(before: Task, *, at: int, door: str, name: str, effects: int) -> WriteSet:
    after = change(before, state_version=before.state_version + 1, effects=effects)
    made = writes(before.pool, 1)
    made.pool_version = 1
    made.tasks.append(TaskWrite(before.state_version, after, "effect"))
    made.events.append(event(after, at, name, door=door, detail={"effect": f"{after.task_id}-{effects}"}))
    return made


def prepared(before: Task, at: int = 20, value: Any = "hello", **fields: Any) -> WriteSet:
    """A first prepare, as the kernel writes it."""
    number = before.effects + 1
    payload = value if isinstance(value, Content) else encode(value)
    execution = Execution(1, f"rq-{before.task_id}-{number}", before.claim_generation, "at", 1, at, at + 10)
    made = _moved(before, at=at, door="effect.prepare", name="effect_prepared", effects=number)
    values = {"payload_digest": payload.digest, "first_prepared_at": at, "changed_at": at, "executions": (execution,)}
    made.effects.append(effect(before.task_id, number, **{**values, **fields}))
    made.payloads.append((before.task_id, number, payload))
    return made


def settled(before: WriteSet, at: int = 30, said: bool = True, **fields: Any) -> WriteSet:
    """What became of what `before` prepared."""
    task, [found] = before.tasks[0].task, before.effects
    made = _moved(task, at=at, door="effect.settle", name="effect_committed", effects=task.effects)
    values = {"state": COMMITTED, "version": found.version + 1, "changed_at": at, "receipt": encode({"id": 7})}
    made.effects.append(change(found, **{**values, **fields}))
    if said:
        request_id = f"st-{task.task_id}-{task.state_version}"
        made.requests.append(Request(request_id, task.attempt_id or "", "effect.settle", at, {"state": "COMMITTED"}))
    return made


async def claims(store: PostgresStore, *names: str) -> list[Task]:
    await store.run(applying(insert(*(task(name) for name in names))))
    sets = [claimed(task(name), f"cl-{name}") for name in names]
    assert await store.run(applying(*sets)) == [True] * len(names)
    return [made.tasks[0].task for made in sets]


async def standing(store: PostgresStore, *names: str) -> dict[str, Any]:
    found = {name: await store.history(name) for name in names}
    payloads = await store.payloads([(name, number) for name in names for number in (1, 2)])
    return {"histories": found, "payloads": payloads}


@pytest.mark.parametrize("way", ["fast", "slow"])
async def test_prepares_and_settles_come_back_as_they_were_written_whichever_way_they_go(
    store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "slow":
        monkeypatch.setattr("fencepost.stores.postgres.sort", lambda sets: ([], sets))
    one, other = await claims(store, "a", "b")
    first = [
        prepared(one),
        prepared(other, value=Content(b"\x00\xff", "sha256:raw", True), node_id="n", state=1, executions=()),
    ]
    assert await store.run(applying(*first)) == [True, True]
    fields = {"etag": 'W/"1"', "decided_by": "w", "note": "why"}
    then = [
        settled(first[0], receipt=Content(b"\x01", "sha256:r", True), **fields),
        settled(first[1], said=False, state=ABSENT, absent_ground="CERTAIN", receipt=None, repeat_closed=True),
    ]
    assert await store.run(applying(*then)) == [True, True]
    more = prepared(then[0].tasks[0].task, at=40, value="second")
    assert await store.run(applying(more)) == [True]

    found = await standing(store, "a", "b")
    assert found["histories"]["a"].effects == [*then[0].effects, *more.effects]
    assert found["histories"]["b"].effects == then[1].effects
    assert found["histories"]["a"].events[-3:] == [first[0].events[0], then[0].events[0], more.events[0]]
    assert (found["histories"]["a"].task, found["histories"]["b"].task) == (
        more.tasks[0].task,
        then[1].tasks[0].task,
    )
    assert found["payloads"] == {(t, n): body for made in (*first, more) for t, n, body in made.payloads}
    con = await asyncpg.connect(url)
    try:
        row = await con.fetchrow("SELECT * FROM fencepost.request WHERE request_id = 'st-a-3'")
        assert codec.request(tuple(row)) == then[0].requests[0]
    finally:
        await con.close()


async def test_a_first_prepare_and_a_settle_go_the_fast_way_in_one_statement_for_all(store: PostgresStore) -> None:
    names = [f"t{number}" for number in range(20)]
    first = [prepared(one) for one in await claims(store, *names)]
    then = [settled(made) for made in first]
    for sets, shape in ((first, swift.EFFECT_NEW), (then, swift.EFFECT_SAID)):
        groups, others = swift.sort(sets)
        assert others == [] and [group.shape for group in groups] == [shape]
        assert await store.run(applying(*sets)) == [True] * 20


async def test_the_fast_way_leaves_no_trace_of_a_lost_swap_nor_of_a_raised_pool(store: PostgresStore) -> None:
    one, other = await claims(store, "a", "b")
    late = prepared(change(one, state_version=one.state_version + 5))
    raised = prepared(other)
    raised.epoch = 2
    assert swift.sort([late, raised])[1] == []
    assert await store.run(applying(late, raised)) == [False, False]
    found = await standing(store, "a", "b")
    assert [found["histories"][name].effects for name in ("a", "b")] == [[], []]
    assert found["payloads"] == {}
    kept = prepared(other)
    assert await store.run(applying(kept)) == [True]
    late_settle = settled(kept)
    late_settle.pool_version = 7
    assert await store.run(applying(late_settle)) == [False]
    assert (await store.run(loading(effects=["b"]))).effects == {"b": kept.effects}


# What the fast way has no place for, in a first prepare and in what comes after.
NOT_NEW: tuple[dict[str, Any], ...] = (
    {"pool": "elsewhere"},
    {"revision": 2},
    {"version": 2},
    {"first_prepared_at": 19},
    {"changed_at": 19},
    {"receipt": encode("r")},
    {"etag": "e"},
    {"note": "n"},
    {"decided_by": "w"},
    {"approval": Approval("chief", 1, 1, 0)},
    {"evidence": (LateEvidence(1, 1, 1, None),)},
    {"repeat_closed": True},
    {"person_only": True},
    {"absent_ground": "CERTAIN"},
    {"payload_digest": "sha256:other"},
)
NOT_MOVED: tuple[dict[str, Any], ...] = (
    {"approval": Approval("chief", 1, 1, 0)},
    {"evidence": (LateEvidence(1, 1, 1, None),)},
    {"evidence_settled": 1},
    {"changed_at": 5},
)


async def test_what_the_fast_way_would_not_write_takes_the_other_one(store: PostgresStore) -> None:
    names = [f"t{number:02}" for number in range(len(NOT_NEW))]
    tasks = await claims(store, *names)
    made = [prepared(one, **wrong) for one, wrong in zip(tasks, NOT_NEW, strict=True)]
    assert swift.sort(made) == ([], made)
    assert await store.run(applying(*made)) == [True] * len(made)
    found = await store.run(loading(effects=names))
    assert found.effects == {name: one.effects for name, one in zip(names, made, strict=True)}


async def test_a_move_that_does_not_fit_takes_the_other_way(store: PostgresStore) -> None:
    names = [f"t{number:02}" for number in range(len(NOT_MOVED))]
    first = [prepared(one) for one in await claims(store, *names)]
    await store.run(applying(*first))
    made = [settled(one, **wrong) for one, wrong in zip(first, NOT_MOVED, strict=True)]
    assert swift.sort(made) == ([], made)
    assert await store.run(applying(*made)) == [True] * len(made)
    found = await store.run(loading(effects=names))
    assert found.effects == {name: one.effects for name, one in zip(names, made, strict=True)}


async def test_settling_is_a_hot_update_of_the_effect_and_an_open_one_is_found_by_its_index(
    store: PostgresStore, url: str
) -> None:
    names = [f"t{number:03}" for number in range(200)]
    first = [prepared(one) for one in await claims(store, *names)]
    con = await asyncpg.connect(url)
    try:
        for start in range(0, 200, 50):
            assert all(await store.run(applying(*first[start : start + 50])))
        for start in range(0, 200, 50):
            batch = [settled(made) for made in first[start : start + 50]]
            assert all(await store.run(applying(*batch)))
        await store.close()  # its sessions tell the server what they did as they end
        async with con.transaction():
            updates, hot = await con.fetchrow(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = 'fencepost.effect'::regclass"
            )
        assert updates == 200
        assert hot >= 190, f"{hot} of {updates} updates touched no index"
        assert await con.fetchval("SELECT pg_relation_size('fencepost.effect_open')") == 8192  # its first page alone
    finally:
        await con.close()


@pytest.mark.parametrize("analyzed", [False, True])
async def test_the_open_effects_are_looked_up_without_the_settled_ones(
    store: PostgresStore, url: str, analyzed: bool
) -> None:
    """The last hundreds of many wait: whoever looked for them in the order of task ids would walk over all."""
    con = await asyncpg.connect(url)
    try:
        await con.execute(
            "INSERT INTO fencepost.effect SELECT 'task' || n, 1, 'e' || n, 'default', 1, 'n', 's', 'd', "
            """'{"downstream":"mail","guarantee":"IDEMPOTENT"}', CASE WHEN n > 29700 THEN 2 ELSE 4 END, """
            "1, n, n, '[]', 0, 0, NULL, NULL, NULL, 0, NULL, NULL, '[]', 0, NULL, NULL "
            "FROM generate_series(10001, 30000) n"
        )
        if analyzed:
            await con.execute("VACUUM ANALYZE fencepost.effect")

        async def seen() -> tuple[int, int]:
            return tuple(  # type: ignore[return-value]
                await con.fetchrow(
                    "SELECT seq_scan, idx_tup_fetch FROM pg_stat_all_tables WHERE relid = 'fencepost.effect'::regclass"
                )
            )

        before = await seen()
        found = await store.effects(EffectFilter(pool="default", states=(1, 2)), ("task10005", 1), 3)
        assert [one.task_id for one in found] == ["task29701", "task29702", "task29703"]
        assert await store.unknown_backlog() == [("default", "IDEMPOTENT", UNKNOWN, 300, 29701)]
        await store.close()  # its session tells the server what it did as it ends
        scans, fetched = await seen()
        assert scans == before[0]
        assert fetched - before[1] <= 2 * 300
    finally:
        await con.close()


# what this process remembers ----------------------------------------------------------------------


def remembered(store: PostgresStore, name: str) -> list[Effect] | None:
    return store._guesses._effects.get(name)


async def test_the_effects_of_a_task_are_remembered_as_they_stand_in_its_version(store: PostgresStore) -> None:
    [one] = await claims(store, "a")
    first = prepared(one)
    await store.run(applying(first))
    assert remembered(store, "a") == first.effects
    then = settled(first)
    await store.run(applying(then))
    assert remembered(store, "a") == then.effects
    second = prepared(then.tasks[0].task)
    await store.run(applying(second))
    assert remembered(store, "a") == [*then.effects, *second.effects]
    lost = settled(first)
    assert await store.run(applying(lost)) == [False]
    assert remembered(store, "a") is None
    assert (await store.run(loading(effects=["a"], tasks=["a"]))).effects == {"a": [*then.effects, *second.effects]}


async def test_effects_that_another_process_wrote_are_not_taken_for_known(store: PostgresStore, opened: Any) -> None:
    other = await opened()
    [one] = await claims(store, "a")
    first = prepared(one)
    await other.run(applying(first))
    then = settled(first)
    await store.run(applying(then))  # one of one, but what was before it was not seen here
    assert remembered(store, "a") is None
    second = prepared(then.tasks[0].task)
    await store.run(applying(second))
    assert remembered(store, "a") is None


async def test_effects_that_do_not_fit_their_number_are_not_taken_for_known(store: PostgresStore) -> None:
    [one] = await claims(store, "a")
    made = prepared(one)
    made.tasks[0] = TaskWrite(one.state_version, change(made.tasks[0].task, effects=2), "effect")
    assert await store.run(applying(made)) == [True]
    assert remembered(store, "a") is None


async def test_a_commit_of_a_task_with_effects_goes_the_fast_way(store: PostgresStore) -> None:
    [one] = await claims(store, "a")
    first = prepared(one)
    then = settled(first)
    await store.run(applying(first))
    await store.run(applying(then))
    made = committed(then.tasks[0].task, at=50)
    assert swift.sort([made])[1] == []
    assert await store.run(applying(made)) == [True]
    history = await store.history("a")
    assert history is not None and history.task.effects == 1 and history.effects == then.effects
