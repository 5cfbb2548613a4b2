"""What the contract says of effects (claim.v1, section 5, and invariant 4), judged on one accepted change.

Written without the kernel, as `oracle` is: it compares plain fields and spells the numbers of states anew. It asks what
must be true of any change of a task's effects; whether a record tells the truth is asked where the truth is known, at
the modelled downstream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.model.oracle import CANCELLED, CLAIMED, COMMITTED, PARKED, Violation

E_AWAITING, E_UNKNOWN, E_PREPARED, E_COMMITTED, E_ABSENT, E_DENIED, E_ABANDONED = range(1, 8)
OPEN = (E_AWAITING, E_UNKNOWN, E_PREPARED)
REPEATABLE = ("IDEMPOTENT", "CONDITIONAL", "READ_ONLY")
BOUND = ("task_id", "number", "effect_id", "revision", "node_id", "slot", "payload_digest", "terms")
GONE = ("RESERVATION_CANCELLED", "RESERVATION_LAPSED")


def _must(true: Any, rule: str, text: str) -> None:
    if not true:
        raise Violation(rule, text)


def contested(effect: Any) -> bool:
    return len(effect.evidence) > effect.evidence_settled


def past_window(effect: Any, now: int) -> bool:
    """An IDEMPOTENT key may be forgotten before a call that is prepared now arrives."""
    terms = effect.terms
    return (
        terms.guarantee == "IDEMPOTENT" and now + terms.send_window_us > effect.first_prepared_at + terms.retention_us
    )


def for_a_person(effect: Any, now: int) -> bool:
    if effect.terms.guarantee == "READ_ONLY":
        return False
    lost = effect.terms.guarantee == "NON_REPLAYABLE" or effect.person_only
    return lost or past_window(effect, now) or contested(effect)


def judge_effects(
    door: str, command: Any, now: int, pool: Any, task: Any, after: Any, old: Sequence[Any], new: Sequence[Any]
) -> None:
    """`task` and `old` are the records before, `after` and `new` those after the change that `command` made."""
    ids = [effect.effect_id for effect in new]
    _must(len(ids) == len(set(ids)), "4", "two effects under one id")
    _must(list(new[: len(old)]) == list(old) or len(new) >= len(old), "4", "an effect was forgotten")
    for position, effect in enumerate(new):
        before = old[position] if position < len(old) else None
        if effect != before:
            _judge_effect(door, command, now, pool, task, before, effect, old)
        if effect.state == E_PREPARED:
            own = after.state == CLAIMED and effect.executions[-1].attempt_id == after.attempt_id
            _must(own, "effects", "PREPARED, and the attempt that sends it does not hold the task")
    under_way = [e for e in new if e.state in (E_PREPARED, E_UNKNOWN) and e.terms.guarantee != "READ_ONLY"]
    if len(under_way) > 1:
        before = [e for e in old if e.state in (E_PREPARED, E_UNKNOWN)]
        serial = any(e.terms.guarantee == "NON_REPLAYABLE" for e in under_way)
        _must(not serial or door == "evidence" or len(before) >= len(under_way), "serial", "two at once, one unaskable")
    if door in ("commit", "revise"):
        left = [e for e in new if e.revision == task.revision and e.state in OPEN and e.terms.guarantee != "READ_ONLY"]
        _must(not left, "open", f"{door} over an effect that is open")
    if after.state == PARKED and after.park_reason == "WAITING":
        waits = [e for e in new if e.state in (E_AWAITING, E_UNKNOWN)]
        _must(waits, "9", "parked until a decision, and none is left")


def judge_told(command: Any, task: Any, old: Sequence[Any], answer: Any, again: bool) -> None:
    """EXECUTE, which alone allows a call: of what is bound and stored, and said again only as it was said first."""
    effect, execution = answer.effect, answer.execution
    _must(command.payload.digest == effect.payload_digest, "4", "told to send another payload than the bound one")
    _must(effect.state == E_PREPARED, "4", "told to send what is not PREPARED")
    _must(execution == effect.executions[-1], "4", "told to send another execution than the latest")
    if again:
        _must(effect in old, "4", "told to send what is not stored")
        own = (execution.request_id, execution.attempt_id) == (command.request_id, task.attempt_id)
        _must(own and command.claim.attempt_id == task.attempt_id, "4", "told to send another's execution")


def _judge_effect(door: str, command: Any, now: int, pool: Any, task: Any, old: Any, new: Any, all_old: Any) -> None:
    if old is not None:
        for name in BOUND:
            _must(getattr(old, name) == getattr(new, name), "4", f"{name} is bound for good")
        _must(old.state != E_COMMITTED, "4", "a COMMITTED effect was changed")
        _must(new.version == old.version + 1, "7", "an effect's version moves by one")
    before = old.executions if old is not None else ()
    grown = len(new.executions) - len(before)
    _must(grown in (0, 1), "4", "executions are stored one by one")
    if grown:
        _must(new.executions[:-1] == before, "4", "an earlier execution was changed")
        _judge_execution(door, command, now, pool, task, old, new)
        return
    if new.executions != before:
        _judge_reservation(door, command, task, old, new)
    if len(new.evidence) != (len(old.evidence) if old is not None else 0):
        _must(door in ("evidence", "effect.settle", "effect.reconcile"), "evidence", "evidence by another door")
        said = [(late.execution, late.receipt_digest) for late in new.evidence]
        _must(len(said) == len(set(said)), "evidence", "the same report was kept twice")
        known = [e.attempt_id for e in new.executions]
        _must(command.claim.attempt_id in known, "evidence", "from an attempt that never prepared it")
        _must(new.state in (E_UNKNOWN, E_PREPARED), "evidence", "evidence that changed nothing")
        return
    state = old.state if old is not None else None
    if door in ("approve", "deny", "resolve"):
        _must(command.epoch == pool.epoch, "8", "decided under another epoch")
        _must(command.expected_version == old.version, "expected", "decided on another version of the effect")
    if door in ("approve", "deny"):
        _must(command.payload_digest == old.payload_digest, "4", "decided about another payload")
        _must(state == E_AWAITING, "effects", "decided about what awaits nothing")
    if door == "approve":
        _must(task.state != CANCELLED, "approval", "approved while the task is cancelled")
        _must(new.approval is not None and new.state == E_AWAITING, "approval", "an approval is no more than that")
    if door == "effect.prepare":
        _must(new.state == E_AWAITING and state in (None, E_ABSENT), "effects", "asked for an approval of what is open")
        _must(new.approval is None, "approval", "asked for an approval that is there")
    if new.state in (E_COMMITTED, E_ABSENT, E_ABANDONED, E_DENIED) and new.state != state:
        _judge_finding(door, command, now, pool, task, old, new)


def _judge_execution(door: str, command: Any, now: int, pool: Any, task: Any, old: Any, new: Any) -> None:
    """A further call may be sent: invariant 4."""
    execution, guarantee = new.executions[-1], new.terms.guarantee
    if guarantee == "TRANSACTIONAL":
        _must(door == "commit", "effects", "a statement outside of a commit")
        return
    _must(door == "effect.prepare", "effects", f"executed by {door}")
    _must(new.state == E_PREPARED, "effects", "an execution that is not under way")
    _must(command.payload.digest == new.payload_digest, "4", "another payload under a bound slot")
    _must(command.terms.downstream == new.terms.downstream, "4", "another downstream under a bound slot")
    _must(execution.attempt_id == task.attempt_id, "3", "executed for another attempt")
    _must(execution.send_by == now + new.terms.send_window_us, "effects", "another send_by")
    used = [e.request_id for e in old.executions] if old is not None else []
    _must(execution.request_id not in (*used, "ask"), "request", "a used request id started an execution")
    conditional = guarantee == "CONDITIONAL"
    _must((execution.precondition is not None) == conditional, "4", "a precondition, and not CONDITIONAL, or none")
    _must(new.approval is None, "approval", "one approval for more than one execution")
    state = old.state if old is not None else None
    _must(state in (None, E_AWAITING, E_ABSENT, E_UNKNOWN), "4", "executed while under way, decided, or done")
    if state == E_AWAITING:
        approval = old.approval
        _must(approval is not None, "approval", "executed without an approval")
        valid = (approval.epoch, approval.cancel_generation) == (pool.epoch, task.cancel_generation)
        _must(valid, "approval", "executed by an approval that is void")
    elif state != E_UNKNOWN:
        needed = new.terms.approval or (state == E_ABSENT and guarantee == "NON_REPLAYABLE")
        _must(not needed, "approval", "executed without asking")
    else:
        _must(command.repeat and guarantee in REPEATABLE, "4", "executed a second time while the first may take effect")
        closed = contested(old) or old.repeat_closed or old.person_only or past_window(old, now)
        _must(guarantee == "READ_ONLY" or not closed, "4", "repeated what only a person may decide")
        _must(execution.precondition == old.executions[-1].precondition, "4", "repeated under another precondition")


def _judge_reservation(door: str, command: Any, task: Any, old: Any, new: Any) -> None:
    _must(door == "effect.reserve", "4", "an execution was changed")
    _must(new.executions[:-1] == old.executions[:-1], "4", "a reservation of an earlier execution")
    latest, was = new.executions[-1], old.executions[-1]
    _must(command.execution == len(old.executions), "reservation", "reserved for another execution than the latest")
    _must(was.reservation_id is None, "reservation", "a second reservation of one execution")
    _must(latest.reservation_id == command.reservation_id, "reservation", "another reservation than the caller's")
    _must(old.state == E_PREPARED and was.attempt_id == task.attempt_id, "reservation", "reserved by who does not send")
    _must(old.terms.guarantee == "RESERVATION", "reservation", "a reservation that is none")


def _judge_finding(door: str, command: Any, now: int, pool: Any, task: Any, old: Any, new: Any) -> None:
    if door == "commit":
        # What was only read, and is not needed any more.
        _must(old.terms.guarantee == "READ_ONLY", "open", "a commit decided an effect")
        return
    finding = {E_COMMITTED: "HAPPENED", E_ABSENT: "ABSENT", E_ABANDONED: "ABANDONED"}.get(new.state)
    if new.state == E_DENIED:
        _must(door in ("deny", "effect.withdraw") and old.state == E_AWAITING, "effects", "denied what awaits nothing")
        return
    _must(door in ("effect.settle", "effect.reconcile", "resolve"), "effects", f"decided by {door}")
    _must(command.finding == finding, "effects", f"{command.finding} became {finding}")
    _must(old.state in (E_PREPARED, E_UNKNOWN), "effects", f"{finding} of what was not under way")
    person = door == "resolve" and not command.reconciler
    if door != "resolve":
        _must(command.execution == len(old.executions), "execution", "a finding about an earlier execution")
    if door == "effect.settle":
        own = old.executions[-1].attempt_id == command.claim.attempt_id == task.attempt_id
        _must(own, "execution", "settled by who did not prepare it")
        _must(finding == "HAPPENED" or old.state == E_PREPARED, "effects", "settled what is UNKNOWN otherwise")
        _must(finding == "HAPPENED" or not old.executions[-1].repeats, "4", "a repeat's ABSENT, for what it repeated")
    else:
        _must(old.state == E_UNKNOWN, "effects", f"{door} of what is not UNKNOWN")
        _must(command.asked_at <= now, "asked", "asked later than now")
    if not person and door != "effect.settle":
        beyond = old.terms.guarantee == "NON_REPLAYABLE" or old.person_only or past_window(old, now)
        _must(not beyond, "person", "decided without a person what only a person can")
        _must(finding != "ABANDONED", "person", "abandoned without a person")
    if person:
        held = task.state == CLAIMED and task.scheduler_epoch == pool.epoch
        _must(not held or for_a_person(old, now), "held", "decided over the head of who holds the task")
    if door == "resolve" and command.reconciler:
        _must(task.state != CLAIMED or task.scheduler_epoch != pool.epoch, "held", "decided over the holder's head")
    if finding != "HAPPENED" and contested(old):
        named = person and command.late_evidence == len(old.evidence)
        _must(named, "evidence", f"{finding} against late evidence that nobody named")
    if finding == "ABSENT":
        stored = old.executions[-1].reservation_id
        ground = command.why if door == "effect.settle" else command.ground
        _must(stored is None or ground in GONE, "reservation", "ABSENT while a reservation is stored")


__all__ = [
    "COMMITTED",
    "E_ABANDONED",
    "E_ABSENT",
    "E_COMMITTED",
    "E_DENIED",
    "OPEN",
    "contested",
    "judge_effects",
    "judge_told",
]
