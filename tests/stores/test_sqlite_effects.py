"""Effects on SQLite, beside what every store does with them (test_effect_records.py): indexes, cost, trouble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost.errors import Inconsistent
from fencepost.kernel.digests import encode
from fencepost.kernel.records import EffectState, State
from fencepost.stores.base import EffectFilter
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, effect, full_effect, insert, loading, replace, task, with_effects
from tests.stores.conftest import Open


async def _traced(store: SQLiteStore, lane: Any, work: Any) -> list[str]:
    """The statements that `work` executes on the lane's connection."""
    seen: list[str] = []

    def trace(cursor: apsw.Cursor, sql: str, bindings: apsw.Bindings | None) -> bool:
        seen.append(sql)
        return True

    await store._on(lane, lambda con: setattr(con, "exec_trace", trace))
    await work
    await store._on(lane, lambda con: setattr(con, "exec_trace", None))
    return seen


async def _plans(store: SQLiteStore, statements: list[str]) -> list[str]:
    def explain(con: apsw.Connection) -> list[str]:
        return [
            str(row[3])
            for sql in statements
            if sql.lstrip().startswith("SELECT")
            for row in con.execute(f"EXPLAIN QUERY PLAN {sql}", (None,) * sql.count("?")).fetchall()
        ]

    return await store._on(store._reader, explain)


async def test_effects_outlive_the_process_that_wrote_them(store: SQLiteStore, opened: Open) -> None:
    await store.run(applying(insert(task("a"))))
    await store.run(applying(with_effects(task("a"), full_effect("a"), payloads={1: encode("x")})))
    await store.close()
    again = await opened()
    found = await again.run(loading(effects=["a"], payloads=[("a", 1)]))
    assert found.effects == {"a": [full_effect("a")]} and found.payloads == {("a", 1): encode("x")}


async def test_a_payload_is_bound_once(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("a"))))
    await store.run(applying(with_effects(task("a"), effect("a"), payloads={1: encode("x")})))
    before = task("a", state_version=2, effects=1)
    with pytest.raises(Inconsistent, match="effect_payload"):
        await store.run(applying(with_effects(before, effect("a", version=2), payloads={1: encode("y")})))
    found = await store.run(loading(effects=["a"], payloads=[("a", 1)], tasks=["a"]))
    assert found.payloads == {("a", 1): encode("x")} and found.effects == {"a": [effect("a")]}
    assert found.tasks == {"a": before}


@pytest.mark.parametrize("states", [(1,), (2,), (1, 2)])
async def test_what_is_open_is_found_by_its_own_index(store: SQLiteStore, states: tuple[int, ...]) -> None:
    await store.run(applying(insert(task("a"))))
    effects = [effect("a", n, state=int(EffectState.COMMITTED)) for n in range(1, 200)]
    await store.run(applying(with_effects(task("a"), *effects, effect("a", 200, state=states[0]))))
    for where, after in (
        (EffectFilter(states=states), None),
        (EffectFilter(states=states), ("a", 3)),
        (EffectFilter(states=states, pool="default", downstream="mail"), ("a", 3)),
    ):
        seen = await _traced(store, store._reader, store.effects(where, after, 10))
        plans = await _plans(store, seen)
        assert any("effect_open" in plan for plan in plans) and not any(p.startswith("SCAN f") for p in plans), plans
        assert [e.number for e in await store.effects(where, after, 10)] == [200]
    plans = await _plans(store, await _traced(store, store._reader, store.unknown_backlog()))
    assert any("effect_open" in plan for plan in plans), plans


async def test_one_task_s_effects_are_found_by_its_key(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("a"))))
    where = EffectFilter(task_id="a", states=(1, 2))
    plans = await _plans(store, await _traced(store, store._reader, store.effects(where, None, 10)))
    assert any("PRIMARY KEY (task_id=?" in plan for plan in plans), plans


async def test_a_task_without_effects_costs_no_statement_more(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("a"))))
    claimed = task("a", state=int(State.CLAIMED), state_version=2)
    seen = await _traced(store, store._writer, store.run(applying(replace(task("a"), claimed, "claim"))))
    assert seen and not [sql for sql in seen if "effect" in sql]
    seen = await _traced(store, store._writer, store.run(loading(tasks=["a"])))
    assert not [sql for sql in seen if "FROM effect" in sql]


async def test_rows_of_effects_without_a_task_are_counted(store: SQLiteStore, path: Path) -> None:
    await store.run(applying(insert(task("a"))))
    await store.run(applying(with_effects(task("a"), effect("a", 1), effect("a", 2), payloads={1: encode(1)})))
    con = apsw.Connection(str(path))
    con.execute("DELETE FROM task")
    con.close()
    orphans = await store.orphans()
    assert (orphans["effect"], orphans["effect_payload"]) == (2, 1)
