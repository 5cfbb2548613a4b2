"""Migrations, whatever the database: which steps there are, and whether a schema as it stands may be worked on.

A file `NNNN_pre_name.sql` runs before the code that needs it, `NNNN_post_name.sql` once no older code is left
(a version may have either or both). So code of version N also works on a database that version N+1's `pre`
step has prepared, and on one whose own `post` steps are still to come; anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from fencepost.errors import StoreRefused

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


# What a database's own table says: (version, step) → (name, when).
Applied = Mapping[tuple[int, str], tuple[str, int]]


@cache
def shipped_for(store: str) -> tuple[Migration, ...]:
    """Every migration that this release knows for one kind of store, in order of application."""
    found = []
    for file in (files("fencepost.stores") / "migrations" / store).iterdir():
        match = _NAME.fullmatch(file.name)
        if match is not None:
            found.append(Migration(int(match[1]), match[2], match[3], file.read_text("utf-8")))
    found.sort(key=lambda m: (m.version, m.step == "post"))
    return tuple(found)


def newest(migrations: Sequence[Migration]) -> int:
    return max(m.version for m in migrations)


def pending(there: Applied, migrations: Sequence[Migration]) -> list[Migration]:
    return [m for m in migrations if (m.version, m.step) not in there]


def check_schema(there: Applied, where: str, migrations: Sequence[Migration]) -> None:
    """Raises StoreRefused unless this release may work on the schema as it stands."""
    ours = newest(migrations)
    for version, step in there:
        if version > ours + 1 or (version > ours and step == "post"):
            raise StoreRefused(
                f"{where} has schema {max(v for v, _ in there)}, newer than this release's {ours}; upgrade fencepost"
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
        raise StoreRefused(
            f"{where} has schema {have}, older than this release's {ours}; run `fencepost migrate` on it"
        )


def states(there: Applied, migrations: Sequence[Migration]) -> list[MigrationState]:
    """Every step known here or applied there, in order."""
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
