"""Databases on the run's server: made quickly from a template, with a clock that tests may move on."""

from __future__ import annotations

import os

import asyncpg
import pytest

from fencepost.stores.postgres import migrate
from fencepost.stores.postgres_load import CLOCK
from fencepost.stores.postgres_roles import OPERATOR, WORKER, roles_sql
from tests.postgres.server import Missing, Server, running

# The store's clock, as stores in tests are told to read it. The table is the tests', outside fencepost's schema.
MOVABLE_CLOCK = f"({CLOCK} + (SELECT moved_us FROM public.moved_clock))"

_TEMPLATE = "fencepost_template"
_WITH_ROLES = "fencepost_with_roles"
# Users who log in, and the role that each is a member of.
MEMBERS = {"hand": WORKER, "chief": OPERATOR}


def running_or_skip() -> Server:
    """Skips only where nobody said that there is a server: `make test` looks for one, and says so."""
    try:
        return running()
    except Missing as error:
        if os.environ.get("FENCEPOST_TEST_POSTGRES"):
            raise
        pytest.skip(str(error))


async def new_database(server: Server, roles: bool = False) -> str:
    """The name of a database with this release's schema and nothing in it; with the documented `roles`, if asked."""

    async def fill(url: str) -> None:
        await migrate(url, create=True)
        await server.administer(
            "CREATE TABLE public.moved_clock (moved_us bigint NOT NULL)",
            "INSERT INTO public.moved_clock VALUES (0)",
            "CREATE TABLE public.first_pools AS TABLE fencepost.pool",
            database=url.rpartition("/")[2],
        )

    async def grant(url: str) -> None:
        await fill(url)
        await server.administer(
            roles_sql(),
            "GRANT SELECT ON public.moved_clock TO PUBLIC",
            *(f"CREATE ROLE {user} LOGIN" for user in MEMBERS),
            *(f"GRANT {role} TO {user}" for user, role in MEMBERS.items()),
            database=_WITH_ROLES,
        )

    if roles:
        return await server.new_database(await server.template(_WITH_ROLES, grant))
    return await server.new_database(await server.template(_TEMPLATE, fill))


async def advance(server: Server, database: str, seconds: float) -> None:
    await server.administer(
        f"UPDATE public.moved_clock SET moved_us = moved_us + {round(seconds * 1_000_000)}", database=database
    )


# Databases that tests gave back emptied, by whether they have the roles. Making one and dropping it takes longer than
# most tests do. One in which more than rows was changed is not given to another test.
_free: dict[bool, list[str]] = {False: [], True: []}
_made: dict[bool, str] = {}

MOST_BYTES = 1 << 24  # what is larger is bloated by now, and slow to empty
_SIZE = "SELECT pg_database_size(current_database())"
_SHAPE = """SELECT md5(string_agg(line, chr(10) ORDER BY line)) FROM (
    SELECT format('%s %s %s %s %s', c.oid::regclass, relkind, reloptions, relacl, relrowsecurity) FROM pg_class c
        WHERE relnamespace = ANY($1::oid[])
    UNION ALL SELECT format('%s %s %s %s %s', attrelid::regclass, attnum, attname, atttypid, attnotnull)
        FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE relnamespace = ANY($1::oid[])
    UNION ALL SELECT format('%s %s', oid::regprocedure, prosrc) FROM pg_proc WHERE pronamespace = ANY($1::oid[])
    UNION ALL SELECT format('%s %s', conrelid::regclass, conname) FROM pg_constraint WHERE connamespace = ANY($1::oid[])
    UNION ALL SELECT tgname FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL SELECT polname FROM pg_policy
    UNION ALL SELECT extname FROM pg_extension
    UNION ALL SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_t%'
    UNION ALL SELECT s::text FROM pg_db_role_setting s JOIN pg_database d ON d.oid = setdatabase
        WHERE datname = current_database()
    UNION ALL SELECT m::text FROM fencepost.migration m
    UNION ALL SELECT format('%s %s', number_base, number_from) FROM fencepost.meta) shape(line)"""
_EMPTY = """DO $$ DECLARE found text; BEGIN
    FOR found IN SELECT format('%I', relname) FROM pg_class WHERE relkind = 'r'
        AND relnamespace = 'public'::regnamespace AND relname NOT IN ('first_pools', 'moved_clock')
    LOOP EXECUTE 'DROP TABLE public.' || found; END LOOP;
    FOR found IN SELECT format('fencepost.%I', relname) FROM pg_class WHERE relkind = 'r'
        AND relnamespace = 'fencepost'::regnamespace AND relname NOT IN ('migration', 'meta')
    LOOP EXECUTE 'DELETE FROM ' || found; END LOOP;
    INSERT INTO fencepost.pool TABLE public.first_pools;
    UPDATE public.moved_clock SET moved_us = 0;
END $$"""


async def borrow(server: Server, roles: bool = False) -> str:
    """As `new_database`; to be given back."""
    if _free[roles]:
        return _free[roles].pop()
    name = await new_database(server, roles)
    if roles not in _made:
        con = await asyncpg.connect(server.url(name))
        _made[roles] = await _shape(con)
        await con.close()
    return name


async def give_back(server: Server, database: str, roles: bool = False) -> None:
    """Empties the database; drops it where it has another shape now, or somebody still holds something in it."""
    try:
        con = await asyncpg.connect(server.url(database))
        try:
            await con.execute("SET lock_timeout = '2s'")
            await con.execute(_EMPTY)
            await con.execute("SELECT pg_stat_reset()")
            same = await _shape(con) == _made[roles] and await con.fetchval(_SIZE) < MOST_BYTES
        finally:
            await con.close()
    except (asyncpg.PostgresError, OSError):
        same = False
    if same:
        _free[roles].append(database)
    else:
        await server.drop_database(database)


async def end_sessions(server: Server, database: str) -> None:
    """As dropping it would: what a test left behind is not the next one's business."""
    await server.administer(
        f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{database}'"
    )


async def _shape(con: asyncpg.Connection) -> str:
    spaces = await con.fetchval("SELECT array_agg(oid) FROM pg_namespace WHERE nspname IN ('fencepost', 'public')")
    return str(await con.fetchval(_SHAPE, spaces))
