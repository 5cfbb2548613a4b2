"""Audit: a clean store is found clean, and each broken promise is found by its number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.fence import DOORS
from fencepost.kernel.kernel import Kernel, mask_of
from fencepost.kernel.records import Content, Event, LogEntry, Staged, StagedState, State, Task
from fencepost.service.audit import CHECKS, AuditReport, audit
from fencepost.service.coverage import OTHER
from fencepost.stores.base import Numbered, Store, TaskFilter
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SQLiteStore
from fencepost.wire import NewTask
from tests.service.lives import claim, client_of, live, raise_epoch

replace = msgspec.structs.replace


@pytest.fixture(params=["memory", "losing swaps", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        made: Store = await SQLiteStore.open(str(tmp_path / "audited.db"))
    else:
        made = MemoryStore(optimistic=request.param == "losing swaps")
    yield made
    await made.close()


def told(report: AuditReport) -> str:
    return "\n".join(f"{found.invariant} {found.task_id}: {found.says}" for found in report.violations)


async def test_a_store_in_which_everything_happened_through_the_doors_is_clean(store: Store) -> None:
    client = await client_of(store)
    await live(client)
    report = await audit(store)
    assert report.violations == [], told(report)
    assert report.clean
    assert {check.invariant for check in report.checks} == set(CHECKS)
    assert all(check.checked > 0 for check in report.checks)
    assert all(row.ratio == 1.0 and row.accepted == row.changes > 0 for row in report.coverage), report.coverage
    assert report.tasks == 14
    assert report.results == 5
    assert report.attempts == sum(task.claim_generation for task in await store.tasks(TaskFilter(), None, 100))
    await client.close()


async def test_an_empty_store_is_clean_and_claims_no_coverage(store: Store) -> None:
    report = await audit(store)
    assert report.clean
    assert [row.ratio for row in report.coverage] == [None] * len(report.coverage)


async def test_the_report_has_a_json_form_and_says_how_far_it_is(store: Store) -> None:
    client = await client_of(store)
    await client.submit_many([NewTask(n) for n in range(450)])
    seen: list[tuple[int, int]] = []
    report = await audit(store, lambda done, total: seen.append((done, total)))
    assert seen == [(200, 450), (400, 450), (450, 450)]
    shown = msgspec.json.decode(msgspec.json.encode(report))
    assert shown["clean"] is True
    assert shown["checks"][0]["violations"] == 0
    await client.close()


async def test_pruned_tasks_are_checked_from_what_is_left_and_count_in_no_coverage(store: Store) -> None:
    client = await client_of(store)
    await live(client)
    await client.cancel("failed")
    removed = await store.prune(await store.clock() + 1, 1000)
    assert removed["tasks"] >= 6
    await client.reopen("failed")
    await client.commit(await claim(client, "failed"), "at last")
    report = await audit(store)
    assert report.violations == [], told(report)
    assert report.clean
    assert report.pruned_tasks == removed["tasks"]
    assert {row.door: row.changes for row in report.coverage}["submit"] == report.tasks - report.pruned_tasks
    await client.close()


async def test_audit_of_a_store_in_use_reports_nothing_that_is_only_in_between(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.service.audit.PAGE", 7)
    client = await client_of(store)
    await client.submit_many([NewTask(n, task_id=f"p{n:03}") for n in range(60)])
    await client.submit_many([NewTask(n, task_id=f"c{n:03}", depends_on=[f"p{n:03}"]) for n in range(60)])

    async def work() -> None:
        while True:
            found = await client.claim_next(owner="ann", limit=3)
            if not found:
                return
            for one in found:
                await client.commit(one, one.input)

    working = asyncio.create_task(work())
    looks = 0
    while not working.done():
        report = await audit(store)
        assert report.violations == [], told(report)
        looks += 1
    await working
    assert looks > 1
    assert (await audit(store)).results == 120
    await client.close()


# Broken by hand, in memory -----------------------------------------------------------------------


class Tamper:
    """Changes rows of a memory store behind the API's back."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    def task(self, task_id: str, **fields: Any) -> None:
        self.store._tasks[task_id] = replace(self.store._tasks[task_id], **fields)

    def event(self, task_id: str, name: str, **fields: Any) -> None:
        """Change the first event of that name."""
        events = self.store._by_task[task_id]
        old = next(event for event in events if event.name == name)
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
    (5, "a blocked task has no open parent", lambda t: t.task("orphaned", deps_remaining=0), "with no parent open"),
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
]


