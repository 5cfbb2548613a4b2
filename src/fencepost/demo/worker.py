"""One of the demo's worker processes: `python -m fencepost.demo.worker usual|fencepost NAME WHERE PARENT`.

It reads documents until it is asked to leave (SIGTERM), and says on standard output what it does, one JSON line each.
It starts when it reads `go` on standard input. When that pipe ends, whoever started it is gone, and so is it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from fencepost.app import App
from fencepost.client.attempt import Attempt
from fencepost.client.worker import Worker
from fencepost.connect import connect
from fencepost.demo import documents
from fencepost.demo.documents import Document, Findings, Reading
from fencepost.demo.processes import Line
from fencepost.demo.usual_queue import UsualQueue
from fencepost.wire import Claim

LEASE = 2.5  # seconds; a document takes longer than that, so that it has to be renewed
HEARTBEAT_AT = (30, 60)  # per cent of a document, for the usual queue: about every second, as the lease asks for
ABANDONED = 3  # exit code of a worker whose demo is gone
POLL = 0.05  # seconds between two looks for work, in the usual queue


class Prompter:
    """The pipe to the demo: what this worker says, and what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._may_start = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        # Bare os.read: a buffered reader that a daemon thread waits in would make the interpreter's own exit fail.
        while orders := os.read(0, 1_024):
            if orders.startswith(b"go"):
                self._may_start.set()
        os._exit(ABANDONED)

    def say(self, did: str, task: str = "", attempt: int = 0, percent: int = 0, **detail: Any) -> None:
        line = msgspec.json.encode(Line(self.name, did, task, attempt, percent, detail))
        with self._lock:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()

    def wait_for_go(self) -> None:
        self.say("ready")
        self._may_start.wait()


class Leaving:
    """Whether this process was asked to leave (SIGTERM)."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def __bool__(self) -> bool:
        return self._asked


def work_on_the_usual_queue(prompter: Prompter, where: str) -> None:
    queue = UsualQueue(where)
    leaving = Leaving()
    prompter.wait_for_go()
    while not leaving:
        job = queue.claim(prompter.name, LEASE)
        if job is None:
            time.sleep(POLL)
            continue
        job_id, payload, attempt = job
        prompter.say("claimed", job_id, attempt)
        reading = Reading(msgspec.convert(payload, Document))
        for percent, seconds in reading.pieces():
            time.sleep(seconds)
            prompter.say("read", job_id, attempt, percent)
            if percent in HEARTBEAT_AT and not queue.heartbeat(job_id, prompter.name, LEASE):
                prompter.say("gave up", job_id, attempt)
                break
        else:
            queue.complete(job_id, documents.plain(reading.findings(prompter.name)))
            prompter.say("finished", job_id, attempt, answer="accepted")


async def work_on_fencepost(prompter: Prompter, where: str) -> None:
    app = App()
    client = await connect(where)
    insisting: set[asyncio.Task[None]] = set()

    async def read(claim: Claim, document: Document) -> Findings:
        prompter.say("claimed", claim.task_id, claim.generation)
        reading = Reading(document)
        for percent, seconds in reading.pieces():
            await asyncio.sleep(seconds)
            prompter.say("read", claim.task_id, claim.generation, percent)
        return reading.findings(prompter.name)

    async def insist(claim: Claim, work: asyncio.Task[Findings]) -> None:
        """Finish what the worker withdrew, and commit it by hand."""
        answer = await client.commit(claim, documents.plain(await work))
        outcome, reason = str(answer.outcome), str(answer.reason)
        prompter.say("insisted", claim.task_id, claim.generation, answer=outcome, reason=reason)

    # The shipped worker cancels a handler whose lease is over, and would leave it at that. This handler reads on and
    # commits all the same, as code does that hangs in a library: what counts must not depend on its good manners.
    @app.task("read", ttl=LEASE)
    async def handler(attempt: Attempt, document: Document) -> Findings:
        work = asyncio.create_task(read(attempt.claim, document))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            task = asyncio.create_task(insist(attempt.claim, work))
            insisting.add(task)
            task.add_done_callback(insisting.discard)
            raise

    prompter.wait_for_go()
    async with client:
        await Worker(client, app, owner=prompter.name, concurrency=1).run()


def die_with(parent: int) -> None:
    """Linux: be killed when the parent ends, even while stopped. Elsewhere the end of the pipe does it when awake."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(ABANDONED)


def main(kind: str, name: str, where: str, parent: str) -> None:
    die_with(int(parent))
    prompter = Prompter(name)
    if kind == "usual":
        work_on_the_usual_queue(prompter, where)
    else:
        asyncio.run(work_on_fencepost(prompter, where))


if __name__ == "__main__":
    main(*sys.argv[1:])
