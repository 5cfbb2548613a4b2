"""The stage of tests/faults on a database of its own on the run's server: the same processes, the same stories."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest

from tests.faults.stage import PATIENCE, Program, Stage
from tests.postgres.databases import advance, new_database, running_or_skip
from tests.postgres.server import Server

T = TypeVar("T")

on_postgres = pytest.mark.parametrize("stage", ["postgres"], indirect=True)

# Other processes read the store's clock as they are shipped. In this database they find another function first.
MOVED = (
    "CREATE SCHEMA moved",
    """CREATE FUNCTION moved.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    'SELECT pg_catalog.clock_timestamp() + moved_us * interval ''1 microsecond'' FROM public.moved_clock'""",
)
# Every B-tree, and that it has an entry for every row.
CHECK = """SELECT bt_index_check(i.indexrelid, true) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
    JOIN pg_am a ON a.oid = c.relam WHERE a.amname = 'btree' AND c.relnamespace = 'fencepost'::regnamespace"""


class PostgresStage(Stage):
    """What needs no waiting in the tests' words (`advance`, `rows`) blocks their loop for a moment, as on a file."""

    store = "postgres"

    def __init__(self, folder: Path, server: Server, database: str) -> None:
        super().__init__(folder)
        self.server = server
        self.database = database
        self.url = server.url(database)

    @classmethod
    async def make(cls, folder: Path) -> PostgresStage:
        server = running_or_skip()
        database = await new_database(server)
        await server.administer(
            *MOVED, f"ALTER DATABASE {database} SET search_path = moved, pg_catalog, public", database=database
        )
        return cls(folder, server, database)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A bare connection, as another program would open the database."""
        con = await asyncpg.connect(self.server.url(self.database))
        try:
            yield con
        finally:
            await con.close(timeout=10)

    def advance(self, seconds: float, *, wait: float = 30.0) -> None:
        _now(lambda: advance(self.server, self.database, seconds))
        for client in self._clients:  # which carry the clock on by themselves between two answers
            client.backend.store.forget()  # type: ignore[attr-defined]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        async def fetch() -> list[tuple[Any, ...]]:
            async with self.connection() as con:
                await con.execute("SET search_path = fencepost, pg_catalog")
                return [tuple(row) for row in await con.fetch(query)]

        return _now(fetch)

    def after_now(self) -> str:
        """By the transaction's id, which stands in the number. Whoever began before this moment and commits after it
        has a lower number than others that were committed by then, so the number alone does not tell."""
        [(seen,)] = self.rows("SELECT pg_current_snapshot()::text")
        return f"NOT pg_visible_in_snapshot((number >> 20)::text::xid8, '{seen}')"

    def hold_the_lock(self, seconds: float) -> None:
        async def hold() -> None:
            async with self.connection() as con, con.transaction():
                await con.execute("LOCK TABLE fencepost.task IN ACCESS EXCLUSIVE MODE")
                time.sleep(seconds)

        _now(hold)

    def outage(self, pause: float | None) -> None:
        if pause is None:
            self.server.stop(signal.SIGQUIT)
            self.server.start()
            return
        first = self.server.pid
        stopped: list[int] = []
        try:
            for pid in (first, *children(first)):
                with suppress(ProcessLookupError):  # a session that ended just now
                    os.kill(pid, signal.SIGSTOP)
                    stopped.append(pid)
            time.sleep(pause)
        finally:
            for pid in reversed(stopped):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[None]:
        async with self.connection() as con, con.transaction(isolation="repeatable_read", readonly=True):
            await con.fetchval("SELECT count(*) FROM fencepost.pool")
            yield

    async def pause(self, program: Program) -> None:
        """Stop it anywhere but inside a transaction, whose row locks would stay with it."""
        async with asyncio.timeout(PATIENCE), self.connection() as con:
            while True:
                await program.pause()
                inside = await con.fetchval(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND state LIKE 'idle in transaction%'",
                    self.database,
                )
                if not inside:
                    return
                program.wake()
                await asyncio.sleep(0.01)

    def integrity(self) -> str:
        async def check() -> str:
            async with self.connection() as con:
                await con.execute("CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
                await con.fetch(CHECK)
            return "ok"

        return _now(check)

    async def close(self) -> None:
        await super().close()
        await self.server.drop_database(self.database)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


def _now(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it to its end, on a loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result(60)
