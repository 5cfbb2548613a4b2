"""The shipped kernel, driven through every row of the table of effects, and of the table of what prepare answers."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.fence import DOORS
from fencepost.kernel.outcomes import Outcome
from fencepost.kernel.prepare import Prepared
from fencepost.kernel.records import EVENTS, EffectState
from fencepost.kernel.table import EFFECT_TRANSITIONS, PREPARE, EffectTransition, PrepareRow
from tests.kernel import effect_stories as s
from tests.kernel.effect_moves import EFFECT_STORIES, reach
from tests.kernel.effect_stories import APPROVED_MAIL, MAIL, PAY
from tests.model.world import World

AWAITING, PREPARED, UNKNOWN = EffectState.AWAITING_APPROVAL, EffectState.PREPARED, EffectState.UNKNOWN


def key(row: EffectTransition) -> tuple[str, EffectState | None, str]:
    return row.door, row.before, row.condition


def name(row: EffectTransition) -> str:
    before = row.before.name if row.before is not None else "none"
    return f"{row.door}-{before}-{row.after.name}-{row.condition}"


@pytest.mark.parametrize("row", EFFECT_TRANSITIONS, ids=name)
def test_the_kernel_goes_through_this_row_of_the_effects_table(row: EffectTransition) -> None:
    world = World()
    call = EFFECT_STORIES[key(row)](world)
    known = world.effects.get("t", [])
    before = known[-1] if known else None
    journalled = len(world.events)
    task = world.task
    call()
    after = world.effect
    assert (EffectState(before.state) if before else None) == row.before
    assert EffectState(after.state) == row.after
    assert after.version == (before.version if before else 0) + 1
    assert after.changed_at == world.now
    events = [event for event in world.events[journalled:] if event.name == row.event]
    assert len(events) == 1
    event = events[0]
    assert event.door == row.door
    assert world.task.state_version == task.state_version + len(world.events) - journalled
    detail = event.detail or {}
    if row.event == "attempt_ended":
        assert detail["effects_unknown"] == [after.effect_id]
    elif row.event == "result_committed" and before is not None:
        assert detail[f"effects_{row.after.name.lower()}"] == [after.effect_id]
    elif row.event == "result_committed":
        assert [one["effect"] for one in detail["effects"]] == [after.effect_id]
    else:
        told = {"effect": after.effect_id, "state": row.after.name, "version": after.version, "slot": after.slot}
        assert {name: detail[name] for name in told} == told


def test_every_row_of_the_effects_table_has_its_story_and_every_story_its_row() -> None:
    rows = [key(row) for row in EFFECT_TRANSITIONS]
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(EFFECT_STORIES)


def test_the_effects_table_speaks_of_doors_and_events_that_are_on_the_closed_lists() -> None:
    for row in EFFECT_TRANSITIONS:
        assert row.event in EVENTS
        assert row.event in DOORS[row.door].events, row


def test_every_effect_event_that_a_door_declares_is_written_by_some_row() -> None:
    for door in DOORS.values():
        written = {row.event for row in EFFECT_TRANSITIONS if row.door == door.name}
        assert {event for event in door.events if event.startswith("effect_")} <= written, door.name


def test_no_row_leads_out_of_committed_and_every_other_state_is_left_by_some_row() -> None:
    left = {row.before for row in EFFECT_TRANSITIONS if row.before is not row.after}
    assert left - {None} == set(EffectState) - {EffectState.COMMITTED}


# what prepare answers ---------------------------------------------------------------------------


def _held(world: World, row: PrepareRow) -> tuple[k.Presented, dict[str, Any]]:
    """The slot as the row has it, the claim that asks, and how it asks."""
    declared = "declared" in row.condition
    if row.holds is None:
        return s.started(world), {"terms": APPROVED_MAIL if declared else PAY}
    terms = MAIL if declared or row.holds in (AWAITING, EffectState.DENIED) else PAY
    claim = reach(world, row.holds, terms)
    if row.condition == "approved":
        s.accepted(world.person(k.Approve), Outcome.APPROVED)
    fields: dict[str, Any] = {"terms": terms}
    if row.condition.startswith("with `repeat`"):
        fields["repeat"] = True
    if "this execution" in row.condition or "an earlier execution" in row.condition:
        fields["request_id"] = world.effect.executions[-1].request_id
    return claim, fields


@pytest.mark.parametrize("row", PREPARE, ids=lambda row: f"{row.holds}-{row.condition}-{row.answer}")
def test_prepare_answers_as_its_table_says(row: PrepareRow) -> None:
    world = World()
    claim, fields = _held(world, row)
    before = world.effects.get("t", [None])[-1]
    answer = world.ask(k.Prepare, claim, **fields)
    assert type(answer) is Prepared
    assert answer.outcome.value == row.answer
    changed = row.answer in ("EXECUTE", "APPROVAL_REQUIRED") and "this execution" not in row.condition
    if row.condition.startswith("not approved"):
        changed = False
    assert (world.effect != before) == changed
    assert (answer.execution is not None) == (row.answer in ("EXECUTE", "IN_FLIGHT"))
    if row.answer == "EXECUTE":
        assert world.effect.state == PREPARED
        assert answer.execution == world.effect.executions[-1]
    if row.answer == "REPLAY":
        assert answer.effect.receipt is not None
        assert [entry.detail for entry in world.logged("replay")] == [{"effect": answer.effect.effect_id}]
    if row.answer == "RECONCILE":
        assert answer.open == (("ASK", "REPEAT") if row.holds is UNKNOWN else ())
        assert answer.now == world.now


@pytest.mark.parametrize("state", list(EffectState), ids=lambda state: state.name)
@pytest.mark.parametrize("differs", ["payload", "downstream"])
def test_another_payload_or_downstream_is_a_conflict_in_every_row_and_carries_what_is_bound(
    state: EffectState, differs: str
) -> None:
    world = World()
    terms = MAIL if state in (AWAITING, EffectState.DENIED) else PAY
    claim = reach(world, state, terms)
    if state is AWAITING:
        s.accepted(world.person(k.Approve), Outcome.APPROVED)
    before = world.effect
    used = before.executions[-1].request_id
    other: dict[str, Any] = {"payload": "another"} if differs == "payload" else {}
    asked = terms if differs == "payload" else s.of_another_account(terms)
    for fields in ({}, {"repeat": True}, {"request_id": used}):
        answer = world.ask(k.Prepare, claim, terms=asked, **other, **fields)
        assert type(answer) is Prepared
        assert (answer.outcome, answer.execution) == (Outcome.PAYLOAD_CONFLICT, None)
        assert answer.effect == before
    assert world.effect == before
    assert {entry.outcome for entry in world.logged("refusal")} == {"PAYLOAD_CONFLICT"}


def test_the_same_value_spelled_otherwise_is_the_same_payload() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, payload={"a": 1, "b": 2.0})
    s.says(s.prepare(world, claim, payload={"b": 2, "a": 1.0}), Outcome.IN_FLIGHT)


def test_the_slot_is_of_its_node_and_revision() -> None:
    world = World()
    claim = s.started(world)
    for node in (None, "another"):
        s.executes(world, claim, node_id=node)
        s.accepted(world.ask(k.Settle, claim, finding="HAPPENED"), Outcome.SETTLED)
    assert [effect.node_id for effect in world.effects["t"]] == ["main", "another"]
    s.says(s.prepare(world, claim, node_id="main"), Outcome.REPLAY)
    s.accepted(world.person(k.Revise, accept_effects=True), Outcome.REVISED)
    s.executes(world, world.claimed())
    assert [effect.revision for effect in world.effects["t"]] == [1, 1, 2]
    assert len({effect.effect_id for effect in world.effects["t"]}) == 3
