"""The store's clock never goes back: not with the wall clock, not over handles, processes and restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fencepost import clock
from fencepost.kernel.writes import Keys, Snapshot
from fencepost.stores.base import Apply, Load
from fencepost.stores.sqlite import SQLiteStore, StoreClock
from tests.stores.building import Plan, applying, insert, task
from tests.stores.conftest import Open

HOUR = 3_600_000_000


class Hands:
    """A wall clock and an elapsed clock, moved by hand."""

    def __init__(self, wall: int) -> None:
        self.wall = wall
        self.seconds = 100.0

    def clock(self) -> StoreClock:
        return StoreClock(lambda: self.wall, lambda: self.seconds)


def _writing(name: str) -> Plan:
    snapshot = Snapshot()
    yield Load(Keys(tasks={name}), snapshot)
    yield Apply([insert(task(name))])
    return snapshot.now


def _reading() -> Plan:
    snapshot = Snapshot()
    yield Load(Keys(), snapshot)
    return snapshot.now


async def test_the_clock_follows_the_wall_clock(store: SQLiteStore) -> None:
    before = clock.wall_us()
    now = await store.run(_writing("a"))
    assert before <= now <= clock.wall_us()


async def test_a_wall_clock_that_goes_back_does_not_take_the_store_along(opened: Open) -> None:
    hands = Hands(clock.wall_us() + HOUR)
    store = await opened(store_clock=hands.clock())
    first = await store.run(_writing("a"))
    assert first == hands.wall
    hands.wall -= 2 * HOUR
    second = await store.run(_writing("b"))
    assert second == first
    hands.seconds += 1.5
    assert await store.run(_reading()) == first + 1_500_000
    assert await store.clock() == first + 1_500_000


async def test_what_was_stored_holds_for_other_handles_and_after_a_restart(opened: Open) -> None:
    ahead = Hands(clock.wall_us() + HOUR)
    store = await opened(store_clock=ahead.clock())
    now = await store.run(_writing("a"))
    other = await opened()
    assert await other.clock() >= now and await other.run(_writing("b")) >= now
    await store.close()
    await other.close()
    again = await opened()
    assert await again.run(_reading()) >= now


async def test_a_plan_has_one_now(store: SQLiteStore) -> None:
    def plan() -> Plan:
        first = yield from _reading()
        second = yield from _reading()
        return first, second

    first, second = await store.run(plan())
    assert first == second


async def test_readings_of_two_processes_never_fall_in_order_of_commit(store: SQLiteStore, path: Path) -> None:
    """One of them has a wall clock that is an hour slow."""
    code = """
import asyncio, sys
from fencepost import clock
from fencepost.stores.sqlite import SQLiteStore, StoreClock
from tests.stores.building import insert, task
from tests.stores.test_sqlite_clock import _writing

async def main():
    slow = StoreClock(lambda: clock.wall_us() - 3_600_000_000)
    store = await SQLiteStore.open(sys.argv[1], store_clock=slow)
    for i in range(30):
        print(await store.run(_writing(f"other{i}")))
    await store.close()

asyncio.run(main())
"""
    await store.run(_writing("first"))
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    here = [await store.run(_writing(f"here{i}")) for i in range(30)]
    out, _ = process.communicate(timeout=60)
    there = [int(line) for line in out.split()]
    assert len(there) == 30 and there == sorted(there) and here == sorted(here)
    stored = await store._writer.do(lambda con: con.execute("SELECT at FROM clock").get)
    assert stored == max(*here, *there)
    assert min(there) > clock.wall_us() - HOUR // 2  # the slow one followed what was stored


async def test_the_stored_time_moves_only_with_writes(store: SQLiteStore) -> None:
    await store.run(_writing("a"))
    read = "SELECT at, number FROM clock"
    before = await store._writer.do(lambda con: con.execute(read).get)
    await store.run(_reading())
    await store.run(applying())
    assert await store._writer.do(lambda con: con.execute(read).get) == before
    await store.run(_writing("b"))
    assert await store._writer.do(lambda con: con.execute(read).get) > before
