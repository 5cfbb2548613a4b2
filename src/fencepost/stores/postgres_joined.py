"""A plan inside the transaction of a caller, on the caller's own connection: nothing stands until the caller commits.

Everything that the plan does lies in one savepoint, so that a refusal or a lost swap costs the caller nothing, locks
included. What is read takes no lock. The pool's row is locked right before the records are compared and written, and
from then on, until the caller's transaction has ended, a raise waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg

from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.records import LogEntry
from fencepost.kernel.writes import Keys, Snapshot
from fencepost.stores.base import Apply, Load, Plan
from fencepost.stores.postgres_apply import FREE_LOG, LOG, apply_any
from fencepost.stores.postgres_callers import Caller, caller
from fencepost.stores.postgres_connections import translate
from fencepost.stores.postgres_load import Reading

# How often an Apply that a deadlock ended is tried again; one that the caller's earlier locks cause would come back.
DEADLOCKS = 3
# Journal numbers that one transaction has for each table: see postgres_apply.
MOST_ROWS = FREE_LOG - LOG
_PLACE = "fencepost.place"
_busy: set[int] = set()
_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)


Look = Callable[[Keys], Awaitable[Snapshot]]


class Seen:
    """What a fixed snapshot was asked for, and what it showed."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.found = Snapshot()

    def add(self, keys: Keys, found: Snapshot) -> None:
        for name in ("tasks", "pools", "staged"):
            getattr(self.keys, name).update(getattr(keys, name))
            getattr(self.found, name).update(getattr(found, name))

    def older_than(self, fresh: Snapshot) -> bool:
        """Whether others have committed what it does not show. (What it shows beyond that is the caller's own.)"""
        tasks, pools, staged = self.found.tasks, self.found.pools, self.found.staged
        return (
            any(name not in tasks or tasks[name].state_version < t.state_version for name, t in fresh.tasks.items())
            or any(name not in pools or pools[name].state_version < p.state_version for name, p in fresh.pools.items())
            or any(len(staged.get(name, ())) < len(contents) for name, contents in fresh.staged.items())
        )


# A copy of a store, restored or cloned, has its id. So what is compared besides is the running server and the database.
_WHERE = """(SELECT oid::text FROM pg_database WHERE datname = current_database())
|| ' ' || extract(epoch FROM pg_postmaster_start_time())::text"""


async def whereabouts(con: Any) -> str:
    return str(await con.fetchval(f"SELECT {_WHERE}"))


class Home:
    """Where the store's own connections lead to, which `ask` finds out: again only where a caller's leads elsewhere."""

    def __init__(self, ask: Callable[[], Awaitable[str]]) -> None:
        self._ask = ask
        self._known = ""

    async def is_at(self, place: str) -> bool:
        if place != self._known:
            self._known = await self._ask()  # the server may have been started again
        return place == self._known


class _Nothing(Exception):
    """The plan wrote nothing: its locks go."""


async def run_joined(
    connection: Any, plan: Plan, store_id: str, home: Home, reading: Reading, base: int, look: Look
) -> list[LogEntry]:
    """Drive `plan` on `connection`. `look` reads what is committed, by another connection.

    The answer is what hangs on no change, to be journalled whatever becomes of the caller's transaction.

    Raises InvalidRequest (the connection is not fit) and Unavailable, with nothing written.
    """
    con = caller(connection)
    if id(connection) in _busy:
        raise InvalidRequest("connection", "is in use by another call: one after the other")
    _busy.add(id(connection))
    seen: Seen | None = None
    apart: list[LogEntry] = []
    try:
        async with con.transaction():
            if await _fit(con, store_id, home):
                seen = Seen()
            if not await _drive(con, plan, reading, base, seen, apart):
                raise _Nothing
    except _Nothing:
        # A no must not rest on records that had moved on before it was asked.
        if seen is not None and seen.older_than(await look(seen.keys)):
            raise Unavailable(
                "this transaction does not see what others have committed since it began, and cannot decide on it; "
                "nothing was written: roll it back and begin it again"
            ) from None
    except _ERRORS as error:
        raise _translate(error) from error
    finally:
        _busy.discard(id(connection))
        plan.close()
    return apart


async def _drive(
    con: Caller, plan: Plan, reading: Reading, base: int, seen: Seen | None, apart: list[LogEntry]
) -> bool:
    """Whether anything was written."""
    wrote = False
    answer: list[bool] | None = None
    while True:
        try:
            step = plan.send(answer)
        except StopIteration:
            return wrote
        answer = None
        if type(step) is Load:
            await reading.load(con, step.keys, step.into)
            if seen is not None:
                seen.add(step.keys, step.into)
        elif type(step) is Apply:
            if not step.sets:
                apart.extend(step.log)
                answer = []
            else:
                answer = await _apply(con, step, base)
                wrote = wrote or any(answer)
        else:
            raise InvalidRequest("connection", "tasks are not claimed inside another transaction")


async def _fit(con: Caller, store_id: str, home: Home) -> bool:
    """Whether the transaction has one snapshot for all its statements. Raises InvalidRequest where it is not fit."""
    try:
        rows = await con.fetch(
            "SELECT (SELECT store_id FROM fencepost.meta), current_setting('transaction_isolation'), "
            f"current_setting('transaction_read_only'), pg_is_in_recovery()::int, {_WHERE}"
        )
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        raise InvalidRequest("connection", "leads to another database, without a fencepost schema") from None
    found, isolation, read_only, standby, place = rows[0]
    if found != store_id:
        raise InvalidRequest("connection", f"leads to another store ({found}) than this client ({store_id})")
    if standby or read_only == "on":
        raise InvalidRequest("connection", "its transaction is read only")
    if not await home.is_at(place):
        raise InvalidRequest("connection", "leads to a copy of this store, on another server or in another database")
    return str(isolation) not in ("read committed", "read uncommitted")


async def _apply(con: Caller, step: Apply, base: int) -> list[bool]:
    place = int(await con.fetchval(f"SELECT coalesce(nullif(current_setting('{_PLACE}', true), ''), '0')::int8"))
    rows = len(step.log)
    for writes in step.sets:
        rows += len(writes.events) + (len(writes.log) if "log" in writes.made else 0)
    if place + rows >= MOST_ROWS:
        raise InvalidRequest("connection", f"one transaction holds at most {MOST_ROWS} changes")
    answer = await _compared(con, step, base + place)
    # Transaction-local, and taken back with a savepoint, as the rows are that it counts.
    await con.fetch(f"SELECT set_config('{_PLACE}', $1::text, true)", str(place + rows))
    return answer


async def _compared(con: Caller, step: Apply, base: int) -> list[bool]:
    tries = 1
    while True:
        try:
            return await apply_any(con, step.sets, step.log, base, _no_pools)
        except asyncpg.DeadlockDetectedError:
            if tries == DEADLOCKS:
                raise
        tries += 1


async def _no_pools(con: Any, names: Sequence[str]) -> list[Any]:
    raise InvalidRequest("connection", "pools are not changed inside another transaction")


def _translate(error: Exception) -> Exception:
    if isinstance(error, asyncpg.InFailedSQLTransactionError):
        return InvalidRequest("connection", "its transaction has failed already: roll it back")
    if isinstance(error, asyncpg.SerializationError):
        return Unavailable(f"nothing was written; roll this transaction back and begin it again: {error}")
    return translate(error)
