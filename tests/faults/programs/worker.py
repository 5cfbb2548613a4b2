"""A shipped `Worker` with handlers for tests: `python -m tests.faults.programs.worker URL OWNER OPTIONS`.

OPTIONS is a JSON object: `ttl`, `concurrency`, `drain_timeout`, `on_epoch`, `kinds` (which handlers to serve),
`until_idle`. It says what its handlers do, and ends with the worker's exit code. SIGTERM drains it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
import threading
import time
from typing import Any

import fencepost
from fencepost.client.attempt import SyncAttempt
from tests.faults.programs.speech import die, die_with_parent, listen, say

LAST_WORDS = "started"  # of a handler that kills its process


def handlers(app: fencepost.App, ttl: float, kinds: list[str] | None, gates: dict[str, asyncio.Event]) -> None:
    def task(name: str, **more: Any) -> Any:
        return (
            (lambda function: function) if kinds is not None and name not in kinds else app.task(name, ttl=ttl, **more)
        )

    def started(attempt: Any) -> None:
        claim = attempt.claim
        say("started", task=claim.task_id, generation=claim.generation, kind=claim.kind)

    def gate(task_id: str) -> asyncio.Event:
        return gates.setdefault(task_id, asyncio.Event())

    @task("echo")
    async def echo(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        return input

    @task("nap")  # as long as the input says
    async def nap(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        try:
            await asyncio.sleep(float(input))
        except asyncio.CancelledError:
            say("cancelled", task=attempt.claim.task_id, generation=attempt.claim.generation)
            raise
        say("finished", task=attempt.claim.task_id)
        return attempt.claim.owner_id

    @task("hold")  # until it is told to go on; then it uses a tool, and tries hard to commit
    async def hold(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        try:
            await gate(attempt.claim.task_id).wait()
            attempt.check()
            say("used the tool", task=attempt.claim.task_id, generation=attempt.claim.generation)
        except (asyncio.CancelledError, fencepost.Fenced) as stop:
            say("stopped", task=attempt.claim.task_id, generation=attempt.claim.generation, by=type(stop).__name__)
            raise
        return attempt.claim.owner_id

    @task("block")  # the event loop, for as long as the input says
    async def block(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        time.sleep(float(input))
        return "blocked"

    @task("burn")  # the interpreter, in a thread of its own
    def burn(attempt: SyncAttempt, input: Any) -> Any:
        started(attempt)
        until, n = time.monotonic() + float(input), 0
        while time.monotonic() < until:
            n = (n * 31 + 7) % 1_000_003
        return n

    @task("die")
    async def suicide(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        attempt.usage(tokens=100)
        die()

    @task("fail")
    async def fail(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        raise ValueError(input)

    @task("text")  # work that can be checked: a digest, chunk by chunk, with checkpoints
    async def text(attempt: fencepost.Attempt, input: Any) -> Any:
        done = attempt.checkpoint_data or {"chunks": 0}
        for n in range(int(done["chunks"]), int(input["chunks"])):
            await asyncio.sleep(float(input["seconds"]))
            if n % 3 == 2:
                await attempt.checkpoint({"chunks": n + 1})
        return hashlib.sha256(str(input["text"]).encode()).hexdigest()

    @task("odd")  # a result that no store can keep, or hardly
    async def odd(attempt: fencepost.Attempt, input: Any) -> Any:
        started(attempt)
        return {
            "nul": "a\0b",
            "surrogate": "\ud800",
            "nan": float("nan"),
            "infinity": float("inf"),
            "huge": 10**5000,
            "large": "x" * (1 << 20),
            "set": {"b", "c", "a"},
            "deep": _deep(100_000),
            "key": {1: "one"},
            "empty": "",
            "U+FFFF": "\uffff",
        }[input]


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


async def main(url: str, owner: str, options: str) -> int:
    wanted: dict[str, Any] = json.loads(options)
    loop = asyncio.get_running_loop()
    app = fencepost.App()
    gates: dict[str, asyncio.Event] = {}
    handlers(app, wanted.pop("ttl", 1.0), wanted.pop("kinds", None), gates)
    until_idle = wanted.pop("until_idle", False)

    def obey(order: dict[str, Any]) -> None:
        if order["do"] == "go":
            loop.call_soon_threadsafe(gates.setdefault(order["task"], asyncio.Event()).set)

    listen(obey)
    async with await fencepost.connect(url) as client:
        worker = fencepost.Worker(client, app, owner=owner, **wanted)
        say("connected", threads=threading.active_count())
        code = await worker.run(until_idle=until_idle)
    say("ended", code=code)
    return code


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    sys.exit(asyncio.run(main(*sys.argv[1:])))
