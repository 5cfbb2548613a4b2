"""A result is staged in the very instant in which its task is committed, each over a connection of its own."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

import fencepost
from fencepost import Client, Refused, Unavailable
from fencepost.wire import Committed, Pending
from tests.postgres.callers import Asyncpg, claimed, clean
from tests.postgres.server import Server

STAGED, DISCARDED = 1, 3


async def states(url: str) -> list[int]:
    con = await asyncpg.connect(url)
    try:
        return [row[0] for row in await con.fetch("SELECT state FROM fencepost.staged")]
    finally:
        await con.close()


async def waits(con: asyncpg.Connection, count: int) -> None:
    """Until so many sessions wait for a lock."""
    async with asyncio.timeout(20):
        while (
            await con.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            < count
        ):
            await asyncio.sleep(0.005)


async def test_a_commit_that_began_before_the_staged_result_was_there_discards_it(
    client: Client, server: Server, database: str
) -> None:
    claim = await claimed(client, "t")
    url = server.url(database)
    con, watch = await asyncpg.connect(url), await asyncpg.connect(url)
    async with fencepost.connect(url) as other:
        holds = con.transaction()
        await holds.start()
        await con.execute("LOCK TABLE fencepost.log IN SHARE MODE")  # staging writes there, a plain commit does not
        staging = asyncio.create_task(other.stage(claim, "rival"))
        await waits(watch, 1)  # with the task's row locked, and nothing written yet
        committing = asyncio.create_task(client.commit(claim, "done"))
        await waits(watch, 2)  # for that row, by a snapshot that shows nothing staged
        await holds.commit()
        assert isinstance(await staging, str)
        assert isinstance(await committing, Committed)
    await con.close()
    await watch.close()
    assert await states(url) == [DISCARDED]
    await clean(client)


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_a_callers_snapshot_from_before_the_staged_result_does_not_commit_past_it(
    client: Client, server: Server, database: str, isolation: str
) -> None:
    claim = await claimed(client, "t")
    url = server.url(database)
    business = Asyncpg()
    await business.open(url)
    await business.begin(isolation)
    await business.con.fetchval("SELECT count(*) FROM fencepost.task")  # the snapshot is of now
    assert isinstance(await client.stage(claim, "rival"), str)
    with pytest.raises(Unavailable, match="begin it again"):
        await client.commit(claim, "done", connection=business.con)
    await business.do("ROLLBACK")
    await business.begin(isolation)
    assert isinstance(await client.commit(claim, "done", connection=business.con), Pending)
    await business.do("COMMIT")
    await business.close()
    assert await states(url) == [DISCARDED]
    assert not isinstance(await client.result("t"), Refused)
    await clean(client)
