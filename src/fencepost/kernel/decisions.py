"""What people say of effects, and the reconciler: approve, deny, resolve (claim.v1, section 5).

They hold no claim: they present the pool's epoch, and the version of the effect that they saw.
"""

from __future__ import annotations

from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.effect_rules import ABANDONED, ABSENT, AWAITING_APPROVAL, COMMITTED, DENIED, UNKNOWN, moved, shown
from fencepost.kernel.effects import ASKED_AT, conflict, info, named
from fencepost.kernel.fence import EPOCH, FOUND_TASK, PROTOCOL, Compare, Context, Guard, held_by
from fencepost.kernel.operations import Operation, effects_of, guarded, repeat_guard, say
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.prepare import write_effect
from fencepost.kernel.records import CANCELLED, CLAIMED, PARKED, READY, Approval, Effect, Task
from fencepost.kernel.tasks import WAITING
from fencepost.kernel.writes import Decision, Proof, WriteSet


def _put_back(c: Context, effect: Effect) -> dict[str, Any]:
    """A task that waits for people is READY again once the last of its effects that only they can decide is decided;
    in every other state it is left alone."""
    task: Task = c.task
    if task.state != PARKED or task.park_reason != WAITING:
        return {}
    for other in effects_of(c, c.task):
        standing = effect if other.number == effect.number else other
        if other.revision == task.revision and rules.waits(standing, c.now, c.pool.epoch, task.cancel_generation):
            return {}
    return {"state": READY, "park_reason": None, "available_at": min(task.available_at, c.now)}


def _found(c: Context) -> Any:
    if rules.find(effects_of(c, c.task), c.command.effect_id) is None:
        return Refusal(Outcome.NOT_FOUND, Reason.EFFECT, {"effect_id": c.command.effect_id})
    return None


def _payload(c: Context) -> Any:
    effect = named(c)
    if effect.payload_digest != c.command.payload_digest:
        return Refusal(Outcome.PAYLOAD_CONFLICT, None, {"payload": effect.payload_digest, **shown(effect)})
    return None


def _version(c: Context) -> Any:
    effect = named(c)
    return None if effect.version == c.command.expected_version else conflict(effect, Reason.VERSION)


def _awaiting(c: Context) -> Any:
    effect = named(c)
    return None if effect.state == AWAITING_APPROVAL else conflict(effect)


def _not_cancelled(c: Context) -> Any:
    """An approval is void after a cancel, so none is taken while the task is cancelled."""
    if c.task.state == CANCELLED:
        return Refusal(Outcome.CANCELLED, None, {"cancel_generation": c.task.cancel_generation, **shown(named(c))})
    return None


def _approve_act(c: Context, proof: Proof) -> Decision:
    approval = Approval(c.command.who, c.now, c.pool.epoch, c.task.cancel_generation)
    effect = moved(named(c), c.now, approval=approval)
    writes = guarded(c, proof)
    after = write_effect(c, writes, effect, "effect_approved", {"who": c.command.who}, **_put_back(c, effect))
    return say(c, writes, "approve", Outcome.APPROVED, after, info(effect))


def _deny_act(c: Context, proof: Proof) -> Decision:
    command = c.command
    effect = moved(
        named(c), c.now, state=int(DENIED), approval=None, decided_by=command.who, note=command.note or "denied"
    )
    writes = guarded(c, proof)
    after = write_effect(c, writes, effect, "effect_denied", {"who": command.who}, **_put_back(c, effect))
    return say(c, writes, "deny", Outcome.DENIED, after, info(effect))


# resolve ----------------------------------------------------------------------------------------


def _unknown(c: Context) -> Any:
    effect = named(c)
    return None if effect.state == UNKNOWN else conflict(effect)


def _nobody_holds_it(c: Context) -> Any:
    """Whoever holds the task decides its effects, but for what only a person may decide."""
    command, task = c.command, c.task
    if task.state != CLAIMED or task.scheduler_epoch != c.pool.epoch:
        return None
    if not command.reconciler and rules.PERSON in rules.open_ways(named(c), c.now):
        return None
    return Refusal(Outcome.HELD, None, held_by(task))


def _within_guarantee(c: Context) -> Any:
    """The reconciler asks exactly what a successor would ask."""
    command, effect = c.command, named(c)
    if not command.reconciler:
        return None
    if command.finding == "ABANDONED":
        return Problem("INVALID", "finding", "only a person may abandon an effect")
    if rules.ASK not in rules.open_ways(effect, c.now):
        return Refusal(Outcome.PERSON, Reason.GUARANTEE, shown(effect))
    return None


