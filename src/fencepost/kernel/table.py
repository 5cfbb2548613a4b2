"""The transition tables: how a task's record, and an effect's, may move, by which door, and what prepare answers.

Data that a person can read aloud. The kernel does not consult it. The reference page and the state diagrams are made
from it; the tests drive the kernel through every row, and let the model search fail on a transition that no row allows.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fencepost.kernel.records import EffectState, End, State


class Transition(msgspec.Struct, frozen=True):
    """One accepted change of one task record.

    `subject` is whose record it is: the task that the call names, a new one, a successor, or a parent.
    `events` are written in this order, and each moves the state version by one. `end` is how the attempt ended.
    """

    door: str
    subject: str  # "task", "new task", "successor", "parent"
    before: State | None
    condition: str
    after: State
    events: tuple[str, ...]
    end: End | None = None
    charged: bool = False


_READY, _CLAIMED, _BLOCKED = State.READY, State.CLAIMED, State.BLOCKED
_PARKED, _CANCELLED, _COMMITTED = State.PARKED, State.CANCELLED, State.COMMITTED


def _row(
    door: str,
    before: State | None,
    condition: str,
    after: State,
    *events: str,
    end: End | None = None,
    charged: bool = False,
    subject: str = "task",
) -> Transition:
    return Transition(door, subject, before, condition, after, events, end, charged)


def _open_parents(door: str) -> tuple[Transition, ...]:
    """A successor is added to a task that is not COMMITTED: its version moves, so that its commit cannot miss it."""
    return tuple(
        _row(door, state, "it is named as a parent", state, "successor_added", subject="parent")
        for state in (_READY, _CLAIMED, _BLOCKED, _PARKED, _CANCELLED)
    )


def _new_tasks(door: str) -> tuple[Transition, ...]:
    return (
        _row(door, None, "every parent is COMMITTED, or it has none", _READY, "submitted", subject="new task"),
        _row(door, None, "a parent is open", _BLOCKED, "submitted", subject="new task"),
    )


RAN_OUT = "the lease (and the pool's grace) ran out under the present epoch, attempts are left"
USED_UP = "the lease (and the pool's grace) ran out under the present epoch, attempts are used up"
OLDER = "an older epoch granted the claim"
WAITS = "it is to wait, and an effect is left that only a person can lead on"
LAST = "the last decision that it waited for"
NOT_LAST = "it does not wait, or another decision is left"
FINDINGS = (
    ("it happened", "effect_committed"),
    ("it did not happen", "effect_absent"),
    ("nobody can tell, and it is given up", "effect_abandoned"),
)


def _effects() -> Iterator[Transition]:
    """Changes of a task's effects move its version; its state, only where it waited for the decision."""
    asked = (
        ("effect.prepare", "it may be sent", "effect_prepared"),
        ("effect.prepare", "a person has to approve it first", "effect_awaiting"),
        ("effect.reserve", "it is reserved", "effect_reserved"),
        ("effect.settle", "it happened", "effect_committed"),
        ("effect.settle", "it did not happen", "effect_absent"),
        ("effect.settle", "nobody can tell", "effect_unknown"),
        ("effect.reconcile", "it happened", "effect_committed"),
        ("effect.reconcile", "it did not happen", "effect_absent"),
        ("effect.reconcile", "the downstream can no longer tell", "effect_unknown"),
        ("effect.withdraw", "it awaits approval", "effect_denied"),
    )
    for door, condition, event in asked:
        yield _row(door, _CLAIMED, condition, _CLAIMED, event)
    for state in (_READY, _CLAIMED, _PARKED, _CANCELLED, _COMMITTED):
        yield _row("evidence", state, "a late report says that it happened", state, "effect_evidence")
    for door, event, states in (
        ("approve", "effect_approved", (_READY, _CLAIMED, _PARKED)),
        ("deny", "effect_denied", (_READY, _CLAIMED, _PARKED, _CANCELLED)),
    ):
        for state in states:
            yield _row(door, state, NOT_LAST, state, event)
        yield _row(door, _PARKED, LAST, _READY, event)
    for finding, event in FINDINGS:
        for state in (_READY, _CLAIMED, _PARKED, _CANCELLED, _COMMITTED):
            yield _row("resolve", state, f"{finding}; {NOT_LAST}", state, event)
        yield _row("resolve", _PARKED, f"{finding}; {LAST}", _READY, event)


