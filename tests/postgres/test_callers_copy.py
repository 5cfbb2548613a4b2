"""A caller's own connection that leads to a copy of the store, which has its id and its pools."""

from __future__ import annotations

from typing import Any

import pytest

import fencepost
from fencepost import InvalidRequest, NewTask
from fencepost.wire import Pending
from tests.postgres.callers import Asyncpg, claimed, state
from tests.postgres.databases import new_database
from tests.postgres.server import Server


async def test_a_connection_to_a_copy_of_the_store_is_a_wrong_call_and_writes_nothing(server: Server) -> None:
    name = await new_database(server)
    async with fencepost.connect(server.url(name)) as client:
        claim = await claimed(client, "t")
    copy = await server.new_database(name)
    business = Asyncpg()
    await business.open(server.url(copy))
    async with fencepost.connect(server.url(name)) as client, fencepost.connect(server.url(copy)) as in_copy:
        assert client.store_id == in_copy.store_id
        await business.begin()
        for call in (client.submit(NewTask(1, task_id="new"), connection=business.con),
                     client.commit(claim, 1, connection=business.con)):  # fmt: skip
            with pytest.raises(InvalidRequest, match="leads to a copy of this store"):
                await call
        assert isinstance(await in_copy.submit(NewTask(1, task_id="own"), connection=business.con), Pending)
        await business.do("COMMIT")
        assert [await state(in_copy, task_id) for task_id in ("t", "new", "own")] == ["CLAIMED", None, "READY"]
    await business.close()
    for database in (copy, name):
        await server.drop_database(database)


async def test_a_server_that_was_started_again_is_no_copy(server: Server, url: str) -> None:
    async with fencepost.connect(url) as client:
        business = Asyncpg()
        await business.open(url)
        await business.begin()
        assert isinstance(await client.submit(NewTask(1, task_id="a"), connection=business.con), Pending)
        home: Any = client.backend.store._home  # type: ignore[attr-defined]
        assert home._known
        home._known = "as of the server's last life"
        assert isinstance(await client.submit(NewTask(1, task_id="b"), connection=business.con), Pending)
        await business.do("COMMIT")
        await business.close()
        assert await state(client, "b") == "READY"
