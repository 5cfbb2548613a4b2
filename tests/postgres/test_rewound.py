"""A worker that finds proof that the store went back in time closes the intake, and may change nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

import fencepost
from fencepost import Refused
from fencepost.errors import StoreRefused
from tests.postgres.callers import claimed
from tests.postgres.databases import new_database
from tests.postgres.server import Server

# The task as it was before it was claimed: what a backup from then would bring back.
REWIND = """UPDATE fencepost.task SET state = 1, state_version = 1, claim_generation = 0, attempt_id = NULL,
    owner_id = NULL, claimed_at = NULL, lease_expires_at = NULL, charged_attempts = 0 WHERE task_id = 't'"""


@pytest_asyncio.fixture
async def database(server: Server) -> AsyncIterator[str]:
    name = await new_database(server, roles=True)
    yield name
    await server.drop_database(name)


def as_worker(server: Server, database: str) -> str:
    return server.url(database).replace("tester@", "hand@")


async def test_a_worker_closes_the_intake_of_a_store_that_went_back_in_time(server: Server, database: str) -> None:
    async with fencepost.connect(as_worker(server, database)) as client:
        claim = await claimed(client, "t")
        before = await client.pool()
        assert not isinstance(before, Refused) and before.intake == "OPEN"
        await server.administer(REWIND, database=database)
        answer = await client.commit(claim, 1)
        assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "REWOUND")
        async with asyncio.timeout(10):
            while (pool := await client.pool()).intake == "OPEN":  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        assert not isinstance(pool, Refused)
        assert (pool.state_version, pool.epoch) == (before.state_version + 1, before.epoch)
        with pytest.raises(StoreRefused, match="permission denied|row-level security"):  # noqa: RUF043
            await client.open_intake(expected_state_version=pool.state_version)


async def test_what_closes_the_intake_does_so_only_for_a_worker_and_as_it_was_seen(
    server: Server, database: str
) -> None:
    await server.administer("CREATE ROLE nobodys LOGIN", database=database)
    nobody = await asyncpg.connect(server.url(database).replace("tester@", "nobodys@"))
    hand = await asyncpg.connect(as_worker(server, database))
    con = await asyncpg.connect(server.url(database))
    try:
        before = await con.fetchrow("SELECT * FROM fencepost.pool")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await nobody.fetchval("SELECT fencepost.close_intake('default', 1)")
        # Somebody who shadows what it refers to gains nothing: it has a search path of its own.
        await hand.execute("CREATE TEMP TABLE pool AS TABLE fencepost.pool; SET search_path = pg_temp, fencepost")
        close = "SELECT fencepost.close_intake('default', $1)"
        assert await hand.fetchval(close, before["state_version"] - 1) is None
        assert await hand.fetchval(close, before["state_version"] + 1) is None
        assert await con.fetchrow("SELECT * FROM fencepost.pool") == before
        assert await hand.fetchval(close, before["state_version"]) is True
        after = await con.fetchrow("SELECT * FROM fencepost.pool")
        changed = {"intake_open": 0, "state_version": before["state_version"] + 1}
        assert dict(after) == {**dict(before), **changed}
        assert await hand.fetchval(close, after["state_version"]) is None  # closed already: nothing moves
        owners = "SELECT proowner = relowner FROM pg_proc, pg_class WHERE proname = 'close_intake' AND relname = 'pool'"
        assert await con.fetchval(owners)
    finally:
        for each in (nobody, hand, con):
            await each.close()
        await server.administer("DROP ROLE nobodys", database=database)
