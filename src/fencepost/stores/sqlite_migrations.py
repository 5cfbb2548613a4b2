"""The schema of a SQLite file: made by migrations alone, and checked at every opening (see `schema` for the steps)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import apsw
import uuid_utils

from fencepost.clock import wall_us
from fencepost.errors import StoreRefused
from fencepost.kernel.records import PROTOCOL, Policy
from fencepost.stores import codec, schema
from fencepost.stores.schema import Migration, MigrationState, newest, shipped_for
from fencepost.stores.sqlite_file import is_blank

shipped = partial(shipped_for, "sqlite")


def applied(con: apsw.Connection) -> dict[tuple[int, str], tuple[str, int]]:
    rows = con.execute("SELECT version, step, name, applied_at FROM migration ORDER BY version, step")
    return {(version, step): (name, at) for version, step, name, at in rows}


def there(con: apsw.Connection) -> schema.Applied:
    return {} if is_blank(con) else applied(con)


def pending(con: apsw.Connection, migrations: Sequence[Migration]) -> list[Migration]:
    return schema.pending(there(con), migrations)


def check_schema(con: apsw.Connection, path: str, migrations: Sequence[Migration]) -> None:
    """Raises StoreRefused unless this release may work on the schema as it stands."""
    schema.check_schema(applied(con), path, migrations)


def check_protocol(con: apsw.Connection, path: str) -> None:
    for name, least in con.execute("SELECT name, min_protocol FROM pool WHERE min_protocol > ?", (PROTOCOL,)):
        raise StoreRefused(
            f"{path}: pool {name!r} wants protocol {least} or newer, this release speaks {PROTOCOL}; upgrade fencepost"
        )


def apply(con: apsw.Connection, migration: Migration, namespace: str | None = None) -> None:
    """One step in the caller's transaction, with its row in `migration`."""
    now = wall_us()
    if migration.version > 1:
        now = max(now, con.execute("SELECT at FROM clock WHERE id = 1").get)
    con.execute(
        migration.sql,
        {
            "now": now,
            "store_id": str(uuid_utils.uuid4()),
            "namespace": namespace or str(uuid_utils.uuid4()),
            "policy": codec.json_text(Policy()),
        },
    ).fetchall()
    con.execute(
        "INSERT INTO migration (version, name, step, applied_at) VALUES (?, ?, ?, ?)",
        (migration.version, migration.name, migration.step, now),
    )


def create(con: apsw.Connection, migrations: Sequence[Migration], namespace: str | None = None) -> bool:
    """Make a blank file a store at the newest schema, in one transaction. False where it is not blank (any more)."""
    con.execute("BEGIN IMMEDIATE")
    try:
        blank = is_blank(con)
        if blank:
            for migration in migrations:
                apply(con, migration, namespace)
        con.execute("COMMIT")
    except BaseException:
        if con.in_transaction:
            con.execute("ROLLBACK")
        raise
    return blank


def status(con: apsw.Connection, migrations: Sequence[Migration]) -> list[MigrationState]:
    """Every step known here or applied there, in order."""
    return schema.states(there(con), migrations)


def migrate(con: apsw.Connection, migrations: Sequence[Migration], dry_run: bool) -> list[Migration]:
    """Apply what is pending, each step in a transaction of its own; what was (or would be) applied."""
    if dry_run:
        return pending(con, migrations)
    done = []
    for migration in migrations:
        con.execute("BEGIN IMMEDIATE")
        try:
            wanted = migration in pending(con, [migration])
            if wanted:
                apply(con, migration)
            con.execute("COMMIT")
        except BaseException:
            if con.in_transaction:
                con.execute("ROLLBACK")
            raise
        if wanted:
            done.append(migration)
    return done


def describe(con: apsw.Connection) -> dict[str, Any]:
    return {
        "schema": max(version for version, _ in applied(con)),
        "newest_schema": newest(shipped()),
        "pending": [f"{m.version:04}_{m.step}_{m.name}" for m in pending(con, shipped())],
    }
