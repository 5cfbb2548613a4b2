"""What this process has written lately, to try a decision on without asking the server again.

A guess never decides: an acceptance compares the versions of everything that it was decided on, in the transaction that
writes it, and a plan that would refuse, or find nothing, reads afresh first. The clock goes on from the server's last
answer by a clock that only runs forward, for a moment at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.clock import elapsed, to_us
from fencepost.kernel.records import CLAIMED, Pool, Task
from fencepost.kernel.writes import Keys, Snapshot, WriteSet

MOST_TASKS = 20_000
# How long, in seconds, the clock is carried on without an answer from the server.
LONGEST = 1.0


class Guesses:
    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}  # that were claimed through this process; the oldest first
        self._pools: dict[str, Pool] = {}
        self._now: int | None = None
        self._at = 0.0
        self.plenty = False  # the last scan found as many as were asked for

    def fill(self, keys: Keys, into: Snapshot) -> bool:
        """Answer a Load from here. False, with nothing filled in, where something is not known here."""
        gone = elapsed() - self._at
        if self._now is None or gone > LONGEST or not keys.pools or (keys.requests and not self.plenty):
            return False
        if (
            keys.results
            or keys.staged
            or keys.inputs
            or keys.checkpoints
            or keys.children
            or keys.parents
            or keys.starts
        ):
            return False
        tasks, pools = self._tasks, self._pools
        if not (tasks.keys() >= keys.tasks and pools.keys() >= keys.pools):
            return False
        for name in keys.pools:
            into.pools[name] = pools[name]
        for task_id in keys.tasks:
            into.tasks[task_id] = tasks[task_id]
        into.now = self._now + to_us(gone)
        into.guessed = True
        return True

    def now(self) -> int:
        """The store's clock, as far as it is known here."""
        return (self._now or 0) + to_us(elapsed() - self._at)

    def answered(self, into: Snapshot) -> None:
        """The server has answered a Load or Scan into this."""
        self._now, self._at = into.now, elapsed()
        if not into.guessed:
            self._pools.update(into.pools)

    def applied(self, sets: Sequence[WriteSet], won: Sequence[bool]) -> None:
        tasks = self._tasks
        for writes, stands in zip(sets, won, strict=True):
            if stands:
                for write in writes.tasks:
                    task = write.task
                    if task.state == CLAIMED and write.family != "compare":
                        tasks[task.task_id] = task
                    else:
                        tasks.pop(task.task_id, None)
                if writes.pool_write is not None:
                    self._pools.pop(writes.pool_write[1].name, None)
            else:
                for write in writes.tasks:
                    tasks.pop(write.task.task_id, None)
                self._pools.pop(writes.pool, None)
        if len(tasks) > MOST_TASKS:
            for task_id in list(tasks)[: MOST_TASKS // 2]:
                del tasks[task_id]

    def forget(self) -> None:
        self._tasks.clear()
        self._pools.clear()
        self._now = None
