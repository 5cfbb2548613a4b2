"""What a claim's holder says of an execution: reserve, settle, reconcile, withdraw; and late evidence.

claim.v1, section 5. Every change of an effect moves its task's record.
"""

from __future__ import annotations

from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.digests import decode, short_hash
from fencepost.kernel.effect_rules import (
    ABANDONED,
    ABSENT,
    AWAITING_APPROVAL,
    COMMITTED,
    DENIED,
    PREPARED,
    UNKNOWN,
    moved,
    shown,
)
from fencepost.kernel.fence import FENCE_HEAD, FENCE_TAIL, FOUND_TASK, PROTOCOL_ONLY, Compare, Context, Guard
from fencepost.kernel.operations import Accepted, Operation, effects_of, guarded, repeat_guard, say
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.prepare import write_effect
from fencepost.kernel.records import Effect, EffectState, Guarantee, LateEvidence, LogEntry
from fencepost.kernel.writes import Decision, Proof, WriteSet

# reserve, settle, reconcile, withdraw -----------------------------------------------------------


def named(c: Context) -> Effect:
    effect = rules.find(effects_of(c, c.task), c.command.effect_id)
    assert effect is not None
    return effect


def found_effect(c: Context) -> Any:
    effect = rules.find(effects_of(c, c.task), c.command.effect_id)
    if effect is None or (c.claim is not None and effect.revision != c.task.revision):
        return Refusal(Outcome.NOT_FOUND, Reason.EFFECT, {"effect_id": c.command.effect_id})
    return None


def _stale(effect: Effect) -> Refusal:
    return Refusal(Outcome.STALE_EXECUTION, None, shown(effect))


def _own_execution(c: Context) -> Any:
    """Only by the attempt that prepared this execution, and only while it is the latest."""
    effect = named(c)
    number = c.command.execution
    if number != len(effect.executions) or not effect.executions:
        return _stale(effect)
    if rules.latest(effect).attempt_id != c.claim.attempt_id:
        return _stale(effect)
    return None


def _latest_execution(c: Context) -> Any:
    effect = named(c)
    if c.command.execution != len(effect.executions) or not effect.executions:
        return _stale(effect)
    return None


def conflict(effect: Effect, reason: str = Reason.STATE) -> Refusal:
    return Refusal(Outcome.CONFLICT, reason, shown(effect))


def _reserve_prepared(c: Context) -> Any:
    effect = named(c)
    if effect.terms.guarantee != Guarantee.RESERVATION:
        return Problem("INVALID", "reservation_id", f"is for RESERVATION; this effect is {effect.terms.guarantee}")
    if effect.state != PREPARED:
        return _stale(effect)
    return None


def _reserve_once(c: Context) -> Any:
    effect = named(c)
    stored = rules.latest(effect).reservation_id
    if stored is None:
        return None
    if stored == c.command.reservation_id:
        return Decision(Accepted(Outcome.RESERVED, c.task, info(effect), changed=False))
    return Refusal(Outcome.CONFLICT, Reason.RESERVATION, {"reservation_id": stored, **shown(effect)})


def _reserve_act(c: Context, proof: Proof) -> Decision:
    effect = named(c)
    executions = rules.with_latest(effect, reservation_id=c.command.reservation_id)
    effect = moved(effect, c.now, executions=executions)
    writes = guarded(c, proof)
    after = write_effect(c, writes, effect, "effect_reserved", {"reservation": c.command.reservation_id})
    return say(c, writes, "effect.reserve", Outcome.RESERVED, after, info(effect))


def info(effect: Effect) -> dict[str, Any]:
    return {
        "effect_id": effect.effect_id,
        "slot": effect.slot,
        "state": EffectState(effect.state).name,
        "version": effect.version,
        "execution": len(effect.executions),
    }


def _already_so(c: Context, effect: Effect, outcome: Outcome) -> Any:
    """What the record already says is said again; a second, different receipt is two effects, and an alarm."""
    command, state = c.command, effect.state
    if command.finding == "HAPPENED" and state == COMMITTED:
        if rules.same_content(effect.receipt, command.receipt):
            return Decision(Accepted(outcome, c.task, info(effect), changed=False))
        return Refusal(Outcome.CONFLICT, Reason.RECEIPT, shown(effect))
    if command.finding == "ABSENT" and state == ABSENT:
        return Decision(Accepted(outcome, c.task, info(effect), changed=False))
    return None


