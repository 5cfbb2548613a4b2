"""Scans on PostgreSQL: claim order, shares, and dead index entries."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from fencepost.kernel.records import State
from fencepost.kernel.writes import Snapshot
from fencepost.stores import postgres_swift as swift
from fencepost.stores.postgres import PostgresStore
from fencepost.stores.postgres_load import Reading
from fencepost.stores.postgres_scan import LAPSED_AGAIN, Scanner, Share
from tests.postgres.conftest import Open
from tests.postgres.databases import advance
from tests.postgres.server import Server
from tests.postgres.test_applying import claimed, committed
from tests.stores.building import applying, insert, replace, scanning, task
from tests.stores.test_sqlite_scanning import _expected

change = msgspec.structs.replace


def some_tasks(chance: random.Random, now: int) -> list[Any]:
    return [
        task(
            f"t{i:03}",
            pool=chance.choice(["default", "default", "other"]),
            queue=chance.choice(["a", "b", "c", "ä", "Z"]),
            kind=chance.choice(["x", "y", "z", "w"]),
            priority=chance.choice([-1000, -1, 0, 0, 0, 7, 1000]),
            available_at=chance.choice([0, 5, 5, now - 10, now + 3_600_000_000]),
            state=int(chance.choice([State.READY, State.READY, State.CLAIMED, State.COMMITTED, State.BLOCKED])),
            lease_expires_at=chance.choice([now - 100, now - 5_000_000, now + 3_600_000_000]),
            scheduler_epoch=chance.choice([1, 2, 3]),
        )
        for i in range(300)
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_scans_offer_what_the_contract_orders(store: PostgresStore, seed: int) -> None:
    chance = random.Random(seed)
    now = await store.clock()
    tasks = some_tasks(chance, now)
    assert await store.run(applying(insert(*tasks))) == [True]
    for _ in range(60):
        scan: dict[str, Any] = {
            "pool": chance.choice(["default", "other", "none"]),
            "queues": chance.choice([("a",), ("a", "b"), ("c", "a", "ä"), ("none",), (), None]),
            "kinds": chance.choice([None, None, ("x",), ("x", "y"), ("w", "z", "x", "y", "none"), ()]),
            "limit": chance.choice([1, 2, 5, 40, 1000]),
            "lapsed": chance.random() < 0.4,
            "epoch": chance.choice([0, 1, 2]),
            "grace_us": chance.choice([0, 1_000_000]),
        }
        into = Snapshot()
        found = await store.run(scanning(into=into, **scan))
        assert [t.task_id for t in found] == _expected(tasks, now, **scan), scan
        assert all(t == tasks[int(t.task_id[1:])] for t in found)
        assert set(into.inputs) == {t.task_id for t in found} and into.now >= now


@pytest.mark.parametrize("kinds", [None, ("x",), ("x", "y")])
async def test_two_shares_are_disjoint_and_a_short_one_is_filled_from_all(
    opened: Open, kinds: tuple[str, ...] | None
) -> None:
    stores = [await opened(), await opened()]
    tasks = [task(f"t{i:03}", kind="x" if i % 2 or kinds == ("x",) else "y", available_at=i) for i in range(100)]
    await stores[0].run(applying(insert(*tasks)))
    for number, store in enumerate(stores):
        store._scanner.share.of, store._scanner.share.mine = 2, number
    for _ in range(20):  # a turn may end between the two looks; then both look at the same share
        for store in stores:
            store.forget()  # where the machine is slow, a look would go on behind the last one
        found = [{t.task_id for t in await store.run(scanning(kinds=kinds, limit=20))} for store in stores]
        assert [len(one) for one in found] == [20, 20]
        if not found[0] & found[1]:
            break
    else:
        pytest.fail("the shares were never disjoint")
    stores[0].forget()
    everything = await stores[0].run(scanning(kinds=kinds, limit=90))
    assert [t.task_id for t in everything] == [f"t{i:03}" for i in range(90)]


async def test_shares_go_round_so_that_no_task_waits_for_a_service_that_is_gone(
    store: PostgresStore, server: Server, database: str
) -> None:
    await store.run(applying(insert(*(task(f"t{i:03}", available_at=i) for i in range(64)))))
    store._scanner.share.of = 8
    heads = set()
    for _ in range(100):  # 8 on a machine that is quick enough to miss none
        found = await store.run(scanning(limit=1))
        heads.add(found[0].task_id)
        if len(heads) >= 8 and "t000" in heads:
            return
        await advance(server, database, 0.2)
    pytest.fail(f"seen were only {heads}")


def test_a_service_that_loses_takes_smaller_shares_and_one_that_does_not_takes_all_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("fencepost.stores.postgres_scan.elapsed", lambda: now)
    share = Share()
    share.claimed(32, 1)
    assert share.of == 1
    share.claimed(32, 20)
    assert share.of == 2
    share.claimed(32, 20)
    assert share.of == 4 and 0 <= share.mine < 4
    for _ in range(20):
        now += 5
        share.claimed(32, 0)
    assert share.of == 1 and share.mine == 0


async def test_looks_go_on_behind_what_was_seen_where_the_head_is_slow(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.stores.postgres_scan.SLOW", -1.0)
    monkeypatch.setattr("fencepost.stores.postgres_scan._AGAIN", 1e9)
    tasks = [task(f"t{i:03}", available_at=i) for i in range(30)]
    await store.run(applying(insert(*tasks)))
    seen = [[t.task_id for t in await store.run(scanning(limit=10))] for _ in range(3)]
    assert seen == [
        [f"t{i:03}" for i in range(10)],
        [f"t{i:03}" for i in range(10)],  # one slow look may be chance
        [f"t{i:03}" for i in range(10, 20)],
    ]
    early = task("early", priority=-1)
    await store.run(applying(insert(early)))
    assert [t.task_id for t in await store.run(scanning(limit=1))] == ["early"]


async def test_empty_is_never_said_without_a_look_at_the_head(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencepost.stores.postgres_scan.SLOW", -1.0)
    monkeypatch.setattr("fencepost.stores.postgres_scan._AGAIN", 1e9)
    store, other = await opened(), await opened()
    tasks = [task(f"t{i}", available_at=10 + i) for i in range(2)]
    await store.run(applying(insert(*tasks)))
    for _ in range(2):
        assert len(await store.run(scanning(limit=10))) == 2
    await other.run(applying(insert(task("before", available_at=1))))
    for one in tasks:
        await other.run(applying(replace(one, change(one, state_version=2, state=int(State.COMMITTED)))))
    assert [t.task_id for t in await store.run(scanning(limit=10))] == ["before"]


async def test_scans_and_loads_are_planned_by_key_even_while_the_tables_are_empty(store: PostgresStore) -> None:
    """A plan made on an empty table is kept; it must still be right with a million rows."""
    reading, scanner = Reading(), Scanner()
    commits = swift.sort([committed(task("a", state=int(State.CLAIMED), claim_generation=1, attempt_id="at"))])
    claims = swift.sort([claimed(task("b"), "r")])
    async with store._plans.use() as con:
        for sql, parameters in (
            (reading.records, 3),
            (scanner._one_lane[0], 5),
            (scanner._any_kind[1], 7),
            (scanner._named[0], 5),
            (scanner._further, 9),
            (scanner._lapsed, 6),
            *((text, len(values)) for text, values in (swift.statement(g, (), 0) for g, _ in (commits, claims))),
        ):
            nothing = ", ".join(["NULL"] * parameters)
            await con.execute(f"PREPARE probe AS {sql}")
            lines = [row[0] for row in await con.fetch(f"EXPLAIN EXECUTE probe({nothing})")]
            await con.execute("DEALLOCATE probe")
            plan = "\n".join(lines)
            assert "Seq Scan" not in plan and "Hash Join" not in plan and "Merge Join" not in plan, plan
            for position, line in enumerate(lines):
                if "Index" in line and "Scan using" in line:
                    assert "Index Cond" in lines[position + 1], plan


async def test_slow_searches_for_lapsed_leases_put_off_the_next_a_little_and_that_of_no_other_question(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:  # B09
    time = 0.0

    def slow() -> float:
        nonlocal time
        time += 0.1  # between a search's begin and its end, too
        return time

    async def lapsed(queue: str) -> list[str]:
        return [one.task_id for one in await store.run(scanning(queues=(queue,), lapsed=True))]

    monkeypatch.setattr("fencepost.stores.postgres_scan.elapsed", slow)
    assert [await lapsed("default"), await lapsed("default")] == [[], []]
    tasks = [task(queue, queue=queue, state=int(State.CLAIMED), lease_expires_at=1) for queue in ("default", "other")]
    await store.run(applying(insert(*tasks)))
    assert await lapsed("default") == []
    assert await lapsed("other") == ["other"]
    time += LAPSED_AGAIN
    assert await lapsed("default") == ["default"]


async def test_one_slow_search_for_lapsed_leases_may_be_chance(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:  # B09
    monkeypatch.setattr("fencepost.stores.postgres_scan.SLOW", -1.0)
    monkeypatch.setattr("fencepost.stores.postgres_scan._AGAIN", 1e9)
    assert await store.run(scanning(lapsed=True)) == []
    await store.run(applying(insert(task("t", state=int(State.CLAIMED), lease_expires_at=1))))
    assert [one.task_id for one in await store.run(scanning(lapsed=True))] == ["t"]
