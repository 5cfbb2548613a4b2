"""What opening a database refuses, and how it says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

import fencepost
from fencepost.errors import InvalidRequest, StoreRefused, Unavailable
from fencepost.kernel.records import PROTOCOL
from fencepost.stores.postgres import PostgresStore
from fencepost.stores.postgres_migrations import shipped
from fencepost.stores.schema import newest
from tests.postgres.conftest import Open
from tests.postgres.server import Server, _free_port
from tests.stores.building import applying


async def test_connect_makes_a_schema_and_finds_it_again(server: Server) -> None:
    name = await server.new_database()
    try:
        with pytest.raises(StoreRefused, match="holds no fencepost schema"):
            await fencepost.connect(server.url(name), create=False)
        async with await fencepost.connect(server.url(name)) as client:
            await client.submit(fencepost.NewTask({"n": 1}, task_id="t"))
        async with await fencepost.connect(server.url(name), create=False) as client:
            [claim] = await client.claim_next(owner="me")
            assert (await client.commit(claim, "done")).outcome == "COMMITTED"
    finally:
        await server.drop_database(name)


async def test_many_processes_may_create_one_schema_at_once(server: Server) -> None:
    name = await server.new_database()
    code = (
        "import asyncio, sys\n"
        "from fencepost.stores.postgres import PostgresStore\n"
        "async def main():\n"
        "    sys.stdin.readline()\n"
        "    store = await PostgresStore.open(sys.argv[1])\n"
        "    print(store.store_id); await store.close()\n"
        "asyncio.run(main())\n"
    )
    try:
        running = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code,
                server.url(name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for _ in range(5)
        ]
        answers = await asyncio.wait_for(asyncio.gather(*(p.communicate(b"go\n") for p in running)), 60)
        ids = {out for out, _ in answers}
        assert len(ids) == 1 and ids != {b""}, answers
    finally:
        await server.drop_database(name)


async def test_a_server_that_is_not_there_is_unavailable_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await PostgresStore.open(f"postgresql://nobody:secret@127.0.0.1:{_free_port()}/none")
    assert time.monotonic() - began < 5


async def test_a_database_or_user_that_is_not_there_is_refused_and_no_password_is_told(server: Server) -> None:
    for url in (
        server.url("no_such_database"),
        server.url().replace("tester@", "no_such_user:secret@"),
    ):
        with pytest.raises(StoreRefused, match="PostgreSQL refuses") as caught:
            await PostgresStore.open(url)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("pool_size=0", "pool_size must lie within"),
        ("pool_size=many", "pool_size"),
        ("lock_timeout=-1", "lock_timeout must lie within"),
        ("pgbouncer=perhaps", "pgbouncer"),
        ("sslmode=nonsense", "sslmode"),
    ],
)
async def test_a_url_with_a_wrong_setting_is_a_wrong_call(server: Server, query: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        await PostgresStore.open(f"{server.url()}?{query}")


async def test_a_newer_schema_is_refused(opened: Open, server: Server, database: str) -> None:
    await server.administer("INSERT INTO fencepost.migration VALUES (9, 'later', 'pre', 1)", database=database)
    with pytest.raises(StoreRefused, match=f"schema 9, newer than this release's {newest(shipped())}; upgrade"):
        await opened()


async def test_an_older_schema_is_refused_and_so_is_a_schema_that_is_gone(
    opened: Open, server: Server, database: str
) -> None:
    await server.administer("DELETE FROM fencepost.migration", database=database)
    with pytest.raises(StoreRefused, match="no fencepost schema"):
        await opened(create=False)
    await server.administer("DROP SCHEMA fencepost CASCADE", database=database)
    with pytest.raises(StoreRefused, match="no fencepost schema"):
        await opened(create=False)


async def test_a_pool_that_wants_a_newer_protocol_is_refused(opened: Open, server: Server, database: str) -> None:
    await server.administer(f"UPDATE fencepost.pool SET min_protocol = {PROTOCOL + 1}", database=database)
    with pytest.raises(StoreRefused, match=f"pool 'default' wants protocol {PROTOCOL + 1}"):
        await opened()


async def test_a_closed_store_is_unavailable_and_closes_twice(opened: Open) -> None:
    store = await opened()
    await store.close()
    await store.close()
    for call in (store.run(applying()), store.pools(), store.version()):
        with pytest.raises(Unavailable, match="closed"):
            await call


async def test_a_handle_carried_across_a_fork_says_so(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (store.pools(), store.clock(), store.prune(0, 1)):
        with pytest.raises(StoreRefused, match="connect after the fork"):
            await call
    monkeypatch.undo()
    assert await store.pools()


async def test_ids_order_by_code_point_whatever_the_databases_language(opened: Open) -> None:
    from fencepost.stores.base import TaskFilter
    from tests.stores.building import insert, task

    store = await opened()
    names = ["a", "B", "ä", "Z", "z", "_", "é", "e", "\uffff", "10", "9"]
    await store.run(applying(insert(*(task(name) for name in names))))
    assert [t.task_id for t in await store.tasks(TaskFilter(), None, 100)] == sorted(names)


async def test_numbers_go_on_growing_after_a_move_to_a_server_that_counts_from_lower(
    opened: Open, server: Server, database: str
) -> None:
    """As after a dump and restore: the stored numbers are ahead of the new server's transactions."""
    from tests.stores.building import insert, task

    store = await opened()
    await store.run(applying(insert(task("a"))))
    [first] = await store.events(0, 10)
    ahead = 5_000_000 << 20
    await server.administer(f"UPDATE fencepost.event SET number = number + {ahead}", database=database)
    moved = await opened()
    await moved.run(applying(insert(task("b"))))
    numbers = [n.number for n in await moved.events(0, 10)]
    assert [n.entry.task_id for n in await moved.events(0, 10)] == ["a", "b"]
    assert numbers[0] == first.number + ahead < numbers[1]
