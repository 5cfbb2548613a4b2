"""pgqueuer: enqueue in batches of 1 000, one worker on an asyncpg pool and uvloop, batches of 100; durable tables."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode
from playing import INPUT, LEASE, Watch, batches, listen, now, play, say

BATCH = 100
CONNECTIONS = 8


def pool(url: str) -> asyncpg.Pool:
    return asyncpg.create_pool(url, min_size=2, max_size=CONNECTIONS)


async def prepare(url: str) -> None:
    async with pool(url) as connections:
        await Queries.from_asyncpg_pool(connections).install()


async def enqueue(url: str, count: float) -> None:
    async with pool(url) as connections:
        queries = Queries.from_asyncpg_pool(connections)
        watch = Watch()
        for size in batches(int(count), 1000):
            await queries.enqueue(["nothing"] * size, [INPUT.encode()] * size, [0] * size)
        watch.say()


async def drain(url: str) -> None:
    async with pool(url) as connections:
        queuer = PgQueuer.from_asyncpg_pool(connections)

        @queuer.entrypoint("nothing")
        async def nothing(job: Job) -> None:
            return None

        watch = Watch()
        await queuer.qm.run(batch_size=BATCH, mode=QueueExecutionMode.drain)
        watch.say()


async def work(url: str, hold: float) -> None:
    async with pool(url) as connections:
        queuer = PgQueuer.from_asyncpg_pool(connections)

        @queuer.entrypoint("at")
        async def at(job: Job) -> None:
            say(event="started", latency=now() - json.loads(job.payload or b"0"))
            if hold:
                await asyncio.sleep(hold)
                say(event="returned")

        listen("pgqueuer")
        # The time-out of a wait is also how often it looks for jobs whose worker has gone.
        worker = asyncio.create_task(
            queuer.qm.run(
                batch_size=BATCH,
                heartbeat_timeout=timedelta(seconds=LEASE),
                dequeue_timeout=timedelta(seconds=LEASE / 2),
            )
        )
        say(event="ready", pid=os.getpid())
        await worker


async def each(url: str, count: float, pause: float) -> None:
    async with pool(url) as connections:
        queries = Queries.from_asyncpg_pool(connections)
        for _ in range(int(count)):
            await queries.enqueue("at", json.dumps(now()).encode())
            await asyncio.sleep(pause)


async def completions(url: str) -> None:
    async with pool(url) as connections:
        say(count=await connections.fetchval("SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"))


if __name__ == "__main__":
    parts = {part.__name__: part for part in (prepare, enqueue, drain, work, each, completions)}
    play({name: lambda *given, part=part: uvloop.run(part(*given)) for name, part in parts.items()})
