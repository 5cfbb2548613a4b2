"""The documented roles, with real users: what the server refuses them. That they can do their work is shown by the
conformance suite, which runs as a worker and as an operator too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import fencepost
from fencepost.errors import StatementFailed, StoreRefused
from fencepost.service import maintenance
from fencepost.stores.postgres import PostgresStore
from fencepost.stores.postgres_roles import roles_sql
from fencepost.wire import NewTask
from tests.postgres.databases import MOVABLE_CLOCK, new_database
from tests.postgres.server import Server
from tests.postgres.test_applying import committed
from tests.postgres.test_applying_effects import claims, prepared, settled
from tests.stores.building import applying, statement


def of(user: str, server: Server, database: str) -> str:
    return server.url(database).replace("tester@", f"{user}@")


@pytest_asyncio.fixture
async def database(server: Server) -> AsyncIterator[str]:
    """With the roles, and a task that was committed after a checkpoint."""
    name = await new_database(server, roles=True)
    async with await fencepost.connect(server.url(name)) as client:
        await client.submit_many([NewTask({"n": 1}, task_id="done"), NewTask({"n": 2}, task_id="open")])
        [claim] = await client.claim_next(owner="w", limit=1)
        await client.checkpoint(claim, {"at": 1}, number=1)
        assert (await client.commit(claim, "result")).outcome == "COMMITTED"
    yield name
    await server.drop_database(name)


# Each would change what a worker has no business with, were it let.
TAMPERING = [
    "ALTER TABLE fencepost.task ADD COLUMN mine text",
    "CREATE TABLE fencepost.mine (n int)",
    "CREATE INDEX ON fencepost.task (owner_id)",
    "DROP TABLE fencepost.log",
    "TRUNCATE fencepost.log",
    "ALTER TABLE fencepost.pool DISABLE ROW LEVEL SECURITY",
    "UPDATE fencepost.event SET generation = 7",
    "UPDATE fencepost.log SET reason = NULL",
    "UPDATE fencepost.result SET data = 'x'",
    "UPDATE fencepost.result SET generation = 7",
    "UPDATE fencepost.staged SET data = 'x'",
    "UPDATE fencepost.task SET task_id = 'mine'",
    "UPDATE fencepost.task SET pruned_to_version = state_version",
    "UPDATE fencepost.dependency SET parent_id = 'mine'",
    "UPDATE fencepost.effect SET effect_id = 'mine'",
    "UPDATE fencepost.effect SET payload_digest = 'mine'",
    "UPDATE fencepost.effect SET terms = '{}'",
    "UPDATE fencepost.effect SET slot = 'mine'",
    "UPDATE fencepost.effect SET number = 7",
    "UPDATE fencepost.effect_payload SET data = 'x'",
    "UPDATE fencepost.effect_payload SET digest = 'x'",
    "DELETE FROM fencepost.effect",
    "DELETE FROM fencepost.effect_payload",
    "DELETE FROM fencepost.event",
    "DELETE FROM fencepost.log",
    "DELETE FROM fencepost.result",
    "DELETE FROM fencepost.task",
    "DELETE FROM fencepost.request",
    "DELETE FROM fencepost.input",
    "DELETE FROM fencepost.dependency",
    "UPDATE fencepost.pool SET epoch = epoch - 1",
    "UPDATE fencepost.pool SET policy = '{}'",
    "UPDATE fencepost.pool SET stage = 'x'",
    "UPDATE fencepost.pool SET stage = stage",
    "DELETE FROM fencepost.pool",
    "INSERT INTO fencepost.pool SELECT 'mine', 1, 1, 1, stage, min_protocol, policy FROM fencepost.pool",
    "UPDATE fencepost.meta SET number_base = 0",
    "UPDATE fencepost.migration SET version = 9",
    "INSERT INTO fencepost.migration VALUES (9, 'x', 'pre', 0)",
]
OPERATORS_MAY = {
    "UPDATE fencepost.result SET data = 'x'",  # prune empties it; column by column is as fine as grants go
    "UPDATE fencepost.task SET pruned_to_version = state_version",
    "UPDATE fencepost.effect_payload SET data = 'x'",
    "DELETE FROM fencepost.event",
    "DELETE FROM fencepost.log",
    "DELETE FROM fencepost.request",
    "DELETE FROM fencepost.input",
}
POOLS = ("UPDATE fencepost.pool", "INSERT INTO fencepost.pool")


@pytest.mark.parametrize("user", ["hand", "chief"])
async def test_the_server_refuses_ddl_and_tampering(server: Server, database: str, user: str) -> None:
    con = await asyncpg.connect(of(user, server, database))
    let = []
    try:
        for statement in TAMPERING:
            if user == "chief" and (statement in OPERATORS_MAY or statement.startswith(POOLS)):
                continue
            try:
                await con.execute(statement)
            except asyncpg.InsufficientPrivilegeError:
                pass
            else:
                let.append(statement)
    finally:
        await con.close()
    assert let == []
    async with await fencepost.connect(server.url(database)) as client:
        audit = await client.report("audit")
        assert audit.clean, audit.violations


async def test_a_worker_prepares_settles_and_executes_statements_with_the_rights_that_it_has(
    server: Server, database: str
) -> None:
    await server.administer(
        "CREATE TABLE public.open (row text)",
        "CREATE TABLE public.secret (row text)",
        "GRANT INSERT ON public.open TO fencepost_worker",
        database=database,
    )
    store = await PostgresStore.open(of("hand", server, database), create=False, clock=MOVABLE_CLOCK)
    try:
        [one] = await claims(store, "a")
        first = prepared(one)
        assert await store.run(applying(first)) == [True]
        then = settled(first)
        assert await store.run(applying(then)) == [True]
        commit = committed(then.tasks[0].task)
        commit.statements.append(statement("INSERT INTO public.secret VALUES ('mine')"))
        with pytest.raises(StatementFailed, match="permission denied for table secret"):
            await store.run(applying(commit))
        commit.statements[0] = statement("INSERT INTO public.open VALUES ('mine')")
        assert await store.run(applying(commit)) == [True]
        history = await store.history("a")
        assert history is not None and history.effects == then.effects and history.result is not None
    finally:
        await store.close()


async def test_a_worker_may_not_prune_and_an_operator_may(server: Server, database: str) -> None:
    async with await fencepost.connect(of("hand", server, database)) as client:
        with pytest.raises(StoreRefused, match="permission denied"):
            await client.report("prune", older_than=0.0)
    async with await fencepost.connect(of("chief", server, database)) as client:
        removed = await client.report("prune", older_than=0.0)
        assert removed["tasks"] == removed["inputs"] == 1
        audit = await client.report("audit")
        assert audit.clean, audit.violations


async def test_a_worker_that_may_not_prune_goes_on_taking_lapsed_tasks_back(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_EVERY", 0.0)
    async with await fencepost.connect(of("hand", server, database)) as client:
        backend: Any = client.backend
        loop = maintenance.Maintenance(backend, backend._wakeups)
        refused = asyncio.Event()
        prune, asked = loop.prune, 0

        async def counted(older_than: float | None = None) -> dict[str, int]:
            nonlocal asked
            asked += 1
            try:
                return await prune(older_than)
            finally:
                refused.set()

        monkeypatch.setattr(loop, "prune", counted)
        # Something to prune, or nothing would be refused.
        await server.administer(
            "UPDATE public.moved_clock SET moved_us = 0", "UPDATE fencepost.event SET at = 0", database=database
        )
        loop.start(0.01)
        await asyncio.wait_for(refused.wait(), 10)
        [claim] = await client.claim_next(owner="w", ttl=0.1)
        async with asyncio.timeout(10):
            while (view := await client.task(claim.task_id)).state != "READY":
                await asyncio.sleep(0.02)
        assert view.charged_attempts == 1
        assert asked == 1
        await loop.stop()


@pytest.mark.parametrize(("user", "role"), [("tester", "owner"), ("hand", "worker"), ("chief", "operator")])
async def test_doctors_report_names_the_role(server: Server, database: str, user: str, role: str) -> None:
    async with await fencepost.connect(of(user, server, database), create=False) as client:
        report = await client.report("doctor")
    assert (report["role"], report["missing_rights"], report["pooler"]) == (role, [], False)


async def test_missing_rights_are_named(server: Server, database: str) -> None:
    await server.administer("REVOKE INSERT ON fencepost.event FROM fencepost_worker", database=database)
    async with await fencepost.connect(of("hand", server, database), create=False) as client:
        report = await client.report("doctor")
    assert (report["role"], report["missing_rights"]) == ("none", ["INSERT on event"])


async def test_rights_that_a_later_migration_asks_for_are_missing_until_the_roles_are_made_again(
    server: Server, database: str
) -> None:
    await server.administer("REVOKE ALL ON fencepost.effect FROM fencepost_worker", database=database)
    async with await fencepost.connect(of("hand", server, database), create=False) as client:
        report = await client.report("doctor")
        assert (report["role"], report["missing_rights"]) == ("none", ["INSERT on effect", "UPDATE on effect"])
        await server.administer(roles_sql(), database=database)
        report = await client.report("doctor")
        assert (report["role"], report["missing_rights"]) == ("worker", [])


async def test_the_sql_may_be_run_again_and_gives_back_what_was_taken_or_lent(server: Server, database: str) -> None:
    await server.administer(
        "REVOKE INSERT ON fencepost.event FROM fencepost_worker",
        "GRANT DELETE ON fencepost.event TO fencepost_worker",
        roles_sql(),
        roles_sql(),
        database=database,
    )
    con = await asyncpg.connect(of("hand", server, database))
    try:
        assert await con.fetchrow(
            "SELECT has_table_privilege('fencepost.event', 'INSERT'), has_table_privilege('fencepost.event', 'DELETE')"
        ) == (True, False)
    finally:
        await con.close()


async def test_a_user_without_a_role_is_refused_on_opening(server: Server, database: str) -> None:
    await server.administer("DROP ROLE IF EXISTS stranger", "CREATE ROLE stranger LOGIN")
    with pytest.raises(StoreRefused, match="permission denied for schema fencepost"):
        await PostgresStore.open(of("stranger", server, database), create=False)
