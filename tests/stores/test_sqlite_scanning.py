"""Scans on SQLite: claim order, and no step spent on what nobody asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import apsw
import pytest

from fencepost.kernel.records import State, Task
from fencepost.kernel.writes import Snapshot
from fencepost.stores import sqlite_ready as ready
from fencepost.stores import sqlite_transaction as transaction
from fencepost.stores.base import Scan
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, insert, scanning, task


def _expected(tasks: Sequence[Task], now: int, **scan: Any) -> list[str]:
    """The scan's promise, spelled out over all tasks."""
    found = [
        t
        for t in tasks
        if t.pool == scan["pool"]
        and (scan["queues"] is None or t.queue in scan["queues"])
        and (scan["kinds"] is None or t.kind in scan["kinds"])
        and (
            (t.state == State.CLAIMED and (t.lease_expires_at or 0) <= now - scan["grace_us"])
            or (t.state == State.CLAIMED and t.scheduler_epoch < scan["epoch"])
            if scan["lapsed"]
            else t.state == State.READY and t.available_at <= now
        )
    ]
    return [t.task_id for t in sorted(found, key=lambda t: (t.priority, t.available_at, t.task_id))][: scan["limit"]]


@pytest.mark.parametrize("seed", range(4))
async def test_scans_offer_what_the_contract_orders(store: SQLiteStore, seed: int) -> None:
    chance = random.Random(seed)
    now = await store.clock()
    tasks = [
        task(
            f"t{i:03}",
            pool=chance.choice(["default", "default", "other"]),
            queue=chance.choice(["a", "b", "c"]),
            kind=chance.choice(["x", "y", "z", "w"]),
            priority=chance.choice([-1000, -1, 0, 0, 0, 7, 1000]),
            available_at=chance.choice([0, 5, 5, now - 10, now + 3_600_000_000]),
            state=int(chance.choice([State.READY, State.READY, State.CLAIMED, State.COMMITTED, State.BLOCKED])),
            lease_expires_at=chance.choice([now - 100, now - 5_000_000, now + 3_600_000_000]),
            scheduler_epoch=chance.choice([1, 2, 3]),
        )
        for i in range(300)
    ]
    assert await store.run(applying(insert(*tasks))) == [True]
    for _ in range(60):
        scan: dict[str, Any] = {
            "pool": chance.choice(["default", "other", "none"]),
            "queues": chance.choice([("a",), ("a", "b"), ("c", "a", "b"), ("none",), (), None]),
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


async def test_more_kinds_than_one_statement_takes_are_still_merged_in_order(store: SQLiteStore) -> None:
    kinds = [f"k{i:03}" for i in range(2 * ready.LANES_AT_ONCE + 3)]
    tasks = [task(f"t{i:03}", kind=kinds[(i * 37) % len(kinds)], available_at=i) for i in range(200)]
    await store.run(applying(insert(*tasks)))
    for chosen in (None, tuple(kinds)):
        found = await store.run(scanning(kinds=chosen, limit=120))
        assert [t.task_id for t in found] == [f"t{i:03}" for i in range(120)]


async def _profiled(store: SQLiteStore, scan: Scan) -> tuple[list[Task], dict[str, int]]:
    """What a scan finds, and what its statements cost: VM steps, steps of full scans, sorts."""
    total: dict[str, int] = {"VM_STEP": 0, "FULLSCAN_STEP": 0, "SORT": 0}

    def add(seen: dict[str, Any]) -> None:
        for name in total:
            total[name] += seen["stmt_status"][f"SQLITE_STMTSTATUS_{name}"]

    def work(con: apsw.Connection) -> list[Task]:
        one = transaction.Transaction(con, lambda stored: max(stored, 10**15))
        con.trace_v2(apsw.SQLITE_TRACE_PROFILE, add)
        try:
            one.begin()
            return one.scan(scan)
        finally:
            one.rollback()
            con.trace_v2(0, None)

    found = await store._writer.do(work)
    return found, total


def _fill(con: apsw.Connection, many: int, **fields: Any) -> None:
    """Rows made in SQL from one model row: 100,000 through the API would take the test's whole time."""
    columns = ", ".join(f'"{name}"' for name in Task.__struct_fields__)
    model = task("model", **fields)
    values = ", ".join(f"?{i + 1}" for i in range(1, len(Task.__struct_fields__)))
    con.execute(
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {many}) "
        f"INSERT INTO task ({columns}) SELECT ?1 || i, {values} FROM n",
        (f"{model.kind}-{model.state}-", *(getattr(model, name) for name in Task.__struct_fields__[1:])),
    )


CROWDS = ("an unserved kind", "delayed", "finished", "another queue")
ASKED: tuple[tuple[str, ...] | None, ...] = (None, ("served",), ("served", "also"))


