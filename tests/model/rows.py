"""The kernel's transition table as a check: which rows a search went through, and that it left the table nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fencepost.kernel.records import State
from fencepost.kernel.table import TRANSITIONS, Transition
from tests.model.oracle import Violation

Key = tuple[Any, ...]


def key_of(row: Transition) -> Key:
    return (row.door, row.before, row.after, row.events, row.charged)


ROWS: dict[Key, list[Transition]] = {}
for _row in TRANSITIONS:
    ROWS.setdefault(key_of(_row), []).append(_row)


class Rows:
    """Rows by what can be seen of a change. Several rows may look alike and differ in their condition alone."""

    def __init__(self) -> None:
        self.seen: set[Key] = set()

    def check(self, door: str, before: Mapping[str, Any], writes: Any) -> None:
        for write in writes.tasks:
            if write.family == "compare":
                continue
            old = before.get(write.task.task_id)
            events = [event for event in writes.events if event.task_id == write.task.task_id]
            charged = old is not None and write.task.charged_attempts > old.charged_attempts
            names = tuple(event.name for event in events)
            key = (door, State(old.state) if old else None, State(write.task.state), names, charged)
            if key not in ROWS:
                raise Violation("table", f"no row allows {key}")
            self.seen.add(key)


def of_effects(key: Key) -> bool:
    """Rows that only an effect leads through: the searched tasks have none, the row test drives these."""
    door, _, after, events, _ = key
    return any(event.startswith("effect_") for event in events) or (door == "release" and after is State.PARKED)


def unseen(seen: Iterable[Key]) -> list[Key]:
    known = set(seen)
    return [key for key in ROWS if key not in known and not of_effects(key)]
