"""Orders of events about executions, approvals and waiting that broke an earlier wording of the contract: X10 to X39 of
the list of attacks. Each story is told again to a kernel without the rule that mends it, and must then end badly."""

from __future__ import annotations

import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel import decisions, effect_rules, effects, operations, prepare
from fencepost.kernel import tasks as claims
from fencepost.kernel.outcomes import Outcome, Reason
from fencepost.kernel.records import State
from tests.kernel import effect_stories as s
from tests.kernel.effect_stories import APPROVED_MAIL, LOOK, MAIL, PAY, WINDOW
from tests.model.world import World

# X10 to X13: what cannot be replayed --------------------------------------------------------------------


def x10(world: World) -> None:
    claim = s.started(world)
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.executes(world, claim, APPROVED_MAIL)
    assert world.effect.executions[0].approved_by == "P"
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)
    s.stands(world, "AWAITING_APPROVAL", executions=1)
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.APPROVAL_REQUIRED)


def test_x10_one_approval_allows_one_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    s.fails_with(monkeypatch, x10, prepare, "asks_approval", lambda effect, command: effect is None)
    s.fails_without(x10, k.Prepare, "prepare:unapproved:approval-required")


def test_x10_without_a_declared_approval_the_second_execution_still_needs_one() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, MAIL)
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, MAIL), Outcome.APPROVAL_REQUIRED)


def x11(world: World) -> None:
    claim = s.unknown(world, MAIL)
    s.beyond_the_settle_time(world)
    s.says(s.prepare(world, claim, MAIL, repeat=True), Outcome.RECONCILE, "PERSON")
    s.refused(world.ask(k.Reconcile, claim, finding="ABSENT", ground="NOT_FOUND"), Outcome.PERSON, Reason.GUARANTEE)
    s.refused(world.ask(k.Reconcile, claim, finding="HAPPENED"), Outcome.PERSON, Reason.GUARANTEE)
    world.person(k.TakeOver)
    s.refused(s.reconciler(world, "ABSENT", ground="NOT_FOUND"), Outcome.PERSON, Reason.GUARANTEE)
    s.stands(world, "UNKNOWN", executions=1)


def test_x11_a_look_lifts_nothing_out_of_what_cannot_be_replayed() -> None:
    x11(World())
    s.fails_without(x11, k.Reconcile, "reconcile:nothing-to-ask:person")
    s.fails_without(x11, k.Resolve, "resolve:beyond-the-reconciler:person")


def x12(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim, MAIL, slot="one")
    first = world.effect.effect_id
    answer = s.says(s.prepare(world, claim, MAIL, slot="two"), Outcome.BUSY)
    assert answer.busy == (first,)
    s.says(s.prepare(world, claim, PAY, slot="three"), Outcome.BUSY)
    s.executes(world, claim, LOOK, slot="look")
    assert [effect.slot for effect in world.effects["t"]] == ["one", "look"]


def test_x12_what_cannot_be_replayed_goes_alone() -> None:
    x12(World())
    s.fails_without(x12, k.Prepare, "prepare:another-under-way:busy")


def test_x12_nor_does_it_start_while_another_effect_of_the_task_is_under_way() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, PAY, slot="one")
    s.says(s.prepare(world, claim, MAIL, slot="two"), Outcome.BUSY)
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, MAIL, slot="two"), Outcome.BUSY)
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED"), Outcome.SETTLED)
    s.executes(world, claim, MAIL, slot="two")


def x13(world: World) -> None:
    s.unknown(world, MAIL)
    world.person(k.TakeOver)
    s.accepted(world.person(k.Resolve, finding="ABANDONED"), Outcome.RESOLVED)
    answer = s.refused(world.person(k.Revise), Outcome.CONFLICT, Reason.EFFECTS)
    assert answer.current["accept_effects"] == [world.effect.effect_id]
    assert world.task.revision == 1
    s.accepted(world.person(k.Revise, accept_effects=True), Outcome.REVISED)
    assert world.task.revision == 2


def test_x13_a_revise_over_an_abandoned_effect_says_that_it_is_done_with() -> None:
    x13(World())
    s.fails_without(x13, k.Revise, "revise:effects-done:conflict")


# X14 to X16: repeats and request ids ----------------------------------------------------------------------


def x14(world: World) -> None:
    claim = s.unknown(world)
    assert s.executes(world, claim, repeat=True) == 2
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    assert "says nothing" in (s.stands(world, "UNKNOWN", executions=2).note or "")
    s.says(s.prepare(world, claim), Outcome.RECONCILE, "ASK", "REPEAT")