TRANSITIONS: tuple[Transition, ...] = (
    *_new_tasks("submit"),
    *_open_parents("submit"),
    # claim
    _row("claim", _READY, "its available_at has come", _CLAIMED, "attempt_started"),
    _row("claim", _CLAIMED, RAN_OUT, _CLAIMED, "attempt_ended", "attempt_started", end=End.EXPIRED, charged=True),
    _row("claim", _CLAIMED, OLDER, _CLAIMED, "attempt_ended", "attempt_started", end=End.EXPIRED),
    _row("claim", _CLAIMED, USED_UP, _PARKED, "attempt_ended", end=End.EXPIRED, charged=True),
    # a claim's holder
    _row("renew", _CLAIMED, "the lease runs", _CLAIMED, "attempt_renewed"),
    _row("renew", _CLAIMED, "the lease ran out and nobody took it back", _CLAIMED, "attempt_renewed"),
    _row("checkpoint", _CLAIMED, "the number is above the attempt's newest", _CLAIMED, "checkpoint_saved"),
    _row("commit", _CLAIMED, "the fence is passed", _COMMITTED, "result_committed", end=End.COMMITTED),
    _row("commit", _BLOCKED, "it was the last open parent", _READY, "parent_committed", subject="successor"),
    _row("commit", _BLOCKED, "another parent is open", _BLOCKED, "parent_committed", subject="successor"),
    _row("commit", _CANCELLED, "cancelled, and counted down", _CANCELLED, "parent_committed", subject="successor"),
    *_new_tasks("commit"),
    *_open_parents("commit"),
    _row(
        "commit",
        _BLOCKED,
        "it was the last open parent, and a spawned task names it",
        _READY,
        "parent_committed",
        "successor_added",
        subject="successor",
    ),
    _row(
        "commit",
        _BLOCKED,
        "another parent is open, and a spawned task names it",
        _BLOCKED,
        "parent_committed",
        "successor_added",
        subject="successor",
    ),
    _row(
        "commit",
        _CANCELLED,
        "cancelled, counted down, and a spawned task names it",
        _CANCELLED,
        "parent_committed",
        "successor_added",
        subject="successor",
    ),
    _row("release", _CLAIMED, "the fence is passed", _READY, "attempt_ended", end=End.RELEASED),
    _row("release", _CLAIMED, WAITS, _PARKED, "attempt_ended", end=End.RELEASED),
    _row(
        "fail", _CLAIMED, "it may be retried, attempts are left", _READY, "attempt_ended", end=End.FAILED, charged=True
    ),
    _row(
        "fail",
        _CLAIMED,
        "it may be retried, attempts are used up",
        _PARKED,
        "attempt_ended",
        end=End.FAILED,
        charged=True,
    ),
    _row("fail", _CLAIMED, "the error is final", _PARKED, "attempt_ended", end=End.FAILED, charged=True),
    # loops
    _row("expire", _CLAIMED, RAN_OUT, _READY, "attempt_ended", end=End.EXPIRED, charged=True),
    _row("expire", _CLAIMED, OLDER, _READY, "attempt_ended", end=End.EXPIRED),
    _row("expire", _CLAIMED, USED_UP, _PARKED, "attempt_ended", end=End.EXPIRED, charged=True),
    # people
    _row("cancel", _BLOCKED, "", _CANCELLED, "task_cancelled"),
    _row("cancel", _READY, "", _CANCELLED, "task_cancelled"),
    _row("cancel", _PARKED, "", _CANCELLED, "task_cancelled"),
    _row("cancel", _CLAIMED, "", _CANCELLED, "attempt_ended", "task_cancelled", end=End.CANCELLED),
    _row("cancel", _BLOCKED, "its graph says on_failure: cancel", _CANCELLED, "task_cancelled", subject="successor"),
    _row("reopen", _CANCELLED, "no parent is open", _READY, "task_reopened"),
    _row("reopen", _CANCELLED, "a parent is open", _BLOCKED, "task_reopened"),
    _row("reopen", _PARKED, "", _READY, "task_reopened"),
    _row("revise", _BLOCKED, "", _BLOCKED, "input_revised"),
    _row("revise", _READY, "", _READY, "input_revised"),
    _row("revise", _PARKED, "", _READY, "input_revised"),
    _row("revise", _CLAIMED, "", _READY, "attempt_ended", "input_revised", end=End.SUPERSEDED),
    _row("take_over", _CLAIMED, "", _READY, "attempt_ended", end=End.EXPIRED),
    _row("discard", _CLAIMED, "the attempt has a staged result", _CLAIMED, "staged_discarded"),
    *_effects(),
)


