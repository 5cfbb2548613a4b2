"""Audit: a clean store is found clean, and each broken promise is found by its number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.fence import DOORS
from fencepost.kernel.kernel import Kernel, mask_of
from fencepost.kernel.records import Task
from fencepost.service.audit import audit
from fencepost.service.audit_report import CHECKS, AuditReport
from fencepost.service.coverage import OTHER
from fencepost.stores.base import Store, TaskFilter
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SQLiteStore
from fencepost.wire import NewTask
from tests.service.broken import BREAKS, Tamper
from tests.service.broken_effects import BREAKS as EFFECT_BREAKS
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
    assert all(check.checked > 0 for check in report.checks if check.invariant != 4)  # effects: test_audit_effects
    covered = [row for row in report.coverage if row.door != "effect.prepare"]
    assert all(row.ratio == 1.0 and row.accepted == row.changes > 0 for row in covered), covered
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
    assert seen == [(25, 450), (75, 450), (175, 450), (375, 450), (450, 450)]
    shown = msgspec.json.decode(msgspec.json.encode(report))
    assert shown["clean"] is True
    assert shown["checks"][0]["violations"] == 0
    await client.close()


async def test_pages_shrink_where_bodies_are_large(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await client_of(store)
    await client.submit_many([NewTask("x" * 1000, task_id=f"t{n:03}") for n in range(100)])
    monkeypatch.setattr("fencepost.service.audit.PAGE_BYTES", 12_500)
    seen: list[int] = []
    await audit(store, lambda done, total: seen.append(done))
    assert seen[0] == 25
    assert all(after - before <= 10 for before, after in itertools.pairwise(seen))
    assert seen[-1] == 100
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
    monkeypatch.setattr("fencepost.service.audit.LARGEST_PAGE", 7)
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
    assert {broken[0] for broken in (*BREAKS, *EFFECT_BREAKS)} == set(CHECKS)


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


@pytest.mark.parametrize("optimistic", [False, True])
async def test_times_order_records_only_where_the_store_decides_inside_its_transaction(optimistic: bool) -> None:
    store = MemoryStore(optimistic=optimistic)
    client = await client_of(store)
    await live(client)
    Tamper(store).event("taken", "attempt_started", at=1 << 60)  # of epoch 1, in its place in the order of commit
    found = {one.invariant for one in (await audit(store)).violations}
    assert found == (set() if optimistic else {8})
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
    (7, "failed", "UPDATE event SET detail = '{' WHERE task_id = 'failed'", "cannot be read"),
    (7, "child", "UPDATE result SET parents = 'x' WHERE task_id = 'mother'", "one of its parents cannot be read"),
    (7, "mother", "UPDATE result SET parents = 'x' WHERE task_id = 'mother'", "stored about it cannot be read"),
    (7, None, "UPDATE event SET detail = '{' WHERE task_id = 'failed' AND state_version = 3", "in order of commit"),
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
ROW = {name: name for name in ("claim", "commit", "submit", "cancel", "revise", "pool", "effect.prepare")}


@pytest.mark.parametrize(
    ("command", "guard", "door"), removable(), ids=[f"{one[0].__name__} {one[1]}" for one in removable()]
)
async def test_coverage_falls_below_100_percent_without(command: type, guard: str, door: str) -> None:
    store = MemoryStore()
    client = await client_of(store, Kernel().without(command, guard))
    await live(client, effects=True)
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