def test_x14_a_repeat_that_did_nothing_says_nothing_about_the_execution_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s.fails_with(monkeypatch, x14, effects, "_says_nothing", lambda effect, why: None)


def x15(world: World) -> None:
    claim = s.started(world)
    first = s.says(s.prepare(world, claim, request_id="r1"), Outcome.EXECUTE)
    version = world.task.state_version
    world.advance(WINDOW + 5)
    again = s.says(s.prepare(world, claim, request_id="r1"), Outcome.EXECUTE)
    assert first.execution is not None
    assert again.execution == first.execution
    assert world.task.state_version == version
    s.says(s.prepare(world, claim, request_id="r2"), Outcome.IN_FLIGHT)


def test_x15_the_same_request_is_told_the_first_send_by_again() -> None:
    x15(World())
    s.fails_without(x15, k.Prepare, "prepare:request-used:execute-again-or-reconcile")
    s.fails_without(x15, k.Prepare, "prepare:prepared:in-flight")


def test_x15_permission_is_given_again_only_while_the_whole_fence_still_passes() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, request_id="r1")
    s.taken_over(world)
    s.refused(world.ask(k.Prepare, claim, terms=PAY, request_id="r1"), Outcome.FENCED, Reason.GENERATION)


def x16(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim, MAIL, request_id="r1")
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, MAIL, request_id="r2"), Outcome.APPROVAL_REQUIRED)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.says(s.prepare(world, claim, MAIL, request_id="r1"), Outcome.RECONCILE)
    assert s.stands(world, "AWAITING_APPROVAL", executions=1).approval is not None
    s.says(s.prepare(world, claim, MAIL, request_id="r2"), Outcome.APPROVAL_REQUIRED)
    assert s.stands(world, "AWAITING_APPROVAL", executions=1).approval is not None
    assert s.executes(world, claim, MAIL, request_id="r3") == 2


def test_x16_a_late_copy_uses_no_approval_up() -> None:
    x16(World())
    s.fails_without(x16, k.Prepare, "prepare:request-used:execute-again-or-reconcile")


# X17: ends of attempts --------------------------------------------------------------------------------------

ENDS = {
    "release": lambda w, c: w.ask(k.Release, c),
    "fail": lambda w, c: w.ask(k.Fail, c),
    "cancel": lambda w, c: w.person(k.Cancel),
    "take_over": lambda w, c: w.person(k.TakeOver),
    "expire": lambda w, c: (w.run_out(), w.person(k.Expire)),
    "claim": lambda w, c: (w.run_out(), w.claim(owner="B")),
}