class EffectTransition(msgspec.Struct, frozen=True):
    """One accepted change of one effect. `event` is that of its task's record, which carries it."""

    door: str
    before: EffectState | None
    condition: str
    after: EffectState
    event: str


_AWAITING, _UNKNOWN, _PREPARED = EffectState.AWAITING_APPROVAL, EffectState.UNKNOWN, EffectState.PREPARED
_HAPPENED, _ABSENT = EffectState.COMMITTED, EffectState.ABSENT
_DENIED, _ABANDONED = EffectState.DENIED, EffectState.ABANDONED
_effect = EffectTransition

EFFECT_TRANSITIONS: tuple[EffectTransition, ...] = (
    _effect("effect.prepare", None, "the slot is empty", _PREPARED, "effect_prepared"),
    _effect("effect.prepare", None, "the slot is empty, an approval is declared", _AWAITING, "effect_awaiting"),
    _effect("effect.prepare", _AWAITING, "approved, which this uses up", _PREPARED, "effect_prepared"),
    _effect("effect.prepare", _UNKNOWN, "a repeat, while REPEAT is open", _PREPARED, "effect_prepared"),
    _effect("effect.prepare", _ABSENT, "execution + 1", _PREPARED, "effect_prepared"),
    _effect("effect.prepare", _ABSENT, "NON_REPLAYABLE, or an approval is declared", _AWAITING, "effect_awaiting"),
    _effect("effect.reserve", _PREPARED, "RESERVATION, none is stored", _PREPARED, "effect_reserved"),
    _effect("effect.settle", _PREPARED, "HAPPENED", _HAPPENED, "effect_committed"),
    _effect("effect.settle", _PREPARED, "ABSENT", _ABSENT, "effect_absent"),
    _effect("effect.settle", _PREPARED, "UNKNOWN", _UNKNOWN, "effect_unknown"),
    _effect("effect.settle", _PREPARED, "ABSENT, of an execution that repeated one", _UNKNOWN, "effect_unknown"),
    _effect(
        "effect.settle",
        _PREPARED,
        "ABSENT by a precondition that an earlier execution carried, too",
        _UNKNOWN,
        "effect_unknown",
    ),
    _effect("effect.settle", _UNKNOWN, "HAPPENED", _HAPPENED, "effect_committed"),
    _effect("effect.settle", _UNKNOWN, "a stored failure, which closes REPEAT", _UNKNOWN, "effect_unknown"),
    _effect("effect.reconcile", _UNKNOWN, "HAPPENED", _HAPPENED, "effect_committed"),
    _effect("effect.reconcile", _UNKNOWN, "ABSENT, on a ground that counts", _ABSENT, "effect_absent"),
    _effect("effect.reconcile", _UNKNOWN, "moved on, and its history is not complete", _UNKNOWN, "effect_unknown"),
    _effect("effect.withdraw", _AWAITING, "", _DENIED, "effect_denied"),
    *(
        _effect(door, _PREPARED, "its sender's attempt ends", _UNKNOWN, "attempt_ended")
        for door in ("release", "fail", "expire", "claim", "cancel", "take_over")
    ),
    _effect("revise", _PREPARED, "READ_ONLY; others refuse the revise", _UNKNOWN, "attempt_ended"),
    _effect("commit", None, "TRANSACTIONAL: executed by the commit itself", _HAPPENED, "result_committed"),
    _effect("commit", _PREPARED, "READ_ONLY; others refuse the commit", _ABSENT, "result_committed"),
    _effect("commit", _UNKNOWN, "READ_ONLY; others refuse the commit", _ABSENT, "result_committed"),
    _effect("commit", _AWAITING, "READ_ONLY; others refuse the commit", _DENIED, "result_committed"),
    _effect("approve", _AWAITING, "", _AWAITING, "effect_approved"),
    _effect("deny", _AWAITING, "", _DENIED, "effect_denied"),
    _effect("resolve", _UNKNOWN, "HAPPENED", _HAPPENED, "effect_committed"),
    _effect("resolve", _UNKNOWN, "ABSENT", _ABSENT, "effect_absent"),
    _effect("resolve", _UNKNOWN, "ABANDONED, by a person", _ABANDONED, "effect_abandoned"),
    *(
        _effect("evidence", before, "a late HAPPENED", _UNKNOWN, "effect_evidence")
        for before in (_UNKNOWN, _ABSENT, _ABANDONED, _DENIED, _AWAITING)
    ),
    _effect("evidence", _PREPARED, "a late HAPPENED, kept beside it", _PREPARED, "effect_evidence"),
)
# What any change of an effect is one of.
EFFECT_MOVES = frozenset((row.door, row.before, row.after) for row in EFFECT_TRANSITIONS)


