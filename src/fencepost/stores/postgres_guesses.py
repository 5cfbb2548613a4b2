"""What this process has written lately, to try a decision on without asking the server again.

A guess never decides: an acceptance compares the versions of everything that it was decided on, in the transaction that
writes it, and a plan that would refuse, or find nothing, reads afresh first. The clock goes on from the server's last
answer by a clock that only runs forward, for a moment at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.clock import elapsed, to_us
from fencepost.kernel.records import CLAIMED, Effect, Pool, Task
from fencepost.kernel.writes import Keys, Snapshot, TaskWrite, WriteSet

MOST_TASKS = 20_000
# How long, in seconds, the clock is carried on without an answer from the server.
LONGEST = 1.0
# What is never known here.
_BESIDE = ("results", "staged", "inputs", "checkpoints", "children", "parents", "starts", "payloads")


class Guesses:
    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}  # that were claimed through this process; the oldest first
        self._effects: dict[str, list[Effect]] = {}  # all that such a task has, as they stand in its record's version
        self._pools: dict[str, Pool] = {}
        self._now: int | None = None
        self._at = 0.0
        self.plenty = False  # the last scan found as many as were asked for

    def fill(self, keys: Keys, into: Snapshot) -> bool:
        """Answer a Load from here. False, with nothing filled in, where something is not known here."""
        gone = elapsed() - self._at
        beside = any(getattr(keys, name) for name in _BESIDE)
        if beside or (keys.effects and not self._knows_effects(keys, into)):
            return False
        if keys.tasks or keys.pools or keys.requests:
            if self._now is None or gone > LONGEST or not keys.pools or (keys.requests and not self.plenty):
                return False
            tasks, pools = self._tasks, self._pools
            if not (tasks.keys() >= keys.tasks and pools.keys() >= keys.pools):
                return False
            for name in keys.pools:
                into.pools[name] = pools[name]
            for task_id in keys.tasks:
                into.tasks[task_id] = tasks[task_id]
            into.now = self._now + to_us(gone)
        for task_id in keys.effects:
            into.effects[task_id] = self._effects.get(task_id, [])
        into.guessed = True
        return True

    def _knows_effects(self, keys: Keys, into: Snapshot) -> bool:
        """All of them, as they stand in the very versions of their tasks that are filled in now, or were before."""
        effects, tasks = self._effects, self._tasks
        for task_id in keys.effects:
            known = tasks.get(task_id)
            if known is None or (known.effects and task_id not in effects):
                return False
            if task_id not in keys.tasks:
                seen = into.tasks.get(task_id)
                if seen is None or seen.state_version != known.state_version:
                    return False
        return True

    def _changed(self, writes: WriteSet, before: Task | None, write: TaskWrite) -> None:
        """What is known of a task's effects after `write`: no more than was known of them in the version before."""
        task = write.task
        known: list[Effect] | None = None
        if before is not None and before.state_version == write.expected_version:
            known = self._effects.get(task.task_id) if before.effects else []
        if known is not None and "effects" in writes.made:
            merged = {effect.number: effect for effect in known}
            merged.update((effect.number, effect) for effect in writes.effects if effect.task_id == task.task_id)
            known = [merged[number] for number in sorted(merged)]
        if known is None or len(known) != task.effects:
            self._effects.pop(task.task_id, None)
        else:
            self._effects[task.task_id] = known

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
                        if task.effects:
                            self._changed(writes, tasks.get(task.task_id), write)
                        tasks[task.task_id] = task
                    else:
                        self._drop(task.task_id)
                if writes.pool_write is not None:
                    self._pools.pop(writes.pool_write[1].name, None)
            else:
                for write in writes.tasks:
                    self._drop(write.task.task_id)
                self._pools.pop(writes.pool, None)
        if len(tasks) > MOST_TASKS:
            for task_id in list(tasks)[: MOST_TASKS // 2]:
                self._drop(task_id)

    def _drop(self, task_id: str) -> None:
        task = self._tasks.pop(task_id, None)
        if task is not None and task.effects:
            self._effects.pop(task_id, None)

    def forget(self) -> None:
        self._tasks.clear()
        self._effects.clear()
        self._pools.clear()
        self._now = None
