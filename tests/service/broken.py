"""Ways to break a lived-in memory store behind the API's back, each with what audit must say about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, Event, LogEntry, Pool, Staged, StagedState, State
from fencepost.stores.base import Numbered
from fencepost.stores.memory import MemoryStore

replace = msgspec.structs.replace


class Tamper:
    """Changes rows of a memory store behind the API's back."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    def task(self, task_id: str, **fields: Any) -> None:
        self.store._tasks[task_id] = replace(self.store._tasks[task_id], **fields)

    def event(self, task_id: str, that_is: str, /, **fields: Any) -> None:
        """Change the first event of that name."""
        events = self.store._by_task[task_id]
        old = next(event for event in events if event.name == that_is)
        new = replace(old, **fields)
        events[events.index(old)] = new
        self.store._events = [Numbered(n.number, new if n.entry is old else n.entry) for n in self.store._events]

    def drop(self, task_id: str, name: str) -> None:
        events = self.store._by_task[task_id]
        old = next(event for event in events if event.name == name)
        events.remove(old)
        self.store._events = [n for n in self.store._events if n.entry is not old]

    def add(self, task_id: str, event: Event) -> None:
        """Append an event, and move the record's version with it."""
        self.store._by_task[task_id].append(event)
        self.store._numbers += 1
        self.store._events.append(Numbered(self.store._numbers, event))
        self.task(task_id, state_version=event.state_version)

    def again(self, task_id: str, like: str, /, **fields: Any) -> None:
        """Append a copy of the first event of that name, with other fields."""
        events = self.store._by_task[task_id]
        old = next(event for event in events if event.name == like)
        self.add(task_id, replace(old, state_version=events[-1].state_version + 1, **fields))

    def result(self, task_id: str, **fields: Any) -> None:
        self.store._results[task_id] = replace(self.store._results[task_id], **fields)

    def staged(self, task_id: str, that_is: StagedState, /, **fields: Any) -> None:
        """Change the first staged result of that state."""
        rows = self.store._staged[task_id]
        key = next(key for key, row in rows.items() if row.state == that_is)
        rows[key] = replace(rows[key], **fields)

    def pool(self, **fields: Any) -> None:
        self.store._pools["default"] = replace(self.store._pools["default"], **fields)

    def log(self, outcome: str, **changes: Any) -> None:
        """Change the detail of the first pool entry with that outcome."""
        found = next(n for n in self.store._log if n.entry.outcome == outcome)
        entry: LogEntry = found.entry
        new = Numbered(found.number, replace(entry, detail={**(entry.detail or {}), **changes}))
        self.store._log[self.store._log.index(found)] = new


OTHER_BODY = encode({"r": "forged"})
MISLABELLED = Content(b'{"r": "forged"}', "sha256:" + "0" * 64)

