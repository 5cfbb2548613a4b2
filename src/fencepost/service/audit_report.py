"""What `fencepost audit` says: which invariants it looked at, how much of each, and what was wrong."""

from __future__ import annotations

from datetime import datetime

import msgspec

from fencepost.service.coverage import CoverageRow

CHECKS: dict[int, str] = {
    1: "at most one result commit a task; its attempt held the generation; the body has its digest",
    2: "numbers never go down; each generation is one step with an attempt of its own",
    3: "every accepted change came through a door of the list, compared what that declares, and showed current numbers",
    4: "one payload an effect id, ever; one receipt; no execution beside one that may still take effect, but under the"
    " downstream's own key, precondition or reservation",
    5: "no task runs before all its parents are committed; a blocked one has an open parent",
    7: "records and journal agree, without a gap; bodies have their digests; no row is without its task",
    8: "nothing of an older epoch was accepted after a raise",
}
# What each count of `checked` counts.
COUNTED: dict[int, str] = {
    1: "tasks",
    2: "attempts",
    3: "events",
    4: "effects",
    5: "dependencies",
    7: "tasks",
    8: "events of claims",
}


class Violation(msgspec.Struct, frozen=True):
    invariant: int
    task_id: str | None
    says: str


class Check(msgspec.Struct, frozen=True):
    """One invariant: how much was looked at (`checked`, in `unit`), and how much of it was wrong."""

    invariant: int
    says: str
    checked: int
    unit: str
    violations: int


class AuditReport(msgspec.Struct):
    """What audit looked at and what it found. `clean`: no violation, and every door's coverage is 100 %.

    `violations` holds the first thousand of `violation_count`. Invariants without records to check yet are
    not listed. `pruned_tasks` were checked from what retention left; they count in no coverage.
    """

    clean: bool
    at: datetime
    tasks: int
    events: int
    attempts: int
    results: int
    staged: int
    pools: int
    pruned_tasks: int
    checks: list[Check]
    coverage: list[CoverageRow]
    violations: list[Violation]
    violation_count: int
