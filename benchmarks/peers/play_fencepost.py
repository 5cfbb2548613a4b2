"""fencepost: submit_many in batches of 1 000, one Worker, 128 at once."""

from __future__ import annotations

import asyncio
import os

from playing import INPUT, LEASE, Watch, batches, listen, now, play, say

import fencepost
from fencepost import App, Worker
from fencepost.client.attempt import Attempt
from fencepost.wire import NewTask

CONCURRENCY = 128


async def prepare(url: str) -> None:
    async with await fencepost.connect(url):
        pass


async def enqueue(url: str, count: float) -> None:
    async with await fencepost.connect(url) as client:
        watch = Watch()
        for size in batches(int(count), 1000):
            await client.submit_many([NewTask({"text": INPUT}, kind="nothing") for _ in range(size)])
        watch.say()


async def drain(url: str) -> None:
    app = App()

    @app.task("nothing")
    async def nothing(attempt: Attempt, input: dict[str, str]) -> None:
        return None

    async with await fencepost.connect(url) as client:
        watch = Watch()
        await Worker(client, app, concurrency=CONCURRENCY).run_until_idle()
        watch.say()


async def work(url: str, hold: float) -> None:
    app = App()

    @app.task("at", ttl=LEASE)
    async def at(attempt: Attempt, input: dict[str, float]) -> None:
        say(event="started", latency=now() - input["at"])
        if hold:
            await asyncio.sleep(hold)
            say(event="returned")

    listen("fencepost")
    async with await fencepost.connect(url) as client:
        worker = asyncio.create_task(Worker(client, app, cancel_grace=1.0).run())
        say(event="ready", pid=os.getpid())
        await worker


async def each(url: str, count: float, pause: float) -> None:
    async with await fencepost.connect(url) as client:
        for _ in range(int(count)):
            await client.submit(NewTask({"at": now()}, kind="at", max_attempts=5))
            await asyncio.sleep(pause)


async def completions(url: str) -> None:
    async with await fencepost.connect(url) as client:
        found = await client.backend.store.events(0, 1000, names=["result_committed"])  # type: ignore[attr-defined]
        say(count=len(found))


if __name__ == "__main__":
    parts = {part.__name__: part for part in (prepare, enqueue, drain, work, each, completions)}
    play({name: lambda *given, part=part: asyncio.run(part(*given)) for name, part in parts.items()})
