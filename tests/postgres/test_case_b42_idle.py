"""B42: idle workers, wake-ups and stuck listeners must not eat the database. Short forms: test_wakeups."""

from __future__ import annotations

import asyncio
import statistics

import asyncpg
import pytest

from fencepost import NewTask, Result, Submitted
from fencepost.stores.postgres_wakeups import CHANNEL
from tests.faults.stage import stage
from tests.postgres.proxy import proxy_before
from tests.postgres.stage import PostgresStage, on_postgres

__all__ = ["stage"]


# Searches of the queue that one new task may set off, however many wait: who takes it looks once more whether there is
# another, and so does one who waits beside it; a look that finds nothing on what it remembers searches again. On a
# machine so busy that nobody takes the task for a moment, more are told.
LOOKS = 6
MOST_LOOKS = 12


def look_or_not(sql: bytes) -> str:
    return "look" if b"fencepost.input i" in sql and b"t.state = 1" in sql else "other"


async def idle(stage: PostgresStage, *, processes: int, workers: int, slots: int, seconds: float) -> None:
    """Idling costs less than one statement a second and process, and a new task wakes a few, however many wait."""
    client = await stage.client()
    async with proxy_before(stage.server.port) as proxy:
        proxy.name = look_or_not
        url = f"postgresql://tester@127.0.0.1:{proxy.port}/{stage.database}?sslmode=disable"
        crowd = [await stage.program("idlers", url, f"p{n}", str(workers), str(slots)) for n in range(processes)]
        for program in crowd:
            await program.reaches("connected")
        await asyncio.sleep(3.0)  # until all have looked and wait
        proxy.statements.clear()
        await asyncio.sleep(seconds)
        rate = proxy.statements.total() / seconds / processes
        print(
            f"{rate:.2f} statements per second and process, {processes} processes of {workers} workers "
            f"with {slots} slots each: {dict(proxy.statements)}"
        )
        assert rate < 1.0

        spent = []
        for n in range(9):
            proxy.statements.clear()
            await client.submit(NewTask(n, task_id=f"t{n}", kind="echo"))
            assert isinstance(await client.result(f"t{n}", wait=20.0), Result)
            await asyncio.sleep(0.3)  # for whoever was woken in vain
            spent.append(dict(proxy.statements))
        print(f"one new task: {spent}")
        looks = [each["look"] for each in spent]
        assert statistics.median(looks) <= LOOKS
        assert sorted(looks)[-2] <= MOST_LOOKS
        assert sum(program.count("started") for program in crowd) == 9
        for program in crowd:
            program.tell("end")
        for program in crowd:
            said = await program.reaches("ended")
            assert said["codes"] == [0] * workers
    await stage.audit()


@on_postgres
@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_b42_of_500_idle_slots_in_ten_processes_one_starts_each_new_task(
    stage: PostgresStage,
) -> None:
    await idle(stage, processes=10, workers=1, slots=50, seconds=30.0)


@on_postgres
@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_b42_of_500_idle_workers_on_ten_clients_one_starts_each_new_task(stage: PostgresStage) -> None:
    await idle(stage, processes=10, workers=50, slots=1, seconds=30.0)


@on_postgres
async def test_b42_a_listener_that_is_stuck_makes_no_submit_fail_even_when_the_servers_queue_is_full(
    stage: PostgresStage,
) -> None:
    server = stage.server
    small = await _may_be_small(stage)
    if small:
        await server.administer("ALTER SYSTEM SET max_notify_queue_pages = 64")
        server.stop()
        server.start()
    try:
        client = await stage.client()
        async with stage.connection() as stuck, stage.connection() as noisy:
            await stuck.execute(f"LISTEN {CHANNEL}")
            await stuck.execute("BEGIN; SELECT 1")
            full = False
            if small:
                with pytest.raises(asyncpg.PostgresError, match="too many notifications"):
                    for _ in range(200):
                        await noisy.execute(
                            "SELECT pg_notify('noise', repeat('x', 7000) || i) FROM generate_series(1, 50) i"
                        )
                full = True
            waiting = asyncio.create_task(client.claim_next(owner="W", wait=30.0))
            await asyncio.sleep(0.1)
            for n in range(20):
                answers = await client.submit_many([NewTask(n, task_id=f"t{n}-{m}") for m in range(10)])
                assert all(isinstance(each, Submitted) and each.created for each in answers)
            claimed = await asyncio.wait_for(waiting, 20)
            assert isinstance(claimed, list) and len(claimed) == 1
            other = await stage.hand()  # in another process, which hears of nothing: it looks by itself
            assert len(await other.call("claim_next", owner="V", wait=10.0)) == 1
            print("the server's queue was full" if full else "a small queue cannot be set on this server")
        await stage.audit()
    finally:
        if small:
            await server.administer("ALTER SYSTEM RESET max_notify_queue_pages")
            server.stop()
            server.start()


async def _may_be_small(stage: PostgresStage) -> bool:
    async with stage.connection() as con:
        return bool(await con.fetchval("SELECT count(*) FROM pg_settings WHERE name = 'max_notify_queue_pages'"))
