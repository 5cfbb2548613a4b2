"""Lost connections, restarts, killed backends: unknown is said to be unknown, and everything goes on by itself."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import asyncpg
import pytest

import fencepost
from fencepost.errors import StoreRefused, Unavailable
from fencepost.stores.postgres_connections import translate
from fencepost.wire import Claim, Committed, NewTask
from tests.postgres.conftest import Open
from tests.postgres.server import Server
from tests.stores.building import applying, insert, loading, task


async def commit_until_known(client: fencepost.Client, claim: Claim, value: Any, unknown: list[str]) -> Committed:
    """As a worker does: the same commit again where nothing is known."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await client.commit(claim, value)
            except Unavailable:
                unknown.append(claim.task_id)
                await asyncio.sleep(0.05)
                continue
            assert isinstance(answer, Committed), answer
            return answer


async def test_fifty_commits_in_flight_at_an_immediate_restart_are_each_made_once(
    server: Server, url: str
) -> None:  # B09
    clients = [await fencepost.connect(url) for _ in range(3)]
    unknown: list[str] = []
    try:
        for round_ in range(3):
            ids = [f"r{round_}-{n}" for n in range(50)]
            await clients[0].submit_many([NewTask({"n": n}, task_id=name) for n, name in enumerate(ids)])
            claims: list[Claim] = []
            while len(claims) < 50:
                got = await clients[0].claim_next(owner="w", limit=50)
                assert isinstance(got, list)
                claims += got
            committing = [
                asyncio.create_task(commit_until_known(clients[n % 3], claim, n, unknown))
                for n, claim in enumerate(claims)
            ]
            await asyncio.sleep(0.002 * round_)
            await asyncio.to_thread(server.stop, signal.SIGQUIT)
            await asyncio.to_thread(server.start)
            answers = await asyncio.gather(*committing)
            assert len({answer.result_commit_id for answer in answers}) == 50
        events = await clients[0].report("audit")
        assert events.clean, events.violations
    finally:
        for client in clients:
            await client.close()


async def test_killed_backends_are_replaced_and_nothing_is_written_twice(server: Server, url: str) -> None:
    client = await fencepost.connect(url)
    killer = await asyncpg.connect(server.url())
    unknown: list[str] = []
    stop = asyncio.Event()

    async def kill() -> None:
        while not stop.is_set():
            await killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'fencepost%' AND datname = $1 AND random() < 0.5",
                url.rpartition("/")[2],
            )
            await asyncio.sleep(0.03)

    try:
        await client.submit_many([NewTask({"n": n}, task_id=f"t{n}") for n in range(120)])
        killing = asyncio.create_task(kill())
        done = set()
        async with asyncio.timeout(60):
            while len(done) < 120:
                try:
                    got = await client.claim_next(owner="w", limit=5, ttl=1.0)
                except Unavailable:
                    continue
                assert isinstance(got, list)
                for claim in got:
                    done.add((await commit_until_known(client, claim, 1, unknown)).task_id)
                if not got:
                    await asyncio.sleep(0.05)  # claims whose answers were lost come back when their lease ends
        stop.set()
        await killing
        report = await client.report("audit")
        assert report.clean, report.violations
    finally:
        stop.set()
        await killer.close()
        await client.close()


async def test_a_call_during_a_restart_waits_for_the_server_to_come_back(server: Server, opened: Open) -> None:
    store = await opened()
    await store.run(applying(insert(task("a"))))
    await asyncio.to_thread(server.stop)
    calling = asyncio.create_task(store.run(loading(tasks=["a"])))
    reading = asyncio.create_task(store.pools())
    await asyncio.to_thread(server.start)
    found = await asyncio.wait_for(calling, 20)
    assert set(found.tasks) == {"a"}
    assert len(await asyncio.wait_for(reading, 20)) == 1


async def test_a_server_that_stays_away_is_unavailable_in_time(server: Server, opened: Open) -> None:
    store = await opened(reconnect_wait=0.3)
    await asyncio.to_thread(server.stop)
    try:
        with pytest.raises(Unavailable, match="cannot be reached"):
            async with asyncio.timeout(10):
                await store.run(applying(insert(task("a"))))
    finally:
        await asyncio.to_thread(server.start)
    assert await store.run(applying(insert(task("a")))) == [True]


async def test_connections_are_handed_out_first_come_first_served(opened: Open) -> None:
    store = await opened(pool_size=1)
    order: list[int] = []

    async def use(number: int) -> None:
        async with store._plans.use() as con:
            order.append(number)
            await con.fetchval("SELECT 1")

    await asyncio.gather(*(use(number) for number in range(20)))
    assert order == list(range(20))
    assert len(store._plans._idle) == 1


async def test_a_caller_that_gave_up_leaves_its_connection_in_order(opened: Open) -> None:
    store = await opened(pool_size=1)
    for _ in range(5):
        waiting = asyncio.create_task(store.run(applying(insert(*(task(f"x{i}") for i in range(200))))))
        await asyncio.sleep(0.003)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert len((await store.run(loading(tasks=["x0"]))).tasks) in (0, 1)
    assert (await store.run(applying(insert(task("after"))))) == [True]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (asyncpg.DeadlockDetectedError("deadlock detected"), Unavailable, "nothing was written"),
        (asyncpg.QueryCanceledError("canceling"), Unavailable, "statement_timeout"),
        (asyncpg.DiskFullError("no space left"), Unavailable, "no space left"),
        (asyncpg.TooManyConnectionsError("sorry, too many clients"), Unavailable, "too many clients"),
        (ConnectionResetError("reset"), Unavailable, "went away"),
        (asyncpg.ConnectionDoesNotExistError("closed in the middle"), Unavailable, "went away"),
        (TimeoutError(), Unavailable, "in time"),
        (asyncpg.InsufficientPrivilegeError("permission denied for table task"), StoreRefused, "permission denied"),
        (asyncpg.UndefinedTableError("relation does not exist"), StoreRefused, "fencepost migrate"),
    ],
)
def test_no_raw_error_reaches_a_caller(error: Exception, kind: type[Exception], text: str) -> None:
    found = translate(error)
    assert type(found) is kind and text in str(found)
