"""Tasks from JSON Lines: every line is checked before any is written.

One line is one task: an object with `input` and, optionally, the other fields of `fencepost.wire.NewTask`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import IO, Any, BinaryIO, NamedTuple

import msgspec

from fencepost.client import requests
from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.digests import MAX_CONTENT_BYTES, parse
from fencepost.service.admission import admit
from fencepost.wire import NewTask, new_id

# A line may spell a value longer than it is stored (escapes, spaces); past this it is no task.
MAX_LINE_BYTES = 8 * MAX_CONTENT_BYTES
IN_MEMORY_BYTES = 64 << 20


class BadLine(InvalidRequest):
    """A line that is no task. `field` is `line N`, so that a person finds it."""

    def __init__(self, number: int, reason: str) -> None:
        self.number = number
        super().__init__(f"line {number}", reason)


class _Place(NamedTuple):
    line: int
    batch: int
    pool: str


class CheckedLines:
    """All tasks of a source, checked, in a copy of their own: what is written is what was checked.

    `parents` are the tasks that lines depend on and that no line defines, each with the first line that names it;
    `pools` likewise. Whether those exist, only the store can say.
    """

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.count = 0
        self.parents: dict[str, int] = {}
        self.pools: dict[str, int] = {}
        self._defaults = defaults
        self._copy: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115 (see close)

    def close(self) -> None:
        self._copy.close()

    def read(self, source: BinaryIO) -> None:
        """Checks everything in `source`. Raises BadLine for the first line that is no task or has no place here."""
        places: dict[str, _Place] = {}
        children: list[tuple[_Place, NewTask]] = []
        number = 0
        while line := source.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BadLine(number, f"is longer than {MAX_LINE_BYTES} bytes")
            self._copy.write(line.rstrip(b"\r\n") + b"\n")
            if not line.strip():
                continue
            task = self._task(line, number)
            place = _Place(number, self.count // k.MAX_BATCH, task.pool)
            self.count += 1
            self.pools.setdefault(task.pool, number)
            if task.task_id is not None:
                if task.task_id in places:
                    raise BadLine(
                        number, f"task_id {task.task_id!r} stands in line {places[task.task_id].line} already"
                    )
                places[task.task_id] = place
            if task.depends_on:
                children.append((place, task))
        for place, task in children:
            self._check_parents(place, task, places)
        _refuse_cycles(children, places)

    def _check_parents(self, place: _Place, task: NewTask, places: dict[str, _Place]) -> None:
        for parent in task.depends_on:
            found = places.get(parent)
            if found is None:
                self.parents.setdefault(parent, place.line)
            elif found.pool != place.pool:
                raise BadLine(place.line, f"depends on {parent!r}, which lives in another pool ({found.pool!r})")
            elif found.batch > place.batch:
                raise BadLine(
                    place.line,
                    f"depends on {parent!r} of line {found.line}, which is written later: in a file of more than "
                    f"{k.MAX_BATCH} tasks, parents stand before their children",
                )

    def batches(self) -> Iterator[tuple[list[int], list[NewTask]]]:
        """The tasks again, in the order of the lines, as many at a time as one call can take; and their lines."""
        numbers: list[int] = []
        tasks: list[NewTask] = []
        self._copy.seek(0)
        for number, line in enumerate(self._copy, 1):
            if not line.strip():
                continue
            numbers.append(number)
            tasks.append(self._task(line, number, checked=True))
            if len(tasks) == k.MAX_BATCH:
                yield numbers, tasks
                numbers, tasks = [], []
        if tasks:
            yield numbers, tasks

    def _task(self, line: bytes, number: int, *, checked: bool = False) -> NewTask:
        try:
            return new_task(parse(line, "line"), self._defaults, checked=checked)
        except InvalidRequest as error:
            reason = error.limit if error.field == "line" else f"{error.field}: {error.limit}"
            raise BadLine(number, reason) from None


def new_task(value: Any, defaults: dict[str, Any], *, checked: bool = False) -> NewTask:
    """A task from a line's value, with the command's options where it says nothing. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest("line", 'must be an object such as {"input": …}')
    if "input" not in value:
        raise InvalidRequest("input", "is missing")
    if "available_at" in value:
        defaults = {name: given for name, given in defaults.items() if name != "delay"}
    try:
        task = msgspec.convert({**defaults, **value}, NewTask, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).replace("`", "").partition(" - at $.")
        raise InvalidRequest(path or "line", message[:1].lower() + message[1:]) from None
    if not checked:
        check(task)
    return task


def check(task: NewTask) -> None:
    """Raises InvalidRequest, naming the field, where `task` is wrong in itself. Reads and writes nothing."""
    try:
        (made,) = requests.new_tasks([task], "tasks", None)
        admit(k.Submit(request_id=new_id(), tasks=(made,)), "")
    except InvalidRequest as error:
        raise InvalidRequest(error.field.removeprefix("tasks[0]."), error.limit) from None
    if len(set(task.depends_on)) != len(task.depends_on):
        raise InvalidRequest("depends_on", "names a task twice")


def _refuse_cycles(children: list[tuple[_Place, NewTask]], places: dict[str, _Place]) -> None:
    graph = {task.task_id: [p for p in task.depends_on if p in places] for _, task in children if task.task_id}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        around = error.args[1]
        raise BadLine(places[around[0]].line, f"depends on itself: {' → '.join(around)}") from None
