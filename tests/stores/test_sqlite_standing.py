"""What a connection remembers of its last transaction is used only while nobody has written since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apsw
import pytest

from fencepost.errors import Inconsistent
from fencepost.kernel.records import LogEntry, Pool
from fencepost.kernel.writes import Keys, Snapshot
from fencepost.stores.base import Apply, Load
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import Plan, applying, insert, task, writes
from tests.stores.conftest import Open


def _looking(name: str = "default") -> Plan:
    snapshot = Snapshot()
    yield Load(Keys(pools={name}), snapshot)
    return snapshot.pools.get(name)


def _raising(to: int) -> Plan:
    snapshot = Snapshot()
    yield Load(Keys(pools={"default"}), snapshot)
    standing = snapshot.pools["default"]
    made = writes()
    made.pool_write = (standing.state_version, Pool("default", standing.state_version + 1, to))
    yield Apply([made])
    return None


async def test_a_pool_that_another_handle_has_written_is_read_again(opened: Open) -> None:
    one, other = await opened(), await opened()
    assert (await one.run(_looking())).epoch == 1
    await other.run(_raising(5))
    assert (await one.run(_looking())).epoch == 5
    await one.run(_raising(6))
    assert (await one.run(_looking())).epoch == 6
    assert (await other.run(_looking())).epoch == 6


async def test_a_pool_that_was_missing_is_looked_for_again(opened: Open) -> None:
    one, other = await opened(), await opened()
    assert await one.run(_looking("new")) is None
    made = writes()
    made.pool_write = (0, Pool("new"))
    await other.run(applying(made))
    assert (await one.run(_looking("new"))).epoch == 1


async def test_a_write_under_an_epoch_that_another_handle_has_raised_loses(opened: Open) -> None:
    one, other = await opened(), await opened()
    made = insert(task("a"))
    made.epoch = 1
    assert await one.run(applying(made)) == [True]
    await other.run(_raising(2))
    late = insert(task("b"))
    late.epoch = 1
    assert await one.run(applying(late)) == [False]


async def test_numbers_go_on_where_another_handle_left_off(opened: Open) -> None:
    one, other = await opened(), await opened()
    entry = LogEntry("usage", 1, "default", None, "usage")

    def noting() -> Plan:
        yield Apply((), [entry])

    for store in (one, other, one, one, other):
        await store.run(noting())
    assert [found.number for found in await one.log(0, 10)] == [1, 2, 3, 4, 5]


async def test_what_was_rolled_back_is_forgotten(store: SQLiteStore) -> None:
    def failing() -> Plan:
        yield from _raising(9)
        raise RuntimeError("after the write")

    await store.run(_looking())
    with pytest.raises(RuntimeError, match="after the write"):
        await store.run(failing())
    assert (await store.run(_looking())).epoch == 1


def _unread(count: list[str]) -> Callable[[apsw.Connection], None]:
    def trace(con: apsw.Connection) -> None:
        con.trace_v2(apsw.SQLITE_TRACE_STMT, lambda info: count.append(str(info["sql"])))

    return trace


async def test_nothing_is_read_twice_while_nobody_else_writes(store: SQLiteStore) -> None:
    await store.run(_raising(2))
    seen: list[str] = []
    await store._writer.do(_unread(seen))
    await store.run(_looking())
    await store._writer.do(lambda con: con.trace_v2(0, None))
    assert seen == ["BEGIN IMMEDIATE", "COMMIT"]


async def test_a_missing_clock_is_noticed_although_it_was_read_before(store: SQLiteStore) -> None:
    await store.run(_looking())
    con: Any = apsw.Connection(store.path)
    con.execute("DELETE FROM clock")
    con.close()
    with pytest.raises(Inconsistent, match="clock"):
        await store.run(_looking())
