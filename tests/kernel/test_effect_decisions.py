"""What people and the reconciler may say of effects, and what waits for them: approve, deny, withdraw, resolve."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.outcomes import Outcome, Reason
from fencepost.kernel.records import EffectState, State
from tests.kernel import effect_stories as s
from tests.kernel.effect_moves import bring, first_sender, reach
from tests.kernel.effect_stories import APPROVED_MAIL, LOOK, MAIL, PAY
from tests.model.world import World


def awaiting(world: World) -> k.Presented:
    claim = s.started(world)
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)
    return claim


# approvals --------------------------------------------------------------------------------------


def test_a_double_click_approves_once() -> None:
    world = World()
    claim = awaiting(world)
    version = world.effect.version
    s.accepted(world.person(k.Approve, expected_version=version), Outcome.APPROVED)
    s.refused(world.person(k.Approve, expected_version=version), Outcome.CONFLICT, Reason.VERSION)
    s.refused(world.person(k.Deny, expected_version=version), Outcome.CONFLICT, Reason.VERSION)
    s.executes(world, claim, APPROVED_MAIL)
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)
    s.refused(world.person(k.Approve, expected_version=version), Outcome.CONFLICT, Reason.VERSION)
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)


@pytest.mark.parametrize("kind", [k.Approve, k.Deny])
def test_a_decision_whose_answer_was_lost_is_said_again(kind: type) -> None:
    world = World()
    claim = awaiting(world)
    version, outcome = world.effect.version, Outcome.APPROVED if kind is k.Approve else Outcome.DENIED
    s.accepted(world.person(kind, request_id="click"), outcome)
    if kind is k.Approve:
        s.executes(world, claim, APPROVED_MAIL)
    before = world.effect
    again = world.person(kind, request_id="click", expected_version=version)
    s.accepted(again, outcome, changed=False)
    assert world.effect == before


def test_a_request_id_is_no_answer_about_another_effect() -> None:
    world = World()
    claim = awaiting(world)
    s.accepted(world.person(k.Approve, request_id="click"), Outcome.APPROVED)
    s.executes(world, claim, APPROVED_MAIL)
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED", request_id="settled"), Outcome.SETTLED)
    s.prepare(world, claim, APPROVED_MAIL, slot="second")
    s.problem(world.person(k.Approve, request_id="click"), "INVALID", "request_id")
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.executes(world, claim, APPROVED_MAIL, slot="second")
    s.problem(world.ask(k.Settle, claim, finding="HAPPENED", request_id="settled"), "INVALID", "request_id")
    s.stands(world, "PREPARED")


@pytest.mark.parametrize("kind", [k.Approve, k.Deny])
def test_a_decision_is_about_the_payload_that_was_shown(kind: type) -> None:
    world = World()
    awaiting(world)
    answer = world.person(kind, payload_digest=encode("another").digest)
    assert s.refused(answer, Outcome.PAYLOAD_CONFLICT).current["payload"] == world.effect.payload_digest
    assert s.stands(world, "AWAITING_APPROVAL").approval is None


def test_whichever_attempt_asks_uses_the_approval_up() -> None:
    world = World()
    awaiting(world)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    world.run_out()
    successor = world.claimed(owner="B")
    s.executes(world, successor, APPROVED_MAIL)
    assert world.effect.executions[0].approved_by == "P"
    assert world.effect.approval is None


@pytest.mark.parametrize("void", ["cancel", "raise"])
def test_an_approval_is_void_after_a_cancel_or_a_raise(void: str) -> None:
    world = World()
    awaiting(world)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    if void == "cancel":
        s.accepted(world.person(k.Cancel), Outcome.CANCELLED)
        s.accepted(world.person(k.Reopen), Outcome.REOPENED)
    else:
        world.raise_epoch()
    claim = world.claimed(owner="B")
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.executes(world, claim, APPROVED_MAIL)


def test_a_cancelled_task_takes_no_approval() -> None:
    def story(world: World) -> None:
        awaiting(world)
        s.accepted(world.person(k.Cancel), Outcome.CANCELLED)
        s.refused(world.person(k.Approve), Outcome.CANCELLED)
        s.accepted(world.person(k.Deny), Outcome.DENIED)

    story(World())
    s.fails_without(story, k.Approve, "approve:task-cancelled:cancelled")


@pytest.mark.parametrize("kind", [k.Approve, k.Deny, k.Resolve])
def test_x35_a_decision_prepared_before_a_raise_is_fenced_after_it(kind: type) -> None:
    def story(world: World) -> None:
        reach(world, EffectState.UNKNOWN if kind is k.Resolve else EffectState.AWAITING_APPROVAL, MAIL)
        before = world.effect
        world.raise_epoch()
        fields = {"finding": "HAPPENED"} if kind is k.Resolve else {}
        s.refused(world.person(kind, epoch=1, **fields), Outcome.FENCED, Reason.EPOCH)
        assert world.effect == before

    story(World())
    s.fails_without(story, kind, "fence:other-epoch:fenced")


def test_one_approval_is_not_used_up_where_another_effect_is_under_way() -> None:
    world = World()
    claim = awaiting(world)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.executes(world, claim, PAY, slot="pay")
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.BUSY)
    assert world.effects["t"][0].approval is not None


def test_a_late_copy_of_the_first_prepare_uses_no_approval_up() -> None:
    world = World()
    claim = s.started(world)
    s.says(s.prepare(world, claim, APPROVED_MAIL, request_id="r1"), Outcome.APPROVAL_REQUIRED)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    before = world.effect
    s.says(s.prepare(world, claim, APPROVED_MAIL, request_id="r1"), Outcome.APPROVAL_REQUIRED)
    assert world.effect == before
    s.executes(world, claim, APPROVED_MAIL, request_id="r2")


def test_a_request_id_of_another_call_is_no_request_for_an_approval() -> None:
    world = World()
    claim = s.started(world)
    s.accepted(world.ask(k.SaveCheckpoint, claim, number=1, request_id="r1"), Outcome.CHECKPOINTED)
    s.problem(world.ask(k.Prepare, claim, terms=APPROVED_MAIL, request_id="r1"), "INVALID", "request_id")
    assert world.effects == {}
    s.says(s.prepare(world, claim, APPROVED_MAIL, request_id="r2"), Outcome.APPROVAL_REQUIRED)
    other = world.ask(k.Prepare, claim, terms=APPROVED_MAIL, slot="another", request_id="r2")
    s.problem(other, "INVALID", "request_id")


def test_the_request_that_used_an_approval_up_is_remembered_so_that_no_second_one_can_be() -> None:
    world = World()
    claim = awaiting(world)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.executes(world, claim, APPROVED_MAIL, request_id="r1")
    assert world.requests["r1"].answer == {"outcome": "EXECUTE", "effect": world.effect.effect_id}
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, APPROVED_MAIL, request_id="r1"), Outcome.RECONCILE)
    s.says(s.prepare(world, claim, APPROVED_MAIL, request_id="r2"), Outcome.APPROVAL_REQUIRED)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.says(s.prepare(world, claim, APPROVED_MAIL, request_id="r1"), Outcome.RECONCILE)
    s.stands(world, "AWAITING_APPROVAL", executions=1)


def test_what_was_withdrawn_or_denied_stays_so() -> None:
    for end in (lambda w, c: w.ask(k.Withdraw, c), lambda w, c: w.person(k.Deny)):
        world = World()
        claim = awaiting(world)
        end(world, claim)
        effect = s.stands(world, "DENIED", executions=0)
        assert effect.decided_by in ("A", "P")
        s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.DENIED)
        s.refused(world.person(k.Approve), Outcome.CONFLICT, Reason.STATE)
        s.accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)


# waiting ----------------------------------------------------------------------------------------


def test_a_task_waits_for_the_last_decision_and_for_no_more() -> None:
    world = World()
    claim = awaiting(world)
    s.prepare(world, claim, APPROVED_MAIL, slot="second")
    first, second = world.effects["t"]
    bring(world, claim, State.PARKED)
    s.accepted(world.person(k.Deny, effect_id=first.effect_id, expected_version=first.version), Outcome.DENIED)
    assert world.task.state == State.PARKED
    s.accepted(world.person(k.Approve, effect_id=second.effect_id, expected_version=second.version), Outcome.APPROVED)
    assert (world.task.state, world.task.park_reason) == (State.READY, None)
    world.claimed(owner="B")


def test_a_task_is_not_put_back_while_an_approval_of_it_has_become_void() -> None:
    world = World()
    claim = awaiting(world)
    s.prepare(world, claim, APPROVED_MAIL, slot="second")
    first, second = world.effects["t"]
    s.accepted(world.person(k.Approve, effect_id=first.effect_id, expected_version=first.version), Outcome.APPROVED)
    bring(world, claim, State.PARKED)
    world.raise_epoch()
    s.accepted(world.person(k.Approve, effect_id=second.effect_id, expected_version=second.version), Outcome.APPROVED)
    assert world.task.state == State.PARKED


@pytest.mark.parametrize("finding", ["HAPPENED", "ABANDONED"])
def test_what_it_was_sending_is_waited_for_where_only_a_person_can_tell(finding: str) -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, MAIL)
    bring(world, claim, State.PARKED)
    s.stands(world, "UNKNOWN")
    s.accepted(world.person(k.Resolve, finding=finding), Outcome.RESOLVED)
    assert world.task.state == State.READY


@pytest.mark.parametrize("terms", [PAY, LOOK], ids=lambda terms: terms.guarantee)
def test_nobody_waits_for_a_person_where_a_successor_can_ask(terms: object) -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, terms)  # type: ignore[arg-type]
    s.accepted(world.ask(k.Release, claim, wait=True), Outcome.RELEASED)
    assert world.task.state == State.READY


def test_a_task_parked_for_another_reason_is_left_alone_by_decisions() -> None:
    world = World()
    claim = awaiting(world)
    s.accepted(world.ask(k.Fail, claim, retry=False), Outcome.FAILED)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    assert (world.task.state, world.task.park_reason) == (State.PARKED, "FINAL")


def test_a_waiting_task_may_be_reopened_by_a_person() -> None:
    world = World()
    claim = awaiting(world)
    bring(world, claim, State.PARKED)
    s.accepted(world.person(k.Reopen), Outcome.REOPENED)
    s.says(s.prepare(world, world.claimed(owner="B"), APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)


# resolve ----------------------------------------------------------------------------------------


def test_whoever_holds_the_task_decides_its_effects_but_for_what_only_a_person_may() -> None:
    def story(world: World) -> None:
        claim = reach(world, EffectState.UNKNOWN)
        s.refused(world.person(k.Resolve, finding="HAPPENED"), Outcome.HELD)
        s.refused(s.reconciler(world, "HAPPENED"), Outcome.HELD)
        s.stands(world, "UNKNOWN")
        world.advance(s.RETENTION)
        s.refused(s.reconciler(world, "HAPPENED"), Outcome.HELD)
        s.accepted(world.person(k.Resolve, finding="HAPPENED"), Outcome.RESOLVED)
        s.says(s.prepare(world, claim), Outcome.REPLAY)

    story(World())
    s.fails_without(story, k.Resolve, "resolve:task-held:held")


def test_a_claim_of_an_older_epoch_holds_nobody_off_from_its_effects() -> None:
    world = World()
    reach(world, EffectState.UNKNOWN)
    world.raise_epoch()
    s.accepted(s.reconciler(world, "HAPPENED"), Outcome.RESOLVED)


def test_a_closed_intake_does_not_stop_the_reconciler() -> None:
    world = World()
    reach(world, EffectState.UNKNOWN)
    world.person(k.TakeOver)
    s.accepted(world.pool_command(k.CloseIntake), Outcome.INTAKE_CLOSED)
    s.accepted(s.reconciler(world, "HAPPENED"), Outcome.RESOLVED)
    assert s.stands(world, "COMMITTED").decided_by == "reconciler"


def test_the_reconciler_abandons_nothing_and_gives_no_persons_ground() -> None:
    world = World()
    reach(world, EffectState.UNKNOWN)
    world.person(k.TakeOver)
    s.beyond_the_settle_time(world)
    s.problem(s.reconciler(world, "ABANDONED"), "INVALID", "finding")
    s.problem(s.reconciler(world, "ABSENT"), "INVALID", "ground")
    s.accepted(s.reconciler(world, "ABSENT", ground="NOT_FOUND"), Outcome.RESOLVED)
    assert s.stands(world, "ABSENT").absent_ground == "NOT_FOUND"


def test_only_an_unknown_effect_is_resolved_and_only_as_it_was_seen() -> None:
    world = World()
    reach(world, EffectState.UNKNOWN)
    world.person(k.TakeOver)
    version = world.effect.version
    s.refused(world.person(k.Resolve, finding="HAPPENED", expected_version=version - 1), Outcome.CONFLICT)
    s.accepted(world.person(k.Resolve, finding="HAPPENED", receipt="r"), Outcome.RESOLVED)
    s.refused(world.person(k.Resolve, finding="ABANDONED"), Outcome.CONFLICT, Reason.STATE)
    assert s.stands(world, "COMMITTED").receipt == encode("r")


@pytest.mark.parametrize("state", [EffectState.PREPARED, EffectState.ABSENT, EffectState.DENIED, EffectState.ABANDONED])
def test_what_is_not_unknown_is_not_resolved(state: EffectState) -> None:
    world = World()
    claim = reach(world, state, MAIL)
    if state is not EffectState.PREPARED:
        bring(world, claim, State.READY)
    before = world.effect
    s.refused(world.person(k.Resolve, finding="HAPPENED"), Outcome.CONFLICT, Reason.STATE)
    assert world.effect == before


def test_what_a_person_decided_in_sight_of_the_evidence_stands_until_there_is_more() -> None:
    world = World()
    reach(world, EffectState.ABSENT)
    sender = first_sender(world)
    s.accepted(world.ask(k.Evidence, sender, receipt="r"), Outcome.RECORDED)
    world.person(k.TakeOver)
    s.beyond_the_settle_time(world)
    s.accepted(world.person(k.Resolve, finding="ABSENT", late_evidence=1), Outcome.RESOLVED)
    s.accepted(world.ask(k.Evidence, sender, receipt="r"), Outcome.RECORDED, changed=False)
    assert s.executes(world, world.claimed(owner="C")) == 2
    s.accepted(world.ask(k.Evidence, sender, execution=1, receipt="s"), Outcome.RECORDED)
    s.stands(world, "PREPARED", executions=2)
    s.refused(world.ask(k.Settle, world_claim(world), finding="ABSENT", why="REFUSED"), Outcome.EVIDENCE)


def world_claim(world: World) -> k.Presented:
    """What the present holder shows."""
    task = world.task
    return k.Presented(
        "store", "pool", "t", task.attempt_id or "", task.claim_generation, 0, task.input_digest, task.owner_id
    )


# revise -----------------------------------------------------------------------------------------

DONE: dict[str, Callable[[World], object]] = {
    "COMMITTED": lambda w: reach(w, EffectState.COMMITTED),
    "ABANDONED": lambda w: reach(w, EffectState.ABANDONED),
    "ABSENT, not for certain": lambda w: reach(w, EffectState.ABSENT),
    "DENIED after that": lambda w: reach(w, EffectState.DENIED, MAIL),
}


@pytest.mark.parametrize("done", DONE)
def test_a_revise_over_what_happened_or_may_have_says_that_it_is_done_with(done: str) -> None:
    def story(world: World) -> None:
        DONE[done](world)
        answer = s.refused(world.person(k.Revise), Outcome.CONFLICT, Reason.EFFECTS)
        assert answer.current["accept_effects"] == [world.effect.effect_id]
        s.accepted(world.person(k.Revise, accept_effects=True), Outcome.REVISED)

    story(World())
    s.fails_without(story, k.Revise, "revise:effects-done:conflict")


def test_a_revise_asks_nothing_about_what_never_happened_for_certain() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    s.prepare(world, claim, APPROVED_MAIL, slot="mail-2")
    s.accepted(world.person(k.Deny), Outcome.DENIED)
    s.executes(world, claim, LOOK, slot="look")
    s.accepted(world.person(k.Revise), Outcome.REVISED)


def test_effects_of_a_revision_that_was_accepted_do_not_speak_against_the_next_revise() -> None:
    world = World()
    reach(world, EffectState.COMMITTED)
    s.accepted(world.person(k.Revise, accept_effects=True), Outcome.REVISED)
    s.accepted(world.person(k.Revise), Outcome.REVISED)
    assert world.task.revision == 3
