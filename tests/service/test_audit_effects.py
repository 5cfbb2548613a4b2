"""Audit of effects: invariant 4, and that records, journal and payloads agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fencepost.kernel.records import EVENTS
from fencepost.service.audit import audit
from fencepost.service.audit_report import AuditReport
from fencepost.service.numbers import numbers
from fencepost.stores.base import Store
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SQLiteStore
from fencepost.wire import NewTask, Refused
from tests.service.broken import Tamper
from tests.service.broken_effects import BREAKS
from tests.service.effect_lives import LOOK, prepared
from tests.service.lives import claim, client_of, live


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


async def test_effects_that_went_through_every_door_are_clean_and_covered(store: Store) -> None:
    client = await client_of(store)
    await live(client, effects=True)
    report = await audit(store)
    assert report.violations == [], told(report)
    assert report.clean
    assert {check.invariant: check.checked for check in report.checks}[4] == 9
    row = next(row for row in report.coverage if row.door == "effect.prepare")
    assert (row.accepted, row.changes, row.ratio) == (10, 10, 1.0)
    shown = {numbered.entry.name for numbered in await store.events(0, 1000)}
    assert {name for name in EVENTS if name.startswith("effect_")} <= shown
    await client.close()


async def test_status_and_audit_count_the_same_coverage(store: Store) -> None:
    client = await client_of(store)
    await live(client, effects=True)
    rows = [(row.door, row.accepted, row.changes) for row in (await audit(store)).coverage]
    assert [(row["door"], row["accepted"], row["changes"]) for row in (await numbers(store))["coverage"]] == rows
    await client.close()


async def test_a_commit_leaves_nothing_open_of_what_was_only_read(store: Store) -> None:
    """Sent and not heard of, of this attempt and of one before, and waiting for a person: none outlives its task."""
    client = await client_of(store)
    await client.submit_many([NewTask("reads", task_id="reader")])
    first = await claim(client, "reader")
    await prepared(client, first, "before", LOOK)
    await client.take_over("reader", who="eve")
    second = await claim(client, "reader", owner="bob")
    sent = await prepared(client, second, "now", LOOK)
    await prepared(client, second, "asked", replace(LOOK, approval=True))
    assert {row["state"] for row in (await numbers(store))["effects"]} == {"UNKNOWN", "AWAITING_APPROVAL"}
    await client.commit(second, "done")
    late = await client.settle(second, sent.effect_id, 1, "HAPPENED", receipt="seen at last")
    assert isinstance(late, Refused)
    views = await client.effects(task_id="reader")
    assert [view.state for view in views.items] == ["ABSENT", "ABSENT", "DENIED"]
    assert (await numbers(store))["effects"] == []
    report = await audit(store)
    assert report.clean, told(report)
    await client.close()


async def test_pruned_effects_are_checked_from_what_is_left(store: Store) -> None:
    client = await client_of(store)
    await live(client, effects=True)
    await store.prune(await store.clock() + 1, 1000)
    report = await audit(store)
    assert report.violations == [], told(report)
    assert report.clean
    await client.close()


@pytest.mark.parametrize(("invariant", "name", "tamper", "says"), BREAKS, ids=[broken[1] for broken in BREAKS])
async def test_audit_finds_that(invariant: int, name: str, tamper: Callable[[Tamper], Any], says: str) -> None:
    store = MemoryStore()
    client = await client_of(store)
    await live(client, effects=True)
    tamper(Tamper(store))
    report = await audit(store)
    assert not report.clean
    found = [one for one in report.violations if one.invariant == invariant and says in one.says]
    assert found, told(report)
    await client.close()
