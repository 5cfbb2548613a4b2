"""A pool's epochs over time, as its log tells them: what audit holds the journal of tasks against."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from fencepost.kernel.fence import DOORS
from fencepost.kernel.records import Event, LogEntry, Pool
from fencepost.service.journal import compared_names, log_of
from fencepost.stores.base import Store

# Events of what passes the whole fence: under the pool's present epoch, or not at all.
FENCED = (
    "attempt_started",
    "attempt_renewed",
    "checkpoint_saved",
    "result_committed",
    "attempt_ended",
    "effect_awaiting",
    "effect_prepared",
    "effect_reserved",
    "effect_committed",
    "effect_absent",
    "effect_unknown",
    "effect_denied",
)
_FENCED_DOORS = (
    "renew",
    "checkpoint",
    "commit",
    "release",
    "fail",
    "effect.prepare",
    "effect.reserve",
    "effect.settle",
    "effect.reconcile",
    "effect.withdraw",
)


def passes_fence(event: Event) -> bool:
    """Whether the event's epoch was the pool's when it was accepted. Others show the epoch of an older claim."""
    return event.name == "attempt_started" or (event.name in FENCED and event.door in _FENCED_DOORS)


class Epochs:
    """One pool's (at, epoch), in order. `whole`: retention has removed nothing of it."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._epochs: list[int] = []
        self.whole = True
        self.current = 1
        self.changes = 0  # of the pool's record since it was created
        self.accepted = 0  # log entries of such changes that carry the door's full comparison
        self.incomplete = 0

    def add(self, at: int, epoch: int) -> None:
        self._times.append(max(at, self._times[-1]) if self._times else at)
        self._epochs.append(epoch)

    def before(self, at: int) -> int:
        """The epoch reached strictly before `at`; 0 where that is not known."""
        place = bisect_left(self._times, at)
        return self._epochs[place - 1] if place else int(self.whole)

    def until(self, at: int) -> int | None:
        """The epoch reached up to and at `at`; None where that is not known."""
        place = bisect_right(self._times, at)
        return self._epochs[place - 1] if place else (1 if self.whole else None)


async def read_epochs(store: Store, report: Callable[[int, str], None]) -> dict[str, Epochs]:
    """Every pool's epochs. What its log and its record contradict is reported with the invariant's number."""
    pools = await store.pools()  # before the log, which then reaches at least as far
    found = {}
    for pool in pools:
        entries = [numbered.entry async for numbered in log_of(store, None, ("pool",), pool.name)]
        found[pool.name] = _epochs(pool, entries, report)
    return found


def _epochs(pool: Pool, entries: list[LogEntry], report: Callable[[int, str], None]) -> Epochs:
    name, known = f"pool {pool.name!r}", Epochs()
    last: int | None = None
    at_record: int | None = None
    for entry in entries:
        detail = entry.detail or {}
        version, epoch = detail.get("state_version"), detail.get("epoch")
        if not isinstance(version, int) or not isinstance(epoch, int):
            report(7, f"{name}: a log entry {entry.outcome} shows no epoch or version")
            continue
        raised = entry.outcome == "EPOCH_RAISED"
        if version > 1:
            missing = int(DOORS["pool"].compares) & ~int(detail.get("compared") or 0)
            known.incomplete += bool(missing)
            known.accepted += not missing
            if missing:
                names = ", ".join(compared_names(missing))
                report(3, f"{name}: its change to version {version} came without comparing {names}")
        if last is None:
            known.whole = version <= 2  # a pool that the store was created with has no entry of version 1
            if not known.whole:
                known.current = epoch - raised
                known.add(entry.at, epoch)
        elif version != last + 1:
            report(7, f"{name}: its log goes from version {last} to {version}")
        if epoch < known.current:
            report(2, f"{name}: the epoch went from {known.current} to {epoch}")
        elif epoch > known.current and not raised:
            report(7, f"{name}: epoch {epoch} came without a raise")
        if raised:
            known.add(entry.at, epoch)
        last = version
        known.current = max(known.current, epoch)
        if version == pool.state_version:
            at_record = epoch
    if last is None:
        known.whole = pool.state_version == 1
        if known.whole and pool.epoch != 1:
            report(7, f"{name} stands at epoch {pool.epoch}, its log knows no raise")
    elif at_record is None:
        report(7, f"{name}: no log entry led to its state version {pool.state_version}")
    elif at_record != pool.epoch:
        report(7, f"{name} stands at epoch {pool.epoch}, its log says {at_record}")
    known.current = max(known.current, pool.epoch)
    known.changes = pool.state_version - 1
    return known
