"""A shipped `Worker` whose one handler causes one effect, and which stands still at one point of it.

    python -m tests.faults.programs.sender URL OWNER OPTIONS

OPTIONS is a JSON object: `queue`, `point` (see POINTS), `downstream` (a table of fencepost.toml), `payload`. At its
point it says `at` and blocks its event loop, so that a signal meets it nowhere else; without a point where it came past
it, and then it ends. An order (`go`) lets it go on, as
a sender that was paused: it says what each door answers it from then on, and at the end `reported`, after it has tried
to commit a result of its own whatever else happened to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import fencepost
from fencepost.effects.base import Deadline, Guarantee, Happened
from fencepost.effects.config import Downstreams
from fencepost.kernel.commands import Commit, Prepare, Reconcile, Reserve, Settle
from fencepost.wire import Refused
from tests.faults.between import client_behind
from tests.faults.programs.speech import die_with_parent, listen, say

DOORS = (Prepare, Reserve, Settle, Reconcile, Commit)
TTL = 1.0
POINTS = {
    "before prepare": "the prepare has not reached the store",
    "after prepare": "EXECUTE was answered, and the look at `send_by` is still to come",
    "past the last look": "the call is made, and its first byte is not sent; it never looks at `send_by` again",
    "after reserve": "the reservation is stored, and not confirmed",
    "after send": "the downstream has acted, and its answer is lost",
    "before settle": "the answer is there, and the settle has not reached the store",
    "after settle": "the store has the receipt",
    "before commit": "the handler has ended, and the commit has not reached the store",
    "after commit": "the store has committed, and its answer is not there",
}
AFTER_THE_WORK = ("before commit", "after commit")


class Gate:
    """Where it stands, once."""

    def __init__(self, point: str) -> None:
        assert point in POINTS, point
        self._point = point
        self._go = threading.Event()
        self._reached = False
        self.woken = False

    def stand_at(self, point: str) -> bool:
        """Whether it stood here; blocks the whole event loop until it is told to go on."""
        if point != self._point or self._reached:
            return False
        self._reached = True
        say("at", point=point)
        self._go.wait()
        self.woken = True
        return True

    def miss(self) -> None:
        """It came off the straight way before it stood: the machine was too slow for the window, or the lease."""
        if not self._reached and self._point not in AFTER_THE_WORK:
            say("at", point=None)
            os._exit(0)

    def open(self) -> None:
        self._go.set()


def stopping(downstream: Any, gate: Gate) -> None:
    """Put the points of a call around the one that acts."""
    name = "confirm" if downstream.declaration.guarantee == Guarantee.RESERVATION else "execute"
    act = getattr(downstream, name, None)
    if act is None:
        return

    async def around(call: Any) -> Any:
        gate.stand_at("after reserve")
        if gate.stand_at("past the last look"):
            call = dataclasses.replace(call, send_by=Deadline.none())
        if gate.woken:
            say("calls")
            found = await asyncio.shield(_background(late(call)))
        else:
            found = await act(call)
        if isinstance(found, Happened) and gate.stand_at("after send"):
            raise ConnectionResetError("the answer was lost")
        return found

    async def late(call: Any) -> Any:
        found: Any = None
        try:
            found = await act(call)
            return found
        finally:
            say("late call", found=type(found).__name__, why=getattr(found, "why", None))

    setattr(downstream, name, around)


def rule(gate: Gate) -> Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]:
    """The points around a call of the store. Once it has been woken, every call reaches the store, and is told of."""

    async def passing(command: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        if isinstance(command, Prepare):
            gate.stand_at("before prepare")
        elif isinstance(command, Settle) and command.finding == "HAPPENED":
            gate.stand_at("before settle")
        elif isinstance(command, Settle | Reconcile):
            gate.miss()
        elif isinstance(command, Commit):
            gate.stand_at("before commit")
        if gate.woken and isinstance(command, DOORS):
            return await asyncio.shield(_background(late(command, send)))
        answer = await send()
        if isinstance(answer, Refused):
            return answer
        if isinstance(command, Prepare) and answer.outcome == "EXECUTE":
            gate.stand_at("after prepare")
        elif isinstance(command, Settle) and command.finding == "HAPPENED":
            gate.stand_at("after settle")
        elif isinstance(command, Commit) and gate.stand_at("after commit"):
            say("door", door="commit", outcome=answer.outcome.value)
            say("reported")
        return answer

    async def late(command: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        answer = await send()
        door = type(command).__name__.lower()
        say("door", door=door, outcome=str(answer.outcome), reason=getattr(answer, "reason", None))
        if door == "commit":
            say("reported")
        return answer

    return passing


_running: set[asyncio.Future[Any]] = set()


def _background(coroutine: Any) -> asyncio.Future[Any]:
    """It goes on when its caller is cancelled, as a request does that is on its way."""
    task = asyncio.ensure_future(coroutine)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def main(url: str, owner: str, options: str) -> int:
    wanted: dict[str, Any] = json.loads(options)
    gate = Gate(wanted["point"])
    listen(lambda order: gate.open())
    downstreams = Downstreams({"world": wanted["downstream"]})
    downstream = downstreams["world"]
    stopping(downstream, gate)
    app = fencepost.App()

    @app.task("send", ttl=TTL)
    async def send(attempt: fencepost.Attempt, input: Any) -> Any:
        try:
            if downstream.declaration.guarantee == Guarantee.TRANSACTIONAL:
                gate.stand_at("before prepare")  # there is none: before anything is bound
            await attempt.effect("send", wanted["payload"], using=downstream)
        finally:
            gate.miss()
            if gate.woken:
                _background(client.commit(attempt.claim, {"by": "the late sender"}))
        return {"by": owner}

    client = await client_behind(url, rule(gate))
    async with client:
        worker = fencepost.Worker(client, app, owner=owner, queues=[wanted["queue"]], concurrency=1)
        return await worker.run()


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    sys.exit(asyncio.run(main(*sys.argv[1:])))