def _settle_state(c: Context) -> Any:
    """PREPARED takes any finding, UNKNOWN takes HAPPENED; what the record says already is answered again."""
    command, effect = c.command, named(c)
    already = _already_so(c, effect, Outcome.SETTLED)
    if already is not None:
        return already
    if effect.state == PREPARED or (effect.state == UNKNOWN and command.finding == "HAPPENED"):
        return None
    if effect.state == UNKNOWN and command.finding == "UNKNOWN":
        if command.why == rules.STORED_FAILURE and not effect.repeat_closed:
            return None
        return Decision(Accepted(Outcome.SETTLED, c.task, info(effect), changed=False))
    return conflict(effect)


def _settle_absent(c: Context) -> Any:
    """Even the sender's own ABSENT does not stand against late evidence, nor beside a stored reservation."""
    command, effect = c.command, named(c)
    if command.finding != "ABSENT":
        return None
    if rules.contested(effect):
        return Refusal(Outcome.EVIDENCE, None, {"late_evidence": len(effect.evidence), **shown(effect)})
    reservation = rules.latest(effect).reservation_id
    if reservation is not None and command.why != rules.RESERVATION_CANCELLED:
        return Refusal(Outcome.CONFLICT, Reason.RESERVATION, {"reservation_id": reservation, **shown(effect)})
    return None


def _says_nothing(effect: Effect, why: str | None) -> str | None:
    """Why the latest execution's ABSENT leaves the effect UNKNOWN; None: it is ABSENT."""
    execution = rules.latest(effect)
    if execution.repeats:
        return "a repeat did nothing, which says nothing about the execution that it repeated"
    if why == rules.PRECONDITION:
        for earlier in effect.executions[:-1]:
            if earlier.precondition == execution.precondition:
                return "the precondition was false, and an earlier execution under it may be why"
    return None


def _settle_act(c: Context, proof: Proof) -> Decision:
    command, effect = c.command, named(c)
    writes = guarded(c, proof)
    if command.finding == "HAPPENED":
        effect = happened(c, writes, effect, "effect.settle")
        name = "effect_committed"
    else:
        nothing = _says_nothing(effect, command.why) if command.finding == "ABSENT" else None
        if command.finding == "ABSENT" and nothing is None:
            ground = rules.weakest(effect.absent_ground, "CERTAIN")
            note = command.note or command.why
            effect = moved(effect, c.now, state=int(ABSENT), absent_ground=ground, note=note)
            name = "effect_absent"
        else:
            closed = effect.repeat_closed or command.why == rules.STORED_FAILURE
            note = nothing or command.note or command.why
            effect = moved(effect, c.now, state=int(UNKNOWN), repeat_closed=closed, note=note)
            name = "effect_unknown"
    after = write_effect(c, writes, effect, name, {"why": command.why} if command.why else None)
    return say(c, writes, "effect.settle", Outcome.SETTLED, after, info(effect))


def happened(c: Context, writes: WriteSet, effect: Effect, door: str) -> Effect:
    """COMMITTED, with the receipt that came along. A late report of another receipt makes it two effects."""
    command = c.command
    if command.receipt is not None:
        for late in effect.evidence:
            if late.receipt_digest not in (None, command.receipt.digest):
                writes.log.append(_two_effects(c, effect, door, late.receipt_digest or ""))
                break
    return moved(
        effect, c.now, state=int(COMMITTED), receipt=command.receipt, etag=command.etag, note=None, absent_ground=None
    )


def _reconcile_state(c: Context) -> Any:
    effect = named(c)
    already = _already_so(c, effect, Outcome.RECONCILED)
    if already is not None:
        return already
    return None if effect.state == UNKNOWN else conflict(effect)


def asked_before_now(c: Context) -> Any:
    if c.command.asked_at > c.now:
        return Problem("INVALID", "asked_at", "lies after the store's now: it is the time of the answer that was read")
    return None


def _reconcile_person(c: Context) -> Any:
    effect = named(c)
    if rules.ASK in rules.open_ways(effect, c.now) or effect.terms.guarantee == Guarantee.READ_ONLY:
        return None
    return Refusal(Outcome.PERSON, Reason.GUARANTEE, shown(effect))


def _reconcile_absent(c: Context) -> Any:
    command = c.command
    if command.finding == "STILL_UNKNOWN" and command.ground is not None:
        if command.ground != rules.MOVED_ON or named(c).terms.guarantee != Guarantee.CONDITIONAL:
            return Problem("INVALID", "ground", "STILL_UNKNOWN has none but MOVED_ON, of a CONDITIONAL effect")
    if command.finding != "ABSENT":
        return None
    ground = rules.absent(named(c), command.ground, command.asked_at, person=False)
    return None if isinstance(ground, str) else ground


