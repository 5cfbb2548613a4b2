"""What a commit brings along to be done in its own transaction: one statement an effect, on tables of its author's.

It is sent as the body of PREPARE, in the protocol that takes one statement at a time, so that the server itself refuses
whatever is not one SELECT, INSERT, UPDATE, DELETE, MERGE or VALUES: nothing here ends the transaction or changes a
schema. Values follow as literals, which take the types of their parameters, whichever driver there is.

A statement must leave fencepost's tables alone, and views, triggers and functions on its way too: the server counts
what a transaction does to each table, and knows its locks, and both are compared. That catches mistakes. What the
database's owner does on purpose it does not catch; the worker's role has no right to (see postgres_roles).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec

from fencepost.errors import StatementFailed
from fencepost.kernel.records import Statement
from fencepost.stores import codec
from fencepost.stores.postgres_callers import Caller
from fencepost.stores.postgres_connections import BROKEN, LOST_AGAINST_OTHERS, Connection

# What the statement before may have left on the connection.
CLEAR = "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; DISCARD TEMP; SELECT pg_advisory_unlock_all()"

_NAME = "fencepost_statement"

_COUNTED = ("numscans", "tuples_returned", "tuples_fetched", "tuples_inserted", "tuples_updated", "tuples_deleted")
_COUNTS = ", ".join(f"pg_catalog.pg_stat_get_xact_{name}(c.oid)" for name in _COUNTED)
# What this transaction has done to fencepost's tables and indexes, and what it has locked of them.
_LOOK = f"""
SELECT pg_catalog.pg_current_xact_id()::text, pg_catalog.current_setting('track_counts'), (
    SELECT pg_catalog.json_agg(pg_catalog.json_build_array(c.relname, {_COUNTS}))::text
    FROM pg_catalog.pg_class c WHERE c.relnamespace = 'fencepost'::regnamespace
), (
    SELECT pg_catalog.json_agg(pg_catalog.json_build_array(c.relname, l.mode))::text
    FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_class c ON c.oid = l.relation
    WHERE l.pid = pg_catalog.pg_backend_pid() AND l.locktype = 'relation'
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
    AND c.relnamespace = 'fencepost'::regnamespace
), (SELECT count(*) FROM pg_catalog.pg_prepared_statements p WHERE p.name = '{_NAME}')"""

_decode = msgspec.json.Decoder(list[list[Any]]).decode


class _Look:
    """A transaction as it stands at one moment."""

    def __init__(self, row: Sequence[Any]) -> None:
        self.transaction: str = row[0]
        self.counting = row[1] == "on"
        self.counts = {tuple(entry) for entry in _decode(row[2])}
        self.locks = {tuple(entry) for entry in _decode(row[3] or "[]")}
        self.prepared = bool(row[4])

    def touched_since(self, before: _Look) -> list[str]:
        return sorted({entry[0] for entry in (self.counts - before.counts) | (self.locks - before.locks)})


async def execute(con: Connection | Caller, statements: Sequence[Statement]) -> None:
    """Execute them in order, inside the transaction that `con` is in.

    Raises StatementFailed for the first one that is refused, and InvalidRequest for a payload that is none; the caller
    then rolls back. What the server says of itself, and not of the statement, is raised as the driver does.
    """
    for statement in statements:
        sql, parameters = codec.statement(statement)
        if "\0" in sql or any(isinstance(value, str) and "\0" in value for value in parameters):
            raise StatementFailed(statement.slot, "no text in PostgreSQL holds a NUL character")
        before = _Look((await con.fetch(_LOOK))[0])
        if not before.counting:
            raise StatementFailed(statement.slot, "track_counts is off: what a statement touches cannot be told")
        if before.prepared:  # by one that failed; its transaction did not take it back
            await con.execute(f"DEALLOCATE {_NAME}")
        try:
            await _one(con, sql, parameters)
        except asyncpg.PostgresError as error:
            if isinstance(error, (*LOST_AGAINST_OTHERS, *BROKEN)):
                raise
            raise StatementFailed(statement.slot, _said(error)) from error
        after = _Look((await con.fetch(_LOOK))[0])
        if after.transaction != before.transaction:
            raise StatementFailed(statement.slot, "it ended the transaction")
        touched = after.touched_since(before)
        if touched or not after.counting:
            raise StatementFailed(statement.slot, f"it touches fencepost's own tables: {', '.join(touched)}")


async def _one(con: Connection | Caller, sql: str, parameters: Sequence[Any]) -> None:
    prepare = con.alone if isinstance(con, Caller) else con.fetch
    await prepare(f"PREPARE {_NAME} AS {sql}")
    values = ", ".join(map(literal, parameters))
    await con.execute(f"EXECUTE {_NAME}{f' ({values})' if values else ''}")
    await con.execute(f"DEALLOCATE {_NAME}")
    if not isinstance(con, Caller):
        # What waits for the end of the transaction is of this statement, and is told as that.
        await con.execute("SET CONSTRAINTS ALL IMMEDIATE")


def literal(value: bool | int | float | str | None) -> str:
    """One whose type the server takes from where it stands."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "'true'" if value else "'false'"
    text = value if isinstance(value, str) else repr(value)
    text = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{text}'"


def _said(error: asyncpg.PostgresError) -> str:
    state = getattr(error, "sqlstate", None)
    return f"{error} (SQLSTATE {state})" if state else str(error)
