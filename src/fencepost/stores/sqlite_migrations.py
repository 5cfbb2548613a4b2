"""The schema: made by migrations alone, and checked at every opening.

A file `NNNN_pre_name.sql` runs before the code that needs it, `NNNN_post_name.sql` once no older code is left
(a version may have either or both). So code of version N also works on a database that version N+1's `pre`
step has prepared, and on one whose own `post` steps are still to come; anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import apsw
import msgspec
import uuid_utils

from fencepost.clock import wall_us
from fencepost.errors import StoreRefused
from fencepost.kernel.records import PROTOCOL, Policy
from fencepost.stores import codec
from fencepost.stores.sqlite_file import is_blank

_NAME = re.compile(r"(\d{4})_(pre|post)_([a-z0-9_]+)\.sql")


class Migration(msgspec.Struct, frozen=True):
    version: int
    step: str  # "pre" or "post"
    name: str
    sql: str


class MigrationState(msgspec.Struct, frozen=True):
    """One step, and when it was applied (microseconds of the store's clock; None: not yet)."""

    version: int
    step: str
    name: str
    applied_at: int | None
    sql: str


@cache
def shipped() -> tuple[Migration, ...]:
    """Every migration that this release knows, in order of application."""
    found = []
    for file in (files("fencepost.stores") / "migrations" / "sqlite").iterdir():
        match = _NAME.fullmatch(file.name)
        if match is not None:
            found.append(Migration(int(match[1]), match[2], match[3], file.read_text("utf-8")))
    found.sort(key=lambda m: (m.version, m.step == "post"))
    return tuple(found)


def newest(migrations: Sequence[Migration]) -> int:
    return max(m.version for m in migrations)


def applied(con: apsw.Connection) -> dict[tuple[int, str], tuple[str, int]]:
    rows = con.execute("SELECT version, step, name, applied_at FROM migration ORDER BY version, step")
    return {(version, step): (name, at) for version, step, name, at in rows}


def pending(con: apsw.Connection, migrations: Sequence[Migration]) -> list[Migration]:
    there = {} if is_blank(con) else applied(con)
    return [m for m in migrations if (m.version, m.step) not in there]


def check_schema(con: apsw.Connection, path: str, migrations: Sequence[Migration]) -> None:
    """Raises StoreRefused unless this release may work on the schema as it stands."""
    ours = newest(migrations)
    there = applied(con)
    for version, step in there:
        if version > ours + 1 or (version > ours and step == "post"):
            raise StoreRefused(
                f"{path} has schema {max(v for v, _ in there)}, newer than this release's {ours}; upgrade fencepost"
            )
    missing = [m for m in migrations if m.step == "pre" and (m.version, m.step) not in there]
    missing += [
        # What an older version left to do must be done before a newer one's first step.
        m
        for m in migrations
        if m.step == "post" and m.version < ours and (m.version, m.step) not in there
    ]
    if missing:
        have = max((v for v, _ in there), default=0)
        raise StoreRefused(f"{path} has schema {have}, older than this release's {ours}; run `fencepost migrate` on it")


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
    there: dict[tuple[int, str], tuple[str, int]] = {} if is_blank(con) else applied(con)
    found = [
        MigrationState(m.version, m.step, m.name, there.get((m.version, m.step), (None, None))[1], m.sql)
        for m in migrations
    ]
    known = {(m.version, m.step) for m in migrations}
    found += [
        MigrationState(v, step, name, at, "") for (v, step), (name, at) in there.items() if (v, step) not in known
    ]
    found.sort(key=lambda m: (m.version, m.step == "post"))
    return found


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
    there = applied(con)
    return {
        "schema": max(v for v, _ in there),
        "newest_schema": newest(shipped()),
        "pending": [f"{m.version:04}_{m.step}_{m.name}" for m in pending(con, shipped())],
    }