def _reconcile_act(c: Context, proof: Proof) -> Decision:
    command, effect = c.command, named(c)
    writes = guarded(c, proof)
    if command.finding == "HAPPENED":
        effect = happened(c, writes, effect, "effect.reconcile")
        name = "effect_committed"
    elif command.finding == "ABSENT":
        found = rules.absent(effect, command.ground, command.asked_at, person=False)
        assert isinstance(found, str)
        ground = rules.weakest(effect.absent_ground, found)
        effect = moved(effect, c.now, state=int(ABSENT), absent_ground=ground, note=command.note or command.ground)
        name = "effect_absent"
    elif command.ground == rules.MOVED_ON:
        # It can no longer be told from what the downstream remembers: from now on this is a person's.
        effect = moved(effect, c.now, person_only=True, note=command.note or "its history is not complete")
        name = "effect_unknown"
    else:
        return Decision(Accepted(Outcome.RECONCILED, c.task, info(effect), changed=False))
    after = write_effect(c, writes, effect, name, {"ground": command.ground} if command.ground else None)
    return say(c, writes, "effect.reconcile", Outcome.RECONCILED, after, info(effect))


def _withdraw_state(c: Context) -> Any:
    effect = named(c)
    return None if effect.state == AWAITING_APPROVAL else conflict(effect)


def _withdraw_act(c: Context, proof: Proof) -> Decision:
    effect = moved(
        named(c),
        c.now,
        state=int(DENIED),
        approval=None,
        decided_by=c.task.owner_id,
        note=c.command.note or "withdrawn",
    )
    writes = guarded(c, proof)
    after = write_effect(c, writes, effect, "effect_denied", {"who": c.task.owner_id, "withdrawn": True})
    return say(c, writes, "effect.withdraw", Outcome.WITHDRAWN, after, info(effect))


# evidence ---------------------------------------------------------------------------------------


def report_of(command: Any) -> k.Evidence | None:
    """A refused settle or reconcile is still a report, where it says that the effect happened."""
    if command.finding != "HAPPENED":
        return None
    return k.Evidence(
        request_id=command.request_id,
        protocol=command.protocol,
        claim=command.claim,
        effect_id=command.effect_id,
        execution=command.execution,
        receipt=command.receipt,
        etag=command.etag,
    )


def _prepared_once(c: Context) -> Any:
    """Compares nothing else: it takes rights away and grants none."""
    effect = rules.find(effects_of(c, c.task), c.command.effect_id)
    if effect is not None and any(e.attempt_id == c.claim.attempt_id for e in effect.executions):
        return None
    return Refusal(Outcome.NOT_FOUND, Reason.EFFECT, {"effect_id": c.command.effect_id})


def _evidence_news(c: Context) -> Any:
    """Said already, about a COMMITTED effect, or about one that only reads: nothing changes.

    Another receipt than the kept one is an alarm.
    """
    command, effect = c.command, named(c)
    log: tuple[LogEntry, ...] = ()
    if effect.terms.guarantee == Guarantee.READ_ONLY:
        pass  # that something was read is nothing that anybody has to decide about
    elif effect.state == COMMITTED:
        kept, said = effect.receipt, command.receipt
        if kept is not None and said is not None and kept.digest != said.digest:
            log = (_two_effects(c, effect, "evidence", kept.digest),)
    else:
        digest = command.receipt.digest if command.receipt is not None else None
        if (command.execution, digest) not in [(e.execution, e.receipt_digest) for e in effect.evidence]:
            # Beyond the limit the oldest that was decided about makes room; while none is, the effect is open anyhow.
            if len(effect.evidence) < k.MAX_EVIDENCE or effect.evidence_settled:
                return None
    return Decision(Accepted(Outcome.RECORDED, c.task, info(effect), changed=False), log=log)


def _two_effects(c: Context, effect: Effect, door: str, kept: str) -> LogEntry:
    command = c.command
    return LogEntry(
        "alarm",
        c.now,
        c.pool.name,
        c.task.task_id,
        door,
        Outcome.CONFLICT.value,
        Reason.RECEIPT.value,
        short_hash(c.claim.attempt_id),
        c.claim.generation,
        {
            "effect": effect.effect_id,
            "slot": effect.slot,
            "execution": command.execution,
            "receipt": command.receipt.digest,
            "kept_receipt": kept,
        },
    )


