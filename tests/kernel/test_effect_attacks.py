"""Orders of events about findings and late reports that broke an earlier wording of the contract: X02 to X09 of
the list of attacks. Each story is told again to a kernel without the rule that mends it, and must then end badly."""

from __future__ import annotations

import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.outcomes import Outcome, Reason
from fencepost.kernel.records import State, Terms
from tests.kernel import effect_stories as s
from tests.kernel.effect_stories import OBJECT, PAY, SEATS, SETTLE, WINDOW
from tests.model.world import SECOND, World

ABSENT_GUARD = "reconcile:absent-without-ground:evidence-or-person-or-too-early"


# X02, X03: looked at before everything can have arrived --------------------------------------------


def x02(world: World) -> None:
    claim = s.unknown(world)
    sent_by = world.effect.executions[-1].send_by
    answer = s.refused(world.ask(k.Reconcile, claim, finding="ABSENT", ground="NOT_FOUND"), Outcome.TOO_EARLY)
    assert answer.current["not_before_us"] == sent_by + SETTLE * SECOND
    s.stands(world, "UNKNOWN", executions=1)
    world.now = sent_by + SETTLE * SECOND - 1
    s.refused(world.ask(k.Reconcile, claim, finding="ABSENT", ground="NOT_FOUND"), Outcome.TOO_EARLY)
    world.now += 1
    s.accepted(world.ask(k.Reconcile, claim, finding="ABSENT", ground="NOT_FOUND"), Outcome.RECONCILED)
    assert s.stands(world, "ABSENT").absent_ground == "NOT_FOUND"


def test_x02_not_found_is_too_early_until_nothing_that_was_sent_in_time_can_still_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s.fails_with(monkeypatch, x02, effect_rules, "too_early", lambda effect, asked_at: None)
    s.fails_without(x02, k.Reconcile, ABSENT_GUARD)


def x03_reconciled(world: World) -> None:
    claim = s.unknown(world)
    asked = s.says(s.prepare(world, claim), Outcome.RECONCILE, "ASK", "REPEAT").now
    s.beyond_the_settle_time(world)
    late = world.ask(k.Reconcile, claim, asked_at=asked, finding="ABSENT", ground="NOT_FOUND")
    s.refused(late, Outcome.TOO_EARLY)
    s.stands(world, "UNKNOWN")


def x03_resolved(world: World) -> None:
    s.unknown(world)
    s.accepted(world.person(k.TakeOver), Outcome.TAKEN_OVER)
    asked = world.now
    s.beyond_the_settle_time(world)
    s.refused(s.reconciler(world, "ABSENT", ground="NOT_FOUND", asked_at=asked), Outcome.TOO_EARLY)
    s.refused(world.person(k.Resolve, finding="ABSENT", asked_at=asked), Outcome.TOO_EARLY)
    s.stands(world, "UNKNOWN")
    s.accepted(world.person(k.Resolve, finding="ABSENT"), Outcome.RESOLVED)
    assert s.stands(world, "ABSENT").absent_ground == "PERSON"


def test_x03_a_finding_counts_from_when_it_was_asked_and_not_from_when_it_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s.fails_with(monkeypatch, x03_reconciled, effect_rules, "too_early", lambda effect, asked_at: None)
    s.fails_without(x03_reconciled, k.Reconcile, ABSENT_GUARD)


def test_x03_nor_may_the_reconciler_or_a_person_say_later_what_was_seen_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s.fails_with(monkeypatch, x03_resolved, effect_rules, "too_early", lambda effect, asked_at: None)
    guard = "resolve:absent-without-ground:conflict-or-person-or-too-early"
    s.fails_without(x03_resolved, k.Resolve, guard)


