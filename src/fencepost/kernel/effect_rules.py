"""What an effect's record alone decides: what is open to whom, when ABSENT may be said, what an attempt's end does.

Pure functions of one effect (or of a task's effects) and the store's time; the doors are in `effects` and `decisions`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fencepost.kernel.digests import canonical
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import Content, Effect, EffectState, Event, Execution, Guarantee, Task
from fencepost.kernel.writes import Proof, WriteSet

_replace = msgspec.structs.replace

AWAITING_APPROVAL, UNKNOWN, PREPARED = EffectState.AWAITING_APPROVAL, EffectState.UNKNOWN, EffectState.PREPARED
COMMITTED, ABSENT = EffectState.COMMITTED, EffectState.ABSENT
DENIED, ABANDONED = EffectState.DENIED, EffectState.ABANDONED

# What may be done about an UNKNOWN effect.
ASK, REPEAT, PERSON = "ASK", "REPEAT", "PERSON"

# Grounds of ABSENT that a successor or the reconciler may give. All but NOT_FOUND are certain.
NOT_FOUND = "NOT_FOUND"  # the key is not known there; counts only once nothing may arrive any more
MOVED_ON = "MOVED_ON"  # CONDITIONAL: the precondition is gone for good, and the complete history lacks the effect id
NO_RESERVATION = "NO_RESERVATION"  # none is stored, so that none can have been confirmed
RESERVATION_CANCELLED = "RESERVATION_CANCELLED"
RESERVATION_LAPSED = "RESERVATION_LAPSED"
GROUNDS = (NOT_FOUND, MOVED_ON, NO_RESERVATION, RESERVATION_CANCELLED, RESERVATION_LAPSED)

# Why the sender itself knows that nothing happened.
REFUSED = "REFUSED"  # answered with a refusal, or never reached
PRECONDITION = "PRECONDITION"  # the precondition was false
ABSENT_REASONS = (REFUSED, PRECONDITION, RESERVATION_CANCELLED)

# Why the sender does not know: a failure that the downstream keeps under the key closes REPEAT.
STORED_FAILURE = "STORED_FAILURE"

_NOT_READ = "its task was committed without it"


def effect_id(namespace: str, task_id: str, revision: int, node_id: str, slot: str) -> str:
    """64 hex digits, without prefix: no attempt, no payload (claim.v1, section 5)."""
    return hashlib.sha256(canonical([namespace, task_id, revision, node_id, slot])).hexdigest()


def find(effects: Iterable[Effect], wanted: str) -> Effect | None:
    for effect in effects:
        if effect.effect_id == wanted:
            return effect
    return None


def contested(effect: Effect) -> bool:
    """Late evidence says that it happened, and nobody has decided about that yet."""
    return len(effect.evidence) > effect.evidence_settled


def window_ends(effect: Effect) -> int | None:
    """Until when an IDEMPOTENT effect may be asked for and repeated under its key; None for the other guarantees.

    What is sent before its `send_by` then still arrives while the key is remembered (attack X04).
    """
    terms = effect.terms
    if terms.guarantee != Guarantee.IDEMPOTENT:
        return None
    return effect.first_prepared_at + terms.retention_us - max(terms.margin_us, terms.send_window_us)


def open_ways(effect: Effect, now: int) -> tuple[str, ...]:
    """What is open for an UNKNOWN effect: ASK the downstream, REPEAT under the same key, or only a PERSON."""
    if effect.state != UNKNOWN:
        return ()
    guarantee = effect.terms.guarantee
    if guarantee == Guarantee.READ_ONLY:
        return (REPEAT,)
    if guarantee == Guarantee.NON_REPLAYABLE or effect.person_only:
        return (PERSON,)
    ends = window_ends(effect)
    if ends is not None and now > ends:
        return (PERSON,)
    if contested(effect):
        return (ASK, PERSON)  # HAPPENED may still be found; that it did not is for a person to say
    if guarantee == Guarantee.RESERVATION or effect.repeat_closed:
        return (ASK,)
    return (ASK, REPEAT)


def nothing_arrives_before(effect: Effect) -> int:
    """From when on a look at the downstream shows all that any sender can have sent: the last send_by, settled."""
    latest = max((execution.send_by for execution in effect.executions), default=effect.first_prepared_at)
    return latest + effect.terms.settle_time_us


def too_early(effect: Effect, asked_at: int) -> Refusal | None:
    earliest = nothing_arrives_before(effect)
    if asked_at >= earliest:
        return None
    return Refusal(Outcome.TOO_EARLY, None, {"not_before_us": earliest, **shown(effect)})


def absent(effect: Effect, ground: str | None, asked_at: int, *, person: bool) -> str | Refusal | Problem:
    """The ground under which ABSENT may be recorded (CERTAIN, NOT_FOUND or PERSON), or why it may not.

    In this order: evidence to the contrary, a stored reservation, what the guarantee can tell at all, the time.
    """
    if contested(effect) and not person:
        return Refusal(Outcome.EVIDENCE, None, {"late_evidence": len(effect.evidence), **shown(effect)})
    reservation = effect.executions[-1].reservation_id if effect.executions else None
    gone = ground in (RESERVATION_CANCELLED, RESERVATION_LAPSED)
    if reservation is not None and not gone:
        return Refusal(Outcome.CONFLICT, Reason.RESERVATION, {"reservation_id": reservation, **shown(effect)})
    if reservation is not None:
        return "CERTAIN"
    if person:
        if ground is not None:
            return Problem("INVALID", "ground", "a person gives one only about a stored reservation")
        early = too_early(effect, asked_at)
        return "PERSON" if early is None else early
    guarantee = effect.terms.guarantee
    if guarantee == Guarantee.RESERVATION:
        # Whatever was reserved and not stored can be confirmed by nobody.
        return "CERTAIN" if ground == NO_RESERVATION else _no_ground(effect, ground)
    if guarantee == Guarantee.CONDITIONAL:
        if ground == MOVED_ON:
            return "CERTAIN"
        if ground == NOT_FOUND:
            return Refusal(Outcome.PERSON, Reason.GUARANTEE, shown(effect))  # a paused write may still be let in
        return _no_ground(effect, ground)
    if ground != NOT_FOUND:
        return _no_ground(effect, ground)
    early = too_early(effect, asked_at)
    return "NOT_FOUND" if early is None else early


def _no_ground(effect: Effect, ground: str | None) -> Problem:
    return Problem("INVALID", "ground", f"{ground!r} is nothing that {effect.terms.guarantee} can tell")


def weakest(before: str | None, ground: str) -> str:
    """An effect is ABSENT as surely as its weakest execution is: one that was merely not found stays that."""
    return before if before is not None and before != "CERTAIN" else ground


def approved(effect: Effect, epoch: int, cancel_generation: int) -> bool:
    """An approval is given that neither a raise nor a cancel has made void."""
    approval = effect.approval
    return approval is not None and approval.epoch == epoch and approval.cancel_generation == cancel_generation


def waits(effect: Effect, now: int, epoch: int, cancel_generation: int) -> bool:
    """Only a person can lead this effect on."""
    if effect.state == AWAITING_APPROVAL:
        return not approved(effect, epoch, cancel_generation)
    return open_ways(effect, now) == (PERSON,)


def blocks(effect: Effect, revision: int) -> bool:
    """It keeps its revision from being committed or revised."""
    return (
        effect.revision == revision
        and effect.state in (AWAITING_APPROVAL, PREPARED, UNKNOWN)
        and effect.terms.guarantee != Guarantee.READ_ONLY
    )


def took_place(effect: Effect, revision: int) -> bool:
    """It happened, or may have: a new revision, whose effects have other ids, might do it again."""
    if effect.revision != revision or effect.terms.guarantee == Guarantee.READ_ONLY:
        return False
    if effect.state in (COMMITTED, ABANDONED):
        return True
    # DENIED may have been ABSENT before: that a further execution was refused makes the earlier one no surer.
    return effect.state in (ABSENT, DENIED) and effect.absent_ground not in (None, "CERTAIN")


def in_the_way(effects: Iterable[Effect], wanted: str, guarantee: str) -> tuple[str, ...]:
    """What is under way while `wanted` is to be sent: an effect that nobody can ask about goes alone."""
    if guarantee == Guarantee.READ_ONLY:
        return ()
    busy = []
    for effect in effects:
        if effect.effect_id == wanted or effect.state not in (PREPARED, UNKNOWN):
            continue
        theirs = effect.terms.guarantee
        if theirs == Guarantee.READ_ONLY:
            continue
        if guarantee == Guarantee.NON_REPLAYABLE or theirs == Guarantee.NON_REPLAYABLE:
            busy.append(effect.effect_id)
    return tuple(busy)


def moved(effect: Effect, now: int, **fields: Any) -> Effect:
    return _replace(effect, version=effect.version + 1, changed_at=now, **fields)


def lose_senders(writes: WriteSet, effects: Sequence[Effect], now: int) -> list[str]:
    """An attempt ends: what it was sending is UNKNOWN, in the same transaction. The ids of these effects."""
    unknown = []
    for effect in effects:
        if effect.state == PREPARED:
            writes.effects.append(without_sender(effect, now))
            unknown.append(effect.effect_id)
    return unknown


def end_reads(writes: WriteSet, effects: Sequence[Effect], now: int) -> dict[str, list[str]]:
    """A task is committed: nobody will repeat what it only read, of whatever revision, and nothing came of it.

    PREPARED and UNKNOWN ones are ABSENT, one that awaits an approval is DENIED. The ids, by what they became.
    """
    ended: dict[str, list[str]] = {}
    for effect in effects:
        if effect.terms.guarantee != Guarantee.READ_ONLY or effect.state not in (AWAITING_APPROVAL, PREPARED, UNKNOWN):
            continue
        if effect.state == AWAITING_APPROVAL:
            writes.effects.append(moved(effect, now, state=int(DENIED), approval=None, note=_NOT_READ))
            ended.setdefault("effects_denied", []).append(effect.effect_id)
        else:
            writes.effects.append(moved(effect, now, state=int(ABSENT), absent_ground="CERTAIN", note=_NOT_READ))
            ended.setdefault("effects_absent", []).append(effect.effect_id)
    return ended


def without_sender(effect: Effect, now: int) -> Effect:
    """The effect once the attempt that may be sending it has ended."""
    if effect.state != PREPARED:
        return effect
    return moved(effect, now, state=int(UNKNOWN), note="its sender's attempt ended")


def latest(effect: Effect) -> Execution:
    return effect.executions[-1]


def with_latest(effect: Effect, **fields: Any) -> tuple[Execution, ...]:
    return (*effect.executions[:-1], _replace(effect.executions[-1], **fields))


def shown(effect: Effect) -> dict[str, Any]:
    """What a refused caller is told about the effect: no attempt ids, no request ids."""
    return {
        "effect_id": effect.effect_id,
        "slot": effect.slot,
        "effect_state": EffectState(effect.state).name,
        "effect_version": effect.version,
        "execution": len(effect.executions),
    }


def effect_event(
    task: Task, effect: Effect, now: int, proof: Proof, name: str, more: dict[str, Any] | None = None
) -> Event:
    """The event of the change that led to `task` and `effect`: enough to follow the effect by the journal alone."""
    detail: dict[str, Any] = {
        "effect": effect.effect_id,
        "number": effect.number,
        "slot": effect.slot,
        "state": EffectState(effect.state).name,
        "version": effect.version,
        "execution": len(effect.executions),
        "payload": effect.payload_digest,
        "downstream": effect.terms.downstream,
        "guarantee": effect.terms.guarantee,
    }
    if effect.receipt is not None:
        detail["receipt"] = effect.receipt.digest
    if more:
        detail.update(more)
    return Event(
        task.task_id,
        task.state_version,
        now,
        proof.door,
        name,
        task.scheduler_epoch,
        task.claim_generation,
        task.cancel_generation,
        task.revision,
        task.attempt_id,
        proof.compared,
        task.state,
        detail,
    )


def same_content(one: Content | None, other: Content | None) -> bool:
    return (one.digest if one is not None else None) == (other.digest if other is not None else None)