@pytest.mark.parametrize("end", ENDS)
def test_x17_every_end_of_an_attempt_but_commit_leaves_what_it_was_sending_unknown(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(world: World) -> None:
        claim = s.started(world)
        s.executes(world, claim)
        s.refused(world.person(k.Revise), Outcome.CONFLICT, Reason.EFFECTS)
        effect_id = world.effect.effect_id
        ENDS[end](world, claim)
        s.stands(world, "UNKNOWN", executions=1)
        ended = [event.detail or {} for event in world.events_of() if event.name == "attempt_ended"]
        assert [detail.get("effects_unknown") for detail in ended] == [[effect_id]]
        if world.task.state != State.CANCELLED:
            s.refused(world.person(k.Revise, accept_effects=True), Outcome.CONFLICT, Reason.EFFECTS)

    s.fails_with(monkeypatch, story, operations, "lose_senders", lambda writes, effects, now: [])


def test_x17_a_revise_is_refused_while_an_effect_is_open() -> None:
    def story(world: World) -> None:
        s.unknown(world)
        s.refused(world.person(k.Revise, accept_effects=True), Outcome.CONFLICT, Reason.EFFECTS)
        assert world.task.revision == 1

    story(World())
    s.fails_without(story, k.Revise, "revise:effects-open:conflict")


# X22, X23: waiting for a person -----------------------------------------------------------------------------


def x22(world: World) -> None:
    claim = s.started(world)
    s.prepare(world, claim, APPROVED_MAIL)
    s.accepted(world.ask(k.Release, claim, wait=True), Outcome.RELEASED)
    assert (world.task.state, world.task.park_reason, world.task.charged_attempts) == (State.PARKED, "WAITING", 0)
    s.refused(world.claim(owner="B"), Outcome.NOT_CLAIMABLE, "PARKED")
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    assert (world.task.state, world.task.park_reason) == (State.READY, None)
    s.executes(world, world.claimed(owner="B"), APPROVED_MAIL)


def test_x22_a_task_given_back_to_wait_is_parked_until_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    s.fails_with(monkeypatch, x22, claims, "_waits", lambda c: False)
    s.fails_with(monkeypatch, x22, decisions, "_put_back", lambda c, effect: {})


def test_x22_approved_before_the_release_arrives_it_is_ready_at_once() -> None:
    world = World()
    claim = s.started(world)
    s.prepare(world, claim, APPROVED_MAIL)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.accepted(world.ask(k.Release, claim, wait=True), Outcome.RELEASED)
    assert world.task.state == State.READY


@pytest.mark.parametrize("decide", [k.Deny, k.Approve])
def test_x22_cancelled_while_it_waits_and_then_decided_it_stays_cancelled(decide: type) -> None:
    world = World()
    claim = s.started(world)
    s.prepare(world, claim, APPROVED_MAIL)
    s.accepted(world.ask(k.Release, claim, wait=True), Outcome.RELEASED)
    s.accepted(world.person(k.Cancel), Outcome.CANCELLED)
    world.person(decide)
    assert world.task.state == State.CANCELLED


def x23(world: World) -> None:
    claim = s.started(world)
    s.prepare(world, claim, APPROVED_MAIL)
    s.problem(world.ask(k.Commit, claim), "UNSETTLED", "t")
    assert world.task.state == State.CLAIMED
    s.accepted(world.ask(k.Withdraw, claim), Outcome.WITHDRAWN)
    s.stands(world, "DENIED")
    s.says(s.prepare(world, claim, APPROVED_MAIL), Outcome.DENIED)
    s.accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)


def test_x23_an_attempt_that_awaits_an_approval_is_not_done_and_may_withdraw() -> None:
    x23(World())
    s.fails_without(x23, k.Commit, "commit:effects-open:unsettled")
    s.fails_without(x23, k.Prepare, "prepare:decided:denied-or-abandoned")


# X37 to X39 ---------------------------------------------------------------------------------------------------


def x37(world: World) -> None:
    claim = s.unknown(world, MAIL)
    newer = msgspec.structs.replace(PAY, downstream=MAIL.downstream)
    s.says(s.prepare(world, claim, newer, repeat=True), Outcome.RECONCILE, "PERSON")
    assert s.stands(world, "UNKNOWN", executions=1).terms == MAIL


def test_x37_the_guarantee_that_was_bound_counts_and_not_a_newer_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_newer(effect: effect_rules.Effect, now: int) -> tuple[str, ...]:
        return ("ASK", "REPEAT") if effect.state == effect_rules.UNKNOWN else ()

    s.fails_with(monkeypatch, x37, effect_rules, "open_ways", of_the_newer)
    s.fails_without(x37, k.Prepare, "prepare:unknown:reconcile")


def x38(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN", why="STORED_FAILURE"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, repeat=True), Outcome.RECONCILE, "ASK")
    s.stands(world, "UNKNOWN", executions=1)
    world.advance(s.RETENTION)
    s.says(s.prepare(world, claim, repeat=True), Outcome.RECONCILE, "PERSON")


def test_x38_a_failure_that_the_key_would_only_bring_back_closes_repeat() -> None:
    x38(World())
    s.fails_without(x38, k.Prepare, "prepare:unknown:reconcile")


def test_x38_said_of_an_effect_that_was_unknown_already_it_still_closes_repeat() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN"), Outcome.SETTLED)
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN"), Outcome.SETTLED, changed=False)
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN", why="STORED_FAILURE"), Outcome.SETTLED)
    s.says(s.prepare(world, claim, repeat=True), Outcome.RECONCILE, "ASK")


def x39(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim, payload="X")
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    successor = s.taken_over(world)
    answer = s.says(s.prepare(world, successor, payload="Y"), Outcome.PAYLOAD_CONFLICT)
    assert answer.effect.payload_digest == world.payloads["t", 1].digest
    s.stands(world, "ABSENT", executions=1)
    s.executes(world, successor, payload="Y", slot="another")


def test_x39_another_payload_is_never_sent_under_a_bound_slot() -> None:
    x39(World())
    s.fails_without(x39, k.Prepare, "prepare:other-payload:payload-conflict")