# (invariant, what happened, how, what audit says): of a store in which `lives.live` happened.
BREAKS: list[tuple[int, str, Callable[[Tamper], Any], str]] = [
    (1, "a result's body is another", lambda t: t.result("child", content=MISLABELLED), "stored under another digest"),
    (
        1,
        "a result's body does not have its digest",
        lambda t: t.result("child", content=replace(t.store._results["child"].content, data=b'{"c":2}')),
        "does not have its digest",
    ),
    (
        1,
        "a result's body is no JSON",
        lambda t: t.result("child", content=replace(t.store._results["child"].content, data=b"{")),
        "is not the JSON",
    ),
    (
        1,
        "body and digest are replaced together",
        lambda t: t.result("child", content=OTHER_BODY, result_digest=OTHER_BODY.digest),
        "not the one that its journal says",
    ),
    (1, "a result is of another generation", lambda t: t.result("child", generation=7), "another generation"),
    (1, "a result is of another attempt", lambda t: t.result("child", attempt_id="x"), "another attempt"),
    (1, "a result is gone", lambda t: t.store._results.pop("child"), "COMMITTED without a result"),
    (
        1,
        "a staged result's body is gone",
        lambda t: t.store._staged.pop("lost"),
        "body is missing, and nothing was pruned",
    ),
    (
        1,
        "a result was committed twice",
        lambda t: t.again("child", "result_committed"),
        "was committed 2 times",
    ),
    (
        1,
        "a result that no event committed",
        lambda t: t.store._results.update(failed=replace(t.store._results["child"], task_id="failed")),
        "has a result although it is READY",
    ),
    (
        1,
        "a rival staged result is made canonical",
        lambda t: t.staged("lost", StagedState.DISCARDED, state=int(StagedState.COMMITTED)),
        "COMMITTED and is not the canonical one",
    ),
    (1, "a result's lineage is cut", lambda t: t.result("child", parents=()), "lineage"),
    (2, "a generation is left out", lambda t: t.event("child", "attempt_started", generation=2), "steps from 0 to 2"),
    (
        2,
        "an attempt id is used for two tasks",
        lambda t: t.event("child", "attempt_started", attempt_id=t.store._tasks["father"].attempt_id),
        "was seen before",
    ),
    (
        2,
        "one attempt holds two generations",
        lambda t: t.event("spawned", "attempt_started", attempt_id=t.store._tasks["spawned"].attempt_id),
        "no attempt of its own",
    ),
    (
        2,
        "a later grant shows an older epoch",
        lambda t: [t.event("spawned", name, epoch=3) for name in ("attempt_started", "attempt_ended")],
        "was granted under epoch 2 after a newer one",
    ),
    (
        2,
        "a cancel generation goes down",
        lambda t: t.event("cancelled", "task_reopened", cancel_generation=0),
        "shows cancel generation 0",
    ),
    (
        2,
        "an epoch is granted that the pool never had",
        lambda t: t.task("taken", scheduler_epoch=9),
        "the pool has reached 2",
    ),
    (2, "a pool's epoch goes down", lambda t: t.log("POLICY_SET", epoch=1), "the epoch went from 2 to 1"),
    (3, "an event lacks a comparison", lambda t: t.event("lost", "attempt_renewed", compared=1), "without comparing"),
    (3, "an event names no door", lambda t: t.event("lost", "attempt_renewed", door="window"), "is no door"),
    (
        3,
        "an event is none of its door's",
        lambda t: t.event("lost", "attempt_renewed", door="release"),
        "none that the door release may write",
    ),
    (
        3,
        "a commit came from another attempt",
        lambda t: t.event("child", "result_committed", attempt_id="stranger"),
        "of another attempt than held the task",
    ),
    (
        3,
        "a renewal shows a generation above the current",
        lambda t: t.event("lost", "attempt_renewed", generation=5),
        "shows generation 5",
    ),
    (
        3,
        "an event shows an epoch before the pool reached it",
        lambda t: [
            t.event("child", name, epoch=2) for name in ("attempt_started", "result_committed", "staged_discarded")
        ],
        "before the pool reached it",
    ),
    (3, "a pool's change lacks a comparison", lambda t: t.log("EPOCH_RAISED", compared=0), "without comparing"),
    (5, "a task runs before its parents", lambda t: t.task("child", deps_remaining=1), "parent(s) open"),
    (
        5,
        "a blocked task is made READY",
        lambda t: t.task("orphaned", state=int(State.READY), ready_at=1),
        "is READY with 1 parent(s) open",
    ),
    (
        5,
        "a blocked task has no open parent",
        lambda t: t.task("orphaned", deps_remaining=0),
        "is BLOCKED with no parent open",
    ),
    (
        5,
        "open parents are counted too low, in a state that may be",
        lambda t: t.task("fallen", deps_remaining=0),
        "counts 0 open parents, 1 are not committed",
    ),
    (
        5,
        "open parents are counted too high",
        lambda t: t.task("fallen", deps_remaining=2),
        "counts 2 open parents, 1 are not committed",
    ),
    (5, "successors are counted wrong", lambda t: t.task("final", successors=0), "counts 0 successors"),
    (5, "a dependency is gone", lambda t: t.store._parents["child"].pop(), "has 1 dependencies"),
    (
        5,
        "a parent counts down twice",
        lambda t: t.event("child", "parent_committed", detail={"parent": "father", "left": 1}),
        "counted down twice",
    ),
    (
        5,
        "a child is counted down before its parent commits",
        lambda t: t.event("child", "parent_committed", at=1),
        "before that one was committed",
    ),
    (
        5,
        "a stranger counts down",
        lambda t: t.event("child", "parent_committed", detail={"parent": "lost", "left": 1}),
        "is no parent of it",
    ),
    (7, "an event is gone", lambda t: t.drop("child", "staged_discarded"), "no event of state version"),
    (7, "the last event is gone", lambda t: t.drop("child", "result_committed"), "no event of state version"),
    (7, "the first event is gone", lambda t: t.drop("child", "submitted"), "no event of state version 1"),
    (
        7,
        "a task is put in by hand",
        lambda t: t.store._tasks.update(
            forged=replace(t.store._tasks["released"], task_id="forged", attempt_id=None, claim_generation=0)
        ),
        "has no event",
    ),
    (7, "a state is set", lambda t: t.task("failed", state=int(State.COMMITTED)), "its journal ends with READY"),
    (7, "a generation is set", lambda t: t.task("failed", claim_generation=3), "claim generation is 3"),
    (7, "an attempt is replaced", lambda t: t.task("taken", attempt_id="mine"), "attempt is not the one"),
    (7, "an owner is replaced", lambda t: t.task("taken", owner_id="mallory"), "owner is 'mallory'"),
    (7, "a lease is prolonged", lambda t: t.task("taken", lease_expires_at=1 << 60), "lease's end is"),
    (7, "a charge is forgiven", lambda t: t.task("failed", charged_attempts=0), "charged attempts is 0"),
    (7, "a revision is set", lambda t: t.task("failed", revision=2), "revision is 2"),
    (7, "an end is rewritten", lambda t: t.task("failed", end=3), "end of the latest attempt"),
    (
        7,
        "an input is replaced",
        lambda t: t.store._inputs.update(failed=(1, OTHER_BODY)),
        "its input is stored under another digest",
    ),
    (7, "an input is gone", lambda t: t.store._inputs.pop("failed"), "its input is missing"),
    (
        7,
        "an input and its digest are replaced together",
        lambda t: (t.store._inputs.update(revised=(2, OTHER_BODY)), t.task("revised", input_digest=OTHER_BODY.digest)),
        "input digest is",
    ),
    (
        7,
        "a checkpoint is replaced",
        lambda t: t.store._checkpoints.update(lost=replace(t.store._checkpoints["lost"], content=OTHER_BODY)),
        "is not the one that its journal says was saved",
    ),
    (7, "a checkpoint is gone", lambda t: t.store._checkpoints.pop("lost"), "its checkpoint is missing"),
    (
        7,
        "a dead attempt's result is undecided again",
        lambda t: t.staged("revised", StagedState.DISCARDED, state=int(StagedState.STAGED)),
        "still STAGED although its attempt ended",
    ),
    (
        7,
        "a staged body is replaced",
        lambda t: t.staged("revised", StagedState.DISCARDED, content=MISLABELLED),
        "does not have its digest",
    ),
    (
        7,
        "a result is staged by nobody",
        lambda t: t.store._staged["failed"].update(
            {(9, "d"): Staged("failed", 9, "x", OTHER_BODY, int(StagedState.DISCARDED), 1)}
        ),
        "of an attempt that never was",
    ),
    (
        7,
        "rows are left without their task",
        lambda t: t.store._inputs.update(nobody=(1, OTHER_BODY)),
        "1 row(s) of input belong to no task",
    ),
    (7, "a pool's epoch is set", lambda t: t.pool(epoch=9), "stands at epoch 9, its log says 2"),
    (7, "a pool is changed without a log entry", lambda t: t.pool(state_version=99), "no log entry led to its state"),
    (
        8,
        "an old epoch's renewal is accepted after a raise",
        lambda t: t.again("taken", "attempt_started", name="attempt_renewed", door="renew", epoch=1, at=1 << 60),
        "was accepted after the raise to 2",
    ),
    (
        8,
        "an old epoch's commit comes after a new epoch's claim",
        lambda t: t.again("child", "result_committed", epoch=1),
        "was accepted after one of epoch 2",
    ),
    # what single events may say
    (
        7,
        "an event that moves no state moved one",
        lambda t: t.event("child", "staged_discarded", state=int(State.READY)),
        "staged_discarded (state version 6) leads from CLAIMED to READY",
    ),
    (
        7,
        "a renewal ended the claim",
        lambda t: t.event("lost", "attempt_renewed", state=int(State.READY)),
        "leads from CLAIMED to READY",
    ),
    (
        7,
        "a cancelled task was cancelled again",
        lambda t: t.again("fallen", "task_cancelled", cancel_generation=2),
        "leads from CANCELLED to CANCELLED",
    ),
    (7, "a task was submitted twice", lambda t: t.again("released", "submitted"), "was submitted again"),
    (
        7,
        "a task was submitted as claimed",
        lambda t: t.event("released", "submitted", state=int(State.CLAIMED)),
        "was submitted as CLAIMED",
    ),
    (
        5,
        "a task was submitted as READY with an open parent",
        lambda t: t.event("orphaned", "submitted", state=int(State.READY)),
        "was READY at state version 1 with 1 parent(s) open",
    ),
    (
        5,
        "a task without parents was BLOCKED",
        lambda t: t.event("released", "submitted", state=int(State.BLOCKED)),
        "was BLOCKED at state version 1 with no parent open",
    ),
    (7, "successors did not grow", lambda t: t.again("mother", "successor_added"), "successors went from 1 to 1"),
    (
        7,
        "a renewal moved the lease back",
        lambda t: t.event("lost", "attempt_renewed", detail={"lease_us": 1}),
        "moved the lease's end back",
    ),
    (
        7,
        "a checkpoint number did not grow",
        lambda t: t.event("lost", "checkpoint_saved", detail={"number": 0}),
        "checkpoint 0 was saved over 0",
    ),
    (
        7,
        "an attempt ended in no known way",
        lambda t: t.event("failed", "attempt_ended", detail={"end": "VANISHED"}),
        "an attempt ended 'VANISHED'",
    ),
    (
        5,
        "a count-down skips numbers",
        lambda t: t.event("child", "parent_committed", detail={"parent": "mother", "left": 7}),
        "7 parent(s) are said to be open",
    ),
    (
        7,
        "more events are gone than were pruned",
        lambda t: (
            t.task("failed", pruned_to_version=1),
            t.drop("failed", "submitted"),
            t.drop("failed", "attempt_started"),
        ),
        "no event of state version 2",
    ),
    (
        7,
        "a task begins with a renewal",
        lambda t: t.event("released", "submitted", name="attempt_renewed"),
        "its first event is attempt_renewed",
    ),
    (
        2,
        "a state version comes again",
        lambda t: t.add("released", t.store._by_task["released"][0]),
        "state version 1 comes after 3",
    ),
    # what single records may say
    (7, "a state is none", lambda t: t.task("released", state=9), "has the state 9"),
    (2, "a number is below its first", lambda t: t.task("released", cancel_generation=-1), "below its first"),
    (7, "a lease without a claim", lambda t: t.task("released", lease_expires_at=5), "a lease without being CLAIMED"),
    (2, "a generation without an epoch", lambda t: t.task("released", scheduler_epoch=0), "do not belong together"),
    (7, "pruned beyond its end", lambda t: t.task("released", pruned_to_version=99), "which it never had"),
    (7, "a task in no pool", lambda t: t.task("released", pool="nowhere"), "which does not exist"),
    (
        1,
        "a result commit is named that is not there",
        lambda t: t.task("released", result_commit_id="x"),
        "names a result commit that does not exist",
    ),
    (
        1,
        "a commit is undone",
        lambda t: (
            t.store._results.pop("child"),
            t.task("child", state=int(State.READY), result_commit_id=None),
        ),
        "neither record nor result shows it",
    ),
    (
        1,
        "a commit leaves no event",
        lambda t: t.drop("child", "result_committed"),
        "has a result that no event committed",
    ),
    (
        7,
        "an input is of another revision",
        lambda t: t.store._inputs.update(failed=(4, t.store._inputs["failed"][1])),
        "its input is of revision 4",
    ),
    (
        7,
        "a checkpoint is of another generation",
        lambda t: t.store._checkpoints.update(lost=replace(t.store._checkpoints["lost"], generation=1)),
        "its checkpoint is of another revision or generation",
    ),
    (
        7,
        "a staged result's state is none",
        lambda t: t.staged("revised", StagedState.DISCARDED, state=7),
        "has the state 7",
    ),
    # pools
    (7, "a pool's log entry shows no epoch", lambda t: t.log("POLICY_SET", epoch=None), "shows no epoch or version"),
    (
        7,
        "a pool is put in by hand",
        lambda t: t.store._pools.update(new=Pool("new", epoch=5)),
        "its log knows no raise",
    ),
    (7, "a pool's log has a gap", lambda t: t.log("POLICY_SET", state_version=50), "its log goes from version 4 to 50"),
    (7, "an epoch comes without a raise", lambda t: t.log("INTAKE_OPENED", epoch=2), "came without a raise"),
]
