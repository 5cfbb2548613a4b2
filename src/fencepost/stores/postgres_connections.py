"""Connections to PostgreSQL: the URL's settings, who gets one next, and what the server's errors mean to a caller.

Few connections do more than many: each is a process on the server. They are handed out first come, first served
(a last-in-first-out pool lets waiters starve), and replaced with a back-off when the server went away.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
import msgspec
from asyncpg import Connection as Connection  # untyped: Any to mypy

from fencepost.clock import elapsed
from fencepost.errors import Inconsistent, InvalidRequest, StoreRefused, Unavailable

# How often a statement that lost against others (deadlock, serialization, lock) is tried before that is said.
MAX_TRIES = 10
_NAP = 0.05
_LONGEST_NAP = 1.0
_STATEMENTS = 200  # prepared per connection; the store has fewer shapes


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a postgresql:// URL may say beside libpq's own parameters. Durations are seconds."""

    pool_size: int = 4  # connections for claims, renewals, commits; one more reads, one more listens
    pgbouncer: bool = False  # a pooler in transaction mode stands between: nothing may be kept on a connection
    statement_timeout: float = 30.0  # for any one statement
    lock_timeout: float = 5.0  # for any one lock, before the statement is tried again
    raise_timeout: float = 10.0  # raise_epoch waits so long for those who are at work on the pool
    connect_timeout: float = 10.0  # one try to connect
    reconnect_wait: float = 10.0  # how long a call waits for a server that went away


def parse(url: str) -> tuple[str, Settings]:
    """The URL for the driver, and the settings that were taken out of it. Raises InvalidRequest."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise InvalidRequest("url", "a PostgreSQL URL begins with postgresql://")
    ours: dict[str, str] = {}
    rest: list[tuple[str, str]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in Settings.__struct_fields__:
            ours[name] = value
        else:
            rest.append((name, value))
    try:
        settings = msgspec.convert(ours, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest("url", f"{error} (a parameter of the PostgreSQL URL)") from None
    if not 1 <= settings.pool_size <= 100:
        raise InvalidRequest("url", f"pool_size must lie within 1…100, got {settings.pool_size}")
    for name in ("statement_timeout", "lock_timeout", "raise_timeout", "connect_timeout"):
        if not 0 < getattr(settings, name) <= 3600:
            raise InvalidRequest("url", f"{name} must lie within 0…3600 seconds")
    return urlunsplit(parts._replace(query=urlencode(rest))), settings


# A batch looks up its rows by key; a plan made while a table was small must not scan it once it is large. The
# parameters' values teach the planner nothing, so it plans each statement once.
_KEYED: Mapping[str, str] = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


class Connections:
    """At most `size` of them, made when they are needed. Belongs to the event loop that it was made on."""

    def __init__(self, dsn: str, settings: Settings, size: int, *, keyed: bool, name: str) -> None:
        self._dsn = dsn
        self._settings = settings
        self._keyed = keyed
        self._name = name
        self._turn = asyncio.Semaphore(size)
        self._idle: deque[Connection] = deque()
        self._closed = False
        self._pid = os.getpid()

    @asynccontextmanager
    async def use(self, *, patience: float | None = None) -> AsyncIterator[Connection]:
        """A connection of one's own for the block. Raises Unavailable when there is none in time, StoreRefused
        when asking again would not help."""
        if self._pid != os.getpid():
            raise StoreRefused("this store was opened before this process was forked; connect after the fork")
        if self._closed:
            raise Unavailable("this store is closed")
        async with self._turn:
            con = await self._one(self._settings.reconnect_wait if patience is None else patience)
            try:
                yield con
            finally:
                self._back(con)

    def _back(self, con: Connection) -> None:
        if self._closed or con.is_closed():
            con.terminate()
        else:
            self._idle.append(con)

    async def _one(self, patience: float) -> Connection:
        while self._idle:
            con = self._idle.popleft()
            if not con.is_closed():
                return con
            con.terminate()
        return await self.connect(patience)

    async def connect(self, patience: float) -> Connection:
        """A new connection; a server that does not answer is asked again, ever more slowly, for `patience` seconds."""
        until = elapsed() + patience
        nap = _NAP
        while True:
            try:
                return await self._connect()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                failure = translate(error)
                if isinstance(failure, StoreRefused) or elapsed() + nap > until or self._closed:
                    raise failure from error
            await asyncio.sleep(nap * (0.5 + random.random()))
            nap = min(2 * nap, _LONGEST_NAP)

    async def _connect(self) -> Connection:
        settings = self._settings
        session = {"application_name": self._name}
        if not settings.pgbouncer:  # which knows no other parameter, and would give it to strangers
            session |= {
                "statement_timeout": _milliseconds(settings.statement_timeout),
                "lock_timeout": _milliseconds(settings.lock_timeout),
                "idle_in_transaction_session_timeout": _milliseconds(settings.statement_timeout),
                "jit": "off",
                # Swaps compare versions; a database whose default is stricter would only make them fail.
                "default_transaction_isolation": "read committed",
            }
            if self._keyed:
                session |= _KEYED
        try:
            return await asyncpg.connect(
                self._dsn,
                timeout=settings.connect_timeout,
                command_timeout=settings.statement_timeout + 5.0,
                statement_cache_size=0 if settings.pgbouncer else _STATEMENTS,
                max_cached_statement_lifetime=0,
                max_cacheable_statement_size=0,
                server_settings=session,
            )
        except (ValueError, asyncpg.ClientConfigurationError) as error:
            raise InvalidRequest("url", str(error)) from error

    async def close(self) -> None:
        self._closed = True
        if self._pid != os.getpid():
            return
        idle = list(self._idle)
        self._idle.clear()
        await asyncio.gather(*map(_end, idle))


async def _end(con: Connection) -> None:
    try:
        await con.close(timeout=2)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        con.terminate()


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


# Nothing was written, and the same again may well succeed.
LOST_AGAINST_OTHERS = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)
# The connection is of no use any more.
BROKEN = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,  # with it, wrong passwords
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)


def translate(error: BaseException) -> Exception:
    """What a caller is told: Unavailable, StoreRefused, or Inconsistent where the database refuses what must fit."""
    if "unsupported startup parameter" in str(error):
        return StoreRefused(f"a pooler stands before PostgreSQL, add pgbouncer=true to the URL ({error})")
    if isinstance(error, _REFUSED):
        return StoreRefused(f"PostgreSQL refuses: {error}")
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.UndefinedColumnError | asyncpg.InvalidSchemaNameError):
        return StoreRefused(f"this database has no (or an older) fencepost schema: {error}; run `fencepost migrate`")
    if isinstance(error, LOST_AGAINST_OTHERS):
        text = f"too contended, nothing was written: {error}"
    elif isinstance(error, asyncpg.QueryCanceledError):
        text = f"a statement took longer than statement_timeout and was given up: {error}"
    elif isinstance(error, asyncpg.IntegrityConstraintViolationError | asyncpg.DataError):
        return Inconsistent(f"PostgreSQL refuses a row that must fit ({error}); run fencepost audit")
    elif isinstance(error, TimeoutError):
        text = "PostgreSQL did not answer in time"
    elif isinstance(error, BROKEN):
        text = f"PostgreSQL cannot be reached, or went away: {error or type(error).__name__}"
    else:
        text = f"PostgreSQL answered {type(error).__name__}: {error}"
    return Unavailable(text)