def x03_future(world: World) -> None:
    claim = s.unknown(world)
    ahead = world.now + 3_600 * SECOND
    s.problem(
        world.ask(k.Reconcile, claim, asked_at=ahead, finding="ABSENT", ground="NOT_FOUND"), "INVALID", "asked_at"
    )
    world.person(k.TakeOver)
    s.problem(s.reconciler(world, "ABSENT", ground="NOT_FOUND", asked_at=ahead), "INVALID", "asked_at")
    s.stands(world, "UNKNOWN")


def test_x03_nothing_can_have_been_asked_later_than_now() -> None:
    x03_future(World())
    s.fails_without(x03_future, k.Reconcile, "effect:asked-later-than-now:invalid")
    s.fails_without(x03_future, k.Resolve, "effect:asked-later-than-now:invalid")


# X04: repeated near the end of the retention -------------------------------------------------------


def x04(world: World) -> None:
    claim = s.unknown(world)
    first = world.effect.first_prepared_at
    world.now = first + (s.RETENTION - WINDOW) * SECOND
    s.executes(world, claim, repeat=True)
    execution = world.effect.executions[-1]
    assert execution.send_by == first + s.RETENTION * SECOND, "what is sent in time finds the key remembered"
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN"), Outcome.SETTLED)
    world.advance(0.000001)
    s.says(s.prepare(world, claim, repeat=True), Outcome.RECONCILE, "PERSON")
    s.refused(world.ask(k.Reconcile, claim, finding="ABSENT", ground="NOT_FOUND"), Outcome.PERSON)
    s.refused(world.ask(k.Reconcile, claim, finding="HAPPENED"), Outcome.PERSON)
    assert world.effect.first_prepared_at == first, "a repeat does not start the retention anew"


def test_x04_the_margin_before_the_retentions_end_is_at_least_the_send_window(monkeypatch: pytest.MonkeyPatch) -> None:
    s.fails_with(
        monkeypatch,
        x04,
        effect_rules,
        "window_ends",
        lambda e: e.first_prepared_at + e.terms.retention_us if e.terms.retention_us else None,
    )
    s.fails_without(x04, k.Prepare, "prepare:unknown:reconcile")


def test_x04_a_declared_margin_counts_where_it_is_longer_than_the_send_window() -> None:
    longer = msgspec.structs.replace(PAY, margin_us=2 * WINDOW * SECOND)
    assert effect_rules.window_ends(_effect_of(PAY)) == _effect_of(PAY).first_prepared_at + 90 * SECOND
    assert effect_rules.window_ends(_effect_of(longer)) == _effect_of(longer).first_prepared_at + 80 * SECOND
    assert effect_rules.window_ends(_effect_of(OBJECT)) is None


def _effect_of(terms: Terms) -> effect_rules.Effect:
    world = World()
    s.executes(world, s.started(world), terms)
    return world.effect


# X05: the resource moved on --------------------------------------------------------------------------


def x05(world: World) -> None:
    claim = s.unknown(world, OBJECT)
    s.beyond_the_settle_time(world)
    s.refused(world.ask(k.Reconcile, claim, finding="ABSENT", ground="NOT_FOUND"), Outcome.PERSON, Reason.GUARANTEE)
    s.problem(world.ask(k.Prepare, claim, terms=OBJECT, precondition="e2", repeat=True), "INVALID", "precondition")
    s.stands(world, "UNKNOWN", executions=1)
    s.accepted(world.ask(k.Reconcile, claim, finding="STILL_UNKNOWN", ground="MOVED_ON"), Outcome.RECONCILED)
    s.says(s.prepare(world, claim, OBJECT, repeat=True), Outcome.RECONCILE, "PERSON")
    s.refused(world.ask(k.Reconcile, claim, finding="ABSENT", ground="MOVED_ON"), Outcome.PERSON)
    s.stands(world, "UNKNOWN", executions=1)


def test_x05_a_resource_that_moved_on_is_for_its_complete_history_or_a_person_to_tell() -> None:
    x05(World())
    s.fails_without(x05, k.Reconcile, ABSENT_GUARD)
    s.fails_without(x05, k.Reconcile, "reconcile:nothing-to-ask:person")
    s.fails_without(x05, k.Prepare, "prepare:precondition:invalid")


