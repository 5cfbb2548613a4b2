"""Stores on the run's PostgreSQL server, each test in a database of its own. Run with FENCEPOST_TEST_POSTGRES=1."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

import fencepost
from fencepost import Client
from fencepost.stores.postgres import PostgresStore
from tests.postgres.callers import DRIVERS, MADE, Business, Join
from tests.postgres.databases import MOVABLE_CLOCK, borrow, end_sessions, give_back, new_database, running_or_skip
from tests.postgres.server import Server

collect_ignore_glob = [] if os.environ.get("FENCEPOST_TEST_POSTGRES") else ["test_*.py"]

FRESH = {"test_applying_effects", "test_scanning"}

Open = Callable[..., Awaitable[PostgresStore]]


@pytest.fixture
def server() -> Server:
    return running_or_skip()


@pytest_asyncio.fixture
async def database(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[str]:
    """The name of a database with the schema, and nothing in it.

    Other tests may have had it before, but not where plans and sizes are looked at."""
    if request.path.stem in FRESH:
        name = await new_database(server)
        yield name
        await server.drop_database(name)
        return
    name = await borrow(server)
    yield name
    await end_sessions(server, name)
    await give_back(server, name)


@pytest.fixture
def url(server: Server, database: str) -> str:
    return server.url(database)


@pytest_asyncio.fixture
async def opened(server: Server, database: str) -> AsyncIterator[Open]:
    """`await opened(pool_size=1)` opens the test's database; names are settings of the URL, or of `open`."""
    stores: list[PostgresStore] = []

    async def open_one(**settings: Any) -> PostgresStore:
        more = {name: settings.pop(name) for name in ("create", "namespace", "shipped") if name in settings}
        store = await PostgresStore.open(server.url(database, **settings), clock=MOVABLE_CLOCK, **more)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        await store.close()


@pytest_asyncio.fixture
async def store(opened: Open) -> PostgresStore:
    return await opened()


@pytest_asyncio.fixture
async def client(server: Server, database: str) -> AsyncIterator[Client]:
    await server.administer("CREATE TABLE public.business (row text)", database=database)
    async with fencepost.connect(server.url(database, raise_timeout=0.5)) as found:
        yield found


@pytest_asyncio.fixture(params=DRIVERS)
async def join(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Join]:
    """`await join()` opens a connection of the caller's own."""
    opened: list[Business] = []

    async def one() -> Business:
        business = MADE[request.param]()
        await business.open(url)
        opened.append(business)
        return business

    yield one
    for business in opened:
        await business.close()
