"""Situations of the doors of effects, and the ways to make their guards refuse (see `situations`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.effect_rules import effect_id
from fencepost.kernel.records import (
    Approval,
    Content,
    Effect,
    EffectState,
    Execution,
    LateEvidence,
    Request,
    State,
    Terms,
)
from tests.kernel.situation import (
    CLAIMED,
    FRESH,
    HELD_TOKEN,
    READY,
    Breaker,
    Situation,
    replace,
    said,
    sets,
    shows,
    speaker,
    tasks,
)
from tests.model.world import POOL, SECOND, START

HOUR = 3_600 * SECOND
PAY = Terms("pay/account", "IDEMPOTENT", 10 * SECOND, 20 * SECOND, retention_us=24 * HOUR)
SEATS = Terms("seats", "RESERVATION", 10 * SECOND, 20 * SECOND)
MAIL = Terms("smtp", "NON_REPLAYABLE", 10 * SECOND, 20 * SECOND)
PAYLOAD = encode({"amount": 12})
OTHER_PAYLOAD = encode({"amount": 13})
RECEIPT = encode({"payment": "p1"})
MAIN_ID = effect_id("namespace", "t", 2, "main", "pay")

EXECUTION = Execution(
    execution=1,
    request_id="request-of-the-execution",
    generation=2,
    attempt_id="attempt-2",
    epoch=3,
    prepared_at=START - 60 * SECOND,
    send_by=START - 50 * SECOND,
)
# Executed once, by the attempt that holds the task; beside it another effect, which is done.
MAIN = Effect(
    task_id="t",
    number=1,
    effect_id=MAIN_ID,
    pool=POOL,
    revision=2,
    node_id="main",
    slot="pay",
    payload_digest=PAYLOAD.digest,
    terms=PAY,
    state=int(EffectState.ABSENT),
    version=3,
    first_prepared_at=START - 60 * SECOND,
    changed_at=START - 40 * SECOND,
    executions=(EXECUTION,),
    absent_ground="CERTAIN",
)
OTHER = replace(
    MAIN,
    number=2,
    effect_id=effect_id("namespace", "t", 1, "main", "other"),
    revision=1,
    slot="other",
    state=int(EffectState.COMMITTED),
    absent_ground=None,
    receipt=RECEIPT,
)
EVIDENCE = LateEvidence(START, 1, 2, RECEIPT.digest, {"payment": "p1"})
APPROVAL = Approval("P", START, 3, 1)


def _with_effects(command: Any, state: EffectState, task: Any = CLAIMED, **fields: Any) -> Callable[[], Situation]:
    def make() -> Situation:
        situation = Situation(command, replace(task, effects=2))
        situation.effects = [replace(MAIN, state=int(state), **fields), OTHER]
        return situation

    return make


def _asks(kind: type, **fields: Any) -> Any:
    if kind is not k.Evidence:
        fields["epoch"] = 3
    if kind is not k.Prepare:
        fields.setdefault("effect_id", MAIN_ID)
    return kind(request_id=FRESH, claim=HELD_TOKEN, **fields)


def _decides(kind: type, **fields: Any) -> Any:
    return kind(request_id=FRESH, task_id="t", effect_id=MAIN_ID, expected_version=3, epoch=3, who="P", **fields)


ACCEPTED: dict[type, Callable[[], Situation]] = {
    k.Prepare: _with_effects(
        _asks(k.Prepare, slot="pay", payload=PAYLOAD, terms=PAY, namespace="namespace"), EffectState.ABSENT
    ),
    k.Reserve: _with_effects(
        _asks(k.Reserve, execution=1, reservation_id="r1"), EffectState.PREPARED, terms=SEATS, absent_ground=None
    ),
    k.Settle: _with_effects(_asks(k.Settle, execution=1, finding="ABSENT", why="REFUSED"), EffectState.PREPARED),
    k.Reconcile: _with_effects(
        _asks(k.Reconcile, execution=1, asked_at=START, finding="ABSENT", ground="NOT_FOUND"), EffectState.UNKNOWN
    ),
    k.Withdraw: _with_effects(_asks(k.Withdraw), EffectState.AWAITING_APPROVAL),
    k.Evidence: _with_effects(_asks(k.Evidence, execution=1, receipt=RECEIPT), EffectState.ABSENT),
    k.Approve: _with_effects(_decides(k.Approve, payload_digest=PAYLOAD.digest), EffectState.AWAITING_APPROVAL),
    k.Deny: _with_effects(_decides(k.Deny, payload_digest=PAYLOAD.digest), EffectState.AWAITING_APPROVAL),
    k.Resolve: _with_effects(
        _decides(
            k.Resolve, finding="ABSENT", ground="NOT_FOUND", asked_at=START, evidence="asked by key", reconciler=True
        ),
        EffectState.UNKNOWN,
        READY,
    ),
}


def _effect(number: int = 1, **fields: Any) -> Breaker:
    """Changes an effect; where the situation has none, the task gets the two."""

    def break_it(s: Situation) -> None:
        if not s.effects:
            s.effects = [MAIN, OTHER]
            s.set_task(effects=2)
        s.set_effect(number, **fields)

    return break_it


def _state(state: EffectState, number: int = 1) -> Breaker:
    return _effect(number, state=int(state))


def _execution(**fields: Any) -> Breaker:
    def break_it(s: Situation) -> None:
        s.set_effect(executions=tuple(replace(execution, **fields) for execution in s.effects[0].executions))

    return break_it


def _many_executions(s: Situation) -> None:
    s.set_effect(executions=tuple(replace(EXECUTION, execution=n) for n in range(1, k.MAX_EXECUTIONS + 1)))


def _many_effects(s: Situation) -> None:
    s.set_command(slot="a slot that is empty")
    s.set_task(effects=k.MAX_EFFECTS)


def _asked_for_approval(owner: str | None) -> Breaker:
    """The request id was answered APPROVAL_REQUIRED: to this attempt (None), or to somebody else."""

    def break_it(s: Situation) -> None:
        s.set_effect(terms=replace(s.effects[0].terms, approval=True))
        answer = {"outcome": "APPROVAL_REQUIRED", "effect": MAIN_ID}
        s.requests = {FRESH: Request(FRESH, owner or speaker(s), "effect.prepare", START, answer)}

    return break_it


def _person_who_has_not_seen_it(s: Situation) -> None:
    s.set_effect(evidence=(EVIDENCE,))
    s.set_command(reconciler=False, ground=None, late_evidence=0)


def _short_retention(s: Situation) -> None:
    s.set_effect(terms=replace(PAY, retention_us=30 * SECOND))


def _statement(slot: str, payload: Content = PAYLOAD) -> k.NewStatement:
    return k.NewStatement(slot, payload, "sql/ledger")


def _statement_for_a_taken_slot(s: Situation) -> None:
    if not s.effects:
        _effect()(s)
    s.set_command(statements=(_statement("pay"),))


def _too_many_statements(s: Situation) -> None:
    s.set_task(effects=k.MAX_EFFECTS)
    s.effects = [OTHER]
    s.set_command(statements=(_statement("ledger"),))


BREAKERS: dict[str, tuple[Breaker, ...]] = {
    "commit:effects-open:unsettled": (
        _state(EffectState.AWAITING_APPROVAL),
        _state(EffectState.PREPARED),
        _state(EffectState.UNKNOWN),
    ),
    "commit:slot-taken:payload-conflict": (
        _statement_for_a_taken_slot,
        sets(statements=(_statement("twice"), _statement("twice", OTHER_PAYLOAD))),
        _too_many_statements,
    ),
    "revise:effects-open:conflict": (
        _state(EffectState.AWAITING_APPROVAL),
        _state(EffectState.PREPARED),
        _state(EffectState.UNKNOWN),
    ),
    "revise:effects-done:conflict": (
        _effect(2, revision=2),
        _effect(2, revision=2, state=int(EffectState.ABANDONED)),
        _effect(2, revision=2, state=int(EffectState.ABSENT), absent_ground="NOT_FOUND"),
        _effect(2, revision=2, state=int(EffectState.DENIED), absent_ground="PERSON"),
    ),
    "prepare:transactional:invalid": (sets(terms=replace(PAY, guarantee="TRANSACTIONAL")),),
    "prepare:other-payload:payload-conflict": (
        sets(payload=OTHER_PAYLOAD),
        sets(terms=replace(PAY, downstream="pay/another-account")),
    ),
    "prepare:committed:replay": (_state(EffectState.COMMITTED),),
    "prepare:decided:denied-or-abandoned": (_state(EffectState.DENIED), _state(EffectState.ABANDONED)),
    "prepare:request-used:execute-again-or-reconcile": (
        _execution(request_id=FRESH),
        _asked_for_approval(None),
        _asked_for_approval("somebody else"),
    ),
    "prepare:prepared:in-flight": (_state(EffectState.PREPARED),),
    "prepare:unknown:reconcile": (_state(EffectState.UNKNOWN),),
    "prepare:unapproved:approval-required": (
        _state(EffectState.AWAITING_APPROVAL),
        _effect(state=int(EffectState.AWAITING_APPROVAL), approval=replace(APPROVAL, epoch=2)),
        _effect(state=int(EffectState.AWAITING_APPROVAL), approval=replace(APPROVAL, cancel_generation=0)),
    ),
    "prepare:another-under-way:busy": (
        _effect(2, state=int(EffectState.PREPARED), terms=MAIL),
        _effect(2, state=int(EffectState.UNKNOWN), terms=MAIL),
    ),
    "prepare:precondition:invalid": (
        sets(precondition="e0"),
        _effect(terms=replace(PAY, guarantee="CONDITIONAL")),
    ),
    "prepare:too-many:invalid": (_many_executions, _many_effects),
    "effect:unknown-effect:not-found": (_effect(revision=1), sets(effect_id="of another task")),
    "effect:other-execution:stale-execution": (
        sets(execution=2),
        _execution(attempt_id="attempt-1", generation=1),
        _effect(executions=()),
    ),
    "effect:asked-later-than-now:invalid": (sets(asked_at=START + HOUR),),
    "reserve:repeated:said-again": said("effect.reserve", "RESERVED"),
    "reserve:not-prepared:stale-execution": (_state(EffectState.UNKNOWN), _effect(terms=PAY)),
    "reserve:another-stored:conflict": (_execution(reservation_id="r0"), _execution(reservation_id="r1")),
    "settle:repeated:said-again": said("effect.settle", "SETTLED"),
    "settle:other-state:conflict": (
        _state(EffectState.UNKNOWN),
        _state(EffectState.ABSENT),
        _state(EffectState.COMMITTED),
        _state(EffectState.AWAITING_APPROVAL),
    ),
    "settle:absent-against-evidence:evidence-or-conflict": (
        _effect(evidence=(EVIDENCE,)),
        _execution(reservation_id="r0"),
    ),
    "reconcile:repeated:said-again": said("effect.reconcile", "RECONCILED"),
    "reconcile:other-execution:stale-execution": (sets(execution=2), _effect(executions=())),
    "reconcile:not-unknown:conflict": (
        _state(EffectState.PREPARED),
        _state(EffectState.ABSENT),
        _state(EffectState.COMMITTED),
    ),
    "reconcile:nothing-to-ask:person": (_effect(terms=MAIL), _effect(person_only=True), _short_retention),
    "reconcile:absent-without-ground:evidence-or-person-or-too-early": (
        _effect(evidence=(EVIDENCE,)),
        _execution(reservation_id="r0"),
        sets(ground=None),
        sets(ground="MOVED_ON"),
        sets(asked_at=START - 40 * SECOND),
    ),
    "withdraw:repeated:said-again": said("effect.withdraw", "WITHDRAWN"),
    "withdraw:not-awaiting:conflict": (_state(EffectState.PREPARED), _state(EffectState.DENIED)),
    "evidence:never-prepared:not-found": (shows(attempt_id="attempt-1"), sets(effect_id="of another task")),
    "evidence:no-news:recorded": (
        _state(EffectState.COMMITTED),
        _effect(evidence=(EVIDENCE,)),
        _effect(terms=replace(PAY, guarantee="READ_ONLY")),
    ),
    "decide:unknown-effect:not-found": (sets(effect_id="of another task"),),
    "decide:other-payload:payload-conflict": (sets(payload_digest=OTHER_PAYLOAD.digest),),
    "decide:other-version:conflict": (sets(expected_version=2), sets(expected_version=4)),
    "decide:not-awaiting:conflict": (_state(EffectState.PREPARED), _state(EffectState.DENIED)),
    "approve:repeated:said-again": said("approve", "APPROVED"),
    "approve:task-cancelled:cancelled": (tasks(state=int(State.CANCELLED)),),
    "deny:repeated:said-again": said("deny", "DENIED"),
    "resolve:repeated:said-again": said("resolve", "RESOLVED"),
    "resolve:not-unknown:conflict": (_state(EffectState.PREPARED), _state(EffectState.ABSENT)),
    "resolve:task-held:held": (tasks(state=int(State.CLAIMED), lease_expires_at=START + HOUR),),
    "resolve:beyond-the-reconciler:person": (
        _effect(terms=MAIL),
        sets(finding="ABANDONED"),
        _effect(person_only=True),
        _short_retention,
    ),
    "resolve:evidence-not-named:evidence": (_effect(evidence=(EVIDENCE,)), _person_who_has_not_seen_it),
    "resolve:absent-without-ground:conflict-or-person-or-too-early": (
        _execution(reservation_id="r0"),
        sets(ground="MOVED_ON"),
        sets(asked_at=START - 40 * SECOND),
    ),
}