class PrepareRow(msgspec.Struct, frozen=True):
    """What prepare answers to the same payload digest and downstream; another one is PAYLOAD_CONFLICT, once bound."""

    holds: EffectState | None
    condition: str
    answer: str
    says: str = ""


PREPARE: tuple[PrepareRow, ...] = (
    PrepareRow(None, "", "EXECUTE", "payload, downstream and guarantee are bound for good"),
    PrepareRow(None, "an approval is declared", "APPROVAL_REQUIRED", "they are bound for good"),
    PrepareRow(_AWAITING, "approved", "EXECUTE", "this uses the approval up, whichever attempt asks"),
    PrepareRow(_AWAITING, "not approved, or the approval is void", "APPROVAL_REQUIRED"),
    PrepareRow(_DENIED, "", "DENIED"),
    PrepareRow(_ABANDONED, "", "ABANDONED"),
    PrepareRow(_HAPPENED, "", "REPLAY", "the receipt, no call"),
    PrepareRow(_PREPARED, "the request id of this execution", "EXECUTE", "the `send_by` of the first answer"),
    PrepareRow(_PREPARED, "another request id", "IN_FLIGHT", "the execution: settle it UNKNOWN if its sender is gone"),
    PrepareRow(_UNKNOWN, "", "RECONCILE", "what is open: ASK, REPEAT or PERSON, and the store's time"),
    PrepareRow(_UNKNOWN, "with `repeat`, where that is open", "EXECUTE", "execution + 1, the same key and payload"),
    PrepareRow(_ABSENT, "", "EXECUTE", "execution + 1, a new precondition"),
    PrepareRow(_ABSENT, "NON_REPLAYABLE, or an approval is declared", "APPROVAL_REQUIRED"),
    PrepareRow(_ABSENT, "a request id that an earlier execution used", "RECONCILE", "it starts none, in any row"),
)
