"""Outcomes and reasons: the contract's words, in the order in which refusals come.

A door walks its guards in order and answers with the first that refuses; the order of `Outcome`'s
refusals is the order of section 3 (PROTOCOL, FENCED, CANCELLED, STALE_INPUT, then the record's state).
"""

from __future__ import annotations

import enum
from typing import Any, NoReturn

import msgspec


class Outcome(enum.StrEnum):
    # accepted
    SUBMITTED = "SUBMITTED"
    CLAIMED = "CLAIMED"
    RENEWED = "RENEWED"
    CHECKPOINTED = "CHECKPOINTED"
    STAGED = "STAGED"
    RECORDED = "RECORDED"
    COMMITTED = "COMMITTED"
    RELEASED = "RELEASED"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    PARKED = "PARKED"
    REOPENED = "REOPENED"
    REVISED = "REVISED"
    TAKEN_OVER = "TAKEN_OVER"
    DISCARDED = "DISCARDED"
    POOL_CREATED = "POOL_CREATED"
    INTAKE_OPENED = "INTAKE_OPENED"
    EPOCH_RAISED = "EPOCH_RAISED"
    POLICY_SET = "POLICY_SET"
    EXECUTE = "EXECUTE"
    REPLAY = "REPLAY"
    RESERVED = "RESERVED"
    SETTLED = "SETTLED"
    RECONCILED = "RECONCILED"
    WITHDRAWN = "WITHDRAWN"
    APPROVED = "APPROVED"
    RESOLVED = "RESOLVED"
    # refused, in order
    NOT_FOUND = "NOT_FOUND"
    PROTOCOL = "PROTOCOL"
    FENCED = "FENCED"
    CANCELLED = "CANCELLED"  # also what `cancel` answers when it did it
    STALE_INPUT = "STALE_INPUT"
    ENDED = "ENDED"
    INTAKE_CLOSED = "INTAKE_CLOSED"  # also what `close_intake` answers when it did it
    ALREADY_COMMITTED = "ALREADY_COMMITTED"
    STALE_EXECUTION = "STALE_EXECUTION"
    PAYLOAD_CONFLICT = "PAYLOAD_CONFLICT"
    DENIED = "DENIED"  # also what `deny` answers when it did it
    ABANDONED = "ABANDONED"
    APPROVAL_REQUIRED = "APPROVAL_REQUIRED"
    IN_FLIGHT = "IN_FLIGHT"
    RECONCILE = "RECONCILE"
    BUSY = "BUSY"
    PERSON = "PERSON"
    EVIDENCE = "EVIDENCE"
    TOO_EARLY = "TOO_EARLY"
    CONFLICT = "CONFLICT"
    NOT_CLAIMABLE = "NOT_CLAIMABLE"
    HELD = "HELD"
    EXHAUSTED = "EXHAUSTED"
    NOT_COMMITTED = "NOT_COMMITTED"


class Reason(enum.StrEnum):
    MISSING_EPOCH = "MISSING_EPOCH"
    OLD_PROTOCOL = "OLD_PROTOCOL"
    EPOCH = "EPOCH"
    REWOUND = "REWOUND"
    GENERATION = "GENERATION"
    OWNER = "OWNER"
    STATE = "STATE"
    VERSION = "VERSION"
    REVISION = "REVISION"
    NUMBER = "NUMBER"
    DIFFERENT_TASK = "DIFFERENT_TASK"
    NOT_YET = "NOT_YET"
    ATTEMPTS = "ATTEMPTS"
    MAX_CLAIM_AGE = "MAX_CLAIM_AGE"
    TASK = "TASK"
    POOL = "POOL"
    RESULT = "RESULT"
    EFFECT = "EFFECT"
    EFFECTS = "EFFECTS"
    RECEIPT = "RECEIPT"
    RESERVATION = "RESERVATION"
    GUARANTEE = "GUARANTEE"


class Refusal(msgspec.Struct, frozen=True):
    """The kernel's no: typed, final for this call, with what superseded the caller. Changes no record.

    `ended` is set with ENDED. `alarm` asks whoever runs the kernel to journal an alarm beside it.
    """

    outcome: Outcome
    reason: str | None = None
    current: dict[str, Any] = {}
    alarm: bool = False

    def __bool__(self) -> NoReturn:
        raise TypeError("a refusal has no truth value: compare its outcome")


class Problem(msgspec.Struct, frozen=True):
    """The kernel's "this call is wrong": raised to the caller as the exception that `code` names."""

    code: str  # INVALID, NOT_STAGED, UNSETTLED, SPAWN_CONFLICT
    field: str
    limit: str
