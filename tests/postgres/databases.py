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
# most tests do; only what changes nothing but rows may give one back.
_free: dict[bool, list[str]] = {False: [], True: []}

_EMPTY = """DO $$ DECLARE found text; BEGIN
    FOR found IN SELECT format('fencepost.%I', relname) FROM pg_class WHERE relkind = 'r'
        AND relnamespace = 'fencepost'::regnamespace AND relname NOT IN ('migration', 'meta')
    LOOP EXECUTE 'DELETE FROM ' || found; END LOOP;
    INSERT INTO fencepost.pool TABLE public.first_pools;
    UPDATE public.moved_clock SET moved_us = 0;
END $$"""


async def borrow(server: Server, roles: bool = False) -> str:
    """As `new_database`, for who only writes through stores; to be given back."""
    return _free[roles].pop() if _free[roles] else await new_database(server, roles)


async def give_back(server: Server, database: str, roles: bool = False) -> None:
    """Empties the database; drops it where somebody still holds something in it."""
    con = await asyncpg.connect(server.url(database))
    try:
        await con.execute("SET lock_timeout = '2s'")
        await con.execute(_EMPTY)
    except asyncpg.LockNotAvailableError:
        await con.close()
        await server.drop_database(database)
    else:
        await con.close()
        _free[roles].append(database)
