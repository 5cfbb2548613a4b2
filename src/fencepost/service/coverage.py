"""Acceptance coverage (claim.v1, section 3): what the journal proves, over what the records show.

The denominator never comes from the journal: a change that left no event, or an event that lacks a
comparison, has to show. Audit counts task by task; `numbers` counts journal and records one after the other.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from fencepost.kernel.fence import DOORS
from fencepost.kernel.records import Event, State, Task
from fencepost.service.epochs import Epochs

# Doors whose changes the records count by themselves, by the event that each change leaves.
_COUNTED = {
    "attempt_started": "claim",
    "result_committed": "commit",
    "submitted": "submit",
    "task_cancelled": "cancel",
    "input_revised": "revise",
    "effect_prepared": "effect.prepare",
}
# Renew, checkpoint, release, fail, expire, …; and what commit, submit, cancel and revise change besides.
OTHER = "other"
ROWS = ("submit", "claim", "commit", "effect.prepare", "cancel", "revise", OTHER, "pool")


class CoverageRow(msgspec.Struct, frozen=True):
    """`accepted`: events with their door's full comparison; `changes`: what the records show.

    `ratio` is None where nothing changed. `incomplete` counts, by door, the events that lack a comparison.
    """

    door: str
    accepted: int
    changes: int
    ratio: float | None
    incomplete: dict[str, int]


def row_of(event: Event) -> str:
    return _COUNTED.get(event.name, OTHER)


def lacks(event: Event) -> int:
    """The comparisons that the event's door declares and this event does not carry; -1 for an unknown door."""
    door = DOORS.get(event.door)
    if door is None:
        return -1
    return int(door.compares) & ~event.compared


class Coverage:
    """Adds up records and events; `rows()` compares them."""

    def __init__(self) -> None:
        self._changes: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._incomplete: dict[str, Counter[str]] = {}
        self.left_out = 0  # tasks with pruned events: on neither side

    def record(self, task: Task, executions: int = 0) -> bool:
        """Count what the record shows, and `executions`, what the records of its effects do (TRANSACTIONAL ones come
        with the commit). False where its events were pruned, which then must not be counted either."""
        if task.pruned_to_version:
            self.left_out += 1
            return False
        committed = int(task.state == State.COMMITTED)
        counted = 1 + task.claim_generation + committed + task.cancel_generation + task.revision - 1 + executions
        changes = self._changes
        changes["submit"] += 1
        changes["claim"] += task.claim_generation
        changes["commit"] += committed
        changes["effect.prepare"] += executions
        changes["cancel"] += task.cancel_generation
        changes["revise"] += task.revision - 1
        changes[OTHER] += task.state_version - counted
        return True

    def executions(self, count: int) -> None:
        """Count executions that were read after the records of their tasks, and are among these records' changes."""
        self._changes["effect.prepare"] += count
        self._changes[OTHER] -= count

    def event(self, event: Event) -> None:
        row = row_of(event)
        if lacks(event) == 0:
            self._accepted[row] += 1
        else:
            self._incomplete.setdefault(row, Counter())[event.door] += 1

    def pool(self, epochs: Epochs) -> None:
        """Count a pool's own changes, where retention has left its log whole."""
        if epochs.whole:
            self._changes["pool"] += epochs.changes
            self._accepted["pool"] += epochs.accepted
            if epochs.incomplete:
                self._incomplete.setdefault("pool", Counter())["pool"] += epochs.incomplete

    def rows(self) -> list[CoverageRow]:
        """One row a door. The ratio never exceeds 1, and an incomplete event lowers it even where events were
        written between reading the records and reading the journal."""
        rows = []
        for name in ROWS:
            changes, accepted = self._changes[name], self._accepted[name]
            incomplete = dict(self._incomplete.get(name, {}))
            missing = max(changes - accepted, sum(incomplete.values()))
            ratio = None if changes <= 0 else max(0.0, (changes - missing) / changes)
            rows.append(CoverageRow(name, accepted, changes, ratio, incomplete))
        return rows
