"""procrastinate: batch_defer in batches of 1 000, one worker with concurrency 16, finished jobs deleted."""

from __future__ import annotations

import asyncio
import os

from playing import INPUT, LEASE, Watch, batches, listen, now, play, say
from procrastinate import App, PsycopgConnector

CONCURRENCY = 16


def app_at(url: str) -> App:
    return App(connector=PsycopgConnector(conninfo=url, min_size=4, max_size=CONCURRENCY))


async def prepare(url: str) -> None:
    async with app_at(url).open_async() as app:
        await app.schema_manager.apply_schema_async()


async def enqueue(url: str, count: float) -> None:
    async with app_at(url).open_async() as app:
        watch = Watch()
        for size in batches(int(count), 1000):
            await app.configure_task("nothing").batch_defer_async(*({"text": INPUT} for _ in range(size)))
        watch.say()


async def drain(url: str) -> None:
    app = app_at(url)

    @app.task(name="nothing")
    async def nothing(text: str) -> None:
        return None

    async with app.open_async():
        watch = Watch()
        await app.run_worker_async(wait=False, concurrency=CONCURRENCY, delete_jobs="successful")
        watch.say()


async def work(url: str, hold: float) -> None:
    app = app_at(url)

    @app.task(name="at")
    async def at(at: float) -> None:
        say(event="started", latency=now() - at)
        if hold:
            await asyncio.sleep(hold)
            say(event="returned")

    listen("procrastinate")
    async with app.open_async():
        worker = asyncio.create_task(
            app.run_worker_async(
                concurrency=CONCURRENCY, update_heartbeat_interval=LEASE / 4, stalled_worker_timeout=LEASE
            )
        )
        say(event="ready", pid=os.getpid())
        await worker


async def each(url: str, count: float, pause: float) -> None:
    async with app_at(url).open_async() as app:
        for _ in range(int(count)):
            await app.configure_task("at").defer_async(at=now())
            await asyncio.sleep(pause)


async def rescue(url: str) -> None:
    """What its documentation tells to run now and then: jobs of stalled workers are tried again."""
    async with app_at(url).open_async() as app:
        stalled = list(await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=LEASE))
        for job in stalled:
            await app.job_manager.retry_job(job)
        say(count=len(stalled))


async def completions(url: str) -> None:
    async with app_at(url).open_async() as app:
        found = await app.connector.execute_query_one_async(
            "SELECT count(*) AS n FROM procrastinate_events WHERE type = 'succeeded'"
        )
        say(count=found["n"])


if __name__ == "__main__":
    parts = {part.__name__: part for part in (prepare, enqueue, drain, work, each, rescue, completions)}
    play({name: lambda *given, part=part: asyncio.run(part(*given)) for name, part in parts.items()})
