"""Steps of the schema on PostgreSQL: once each, seen beforehand, and safe under workers that are running."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

import fencepost
from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Task
from fencepost.stores import codec
from fencepost.stores import postgres_migrations as migrations
from fencepost.stores.postgres import PostgresStore, migrate, migration_status
from fencepost.stores.schema import Migration, newest
from tests.postgres.conftest import Open
from tests.postgres.server import Server
from tests.stores.building import applying, effect, loading, task, with_effects

SHIPPED = migrations.shipped()
VERSION = newest(SHIPPED) + 1
NEXT = Migration(VERSION, "pre", "note", "ALTER TABLE fencepost.task ADD COLUMN note text")
AFTER = Migration(VERSION, "post", "noted", "CREATE INDEX task_note ON fencepost.task (note) WHERE note IS NOT NULL")


async def test_a_dry_run_shows_every_step_and_makes_nothing(server: Server) -> None:
    name = await server.new_database()
    try:
        steps = await migrate(server.url(name), dry_run=True)
        assert steps == list(SHIPPED) and "CREATE TABLE fencepost.task" in steps[0].sql
        with pytest.raises(StoreRefused, match="no fencepost schema"):
            await migrate(server.url(name))
        assert all(step.applied_at is None for step in await migration_status(server.url(name)))
        assert await migrate(server.url(name), create=True) == list(SHIPPED)
        assert await migrate(server.url(name)) == []
        assert all(step.applied_at is not None for step in await migration_status(server.url(name)))
    finally:
        await server.drop_database(name)


async def test_steps_are_applied_once_by_however_many_begin_at_once(url: str) -> None:
    done = await asyncio.gather(*(migrate(url, shipped=(*SHIPPED, NEXT, AFTER)) for _ in range(5)))
    assert sorted(step.name for steps in done for step in steps) == ["note", "noted"]


async def test_a_step_that_fails_changes_nothing_and_the_next_call_goes_on_from_there(url: str) -> None:
    broken = Migration(VERSION + 1, "pre", "broken", "ALTER TABLE fencepost.task ADD COLUMN more text; SELECT 1/0")
    with pytest.raises(Exception, match="division by zero"):
        await migrate(url, shipped=(*SHIPPED, NEXT, broken))
    states = await migration_status(url, shipped=(*SHIPPED, NEXT, broken))
    assert [state.applied_at is not None for state in states] == [*[True] * len(SHIPPED), True, False]
    mended = Migration(VERSION + 1, "pre", "broken", "ALTER TABLE fencepost.task ADD COLUMN more text")
    assert await migrate(url, shipped=(*SHIPPED, NEXT, mended)) == [mended]


async def test_this_code_works_on_the_schema_that_the_next_release_has_prepared(opened: Open, url: str) -> None:
    await migrate(url, shipped=(*SHIPPED, NEXT))
    store = await opened()
    await store.close()
    async with await fencepost.connect(url) as client:
        await client.submit(fencepost.NewTask({"n": 1}))
        [claim] = await client.claim_next(owner="me")
        assert (await client.commit(claim, 1)).outcome == "COMMITTED"
    await migrate(url, shipped=(*SHIPPED, NEXT, AFTER))
    with pytest.raises(StoreRefused, match="newer than this release"):
        await opened()


async def test_the_release_before_effects_works_on_the_schema_that_this_one_has_prepared(server: Server) -> None:
    """It names its columns, and knows nothing of one more: its tasks have no effects, and what it writes of others'
    leaves them alone."""
    first = tuple(step for step in SHIPPED if step.version == 1)
    name = await server.new_database()
    url = server.url(name)
    con = await asyncpg.connect(url)
    try:
        await migrate(url, create=True, shipped=first)
        columns = await con.fetch(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = 'fencepost.task'::regclass "
            "AND attnum > 0 AND NOT attisdropped"
        )
        theirs = [row[0] for row in columns]
        assert set(codec.TASK_COLUMNS) - set(theirs) == {"effects"}

        async def submit(one: Task) -> None:
            row = dict(zip(codec.TASK_COLUMNS, codec.task_row(one), strict=True))
            names = ", ".join(f'"{column}"' for column in theirs)
            places = ", ".join(f"${n}" for n in range(1, len(theirs) + 1))
            await con.execute(
                f"INSERT INTO fencepost.task ({names}) VALUES ({places})", *(row[column] for column in theirs)
            )

        await submit(task("before"))
        assert [step.version for step in await migrate(url)] == [step.version for step in SHIPPED if step.version > 1]
        await submit(task("after"))
        store = await PostgresStore.open(url, create=False)
        try:
            assert (await store.run(loading(tasks=["before", "after"]))).tasks == {
                "before": task("before"),
                "after": task("after"),
            }
            for of in ("before", "after"):
                made = with_effects(task(of), effect(of), payloads={1: encode(1)})
                assert await store.run(applying(made)) == [True]
            await con.execute("UPDATE fencepost.task SET state_version = 3, owner_id = 'old' WHERE task_id = 'after'")
            found = await store.run(loading(tasks=["after"], effects=["after"]))
            assert (found.tasks["after"].effects, found.effects["after"]) == (1, [effect("after")])
        finally:
            await store.close()
    finally:
        await con.close()
        await server.drop_database(name)


async def test_a_step_gives_way_to_a_long_transaction_instead_of_holding_up_all_workers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "_PATIENCE", "100ms")
    monkeypatch.setattr(migrations, "_TRIES", 2)
    long = await asyncpg.connect(url)
    try:
        transaction = long.transaction()
        await transaction.start()
        await long.fetch("SELECT count(*) FROM fencepost.task")
        with pytest.raises(Unavailable, match=f"{VERSION:04}_pre_note waits for a long transaction"):
            await migrate(url, shipped=(*SHIPPED, NEXT))
        await transaction.rollback()
        assert await migrate(url, shipped=(*SHIPPED, NEXT)) == [NEXT]
    finally:
        await long.close()


async def test_a_schema_change_under_twenty_workers_loses_no_claim_and_no_worker(url: str) -> None:  # B34
    """Columns come, indexes are made anew, the next release's own step runs: nobody sees more than a hiccup."""
    stop = asyncio.Event()
    committed: list[str] = []

    async def worker(client: fencepost.Client, number: int) -> None:
        while not stop.is_set():
            answer = await client.claim_next(owner=f"w{number}")
            assert isinstance(answer, list)
            for claim in answer:
                await client.renew(claim)
                done = await client.commit(claim, number)
                assert done.outcome == "COMMITTED", done
                committed.append(claim.task_id)
            if not answer:
                await asyncio.sleep(0.01)

    clients = [await fencepost.connect(url) for _ in range(2)]
    try:
        await clients[0].submit_many([fencepost.NewTask({"n": n}, task_id=f"t{n:04}") for n in range(800)])
        working = [asyncio.create_task(worker(clients[n % 2], n)) for n in range(20)]
        con = await asyncpg.connect(url)
        for table in (
            "task",
            "event",
            "result",
            "request",
            "input",
            "pool",
            "log",
            "checkpoint",
            "staged",
            "dependency",
            "effect",
            "effect_payload",
        ):
            await con.execute(f"ALTER TABLE fencepost.{table} ADD COLUMN noise text")
        for name in ("task_ready", "task_claimed"):
            definition = await con.fetchval("SELECT indexdef FROM pg_indexes WHERE indexname = $1", name)
            async with con.transaction():
                await con.execute(f"DROP INDEX fencepost.{name}")
                await con.execute(definition)
        await con.execute("REINDEX TABLE fencepost.task")
        await migrate(url, shipped=(*SHIPPED, NEXT))
        await con.execute("ALTER TABLE fencepost.task DROP COLUMN note")
        await con.close()
        async with asyncio.timeout(60):
            while len(committed) < 800:
                await asyncio.sleep(0.01)
                for task in working:
                    assert not task.done(), task.exception()
        stop.set()
        await asyncio.gather(*working)
        assert len(set(committed)) == 800
        report = await clients[0].report("audit")
        assert report.clean, report.violations
    finally:
        stop.set()
        for client in clients:
            await client.close()