@pytest.mark.parametrize(("invariant", "name", "tamper", "says"), BREAKS, ids=[broken[1] for broken in BREAKS])
async def test_audit_finds_that(invariant: int, name: str, tamper: Callable[[Tamper], Any], says: str) -> None:
    store = MemoryStore()
    client = await client_of(store)
    await live(client)
    assert (await audit(store)).clean
    tamper(Tamper(store))
    report = await audit(store)
    assert not report.clean
    found = [one for one in report.violations if one.invariant == invariant and says in one.says]
    assert found, told(report)
    counted = {check.invariant: check.violations for check in report.checks}
    assert counted[invariant] >= len(found)
    await client.close()


async def test_every_invariant_that_is_listed_is_broken_by_some_test() -> None:
    assert {broken[0] for broken in BREAKS} == set(CHECKS)


async def test_more_violations_than_are_shown_are_counted() -> None:
    store = MemoryStore()
    client = await client_of(store)
    await client.submit_many([NewTask(n, task_id=f"t{n:04}") for n in range(1200)])
    for n in range(1200):
        store._tasks[f"t{n:04}"] = replace(store._tasks[f"t{n:04}"], owner_id="mallory")
    report = await audit(store)
    assert len(report.violations) == 1000
    assert report.violation_count == 1200
    await client.close()


# Broken with SQL, in a file ----------------------------------------------------------------------

STATEMENTS: list[tuple[int, str | None, str, str]] = [
    (1, "child", "UPDATE result SET data = x'7b7d' WHERE task_id = 'child'", "its result's body"),
    (1, "lost", "DELETE FROM result WHERE task_id = 'lost'", "COMMITTED without a result"),
    (7, "failed", "UPDATE task SET claim_generation = 9 WHERE task_id = 'failed'", "claim generation is 9"),
    (7, "taken", "UPDATE task SET lease_expires_at = lease_expires_at + 1 WHERE task_id = 'taken'", "lease's end"),
    (7, "failed", "UPDATE task SET state = 6, \"end\" = 1 WHERE task_id = 'failed'", "is COMMITTED, its journal ends"),
    (7, "child", "DELETE FROM event WHERE task_id = 'child' AND name = 'attempt_started'", "no event of state version"),
    (3, "lost", "UPDATE event SET compared = compared & ~16 WHERE name = 'attempt_renewed'", "comparing GRANT_EPOCH"),
    (7, "failed", "UPDATE input SET data = x'227822' WHERE task_id = 'failed'", "its input"),
    (7, "failed", "UPDATE task SET input_digest = 'sha256:0' WHERE task_id = 'failed'", "its input"),
    (5, "orphaned", "UPDATE task SET state = 1, deps_remaining = 0 WHERE task_id = 'orphaned'", "open parents"),
    (5, "child", "DELETE FROM dependency WHERE task_id = 'child' AND parent_id = 'mother'", "has 1 dependencies"),
    (7, None, "DELETE FROM task WHERE task_id = 'released'", "belong to no task"),
    (8, "spawned", "UPDATE event SET epoch = 1 WHERE task_id = 'spawned' AND epoch = 2", "after the raise to 2"),
]


@pytest.mark.parametrize(("invariant", "task_id", "sql", "says"), STATEMENTS, ids=[one[2] for one in STATEMENTS])
async def test_audit_finds_rows_that_sql_changed_in_the_file(
    tmp_path: Path, invariant: int, task_id: str | None, sql: str, says: str
) -> None:
    await _lived_in(tmp_path)
    _behind_its_back(tmp_path, sql)
    report = await _audited(tmp_path)
    found = [(one.invariant, one.task_id) for one in report.violations if says in one.says]
    assert (invariant, task_id) in found, told(report)
    assert not report.clean