def test_x05_a_complete_history_without_the_effect_id_makes_it_absent_for_certain_at_once() -> None:
    world = World()
    claim = s.unknown(world, OBJECT)
    s.accepted(world.ask(k.Reconcile, claim, finding="ABSENT", ground="MOVED_ON"), Outcome.RECONCILED)
    assert s.stands(world, "ABSENT").absent_ground == "CERTAIN"
    assert s.executes(world, claim, OBJECT, precondition="e2") == 2


def test_x06_a_repeat_goes_under_the_bound_version_and_under_no_other() -> None:
    """That the versions never return is the downstream's to earn; the rule here is that no other is ever taken."""
    world = World()
    claim = s.unknown(world, OBJECT)
    s.executes(world, claim, OBJECT, repeat=True)
    assert [execution.precondition for execution in world.effect.executions] == ["e0", "e0"]


# X07: a reservation that is not stored ----------------------------------------------------------------


def x07(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim, SEATS)
    successor = s.taken_over(world)
    s.accepted(world.ask(k.Reconcile, successor, finding="ABSENT", ground="NO_RESERVATION"), Outcome.RECONCILED)
    s.executes(world, successor, SEATS)
    late = world.ask(k.Reserve, claim, execution=1, reservation_id="r0")
    s.refused(late, Outcome.FENCED, Reason.GENERATION)
    s.refused(world.ask(k.Reserve, successor, execution=1, reservation_id="r0"), Outcome.STALE_EXECUTION)
    s.accepted(world.ask(k.Reserve, successor, reservation_id="r1"), Outcome.RESERVED)
    assert [execution.reservation_id for execution in world.effect.executions] == [None, "r1"]


def test_x07_only_a_reservation_stored_by_the_latest_executions_preparer_may_be_confirmed() -> None:
    x07(World())
    s.fails_without(x07, k.Reserve, "fence:other-generation-or-attempt:fenced")
    s.fails_without(x07, k.Reserve, "effect:other-execution:stale-execution")


def x07_stored(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim, SEATS)
    s.accepted(world.ask(k.Reserve, claim, reservation_id="r0"), Outcome.RESERVED)
    s.refused(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.CONFLICT, Reason.RESERVATION)
    successor = s.taken_over(world)
    assert s.says(s.prepare(world, successor, SEATS), Outcome.RECONCILE, "ASK").effect.executions[-1].reservation_id
    s.beyond_the_settle_time(world)
    for ground in ("NO_RESERVATION", "NOT_FOUND"):
        answer = world.ask(k.Reconcile, successor, finding="ABSENT", ground=ground)
        s.refused(answer, Outcome.CONFLICT, Reason.RESERVATION)
    world.person(k.TakeOver)
    s.refused(world.person(k.Resolve, finding="ABSENT"), Outcome.CONFLICT, Reason.RESERVATION)
    s.stands(world, "UNKNOWN")
    s.accepted(world.person(k.Resolve, finding="ABSENT", ground="RESERVATION_CANCELLED"), Outcome.RESOLVED)
    assert s.stands(world, "ABSENT").absent_ground == "CERTAIN"


def test_x07_while_a_reservation_is_stored_absent_is_refused_at_every_door_and_to_people_too() -> None:
    x07_stored(World())
    s.fails_without(x07_stored, k.Settle, "settle:absent-against-evidence:evidence-or-conflict")
    s.fails_without(x07_stored, k.Reconcile, ABSENT_GUARD)
    s.fails_without(x07_stored, k.Resolve, "resolve:absent-without-ground:conflict-or-person-or-too-early")


# X08, X09: late copies and late reports ---------------------------------------------------------------


