"""Workers on one client that wait for something to do: `… idlers URL OWNER HOW_MANY CONCURRENCY`.

Any order ends them.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import fencepost
from tests.faults.programs.speech import die_with_parent, listen, say


async def main(url: str, owner: str, how_many: str, concurrency: str) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    listen(lambda order: loop.call_soon_threadsafe(over.set))
    app = fencepost.App()

    @app.task("echo")
    async def echo(attempt: fencepost.Attempt, input: Any) -> Any:
        say("started", task=attempt.claim.task_id, by=attempt.claim.owner_id)
        return input

    async with await fencepost.connect(url) as client:
        workers = [
            fencepost.Worker(client, app, owner=f"{owner}-{n}", concurrency=int(concurrency), handle_signals=False)
            for n in range(int(how_many))
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        say("connected")
        await over.wait()
        for worker in workers:
            worker.stop()
        say("ended", codes=await asyncio.gather(*running))


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