def _evidence_named(c: Context) -> Any:
    """Against late evidence a person decides only in sight of it."""
    command, effect = c.command, named(c)
    if command.finding == "HAPPENED" or not rules.contested(effect):
        return None
    if command.reconciler or command.late_evidence != len(effect.evidence):
        return Refusal(Outcome.EVIDENCE, None, {"late_evidence": len(effect.evidence), **shown(effect)})
    return None


def _absent(c: Context) -> Any:
    command = c.command
    if command.finding != "ABSENT":
        return None
    ground = rules.absent(named(c), command.ground, command.asked_at, person=not command.reconciler)
    return None if isinstance(ground, str) else ground


def _resolve_act(c: Context, proof: Proof) -> Decision:
    command, effect = c.command, named(c)
    fields: dict[str, Any] = {"decided_by": command.who, "note": command.evidence}
    if not command.reconciler:
        fields["evidence_settled"] = len(effect.evidence)
    if command.finding == "HAPPENED":
        fields.update(state=int(COMMITTED), receipt=command.receipt, etag=command.etag, absent_ground=None)
        name = "effect_committed"
    elif command.finding == "ABSENT":
        ground = rules.absent(effect, command.ground, command.asked_at, person=not command.reconciler)
        assert isinstance(ground, str)
        fields.update(state=int(ABSENT), absent_ground=rules.weakest(effect.absent_ground, ground))
        name = "effect_absent"
    else:
        fields["state"] = int(ABANDONED)
        name = "effect_abandoned"
    effect = moved(effect, c.now, **fields)
    writes: WriteSet = guarded(c, proof)
    more = {"who": command.who, "reconciler": command.reconciler}
    after = write_effect(c, writes, effect, name, more, **_put_back(c, effect))
    return say(c, writes, "resolve", Outcome.RESOLVED, after, info(effect))


def _guard(id: str, check: Any, says: str, compares: int = 0) -> Guard:
    return Guard(id, compares, check, says)


FOUND = _guard("decide:unknown-effect:not-found", _found, "the effect is one of this task's")
PAYLOAD = _guard(
    "decide:other-payload:payload-conflict", _payload, "the payload digest is the bound one", Compare.PAYLOAD
)
VERSION = _guard(
    "decide:other-version:conflict", _version, "the effect stands at the expected version", Compare.VERSION
)
AWAITING = _guard("decide:not-awaiting:conflict", _awaiting, "the effect is AWAITING_APPROVAL", Compare.STATE)


def _repeated(door: str) -> Guard:
    return _guard(f"{door}:repeated:said-again", repeat_guard(door), "the request id is new")


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        k.Approve,
        "approve",
        (
            FOUND_TASK,
            PROTOCOL,
            EPOCH,
            _repeated("approve"),
            FOUND,
            PAYLOAD,
            VERSION,
            AWAITING,
            _guard("approve:task-cancelled:cancelled", _not_cancelled, "the task is not CANCELLED"),
        ),
        _approve_act,
    ),
    Operation(
        k.Deny,
        "deny",
        (FOUND_TASK, PROTOCOL, EPOCH, _repeated("deny"), FOUND, PAYLOAD, VERSION, AWAITING),
        _deny_act,
    ),
    Operation(
        k.Resolve,
        "resolve",
        (
            FOUND_TASK,
            PROTOCOL,
            EPOCH,
            _repeated("resolve"),
            FOUND,
            VERSION,
            _guard("resolve:not-unknown:conflict", _unknown, "the effect is UNKNOWN", Compare.STATE),
            ASKED_AT,
            _guard(
                "resolve:task-held:held",
                _nobody_holds_it,
                "the task is not CLAIMED under the current epoch, or only a person may decide",
            ),
            _guard(
                "resolve:beyond-the-reconciler:person",
                _within_guarantee,
                "the reconciler records only what the guarantee allows",
            ),
            _guard(
                "resolve:evidence-not-named:evidence",
                _evidence_named,
                "it did happen, or the late evidence is named",
            ),
            _guard(
                "resolve:absent-without-ground:conflict-or-person-or-too-early",
                _absent,
                "ABSENT has a ground that may be given, and was asked late enough for it",
            ),
        ),
        _resolve_act,
    ),
)