def x08(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, execution=1, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    assert s.executes(world, claim) == 2
    before = world.effect
    copy = world.ask(k.Settle, claim, execution=1, finding="ABSENT", why="REFUSED")
    s.refused(copy, Outcome.STALE_EXECUTION)
    assert world.effect == before


def test_x08_a_late_copy_of_a_settlement_leaves_the_next_execution_alone() -> None:
    x08(World())
    s.fails_without(x08, k.Settle, "effect:other-execution:stale-execution")


def x09_before(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim)
    successor = s.taken_over(world)
    late = world.ask(k.Settle, claim, finding="HAPPENED", receipt="r")
    s.refused(late, Outcome.FENCED, Reason.GENERATION)
    s.beyond_the_settle_time(world)
    answer = world.ask(k.Reconcile, successor, finding="ABSENT", ground="NOT_FOUND")
    assert s.refused(answer, Outcome.EVIDENCE).current["late_evidence"] == 1
    s.says(s.prepare(world, successor, repeat=True), Outcome.RECONCILE, "ASK", "PERSON")
    s.stands(world, "UNKNOWN", executions=1)
    s.accepted(world.ask(k.Reconcile, successor, finding="HAPPENED", receipt="r"), Outcome.RECONCILED)
    s.stands(world, "COMMITTED")


def test_x09_a_fenced_happened_is_kept_and_outweighs_not_found() -> None:
    x09_before(World())
    s.fails_without(x09_before, k.Reconcile, ABSENT_GUARD)
    s.fails_without(x09_before, k.Prepare, "prepare:unknown:reconcile")


def x09_after(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim)
    successor = s.taken_over(world)
    s.beyond_the_settle_time(world)
    s.accepted(world.ask(k.Reconcile, successor, finding="ABSENT", ground="NOT_FOUND"), Outcome.RECONCILED)
    s.accepted(world.ask(k.Commit, successor), Outcome.COMMITTED)
    s.refused(world.ask(k.Settle, claim, finding="HAPPENED", receipt="r"), Outcome.FENCED)
    s.stands(world, "UNKNOWN", executions=1)
    assert world.task.state == State.COMMITTED
    event = world.events_of()[-1]
    assert (event.door, event.name, event.state) == ("evidence", "effect_evidence", State.COMMITTED)
    s.refused(s.reconciler(world, "ABSENT", ground="NOT_FOUND"), Outcome.EVIDENCE)
    s.refused(world.person(k.Resolve, finding="ABSENT", late_evidence=0), Outcome.EVIDENCE)
    s.accepted(world.person(k.Resolve, finding="ABSENT", late_evidence=1), Outcome.RESOLVED)
    s.stands(world, "ABSENT")


def test_x09_an_absent_effect_is_unknown_again_whatever_became_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    x09_after(World())
    s.fails_without(x09_after, k.Resolve, "resolve:evidence-not-named:evidence")
    s.fails_with(monkeypatch, x09_after, Kernel, "_reported", lambda self, snapshot, operation, command, no: no)


def x09_prepared(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim)
    successor = s.taken_over(world)
    s.beyond_the_settle_time(world)
    s.accepted(world.ask(k.Reconcile, successor, finding="ABSENT", ground="NOT_FOUND"), Outcome.RECONCILED)
    assert s.executes(world, successor) == 2
    s.refused(world.ask(k.Settle, claim, execution=1, finding="HAPPENED"), Outcome.FENCED)
    s.stands(world, "PREPARED", executions=2)
    answer = world.ask(k.Settle, successor, finding="ABSENT", why="REFUSED")
    s.refused(answer, Outcome.EVIDENCE)
    s.accepted(world.ask(k.Settle, successor, finding="UNKNOWN"), Outcome.SETTLED)


def test_x09_what_is_prepared_when_evidence_arrives_is_settled_happened_or_unknown() -> None:
    x09_prepared(World())
    s.fails_without(x09_prepared, k.Settle, "settle:absent-against-evidence:evidence-or-conflict")