def _evidence_act(c: Context, proof: Proof) -> Decision:
    command, effect = c.command, named(c)
    receipt = command.receipt
    kept = LateEvidence(
        at=c.now,
        execution=command.execution,
        generation=c.claim.generation,
        receipt_digest=receipt.digest if receipt is not None else None,
        receipt=decode(receipt) if receipt is not None and not receipt.binary else None,
        etag=command.etag,
    )
    fields: dict[str, Any] = {"evidence": (*effect.evidence, kept)}
    if len(effect.evidence) >= k.MAX_EVIDENCE:
        fields.update(evidence=(*effect.evidence[1:], kept), evidence_settled=effect.evidence_settled - 1)
    if effect.state in (ABSENT, ABANDONED, DENIED, AWAITING_APPROVAL):
        fields.update(state=int(UNKNOWN), approval=None, note="late evidence says that it happened")
    before = EffectState(effect.state).name
    effect = moved(effect, c.now, **fields)
    writes = WriteSet(proof, c.pool.name, None)
    # The event shows the attempt that holds the task; whose report it was stands in the detail.
    more = {"from": before, "by": short_hash(c.claim.attempt_id), "by_generation": c.claim.generation}
    after = write_effect(c, writes, effect, "effect_evidence", more)
    return Decision(Accepted(Outcome.RECORDED, after, info(effect)), writes)


def _guard(id: str, check: Any, says: str, compares: int = 0) -> Guard:
    return Guard(id, compares, check, says)


def _repeated(door: str) -> Guard:
    return _guard(f"{door.removeprefix('effect.')}:repeated:said-again", repeat_guard(door), "the request id is new")


FOUND_EFFECT = _guard("effect:unknown-effect:not-found", found_effect, "the effect is one of this task's revision")
OWN_EXECUTION = _guard(
    "effect:other-execution:stale-execution",
    _own_execution,
    "the execution is the effect's latest, and this attempt prepared it",
    Compare.EXECUTION,
)
ASKED_AT = _guard("effect:asked-later-than-now:invalid", asked_before_now, "asked_at is not later than now")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        k.Reserve,
        "effect.reserve",
        (
            *FENCE_HEAD,
            _repeated("effect.reserve"),
            *FENCE_TAIL,
            FOUND_EFFECT,
            OWN_EXECUTION,
            _guard("reserve:not-prepared:stale-execution", _reserve_prepared, "it is a RESERVATION, and PREPARED"),
            _guard("reserve:another-stored:conflict", _reserve_once, "no reservation is stored for this execution"),
        ),
        _reserve_act,
    ),
    Operation(
        k.Settle,
        "effect.settle",
        (
            *FENCE_HEAD,
            _repeated("effect.settle"),
            *FENCE_TAIL,
            FOUND_EFFECT,
            OWN_EXECUTION,
            _guard(
                "settle:other-state:conflict",
                _settle_state,
                "the effect is PREPARED, or UNKNOWN and the finding HAPPENED",
            ),
            _guard(
                "settle:absent-against-evidence:evidence-or-conflict",
                _settle_absent,
                "ABSENT meets neither late evidence nor a stored reservation",
            ),
        ),
        _settle_act,
        report=report_of,
    ),
    Operation(
        k.Reconcile,
        "effect.reconcile",
        (
            *FENCE_HEAD,
            _repeated("effect.reconcile"),
            *FENCE_TAIL,
            FOUND_EFFECT,
            _guard(
                "reconcile:other-execution:stale-execution",
                _latest_execution,
                "the execution is the effect's latest",
                Compare.EXECUTION,
            ),
            _guard("reconcile:not-unknown:conflict", _reconcile_state, "the effect is UNKNOWN"),
            ASKED_AT,
            _guard("reconcile:nothing-to-ask:person", _reconcile_person, "the downstream can be asked, in its window"),
            _guard(
                "reconcile:absent-without-ground:evidence-or-person-or-too-early",
                _reconcile_absent,
                "ABSENT has a ground that the guarantee allows, and was asked late enough for it",
            ),
        ),
        _reconcile_act,
        report=report_of,
    ),
    Operation(
        k.Withdraw,
        "effect.withdraw",
        (
            *FENCE_HEAD,
            _repeated("effect.withdraw"),
            *FENCE_TAIL,
            FOUND_EFFECT,
            _guard("withdraw:not-awaiting:conflict", _withdraw_state, "the effect is AWAITING_APPROVAL"),
        ),
        _withdraw_act,
    ),
    Operation(
        k.Evidence,
        "evidence",
        (
            FOUND_TASK,
            PROTOCOL_ONLY,
            _guard(
                "evidence:never-prepared:not-found",
                _prepared_once,
                "this attempt once prepared this effect",
                Compare.PREPARER,
            ),
            _guard("evidence:no-news:recorded", _evidence_news, "it says what is not known or kept yet"),
        ),
        _evidence_act,
    ),
)