@pytest.mark.parametrize(
    ("crowd", "kinds"),
    # Without kinds, every kind is asked for: then none is unserved.
    [(crowd, kinds) for crowd in CROWDS for kinds in ASKED if (crowd, kinds) != ("an unserved kind", None)],
)
async def test_a_hundred_thousand_tasks_in_front_cost_no_steps(
    store: SQLiteStore, kinds: tuple[str, ...] | None, crowd: str
) -> None:
    await store.run(applying(insert(*(task(f"s{i}", kind="served", available_at=100) for i in range(20)))))
    scan = Scan("default", ("default",), kinds, 10, Snapshot())
    alone, before = await _profiled(store, scan)
    fields: dict[str, dict[str, Any]] = {
        "an unserved kind": {"kind": "nobody", "priority": -1},
        "delayed": {"kind": "served", "priority": 0, "available_at": 2 * 10**15},
        "finished": {"kind": "served", "state": int(State.COMMITTED)},
        "another queue": {"queue": "other", "priority": -1},
    }
    await store._writer.do(lambda con: _fill(con, 100_000, **fields[crowd]))
    found, after = await _profiled(store, scan)
    assert [t.task_id for t in found] == [t.task_id for t in alone] and len(found) == 10
    assert after["FULLSCAN_STEP"] == 0 and after["SORT"] <= before["SORT"]
    assert after["VM_STEP"] <= before["VM_STEP"] + 200, (before, after)


async def test_delayed_tasks_of_a_smaller_priority_are_stepped_over_once(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("due", kind="served", priority=5))))
    await store._writer.do(lambda con: _fill(con, 100_000, kind="served", priority=-3, available_at=2 * 10**15))
    found, cost = await _profiled(store, Scan("default", ("default",), ("served",), 10, Snapshot()))
    assert [t.task_id for t in found] == ["due"] and cost["VM_STEP"] < 500


async def test_the_lapsed_scan_walks_over_claimed_tasks_only(store: SQLiteStore) -> None:
    claimed = [task(f"c{i}", state=int(State.CLAIMED), lease_expires_at=5, scheduler_epoch=1) for i in range(20)]
    await store.run(applying(insert(*claimed)))
    scan = Scan("default", None, None, 10, Snapshot(), lapsed=True)
    _, before = await _profiled(store, scan)
    await store._writer.do(lambda con: _fill(con, 50_000, kind="a", state=int(State.COMMITTED)))
    await store._writer.do(lambda con: _fill(con, 50_000, kind="b"))
    found, after = await _profiled(store, scan)
    assert len(found) == 10
    assert after["VM_STEP"] <= before["VM_STEP"] + 50 and after["FULLSCAN_STEP"] == 0


STATEMENTS = {
    "rows of one lane": (ready.ROWS, 6),
    "keys of three lanes": (ready.keys_statement(3), 10),
    "kinds": (ready.NEXT_KIND, 3),
    "queues": (ready.QUEUES, 1),
    "first priority": (ready.PRIORITY, 3),
    "next priority": (ready.NEXT_PRIORITY, 4),
    "lapsed": (transaction.LAPSED.format(queues="", kinds=""), 4),
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_scans_search_the_index_of_what_is_alive(store: SQLiteStore, name: str) -> None:
    sql, parameters = STATEMENTS[name]
    plan = await store._writer.do(
        lambda con: [row[3] for row in con.execute("EXPLAIN QUERY PLAN " + sql, (None,) * parameters)]
    )
    touching = [line for line in plan if line.startswith(("SCAN t", "SEARCH t"))]
    assert touching and all("SEARCH t" in line and "task_live (pool=? AND state=?" in line for line in touching), plan
    assert name == "lapsed" or not any("TEMP B-TREE" in line for line in plan), plan


@pytest.mark.parametrize(
    "sql",
    [transaction.LOAD_TASKS, transaction.LOAD_REQUESTS, transaction.LOAD_INPUTS, transaction.LOAD_RESULTS],
)
async def test_loads_look_each_key_up(store: SQLiteStore, sql: str) -> None:
    plan = await store._writer.do(
        lambda con: [row[3] for row in con.execute("EXPLAIN QUERY PLAN " + sql, (None,) * sql.count("?"))]
    )
    assert plan[0].startswith("SCAN c VIRTUAL TABLE") and len(plan) == 2, plan
    assert plan[1].startswith("SEARCH"), plan


async def test_plans_do_not_depend_on_bound_values(store: SQLiteStore) -> None:
    """Otherwise SQLite prepares a scan anew for each other value, at ten times the cost of running it."""
    stable = await store._writer.do(lambda con: con.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, -1))
    assert stable
