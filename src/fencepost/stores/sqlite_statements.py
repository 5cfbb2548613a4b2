"""What a commit brings along to be done in its own transaction: one statement an effect, on tables of its author's.

The tables stand in the same file as fencepost's, which a statement can neither read nor write. It reads and writes
rows and does nothing else: it changes no schema (a trigger would go on working inside other transactions), no setting,
and ends no transaction. What a trigger of its author's does counts as its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from fencepost.clock import elapsed
from fencepost.errors import StatementFailed
from fencepost.kernel.records import Statement
from fencepost.stores import codec

# Whoever works on the file waits for a statement: one that takes longer than this many seconds is stopped.
LONGEST = 5.0

# Whatever database the connection could have open, these names are refused.
_OWN = """
migration meta clock pool task input dependency checkpoint staged result request event log effect effect_payload
"""
OWN_TABLES = frozenset(_OWN.split())

_ROWS = frozenset((apsw.SQLITE_READ, apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE))
_HARMLESS = frozenset((apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE, apsw.SQLITE_FUNCTION))

# What is the statement's own doing. Everything else is the file's trouble, and told as that.
_ITS_OWN = (
    apsw.AuthError,
    apsw.BindingsError,
    apsw.ConstraintError,
    apsw.InterruptError,
    apsw.MismatchError,
    apsw.RangeError,
    apsw.SQLError,
    apsw.TooBigError,
)


def _authorize(action: int, name: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    """SQLite asks while it prepares a statement, with the names of its schema; for each trigger's body too."""
    if action in _ROWS:
        table = (name or "").lower()
        return apsw.SQLITE_DENY if table in OWN_TABLES or table.startswith("sqlite_") else apsw.SQLITE_OK
    return apsw.SQLITE_OK if action in _HARMLESS else apsw.SQLITE_DENY


def execute(con: apsw.Connection, statements: Sequence[Statement]) -> None:
    """Execute them in order, inside the transaction that `con` is in.

    Raises StatementFailed for the first one that fails, and InvalidRequest for a payload that is none; the caller then
    rolls the transaction back, which also takes back what a failed one has done by halves.
    """
    until = elapsed() + LONGEST
    con.set_authorizer(_authorize)
    con.set_progress_handler(lambda: elapsed() > until, 10_000)
    try:
        for statement in statements:
            _execute(con, statement)
    finally:
        con.set_progress_handler(None)
        con.set_authorizer(None)


def _execute(con: apsw.Connection, statement: Statement) -> None:
    sql, parameters = codec.statement(statement)
    begun = 0

    def one_only(cursor: apsw.Cursor, text: str, bindings: apsw.Bindings | None) -> bool:
        nonlocal begun
        begun += 1
        if begun > 1:
            raise StatementFailed(statement.slot, "more than one statement")
        return True

    cursor = con.cursor()
    cursor.exec_trace = one_only
    try:
        # Setting an authorizer expires what is prepared, the cache too; this keeps other people's texts out of it.
        for _ in cursor.execute(sql, parameters, can_cache=False):
            pass  # rows of RETURNING: nobody is there to get them
    except apsw.InterruptError as error:
        raise StatementFailed(statement.slot, f"stopped after {LONGEST:g} seconds") from error
    except _ITS_OWN as error:
        raise StatementFailed(statement.slot, str(error)) from error
    finally:
        cursor.close(True)
    if not con.in_transaction:
        raise StatementFailed(statement.slot, "it ended the transaction")
