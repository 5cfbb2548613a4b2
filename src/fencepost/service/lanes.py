"""Who is asked next: queued commands become batches, and batches go to the store one after the other in their lane.

What was asked while the last batch was under way is the next batch; there is no linger timer. A store whose swaps can
be lost anyway gets two lanes: one for claims of whatever is next, one for all else. Two batches of claims at once would
only offer each other the same tasks; a batch of claims and one of commits touch different ones, and while one of them
waits for the disk the other is decided.

Callers that all do the same at the same time would leave one lane empty while the other is at work. So where about all
of them wait in one lane, and the other has nothing to do, it takes half of them first; their answers are worked on
while the second half is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fencepost.kernel import commands as k
from fencepost.service.batch import Operation

MAX_BATCH = 512
# Fewer than these are not worth a second statement, nor is a part of those who have been at work here lately.
LEAST_TO_SPLIT = 48
ABOUT_ALL = 0.75
_FORGETTING = 0.99  # of how many they were, with each batch

Run = Callable[[list[Operation]], Awaitable[None]]


class Lanes:
    """Belongs to one event loop. `run` never raises but when it is cancelled."""

    def __init__(self, run: Run, *, several: bool) -> None:
        self._run = run
        self._lanes = [_Lane() for _ in range(2 if several else 1)]
        self._crowd = 0.0

    def add(self, operation: Operation) -> None:
        """`operation` in its lane's next batch."""
        lane = self._lanes[0 if type(operation.command) is k.ClaimNext else -1]
        lane.waiting.append(operation)
        if lane.task is None:
            lane.task = asyncio.create_task(self._work(lane), name="fencepost-lane")

    def running(self) -> list[asyncio.Task[None]]:
        """The lanes that have something to do: each ends when it has nothing more."""
        return [lane.task for lane in self._lanes if lane.task is not None]

    async def _work(self, lane: _Lane) -> None:
        try:
            while lane.waiting:
                batch = next_batch(lane.waiting, self._most(lane))
                del lane.waiting[: len(batch)]
                lane.at_work = batch
                await self._run(batch)
                lane.at_work = []
                # Whoever was answered often asks again at once: that is the next batch, without a new task for it.
                await asyncio.sleep(0)
        finally:
            lane.task, lane.at_work = None, []

    def _most(self, lane: _Lane) -> int:
        """How many `lane` takes next."""
        if len(self._lanes) == 1:
            return MAX_BATCH
        here, everywhere = len(lane.waiting), sum(each.size() for each in self._lanes)
        self._crowd = max(everywhere, _FORGETTING * self._crowd)
        if here < LEAST_TO_SPLIT or here < everywhere or here < ABOUT_ALL * self._crowd:
            return MAX_BATCH
        return -(-here // 2)


class _Lane:
    def __init__(self) -> None:
        self.waiting: list[Operation] = []
        self.at_work: list[Operation] = []
        self.task: asyncio.Task[None] | None = None

    def size(self) -> int:
        """How many have something to do here: a claim of many stands for as many."""
        return sum(
            len(operation.command.attempt_ids) if type(operation.command) is k.ClaimNext else 1
            for operation in (*self.waiting, *self.at_work)
        )


def next_batch(waiting: Sequence[Operation], most: int = MAX_BATCH) -> list[Operation]:
    """What goes into one transaction. A commit that brings statements goes alone: one that fails, fails by itself."""
    most = min(most, MAX_BATCH)
    for position, operation in enumerate(waiting[:most]):
        if operation.alone:
            return list(waiting[: max(1, position)])
    return list(waiting[:most])
