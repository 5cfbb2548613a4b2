"""Ready tasks that were read before they were asked for, so that not every batch of claims costs a statement to look.

They are offers, as all candidates are: a claim of one compares its version, and no plan says "nothing" or "no" from
them. What is kept is a moment old at most: for that long, a more urgent task that another service has just submitted
may come behind those that were seen before it. One that this service makes ready itself never does.
"""

from __future__ import annotations

from typing import Any

from fencepost.clock import elapsed
from fencepost.kernel.records import Content, Task
from fencepost.stores.base import Scan

FRESH = 0.02  # seconds
MOST = 256  # tasks that a look brings beyond those that were asked for
MOST_BYTES = 1 << 18  # of the inputs of one look; where they are more, nothing is read ahead
MOST_TIMES = 16


class Ahead:
    """What the last look brought beyond what was asked for, for one question at a time."""

    def __init__(self) -> None:
        self._question: Any = None
        self._tasks: list[Task] = []  # the best of them last
        self._inputs: dict[str, Content] = {}
        self._until = 0.0
        self._times = 1  # so many times what is asked for is read

    def take(self, question: Any, step: Scan) -> list[Task] | None:
        """As many as the step asks for; None where it must look itself."""
        if not step.into.guessed or question != self._question:
            return None
        tasks = self._tasks
        if elapsed() > self._until:
            self._times = max(1, self._times // 2)
            return None
        if len(tasks) < step.limit:  # asked for sooner than it grows old: more is worth reading
            self._times = min(MOST_TIMES, 2 * self._times)
            return None
        found = [tasks.pop() for _ in range(step.limit)]
        given, inputs = step.into.inputs, self._inputs
        for task in found:
            content = inputs.pop(task.task_id, None)
            if content is not None:
                given[task.task_id] = content
        return found

    def limit(self, question: Any, step: Scan) -> int:
        """How many to look for."""
        if question != self._question:
            self._times = 1
        return step.limit + min(MOST, (self._times - 1) * step.limit)

    def keep(self, question: Any, step: Scan, found: list[Task], began: float) -> list[Task]:
        """Of what a look that `began` then has found: what was asked for. The rest is kept."""
        self.drop()
        self._question, self._until = question, began + FRESH
        wanted, rest = found[: step.limit], found[: step.limit - 1 : -1]
        inputs = step.into.inputs
        if sum(len(content.data) for content in inputs.values()) > MOST_BYTES:
            self._times, self._until = 1, 0.0
            rest = []
        for task in rest:
            content = inputs.pop(task.task_id, None)
            if content is not None:
                self._inputs[task.task_id] = content
        self._tasks = rest
        return wanted

    def wrote(self, task: Task) -> None:
        """This service made `task` ready: what comes behind it must not be taken before it."""
        if self._tasks:
            last = self._tasks[0]
            if (task.priority, task.available_at, task.task_id) < (last.priority, last.available_at, last.task_id):
                self.drop()

    def drop(self) -> None:
        self._tasks, self._inputs = [], {}