async def test_audit_finds_a_task_that_sql_inserted(tmp_path: Path) -> None:
    await _lived_in(tmp_path)
    columns = ", ".join(f'"{name}"' for name in Task.__struct_fields__)
    values = columns.replace('"task_id"', "'forged'", 1)
    _behind_its_back(tmp_path, f"INSERT INTO task ({columns}) SELECT {values} FROM task WHERE task_id = 'released'")
    report = await _audited(tmp_path)
    assert any(one.task_id == "forged" and "has no event" in one.says for one in report.violations), told(report)


async def _lived_in(folder: Path) -> None:
    store = await SQLiteStore.open(str(folder / "audited.db"))
    client = await client_of(store)
    await live(client)
    await client.close()


async def _audited(folder: Path) -> AuditReport:
    store = await SQLiteStore.open(str(folder / "audited.db"))
    try:
        return await audit(store)
    finally:
        await store.close()


def _behind_its_back(folder: Path, sql: str) -> None:
    con = apsw.Connection(str(folder / "audited.db"))
    try:
        con.execute(sql)
        assert con.changes() > 0
    finally:
        con.close()


# Coverage ----------------------------------------------------------------------------------------


def removable() -> list[tuple[type, str, str]]:
    """Every guard without which its operation no longer makes a comparison that its door declares."""
    found = []
    for operation in Kernel().operations:
        if operation.door not in DOORS:
            continue  # stage and usage: beside the records, no acceptance
        declared = int(DOORS[operation.door].compares)
        guards = (*operation.guards, *operation.each)
        for guard in guards:
            left = mask_of([other for other in guards if other is not guard])
            if declared & ~left and operation.command is not k.ClaimNext:
                found.append((operation.command, guard.id, operation.door))
    return found


# Submits, and what else of a door is counted by the records themselves, has a row of its own.
ROW = {"claim": "claim", "commit": "commit", "submit": "submit", "cancel": "cancel", "revise": "revise", "pool": "pool"}


@pytest.mark.parametrize(
    ("command", "guard", "door"), removable(), ids=[f"{one[0].__name__} {one[1]}" for one in removable()]
)
async def test_coverage_falls_below_100_percent_without(command: type, guard: str, door: str) -> None:
    store = MemoryStore()
    client = await client_of(store, Kernel().without(command, guard))
    await live(client)
    report = await audit(store)
    rows = {row.door: row for row in report.coverage}
    row = rows[ROW.get(door, OTHER)]
    assert row.ratio is not None
    assert row.ratio < 1.0
    assert row.incomplete[door] > 0
    assert not report.clean
    assert any(one.invariant == 3 for one in report.violations)
    touched = {row.door, OTHER, "submit"} if door == "commit" else {row.door, OTHER}  # a commit may spawn tasks
    assert all(other.ratio == 1.0 for name, other in rows.items() if name not in touched)
    await client.close()


async def test_a_change_that_left_no_event_lowers_its_doors_coverage() -> None:
    store = MemoryStore()
    client = await client_of(store)
    await live(client)
    Tamper(store).drop("child", "result_committed")
    rows = {row.door: row for row in (await audit(store)).coverage}
    assert rows["commit"].accepted == rows["commit"].changes - 1
    assert rows["commit"].ratio == pytest.approx(4 / 5)
    await client.close()


async def test_a_raise_during_the_audit_is_no_violation() -> None:
    store = MemoryStore()
    client = await client_of(store)
    await client.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(300)])
    raised = False

    async def histories(after: str | None, limit: int) -> Any:
        nonlocal raised
        page = await MemoryStore.histories(store, after, limit)
        if not raised:
            raised = True
            await raise_epoch(client)
            await client.commit(await claim(client, "t299"), 1)
        return page

    store.histories = histories  # type: ignore[method-assign]
    report = await audit(store)
    assert report.results == 1
    assert report.clean, told(report)
    await client.close()


def test_every_door_has_a_comparison_whose_loss_the_coverage_shows() -> None:
    assert {door for _, _, door in removable()} == set(DOORS)
