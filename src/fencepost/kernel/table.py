"""The transition table: how a task's record may move, and by which door. Data that a person can read aloud.

The kernel does not consult it. The reference page and the state diagram are made from it; the tests drive the kernel
through every row, and let the model search fail on a transition that no row allows.
"""

from __future__ import annotations

import msgspec

from fencepost.kernel.records import End, State


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
)
