"""B34: the schema changes under running workers, directly and behind a pooler. See test_migrations for the steps."""

from __future__ import annotations

import asyncio

import pytest

from fencepost import NewTask
from fencepost.stores.postgres import migrate
from tests.faults.crowd import none_open
from tests.faults.stage import stage, until
from tests.postgres.bouncer import bouncing
from tests.postgres.server import Missing
from tests.postgres.stage import PostgresStage, on_postgres
from tests.postgres.test_migrations import NEXT, SHIPPED

__all__ = ["stage"]

PROCESSES, CALLERS = 4, 5


async def deploy(stage: PostgresStage) -> None:
    """What deployments and people do to tables in use, and the product's own next pre step, there and back."""
    server, database = stage.server, stage.database
    tables = [name for (name,) in stage.rows("SELECT tablename::text FROM pg_tables WHERE schemaname = 'fencepost'")]
    for table in tables:
        await server.administer(f"ALTER TABLE fencepost.{table} ADD COLUMN noise text", database=database)
    keys = stage.rows(
        "SELECT conname::text, conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE contype = 'p' AND connamespace = 'fencepost'::regnamespace"
    )
    for name, table, definition in keys:
        await server.administer(
            f"ALTER TABLE fencepost.{table.rpartition('.')[2]} DROP CONSTRAINT {name}, "
            f"ADD CONSTRAINT {name} {definition}",
            database=database,
        )
    for name, definition in stage.rows(
        "SELECT indexname::text, indexdef FROM pg_indexes WHERE indexname IN ('task_ready', 'task_claimed')"
    ):
        await server.administer(f"BEGIN; DROP INDEX fencepost.{name}; {definition}; COMMIT", database=database)
    await migrate(server.url(database), shipped=(*SHIPPED, NEXT))
    await server.administer("ALTER TABLE fencepost.task DROP COLUMN note", database=database)


@on_postgres
@pytest.mark.slow
@pytest.mark.parametrize("way", ["directly", "through pgbouncer"])
async def test_b34_every_table_and_unique_index_changes_under_twenty_workers_and_none_hears_of_it(
    stage: PostgresStage, way: str
) -> None:
    url = stage.url
    if way != "directly":
        try:
            url = bouncing().url(stage.database)
        except Missing as error:
            pytest.skip(str(error))
    client = await stage.client()
    crowd = [await stage.program("claimers", url, f"p{n}", str(CALLERS), "2") for n in range(PROCESSES)]
    for program in crowd:
        await program.reaches("connected")
    for program in crowd:
        program.tell("go")
    submitted = 0
    changing = asyncio.create_task(deploy(stage))
    while not changing.done():
        await client.submit_many([NewTask(n, task_id=f"t{submitted + n:06}") for n in range(50)])
        submitted += 50
        await asyncio.sleep(0.05)
    await changing
    await client.submit_many([NewTask(n, task_id=f"after{n:03}") for n in range(200)])
    await until(lambda: none_open(stage))
    for program in crowd:
        program.tell("end")
    ends = [await program.reaches("done") for program in crowd]
    assert [text for end in ends for text in end["wrong"]] == []
    committed = [task_id for end in ends for task_id in end["committed"]]
    assert len(committed) == len(set(committed)) == submitted + 200
    for program in crowd:
        assert await program.ended() == 0
    lost = stage.rows("SELECT task_id FROM event WHERE name = 'attempt_ended'")
    assert lost == [], "no lease was lost"
    await stage.audit()
