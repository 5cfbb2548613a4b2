"""The schema on PostgreSQL: made by migrations alone, and checked at every opening (see `schema` for the steps).

Who migrates holds one advisory lock, for the length of a transaction, so that many may begin at once; every step is a
transaction of its own. A step that would have to wait for a table longer than a moment gives way and tries again, so
that workers never queue up behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import asyncpg
import uuid_utils

from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel.records import PROTOCOL, Policy, Pool
from fencepost.stores import codec, schema
from fencepost.stores.postgres_apply import NUMBER_BITS
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_load import CLOCK
from fencepost.stores.postgres_rows import listed
from fencepost.stores.schema import Migration, MigrationState, newest, shipped_for

shipped = partial(shipped_for, "postgres")

_LOCK = int.from_bytes(b"fencpost", "big") >> 1
_TRIES = 30
_PATIENCE = "1s"


async def exists(con: Connection) -> bool:
    # Not to_regclass: that may answer from a cache which does not know yet what others made meanwhile.
    return await con.fetchval(  # type: ignore[no-any-return]
        "SELECT EXISTS (SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = 'fencepost' AND c.relname = 'migration')"
    )


async def applied(con: Connection) -> schema.Applied:
    if not await exists(con):
        return {}
    rows = await con.fetch("SELECT version, step, name, applied_at FROM fencepost.migration ORDER BY version, step")
    return {(version, step): (name, at) for version, step, name, at in rows}


async def check(con: Connection, where: str, migrations: Sequence[Migration]) -> None:
    """Raises StoreRefused unless this release may work on the schema, and on every pool, as they stand."""
    there = await applied(con)
    if not there:
        raise StoreRefused(f"{where} holds no fencepost schema")
    schema.check_schema(there, where, migrations)
    for name, least in await con.fetch(
        "SELECT name, min_protocol FROM fencepost.pool WHERE min_protocol > $1 ORDER BY name", PROTOCOL
    ):
        raise StoreRefused(
            f"{where}: pool {name!r} wants protocol {least} or newer, this release speaks {PROTOCOL}; upgrade fencepost"
        )


async def create(con: Connection, migrations: Sequence[Migration], namespace: str | None = None) -> bool:
    """Make a database without a fencepost schema a store at the newest one, in one transaction. False where there is
    one (by now)."""
    async with con.transaction():
        await con.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if await exists(con):
            return False
        for migration in migrations:
            await _apply(con, migration, namespace)
    return True


async def migrate(con: Connection, migrations: Sequence[Migration], dry_run: bool) -> list[Migration]:
    """Apply what is pending; what was (or would be) applied."""
    if dry_run:
        return schema.pending(await applied(con), migrations)
    done = []
    for migration in migrations:
        for attempt in range(_TRIES):
            try:
                async with con.transaction():
                    await con.execute(f"SET LOCAL lock_timeout = '{_PATIENCE}'")
                    await con.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
                    wanted = bool(schema.pending(await applied(con), [migration]))
                    if wanted:
                        await _apply(con, migration, None)
                break
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
                if attempt + 1 == _TRIES:
                    raise Unavailable(
                        f"migration {migration.version:04}_{migration.step}_{migration.name} waits for a long "
                        f"transaction ({error}); it was given up, nothing of it was done"
                    ) from error
            await asyncio.sleep(0.2)
        else:
            continue
        if wanted:
            done.append(migration)
    return done


async def status(con: Connection, migrations: Sequence[Migration]) -> list[MigrationState]:
    return schema.states(await applied(con), migrations)


async def _apply(con: Connection, migration: Migration, namespace: str | None) -> None:
    """One step in the caller's transaction, with its row in `migration`."""
    await con.execute(migration.sql)
    now = await con.fetchval(f"SELECT {CLOCK}")
    if (migration.version, migration.step) == (1, "pre"):
        await con.execute(
            "INSERT INTO fencepost.meta (id, store_id, namespace, created_at, number_base, number_from) "
            f"VALUES (1, $1, $2, $3, 0, pg_snapshot_xmin(pg_current_snapshot())::text::bigint << {NUMBER_BITS})",
            str(uuid_utils.uuid4()),
            namespace or str(uuid_utils.uuid4()),
            now,
        )
        columns = ("name", "state_version", "epoch", "intake_open", "stage", "min_protocol", "policy")
        await con.execute(
            f"INSERT INTO fencepost.pool ({listed(columns)}) VALUES ($1, $2, $3, $4, $5, $6, $7)",
            *codec.pool_row(Pool("default", policy=Policy())),
        )
    await con.execute(
        "INSERT INTO fencepost.migration (version, name, step, applied_at) VALUES ($1, $2, $3, $4)",
        migration.version,
        migration.name,
        migration.step,
        now,
    )


async def identify(con: Connection) -> tuple[str, str, int]:
    """(store id, namespace, number base). A database that was restored on another server, whose transactions are
    counted from lower on, gets a higher base first, so that journal numbers go on growing."""
    row = await con.fetchrow("SELECT store_id, namespace, number_base FROM fencepost.meta WHERE id = 1")
    if row is None:
        raise StoreRefused("this database's row in fencepost.meta is gone; restore it from a backup")
    here = f"m.number_base + (pg_snapshot_xmax(pg_current_snapshot())::text::bigint << {NUMBER_BITS})"
    ahead = f"""
SELECT coalesce(greatest((SELECT max(number) FROM fencepost.log WHERE number >= {here}),
                         (SELECT max(number) FROM fencepost.event WHERE number >= {here})) - ({here}), -1)
FROM fencepost.meta m WHERE m.id = 1"""
    if await con.fetchval(ahead) < 0:
        return row[0], row[1], row[2]
    async with con.transaction():
        await con.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        over = await con.fetchval(ahead)
        if over >= 0:
            more = ((over >> NUMBER_BITS) + 1) << NUMBER_BITS
            await con.execute("UPDATE fencepost.meta SET number_base = number_base + $1 WHERE id = 1", more)
        row = await con.fetchrow("SELECT store_id, namespace, number_base FROM fencepost.meta WHERE id = 1")
    return row[0], row[1], row[2]


async def describe(con: Connection) -> dict[str, Any]:
    there = await applied(con)
    return {
        "schema": max((version for version, _ in there), default=0),
        "newest_schema": newest(shipped()),
        "pending": [f"{m.version:04}_{m.step}_{m.name}" for m in schema.pending(there, shipped())],
    }
