"""raise_epoch on PostgreSQL: once it has returned, nothing of the old epoch is accepted any more."""

from __future__ import annotations

import asyncio

import pytest

import fencepost
from fencepost.errors import Unavailable
from fencepost.stores.postgres import PostgresStore
from fencepost.wire import NewTask, Refused
from tests.postgres.conftest import Open
from tests.postgres.server import Server

ROUNDS = 20


async def test_after_a_raise_no_event_of_the_old_epoch_though_all_are_busy(opened: Open, url: str) -> None:
    clients = [await fencepost.connect(url) for _ in range(4)]
    chief = await fencepost.connect(url)
    store: PostgresStore = await opened()
    stop = asyncio.Event()

    async def busy(number: int) -> None:
        client = clients[number % 4]
        while not stop.is_set():
            got = await client.claim_next(owner=f"w{number}")
            if isinstance(got, Refused):
                await client.adopt_epoch("default")
                continue
            for claim in got:
                await client.renew(claim)
                await client.commit(claim, number)
            if not got:
                await client.submit_many([NewTask({"n": number}) for _ in range(20)])

    working = [asyncio.create_task(busy(number)) for number in range(16)]
    returned: list[tuple[int, int]] = []  # (epoch, the journal's end when the raise had returned)
    try:
        async with asyncio.timeout(60):
            for _ in range(ROUNDS):
                await asyncio.sleep(0.02)
                view = await chief.pool("default")
                assert not isinstance(view, Refused)
                answer = await chief.raise_epoch(
                    "default",
                    expected_epoch=view.epoch,
                    expected_state_version=view.state_version,
                    who="test",
                )
                assert not isinstance(answer, Refused), answer
                raised = [n for n in await store.log(0, 1000, kinds=("pool",)) if n.entry.outcome == "EPOCH_RAISED"]
                returned.append((view.epoch + 1, raised[-1].number))
        stop.set()
        await asyncio.gather(*working)
        events, after = [], 0
        while page := await store.events(after, 1000):
            events += page
            after = page[-1].number
        assert len(returned) == ROUNDS and len({epoch for epoch, _ in returned}) == ROUNDS
        fenced = ("attempt_started", "attempt_renewed", "result_committed")
        for epoch, number in returned:
            late = [n for n in events if n.number > number and n.entry.epoch < epoch and n.entry.name in fenced]
            assert late == []
        assert sum(n.entry.name == "result_committed" for n in events) > 100
    finally:
        stop.set()
        await asyncio.gather(*working, return_exceptions=True)
        for client in (*clients, chief):
            await client.close()


async def test_a_role_that_may_only_work_can_work_and_nothing_else(server: Server, database: str) -> None:
    """The grants of docs/postgresql.md, with a real second role."""
    await server.administer(
        "DROP ROLE IF EXISTS fencepost_worker",
        "CREATE ROLE fencepost_worker LOGIN",
        "GRANT USAGE ON SCHEMA fencepost TO fencepost_worker",
        "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA fencepost TO fencepost_worker",
        "REVOKE INSERT, UPDATE ON fencepost.migration, fencepost.meta FROM fencepost_worker",
        "GRANT DELETE ON fencepost.checkpoint TO fencepost_worker",
        database=database,
    )
    url = server.url(database).replace("tester@", "fencepost_worker@")
    try:
        async with await fencepost.connect(url, create=False) as client:
            await client.submit(NewTask({"n": 1}, task_id="t"))
            [claim] = await client.claim_next(owner="w")
            await client.checkpoint(claim, {"at": 1}, number=1)
            assert (await client.commit(claim, "done")).outcome == "COMMITTED"
            audit = await client.report("audit")
            assert audit.clean, audit.violations
            with pytest.raises(Unavailable, match="permission denied"):
                await client.report("prune", older_than=0.0)
            store = client.backend.store  # type: ignore[attr-defined]
            with pytest.raises(Exception, match=r"permission denied|must be owner"):
                async with store._plans.use() as con:
                    await con.execute("ALTER TABLE fencepost.task ADD COLUMN mine text")
    finally:
        await server.administer("DROP OWNED BY fencepost_worker", "DROP ROLE fencepost_worker", database=database)
