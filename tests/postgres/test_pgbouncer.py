"""Through a pooler in transaction mode: views and looking-after. The conformance suite runs there whole, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

import fencepost
from fencepost.errors import StoreRefused, Unavailable
from fencepost.wire import NewTask
from tests.postgres.bouncer import Bouncer, bouncing
from tests.postgres.server import Missing, Server


@pytest_asyncio.fixture
async def bouncer(server: Server) -> AsyncIterator[Bouncer]:
    try:
        found = bouncing()
    except Missing as error:
        pytest.skip(str(error))
    yield found


async def test_thirty_workers_and_every_report_through_three_connections(
    bouncer: Bouncer, database: str
) -> None:  # B37
    clients = [await fencepost.connect(bouncer.url(database)) for _ in range(3)]
    try:
        await clients[0].submit_many([NewTask({"n": n}, task_id=f"t{n}") for n in range(150)])
        done: list[str] = []

        async def work(number: int) -> None:
            client = clients[number % 3]
            while True:
                got = await client.claim_next(owner=f"w{number}")
                assert isinstance(got, list)
                if not got:
                    return
                assert (await client.commit(got[0], number)).outcome == "COMMITTED"
                done.append(got[0].task_id)

        await asyncio.gather(*(work(number) for number in range(30)))
        assert len(done) == len(set(done)) == 150
        audit = await clients[1].report("audit")
        assert audit.clean, audit.violations
        assert (await clients[1].report("doctor"))["pgbouncer"] is True
        assert await clients[2].report("status")
        removed = await clients[2].report("prune", older_than=0.0)
        assert removed["tasks"] == 150
    finally:
        for client in clients:
            await client.close()


async def test_a_pooler_that_the_url_does_not_mention_is_named(bouncer: Bouncer, database: str) -> None:
    with pytest.raises(StoreRefused, match="pgbouncer=true"):
        await fencepost.connect(bouncer.url(database).partition("?")[0])
    async with await fencepost.connect(bouncer.url(database)) as client:
        assert (await client.report("doctor"))["pooler"] is True


async def test_backends_killed_behind_the_pooler_cost_a_retry_at_most(
    bouncer: Bouncer, server: Server, database: str
) -> None:
    client = await fencepost.connect(bouncer.url(database))
    killer = await asyncpg.connect(server.url())
    try:
        await client.submit_many([NewTask({"n": n}, task_id=f"t{n}") for n in range(60)])
        done = set()
        async with asyncio.timeout(60):
            while len(done) < 60:
                await killer.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = $1 AND pid <> pg_backend_pid() AND random() < 0.2",
                    database,
                )
                try:
                    got = await client.claim_next(owner="w", limit=5, ttl=1.0)
                    assert isinstance(got, list)
                    for claim in got:
                        assert (await client.commit(claim, 1)).outcome == "COMMITTED"
                        done.add(claim.task_id)
                except Unavailable:
                    pass
                await asyncio.sleep(0.01)
                if not done.isdisjoint({f"t{n}" for n in range(60)}) and len(done) < 60:
                    status = await _committed(client)
                    done |= status
        audit = await client.report("audit")
        assert audit.clean, audit.violations
    finally:
        await killer.close()
        await client.close()


async def _committed(client: fencepost.Client) -> set[str]:
    try:
        page = await client.tasks(state="COMMITTED", limit=100)
    except Unavailable:
        return set()
    return {task.task_id for task in page.items}
