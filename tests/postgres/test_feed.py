"""The journal read on and on: nothing missed, nothing twice, whatever commits late."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from fencepost.kernel.records import LogEntry
from fencepost.stores.postgres import PostgresStore
from tests.postgres.conftest import Open
from tests.postgres.server import Server
from tests.stores.building import applying, insert, task


async def test_a_reader_misses_nothing_that_commits_late(opened: Open, server: Server, database: str) -> None:
    store = await opened()
    await store.run(applying(insert(task("a"))))
    late = await asyncpg.connect(server.url(database))
    try:
        transaction = late.transaction()
        await transaction.start()
        number = await late.fetchval(
            "INSERT INTO fencepost.event SELECT (pg_current_xact_id()::text::bigint << 20) + 1, 'late', state_version, "
            "at, door, name, epoch, generation, cancel_generation, revision, attempt_id, compared, state, detail "
            "FROM fencepost.event RETURNING number"
        )
        await store.run(applying(insert(task("b")), log=[LogEntry("usage", 1, "default", "b", "usage")]))
        before = await store.events(0, 10)
        assert [n.entry.task_id for n in before] == ["a"]
        assert await store.log(0, 10) == []
        assert [n.entry.task_id for n in await store.events(0, 10, task_id="b")] == ["b"]
        await transaction.commit()
        after = await store.events(before[-1].number, 10)
        assert [n.entry.task_id for n in after] == ["late", "b"] and after[0].number == number
        assert len(await store.log(0, 10)) == 1
    finally:
        await late.close()


async def test_pages_under_many_writers_hold_every_event_once_and_in_order(opened: Open) -> None:
    stores = [await opened(pool_size=2) for _ in range(3)]
    done = asyncio.Event()

    async def write(number: int, store: PostgresStore) -> None:
        for i in range(60):
            await store.run(applying(insert(task(f"w{number}-{i}-a"), task(f"w{number}-{i}-b"))))

    async def read() -> list[tuple[int, str]]:
        seen: list[tuple[int, str]] = []
        after = 0
        while True:
            last = done.is_set()
            page = await reader.events(after, 7)
            seen += [(n.number, n.entry.task_id) for n in page]
            if page:
                after = page[-1].number
            elif last:
                return seen

    reader = await opened()
    reading = asyncio.create_task(read())
    await asyncio.gather(*(write(n, store) for n, store in enumerate(stores)))
    done.set()
    seen = await asyncio.wait_for(reading, 30)
    assert len(seen) == 360 and len({task_id for _, task_id in seen}) == 360
    assert [number for number, _ in seen] == sorted({number for number, _ in seen})


async def test_pages_are_found_behind_wide_gaps(store: PostgresStore, server: Server, database: str) -> None:
    await store.run(applying(insert(*(task(f"t{i}") for i in range(5)))))
    [first, *_] = await store.events(0, 10)
    start = await asyncpg.connect(server.url(database))
    try:
        await start.execute("UPDATE fencepost.meta SET number_from = 0")
    finally:
        await start.close()
    assert [n.entry.task_id for n in await store.events(0, 3)] == ["t0", "t1", "t2"]
    assert [n.entry.task_id for n in await store.events(first.number + 2, 3)] == ["t3", "t4"]
    last, _ = await store.last_numbers()
    assert await store.events(last, 10) == []
    await store.run(applying(insert(task("next"))))
    assert [n.entry.task_id for n in await store.events(last, 10)] == ["next"]


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_prune_takes_ended_tasks_in_small_steps_and_keeps_the_rest(
    store: PostgresStore, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.stores.postgres_prune.STEP", 2)
    ended = [task(f"done{i}", state=6, state_version=1) for i in range(4)]
    await store.run(applying(insert(*ended, task("alive"), at=5), log=[LogEntry("usage", 5, "default", None, "usage")]))
    removed = await store.prune(10, limit)
    assert removed["tasks"] == min(limit, 4) == removed["events"] == removed["inputs"] and removed["log"] == 1
    while removed["tasks"]:
        removed = await store.prune(10, limit)
    histories = {h.task.task_id: h for h in await store.histories(None, 10)}
    assert len(histories) == 5 and histories["alive"].events and histories["alive"].input is not None
    assert all(h.events == [] and h.task.pruned_to_version == 1 for name, h in histories.items() if name != "alive")
    assert set((await store.orphans()).values()) == {0}
