"""A caller's own connection, of whichever driver, as the store's statements want it.

Statements are written with $1, rows come as tuples, and errors are asyncpg's, by their SQLSTATE. psycopg is never
imported here before the caller has: who hands over one of its connections has it loaded.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar

import asyncpg

from fencepost.errors import InvalidRequest

T = TypeVar("T")
_names = itertools.count()


class Driver(Protocol):
    async def fetch(self, sql: str, *values: Any) -> list[Any]: ...

    async def execute(self, sql: str, *values: Any) -> Any: ...


class Caller:
    """As much of a connection as the store's reading and writing use. `transaction` is a savepoint."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.fetch = driver.fetch
        self.execute = driver.execute
        # In the protocol whose messages hold one statement each; asyncpg fetches in no other.
        self.alone: Callable[[str], Awaitable[list[Any]]] = getattr(driver, "alone", driver.fetch)

    async def fetchval(self, sql: str, *values: Any) -> Any:
        rows = await self.fetch(sql, *values)
        return rows[0][0] if rows else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """What the block wrote, and the locks that it took, are gone where it raises; the caller's own stays."""
        name = f"fencepost_{next(_names)}"
        await self.execute(f"SAVEPOINT {name}")
        try:
            yield
        except BaseException:
            # A connection that is gone has taken the transaction with it; the reason is what is being raised.
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await self.execute(f"ROLLBACK TO SAVEPOINT {name}")
                await self.execute(f"RELEASE SAVEPOINT {name}")
            raise
        await self.execute(f"RELEASE SAVEPOINT {name}")


class _Psycopg:
    """A psycopg connection that is awaited."""

    def __init__(self, con: Any) -> None:
        psycopg = sys.modules["psycopg"]
        self._con = con
        self._cursor: Callable[..., Any] = psycopg.AsyncRawCursor
        self._rows: Any = psycopg.rows.tuple_row

    async def fetch(self, sql: str, *values: Any) -> list[Any]:
        with _errors():
            async with self._cursor(self._con, row_factory=self._rows) as cursor:
                await cursor.execute(sql, _plain(values))
                return list(await cursor.fetchall()) if cursor.description is not None else []

    execute = fetch

    async def alone(self, sql: str) -> list[Any]:
        with _errors():
            async with self._cursor(self._con) as cursor:
                await cursor.execute(sql, [], binary=True)  # without parameters it would be the other protocol
        return []


class _PlainPsycopg:
    """A psycopg connection of plain code: each statement runs in a thread, and the connection takes one at a time."""

    def __init__(self, con: Any) -> None:
        psycopg = sys.modules["psycopg"]
        self._con = con
        self._cursor: Callable[..., Any] = psycopg.RawCursor
        self._rows: Any = psycopg.rows.tuple_row

    async def fetch(self, sql: str, *values: Any) -> list[Any]:
        return await self._in_a_thread(self._fetch, sql, values)

    async def alone(self, sql: str) -> list[Any]:
        return await self._in_a_thread(self._alone, sql)

    async def _in_a_thread(self, work: Callable[..., list[Any]], *values: Any) -> list[Any]:
        running = asyncio.ensure_future(asyncio.to_thread(work, *values))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # The thread goes on whoever waits: it is told to stop, and nothing else is sent before it has.
            await asyncio.to_thread(self._con.cancel)
            await asyncio.wait([running])
            raise

    def _fetch(self, sql: str, values: Sequence[Any]) -> list[Any]:
        with _errors(), self._cursor(self._con, row_factory=self._rows) as cursor:
            cursor.execute(sql, _plain(values))
            return list(cursor.fetchall()) if cursor.description is not None else []

    execute = fetch

    def _alone(self, sql: str) -> list[Any]:
        with _errors(), self._cursor(self._con) as cursor:
            cursor.execute(sql, [], binary=True)
        return []


def _plain(values: Sequence[Any]) -> list[Any]:
    """psycopg sends an enum's name; what is meant is its value."""
    return [[_value(item) for item in value] if isinstance(value, list) else _value(value) for value in values]


def _value(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


class _errors(AbstractContextManager[None]):  # noqa: N801 - reads as a block
    """psycopg's errors as asyncpg's of the same SQLSTATE."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, sys.modules["psycopg"].Error):
            return
        state = getattr(error, "sqlstate", None)
        if state is None:
            raise asyncpg.InterfaceError(str(error) or type(error).__name__) from error
        raise asyncpg.PostgresError.new({"S": "ERROR", "C": state, "M": str(error)}) from error


def caller(connection: Any) -> Caller:
    """Raises InvalidRequest for what is no connection of a known driver, or is in no transaction."""
    if isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return Caller(_asyncpg(connection))
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection | psycopg.Connection):
        _begun(connection)
        plain = isinstance(connection, psycopg.Connection)
        return Caller(_PlainPsycopg(connection) if plain else _Psycopg(connection))
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    raise InvalidRequest("connection", f"must be an asyncpg or psycopg 3 connection, got {kind}")


def _asyncpg(connection: Any) -> Any:
    loop = getattr(connection, "_loop", None)
    if loop is not None and loop is not asyncio.get_running_loop():
        raise InvalidRequest("connection", "belongs to another event loop than this client")
    if connection.is_closed():
        raise InvalidRequest("connection", "is closed")
    if not connection.is_in_transaction():
        raise InvalidRequest("connection", _NO_TRANSACTION)
    return connection


def _begun(connection: Any) -> None:
    if connection.closed:
        raise InvalidRequest("connection", "is closed")
    idle = connection.info.transaction_status == sys.modules["psycopg"].pq.TransactionStatus.IDLE
    if idle and connection.autocommit:
        raise InvalidRequest("connection", _NO_TRANSACTION)


_NO_TRANSACTION = (
    "is in no transaction (it commits each statement by itself): begin one, and commit it when all is written"
)
