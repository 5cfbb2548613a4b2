"""What a claim's holder may say of its effects, by guarantee: settle, reserve, reconcile, late evidence, statements."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.commit import commit_digest
from fencepost.kernel.digests import encode
from fencepost.kernel.effect_rules import effect_id
from fencepost.kernel.outcomes import Outcome, Reason
from fencepost.kernel.records import EffectState, State
from tests.kernel import effect_stories as s
from tests.kernel.effect_moves import first_sender, reach
from tests.kernel.effect_stories import APPROVED_LOOK, LOOK, MAIL, OBJECT, PAY, SEATS
from tests.model.world import SECOND, World, new_task

replace = msgspec.structs.replace


# ids and what is bound --------------------------------------------------------------------------


def test_the_effect_id_is_the_digest_of_store_task_revision_node_and_slot() -> None:
    """sha256 of ["shop","order-17",2,"billing","send-invoice"], as `sha256sum` gives it."""
    wanted = "0320403332f430b45ebdf5309abffcf185fa20b244ee4fce71779d11fbe618cd"
    assert effect_id("shop", "order-17", 2, "billing", "send-invoice") == wanted


def test_neither_attempt_nor_payload_is_in_the_effect_id() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim)
    assert world.effect.effect_id == "f744b92eda6ffcc1453c8ed620343785e6706197e21b256d6ab3c99c52d4aa32"
    successor = s.taken_over(world)
    answer = world.ask(k.Prepare, successor, terms=PAY, payload="another")
    assert answer.effect.effect_id == world.effect.effect_id


def test_each_part_of_an_effect_id_makes_another() -> None:
    parts: tuple[Any, ...] = ("namespace", "t", 1, "main", "mail")
    ids = {effect_id(*parts)}
    for place, other in enumerate(("other", "other", 2, "other", "other")):
        ids.add(effect_id(*(*parts[:place], other, *parts[place + 1 :])))
    assert len(ids) == 6


def test_the_execution_is_stored_before_it_is_sent_with_all_that_a_successor_needs() -> None:
    world = World()
    claim = s.started(world)
    world.advance(3)
    answer = s.prepare(world, claim, payload={"to": "a"})
    [execution] = world.effect.executions
    assert (execution.execution, execution.generation, execution.epoch) == (1, 1, 1)
    assert execution.send_by == world.now + s.WINDOW * SECOND
    assert execution.prepared_at == world.effect.first_prepared_at == world.now
    assert world.payloads["t", 1] == encode({"to": "a"})
    assert (answer.effect, answer.execution) == (world.effect, execution)
    assert world.task.effects == 1


def test_a_transactional_downstream_has_no_prepare() -> None:
    world = World()
    claim = s.started(world)
    terms = replace(PAY, guarantee="TRANSACTIONAL")
    s.problem(world.ask(k.Prepare, claim, terms=terms), "INVALID", "guarantee")
    assert world.effects == {}


@pytest.mark.parametrize("terms", [MAIL, PAY, SEATS, LOOK], ids=lambda terms: terms.guarantee)
def test_a_precondition_is_for_conditional_alone(terms: Any) -> None:
    world = World()
    s.problem(world.ask(k.Prepare, s.started(world), terms=terms, precondition="e0"), "INVALID", "precondition")


def test_conditional_needs_a_precondition_and_a_new_one_for_a_new_execution() -> None:
    world = World()
    claim = s.started(world)
    s.problem(world.ask(k.Prepare, claim, terms=OBJECT), "INVALID", "precondition")
    s.executes(world, claim, OBJECT)
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="PRECONDITION"), Outcome.SETTLED)
    s.stands(world, "ABSENT")
    s.problem(world.ask(k.Prepare, claim, terms=OBJECT), "INVALID", "precondition")
    assert s.executes(world, claim, OBJECT, precondition="e1") == 2


# the guarantees ---------------------------------------------------------------------------------

OPEN = {
    "RESERVATION": (SEATS, ("ASK",)),
    "CONDITIONAL": (OBJECT, ("ASK", "REPEAT")),
    "IDEMPOTENT": (PAY, ("ASK", "REPEAT")),
    "READ_ONLY": (LOOK, ("REPEAT",)),
    "NON_REPLAYABLE": (MAIL, ("PERSON",)),
}


@pytest.mark.parametrize("guarantee", OPEN)
def test_what_is_open_for_an_unknown_effect_follows_from_its_guarantee(guarantee: str) -> None:
    terms, ways = OPEN[guarantee]
    world = World()
    claim = s.unknown(world, terms)
    fields = {"precondition": "e0"} if terms is OBJECT else {}
    s.says(s.prepare(world, claim, terms, **fields), Outcome.RECONCILE, *ways)
    answer = s.prepare(world, claim, terms, repeat=True)
    assert (answer.outcome is Outcome.EXECUTE) == ("REPEAT" in ways)
    if "REPEAT" in ways:
        first, second = world.effect.executions
        assert (second.execution, second.repeats, second.precondition) == (2, True, first.precondition)


@pytest.mark.parametrize("guarantee", OPEN)
def test_only_the_grounds_that_a_guarantee_can_tell_make_it_absent(guarantee: str) -> None:
    terms, _ = OPEN[guarantee]
    counts = {
        "RESERVATION": {"NO_RESERVATION": "CERTAIN"},
        "CONDITIONAL": {"MOVED_ON": "CERTAIN"},
        "IDEMPOTENT": {"NOT_FOUND": "NOT_FOUND"},
        "READ_ONLY": {"NOT_FOUND": "NOT_FOUND"},
        "NON_REPLAYABLE": {},
    }[guarantee]
    for ground in rules.GROUNDS:
        world = World()
        claim = s.unknown(world, terms)
        s.beyond_the_settle_time(world)
        answer = world.ask(k.Reconcile, claim, finding="ABSENT", ground=ground)
        if ground in counts:
            s.accepted(answer, Outcome.RECONCILED)
            assert s.stands(world, "ABSENT").absent_ground == counts[ground]
        else:
            assert getattr(answer, "outcome", None) != Outcome.RECONCILED, answer
            s.stands(world, "UNKNOWN")


def test_a_retention_that_ended_leaves_the_effect_to_a_person_even_where_it_was_never_asked() -> None:
    world = World()
    claim = s.unknown(world)
    world.advance(s.RETENTION)
    s.says(s.prepare(world, claim, repeat=True), Outcome.RECONCILE, "PERSON")


def test_an_absence_is_as_sure_as_its_weakest_execution() -> None:
    """Not found, then refused for certain: the first execution may still have happened."""
    world = World()
    claim = reach(world, EffectState.ABSENT)  # a person said so
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
    assert s.stands(world, "ABSENT", executions=2).absent_ground == "PERSON"
    s.refused(world.person(k.Revise), Outcome.CONFLICT, Reason.EFFECTS)
    assert rules.weakest(None, "CERTAIN") == "CERTAIN"
    assert rules.weakest("CERTAIN", "NOT_FOUND") == "NOT_FOUND"
    assert rules.weakest("NOT_FOUND", "CERTAIN") == "NOT_FOUND"


# settle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "finding", "outcome"),
    [
        (EffectState.PREPARED, "HAPPENED", "COMMITTED"),
        (EffectState.PREPARED, "ABSENT", "ABSENT"),
        (EffectState.PREPARED, "UNKNOWN", "UNKNOWN"),
        (EffectState.UNKNOWN, "HAPPENED", "COMMITTED"),
        (EffectState.UNKNOWN, "ABSENT", None),
        (EffectState.UNKNOWN, "UNKNOWN", "again"),
        (EffectState.COMMITTED, "HAPPENED", "again"),
        (EffectState.COMMITTED, "ABSENT", None),
        (EffectState.COMMITTED, "UNKNOWN", None),
        (EffectState.ABSENT, "ABSENT", "again"),
        (EffectState.ABSENT, "UNKNOWN", None),
    ],
)
def test_prepared_takes_any_finding_unknown_takes_happened_and_what_is_said_already_is_said_again(
    state: EffectState, finding: str, outcome: str | None
) -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim)
    first = {"COMMITTED": "HAPPENED", "ABSENT": "ABSENT", "UNKNOWN": "UNKNOWN"}.get(state.name)
    if first is not None:
        why = "REFUSED" if first == "ABSENT" else None
        s.accepted(world.ask(k.Settle, claim, finding=first, why=why), Outcome.SETTLED)
    before = world.effect
    answer = world.ask(k.Settle, claim, finding=finding, why="REFUSED" if finding == "ABSENT" else None)
    if outcome is None:
        said = s.refused(answer, Outcome.CONFLICT, Reason.STATE)
        assert said.current["effect_state"] == state.name
        assert world.effect == before
    elif outcome == "again":
        s.accepted(answer, Outcome.SETTLED, changed=False)
        assert world.effect == before
    else:
        assert s.accepted(answer, Outcome.SETTLED).info["state"] == outcome
        s.stands(world, outcome)


def test_an_answer_that_was_lost_is_given_again_even_after_the_attempt_ended() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED", receipt="r", request_id="s1"), Outcome.SETTLED)
    s.taken_over(world)
    again = world.ask(k.Settle, claim, finding="HAPPENED", receipt="r", request_id="s1")
    s.accepted(again, Outcome.SETTLED, changed=False)


def test_only_the_attempt_that_prepared_the_execution_settles_it() -> None:
    world = World()
    successor = s.unknown(world)
    for finding in ("HAPPENED", "ABSENT", "UNKNOWN"):
        answer = world.ask(k.Settle, successor, finding=finding, why="REFUSED" if finding == "ABSENT" else None)
        s.refused(answer, Outcome.STALE_EXECUTION)
    s.stands(world, "UNKNOWN")


def test_a_failed_precondition_is_absent_only_where_no_earlier_execution_carried_the_same() -> None:
    world = World()
    claim = s.unknown(world, OBJECT)
    s.accepted(world.ask(k.Reconcile, claim, finding="ABSENT", ground="MOVED_ON"), Outcome.RECONCILED)
    s.executes(world, claim, OBJECT, precondition="e0")
    s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="PRECONDITION"), Outcome.SETTLED)
    s.stands(world, "UNKNOWN", executions=2)


# reserve ----------------------------------------------------------------------------------------


def test_one_reservation_an_execution_and_its_id_is_said_again() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim, SEATS)
    s.accepted(world.ask(k.Reserve, claim, reservation_id="r0"), Outcome.RESERVED)
    s.accepted(world.ask(k.Reserve, claim, reservation_id="r0"), Outcome.RESERVED, changed=False)
    answer = world.ask(k.Reserve, claim, reservation_id="r1")
    assert s.refused(answer, Outcome.CONFLICT, Reason.RESERVATION).current["reservation_id"] == "r0"
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN"), Outcome.SETTLED)
    s.refused(world.ask(k.Reserve, claim, reservation_id="r0"), Outcome.STALE_EXECUTION)


def test_a_stored_reservation_may_be_found_confirmed_or_cancelled_by_whoever_comes_next() -> None:
    for finding, ground, state in (
        ("HAPPENED", None, "COMMITTED"),
        ("ABSENT", "RESERVATION_CANCELLED", "ABSENT"),
        ("ABSENT", "RESERVATION_LAPSED", "ABSENT"),
    ):
        world = World()
        claim = s.started(world)
        s.executes(world, claim, SEATS)
        s.accepted(world.ask(k.Reserve, claim, reservation_id="r0"), Outcome.RESERVED)
        successor = s.taken_over(world)
        answer = world.ask(k.Reconcile, successor, finding=finding, ground=ground)
        s.accepted(answer, Outcome.RECONCILED)
        s.stands(world, state, executions=1)


# late evidence ----------------------------------------------------------------------------------


def test_evidence_comes_from_an_attempt_that_once_prepared_this_effect_and_from_no_other() -> None:
    world = World()
    reach(world, EffectState.ABSENT)
    stranger = replace(first_sender(world), attempt_id="made-up")
    s.refused(world.ask(k.Evidence, stranger), Outcome.NOT_FOUND, Reason.EFFECT)
    s.stands(world, "ABSENT")
    s.accepted(world.ask(k.Evidence, first_sender(world)), Outcome.RECORDED)
    s.stands(world, "UNKNOWN")


def test_the_same_report_again_is_no_news_and_another_one_is_kept_beside_it() -> None:
    world = World()
    reach(world, EffectState.UNKNOWN)
    sender = first_sender(world)
    for receipt, kept, changed in (("r", 1, True), ("r", 1, False), ("s", 2, True), (None, 3, True)):
        s.accepted(world.ask(k.Evidence, sender, receipt=receipt), Outcome.RECORDED, changed=changed)
        assert len(world.effect.evidence) == kept
    assert world.effect.evidence[0].receipt == "r"


def test_evidence_beyond_the_limit_still_turns_a_decided_effect_back_to_unknown() -> None:
    world = World()
    reach(world, EffectState.UNKNOWN)
    sender = first_sender(world)
    for number in range(k.MAX_EVIDENCE + 5):
        world.ask(k.Evidence, sender, receipt=number)
    assert len(world.effect.evidence) == k.MAX_EVIDENCE
    world.person(k.TakeOver)
    s.beyond_the_settle_time(world)
    s.accepted(world.person(k.Resolve, finding="ABSENT"), Outcome.RESOLVED)
    s.accepted(world.ask(k.Evidence, sender, receipt="another"), Outcome.RECORDED)
    effect = s.stands(world, "UNKNOWN")
    assert len(effect.evidence) == k.MAX_EVIDENCE
    assert effect.evidence[-1].receipt == "another"
    assert rules.contested(effect)


def test_a_second_receipt_on_a_committed_effect_is_an_alarm_and_leaves_the_first() -> None:
    world = World()
    successor = s.unknown(world)
    sender = first_sender(world)
    s.accepted(world.ask(k.Reconcile, successor, finding="HAPPENED", receipt="r1"), Outcome.RECONCILED)
    s.refused(world.ask(k.Settle, sender, finding="HAPPENED", receipt="r1"), Outcome.FENCED)
    assert world.logged("alarm") == []
    before = world.effect
    s.refused(world.ask(k.Settle, sender, finding="HAPPENED", receipt="r2"), Outcome.FENCED)
    [alarm] = world.logged("alarm")
    assert alarm.detail is not None
    assert (alarm.detail["kept_receipt"], alarm.detail["receipt"]) == (encode("r1").digest, encode("r2").digest)
    assert world.effect == before


@pytest.mark.parametrize("receipts", [("r1", "r2", 1), ("r1", "r1", 0), (None, "r2", 0)])
def test_a_receipt_other_than_the_late_reports_is_the_same_alarm_whichever_came_first(receipts: Any) -> None:
    late, settled, alarms = receipts
    world = World()
    claim = reach(world, EffectState.ABSENT)
    sender = first_sender(world)
    s.executes(world, claim)
    s.refused(world.ask(k.Settle, sender, execution=1, finding="HAPPENED", receipt=late), Outcome.FENCED)
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED", receipt=settled), Outcome.SETTLED)
    assert len(world.logged("alarm")) == alarms
    s.stands(world, "COMMITTED", executions=2)


def test_evidence_voids_an_approval() -> None:
    world = World()
    reach(world, EffectState.AWAITING_APPROVAL, MAIL)
    s.accepted(world.person(k.Approve), Outcome.APPROVED)
    s.accepted(world.ask(k.Evidence, first_sender(world)), Outcome.RECORDED)
    assert s.stands(world, "UNKNOWN").approval is None


def test_a_refusal_with_a_report_is_both_journalled_and_an_accepted_change() -> None:
    world = World()
    s.unknown(world)
    answer = world.ask(k.Settle, first_sender(world), finding="HAPPENED", receipt="r")
    s.refused(answer, Outcome.FENCED, Reason.GENERATION)
    assert [entry.door for entry in world.logged("refusal")] == ["effect.settle"]
    assert world.events_of()[-1].door == "evidence"
    s.refused(world.ask(k.Settle, first_sender(world), finding="UNKNOWN"), Outcome.FENCED)
    assert len(world.effect.evidence) == 1


# commit -----------------------------------------------------------------------------------------


def ledger(slot: str = "ledger", payload: Any = "insert", **fields: Any) -> k.NewStatement:
    return k.NewStatement(slot, encode(payload), "sql/ledger", **fields)


def test_statements_are_executed_bound_and_committed_by_the_commit_itself() -> None:
    world = World()
    claim = s.started(world)
    s.executes(world, claim)
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED"), Outcome.SETTLED)
    statements = (ledger("a"), ledger("b", node_id="other"))
    answer = world.ask(k.Commit, claim, statements=statements, namespace="namespace")
    s.accepted(answer, Outcome.COMMITTED)
    assert [effect.number for effect in world.effects["t"]] == [1, 2, 3]
    for effect, node in zip(world.effects["t"][1:], ("main", "other"), strict=True):
        assert (effect.state, effect.terms.guarantee) == (EffectState.COMMITTED, "TRANSACTIONAL")
        assert effect.effect_id == effect_id("namespace", "t", 1, node, effect.slot)
    assert [(one.effect_id, one.slot) for one in world.executed] == [
        (effect.effect_id, effect.slot) for effect in world.effects["t"][1:]
    ]
    assert world.task.effects == 3


def test_the_commit_digest_covers_the_statements_with_their_slots() -> None:
    world = World()
    claim = s.started(world)
    content = encode("done")

    def digest(*statements: k.NewStatement) -> str:
        command = k.Commit(
            request_id="r",
            epoch=1,
            claim=claim,
            result_digest=content.digest,
            content=content,
            result_commit_id="c",
            statements=statements,
        )
        return commit_digest(command)

    ways = [(), (ledger(),), (ledger("other"),), (ledger(payload="update"),), (ledger(), ledger("b"))]
    assert len({digest(*way) for way in ways}) == len(ways)
    assert digest(ledger()) == digest(ledger())


def test_the_same_result_with_other_statements_is_no_replay_and_executes_nothing() -> None:
    world = World()
    claim = s.started(world)
    s.accepted(world.ask(k.Commit, claim, result="done", statements=(ledger(),)), Outcome.COMMITTED)
    s.accepted(world.ask(k.Commit, claim, result="done", statements=(ledger(),)), Outcome.COMMITTED, changed=False)
    for statements in ((), (ledger("other"),), (ledger(payload="update"),)):
        s.refused(world.ask(k.Commit, claim, result="done", statements=statements), Outcome.ENDED, "COMMITTED")
    assert len(world.executed) == 1


def taken(world: World) -> None:
    claim = s.started(world)
    s.executes(world, claim, slot="ledger")
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED"), Outcome.SETTLED)
    s.refused(world.ask(k.Commit, claim, statements=(ledger("ledger"),)), Outcome.PAYLOAD_CONFLICT)
    twice = world.ask(k.Commit, claim, statements=(ledger("a"), ledger("a", "update")))
    s.problem(twice, "INVALID", "statements[1].slot")
    assert world.task.state == State.CLAIMED
    assert world.executed == []


def test_a_statement_takes_no_slot_that_is_taken_and_none_twice() -> None:
    taken(World())
    s.fails_without(taken, k.Commit, "commit:slot-taken:payload-conflict")


@pytest.mark.parametrize("state", [EffectState.PREPARED, EffectState.UNKNOWN, EffectState.AWAITING_APPROVAL])
def test_a_commit_names_the_effects_that_are_not_done_and_writes_nothing(state: EffectState) -> None:
    world = World()
    claim = reach(world, state, MAIL)
    answer = s.problem(world.ask(k.Commit, claim), "UNSETTLED", "t")
    assert answer.limit == world.effect.effect_id
    assert world.task.state == State.CLAIMED


@pytest.mark.parametrize("state", [EffectState.PREPARED, EffectState.UNKNOWN])
def test_what_has_no_side_effect_keeps_no_commit_waiting(state: EffectState) -> None:
    world = World()
    claim = reach(world, state, LOOK)
    s.accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)
    assert s.stands(world, "ABSENT", executions=1).absent_ground == "CERTAIN"


def test_a_commit_ends_what_was_only_to_be_read_of_whatever_revision_and_a_late_answer_changes_nothing() -> None:
    world = World()
    reach(world, EffectState.PREPARED, LOOK)
    s.accepted(world.person(k.Revise), Outcome.REVISED)
    claim = world.claimed(owner="B")
    s.executes(world, claim, LOOK)
    s.says(s.prepare(world, claim, APPROVED_LOOK, slot="asked"), Outcome.APPROVAL_REQUIRED)
    s.executes(world, claim, LOOK, slot="seen")
    s.accepted(world.ask(k.Settle, claim, finding="HAPPENED", receipt="r"), Outcome.SETTLED)
    s.accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)
    states = [EffectState(effect.state).name for effect in world.effects["t"]]
    assert states == ["ABSENT", "ABSENT", "DENIED", "COMMITTED"]
    detail = world.events[-1].detail or {}
    ids = [effect.effect_id for effect in world.effects["t"]]
    assert (detail["effects_absent"], detail["effects_denied"]) == (ids[:2], ids[2:3])
    before = list(world.effects["t"])
    answer = world.ask(k.Settle, claim, effect_id=ids[1], execution=1, finding="HAPPENED", receipt="late")
    s.refused(answer, Outcome.ENDED)
    assert world.effects["t"] == before
    assert not world.logged("alarm")


def test_effects_of_an_older_revision_keep_no_commit_waiting() -> None:
    world = World()
    reach(world, EffectState.ABANDONED, MAIL)
    s.accepted(world.person(k.Revise, accept_effects=True), Outcome.REVISED)
    claim = world.claimed(owner="C")
    s.accepted(world.ask(k.Evidence, first_sender(world)), Outcome.RECORDED)
    s.stands(world, "UNKNOWN")
    s.says(s.prepare(world, claim, PAY, slot="new"), Outcome.BUSY)
    s.accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)


def test_effects_are_looked_for_only_where_the_task_ever_had_one() -> None:
    world = World()
    world.submit(new_task("t"), new_task("u"))
    claim = world.claimed()
    command = k.Release(request_id="r", epoch=1, claim=claim)
    assert world.snapshot(command).effects == {}
    s.executes(world, claim)
    assert list(world.snapshot(command).effects) == ["t"]
