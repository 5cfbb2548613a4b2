"""New tasks are written by one statement, and what is compared and journalled is the same as in several."""

from __future__ import annotations

import asyncio

import fencepost
from fencepost.stores.postgres import PostgresStore
from fencepost.stores.postgres_inserts import only_new
from fencepost.wire import NewTask, Submitted
from tests.postgres.proxy import proxy_before
from tests.postgres.server import Server
from tests.stores.building import applying, insert, task


async def test_a_submit_reads_once_and_writes_once(url: str, server: Server) -> None:
    async with proxy_before(server.port) as proxy:
        counted = url.replace(f":{server.port}/", f":{proxy.port}/") + "?sslmode=disable"
        async with await fencepost.connect(counted) as client:
            await client.submit(NewTask(1, task_id="first"))
            proxy.statements.clear()
            parents = NewTask(2, task_id="parent"), NewTask(3, task_id="child", depends_on=["parent"])
            assert all(isinstance(one, Submitted) for one in await client.submit_many(parents))
            hints = proxy.statements["SELECT"]
            assert proxy.statements.total() - hints == 2 and proxy.statements["writes"] == 1, proxy.statements
            assert (await client.report("audit")).clean


async def test_where_an_id_is_taken_its_set_is_lost_and_the_others_stand(store: PostgresStore) -> None:
    await store.run(applying(insert(task("taken"))))
    sets = insert(task("a")), insert(task("taken")), insert(task("z"))
    assert only_new(sets)
    assert await store.run(applying(*sets)) == [True, False, True]
    assert {one.task_id for one in await store.records(["a", "taken", "z"])} == {"a", "taken", "z"}
    assert not any((await store.orphans()).values())


async def test_two_who_submit_the_same_at_once_get_one_task(url: str) -> None:
    async with await fencepost.connect(url) as one, await fencepost.connect(url) as other:
        for n in range(20):
            new = NewTask(n, task_id=f"t{n}")
            answers = await asyncio.gather(one.submit(new), other.submit(new))
            assert all(isinstance(answer, Submitted) for answer in answers)
            assert sorted(answer.created for answer in answers if isinstance(answer, Submitted)) == [False, True]
        assert (await one.report("audit")).clean
