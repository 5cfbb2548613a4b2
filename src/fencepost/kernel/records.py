"""Records of claim.v1, section 2, as values. Times are microseconds on the store's clock.

Field order is column order: a store builds a record from a row by position.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

PROTOCOL = 1


class State(enum.IntEnum):
    """Task states. READY and CLAIMED come first so that one partial index holds what is alive."""

    READY = 1
    CLAIMED = 2
    BLOCKED = 3
    PARKED = 4
    CANCELLED = 5
    COMMITTED = 6


# The same as plain numbers: every decision looks at them, and a look-up in an enum costs more than the comparison.
READY, CLAIMED, BLOCKED, PARKED = int(State.READY), int(State.CLAIMED), int(State.BLOCKED), int(State.PARKED)
CANCELLED, COMMITTED = int(State.CANCELLED), int(State.COMMITTED)


class End(enum.IntEnum):
    """How an attempt ended. NONE: it has not, or the task was never claimed."""

    NONE = 0
    COMMITTED = 1
    EXPIRED = 2
    RELEASED = 3
    FAILED = 4
    CANCELLED = 5
    SUPERSEDED = 6


END_COMMITTED = int(End.COMMITTED)


class StagedState(enum.IntEnum):
    STAGED = 1
    COMMITTED = 2
    DISCARDED = 3


class Content(msgspec.Struct, frozen=True, gc=False):
    """A body: encoded JSON, or raw bytes (`binary`). `digest` covers the value, not the spelling."""

    data: bytes
    digest: str
    binary: bool = False


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool's policy. Durations are seconds."""

    max_ttl: float = 3600.0
    max_claim_age: float = 86400.0
    max_attempts: int = 5
    backoff_base: float = 2.0
    backoff_max: float = 300.0
    backoff_jitter: float = 0.2
    reclaim_grace: float = 0.0
    retention: float = 30 * 86400.0


class Pool(msgspec.Struct, frozen=True):
    name: str
    state_version: int = 1
    epoch: int = 1
    intake_open: bool = True
    stage: str = "ENFORCED"
    min_protocol: int = 1
    policy: Policy = Policy()


class Task(msgspec.Struct, frozen=True, gc=False):
    """The unit that is claimed, and the point of linearization of everything about it."""

    task_id: str
    pool: str
    queue: str
    kind: str
    graph_id: str | None
    node_id: str
    revision: int
    input_digest: str
    submitted_digest: str
    state: int
    state_version: int
    scheduler_epoch: int  # of the latest claim; 0: never claimed
    claim_generation: int
    attempt_id: str | None  # of the latest claim; stays after it ended
    owner_id: str | None
    claimed_at: int | None
    lease_expires_at: int | None  # None unless CLAIMED
    cancel_generation: int
    result_commit_id: str | None
    priority: int
    available_at: int
    ready_at: int | None  # first time this revision was READY
    charged_attempts: int
    max_attempts: int
    deps_total: int
    deps_remaining: int
    successors: int  # tasks that name this one as a parent; moves the version, so that a commit cannot miss one
    checkpoint_number: int  # newest of the latest attempt
    checkpoint_generation: int  # generation that wrote the newest checkpoint of this revision; 0: none
    end: int  # End of the latest attempt
    cancel_with_parent: bool  # the graph's on_failure: cancel
    park_reason: str | None
    created_at: int
    pruned_to_version: int = 0
    trace_context: str | None = None
    effects: int = 0  # side effects that this task ever had, in any revision; 0: nothing to look for


class Dependency(msgspec.Struct, frozen=True):
    task_id: str
    parent_id: str


class Checkpoint(msgspec.Struct, frozen=True):
    """The newest accepted checkpoint of the task's current revision; one a task."""

    task_id: str
    revision: int
    generation: int
    number: int
    content: Content


class Staged(msgspec.Struct, frozen=True):
    """A staged result: the isolated area. Keyed by (task, generation, digest)."""

    task_id: str
    generation: int
    attempt_id: str
    content: Content
    state: int
    staged_at: int


class ResultCommit(msgspec.Struct, frozen=True, gc=False):
    """The canonical result: at most one a task, ever. `content` is None where it was staged beforehand."""

    task_id: str
    result_commit_id: str
    revision: int
    attempt_id: str
    generation: int
    result_digest: str
    commit_digest: str
    parents: tuple[str, ...]  # result commits of the tasks it depended on
    committed_at: int
    content: Content | None


class Request(msgspec.Struct, frozen=True, gc=False):
    """What a request id was used for: kept ten minutes. `answer` is the kernel's own memory of what it said."""

    request_id: str
    owner: str  # owner, attempt or person: who may hear the answer again
    door: str
    at: int
    answer: Any


class Event(msgspec.Struct, frozen=True, gc=False):
    """One accepted change of one task record, keyed (task_id, state_version).

    Presented equals current here, so the numbers stand once, with the mask of the comparisons made.
    """

    task_id: str
    state_version: int
    at: int
    door: str
    name: str
    epoch: int
    generation: int
    cancel_generation: int
    revision: int
    attempt_id: str | None
    compared: int
    state: int  # of the task, after it
    detail: dict[str, Any] | None = None


class LogEntry(msgspec.Struct, frozen=True):
    """What changes no task record: refusals, replays, pool events, staging, usage, alarms. In order of time."""

    kind: str
    at: int
    pool: str | None
    task_id: str | None
    door: str
    outcome: str | None = None
    reason: str | None = None
    attempt: str | None = None  # short hash
    generation: int | None = None
    detail: dict[str, Any] | None = None
    count: int = 1


class EffectState(enum.IntEnum):
    """States of an effect. What waits for a person or for the downstream comes first, so that one partial index
    holds it, and a settled effect never was in it."""

    AWAITING_APPROVAL = 1
    UNKNOWN = 2
    PREPARED = 3
    COMMITTED = 4
    ABSENT = 5
    DENIED = 6
    ABANDONED = 7


class Guarantee(enum.StrEnum):
    """What the downstream offers, and so what may be promised (claim.v1, section 5)."""

    TRANSACTIONAL = "TRANSACTIONAL"
    RESERVATION = "RESERVATION"
    CONDITIONAL = "CONDITIONAL"
    IDEMPOTENT = "IDEMPOTENT"
    READ_ONLY = "READ_ONLY"
    NON_REPLAYABLE = "NON_REPLAYABLE"


class Terms(msgspec.Struct, frozen=True, gc=False):
    """What a downstream declares of itself; bound to the effect at its first prepare, for good.

    `downstream` names it with its account. `margin_us` is what of the retention is left unused: at least the send
    window. `approval`: every execution needs a person's approval first.
    """

    downstream: str
    guarantee: str = "NON_REPLAYABLE"
    send_window_us: int = 10_000_000
    settle_time_us: int = 10_000_000
    retention_us: int = 0  # IDEMPOTENT alone: how long the key is remembered
    margin_us: int = 0
    approval: bool = False


class Execution(msgspec.Struct, frozen=True, gc=False):
    """One call that may be sent, stored before it is. Numbered from 1 in its effect."""

    execution: int
    request_id: str
    generation: int
    attempt_id: str
    epoch: int
    prepared_at: int
    send_by: int
    precondition: str | None = None
    reservation_id: str | None = None
    repeats: bool = False  # of an UNKNOWN one: same key, same payload; its ABSENT says nothing about the one before
    approved_by: str | None = None  # whose approval this execution used up


class Approval(msgspec.Struct, frozen=True, gc=False):
    """For exactly one execution; void after a cancel or an epoch raise."""

    who: str
    at: int
    epoch: int
    cancel_generation: int


class LateEvidence(msgspec.Struct, frozen=True, gc=False):
    """HAPPENED, said by an attempt that once prepared this effect and may settle it no longer."""

    at: int
    execution: int
    generation: int
    receipt_digest: str | None
    receipt: Any = None
    etag: str | None = None


class Effect(msgspec.Struct, frozen=True, gc=False):
    """One side effect on the outside world, identified by its slot; written with its task's record.

    Its payload stands beside it (`Snapshot.payloads`), since it never changes and may be long.
    """

    task_id: str
    number: int  # 1, 2, … in the task, in order of their first prepare: the key of its row
    effect_id: str
    pool: str  # where the task was when this was first prepared
    revision: int
    node_id: str
    slot: str
    payload_digest: str
    terms: Terms
    state: int
    version: int
    first_prepared_at: int  # of execution 1, for good; while there is none: when it was asked for
    changed_at: int
    executions: tuple[Execution, ...] = ()
    repeat_closed: bool = False  # the downstream keeps a failure under the key: REPEAT would only bring it back
    person_only: bool = False  # the downstream was asked and cannot tell: its history is not complete
    absent_ground: str | None = None  # CERTAIN, NOT_FOUND or PERSON
    receipt: Content | None = None
    etag: str | None = None
    approval: Approval | None = None
    evidence: tuple[LateEvidence, ...] = ()
    evidence_settled: int = 0  # how many of these a person has named in deciding; the rest speaks against ABSENT
    decided_by: str | None = None  # the person or loop that resolved or denied it, or the attempt's owner
    note: str | None = None  # why UNKNOWN, why ABSENT, or what evidence was given


class Statement(msgspec.Struct, frozen=True, gc=False):
    """A TRANSACTIONAL effect: what the store executes inside commit's own transaction."""

    effect_id: str
    slot: str
    payload: Content


# The closed list of event names (journal of task records).
EVENTS = (
    "submitted",
    "successor_added",
    "attempt_started",
    "attempt_renewed",
    "checkpoint_saved",
    "result_committed",
    "attempt_ended",
    "parent_committed",
    "task_cancelled",
    "task_reopened",
    "input_revised",
    "staged_discarded",
    "effect_awaiting",
    "effect_prepared",
    "effect_reserved",
    "effect_committed",
    "effect_absent",
    "effect_unknown",
    "effect_approved",
    "effect_denied",
    "effect_abandoned",
    "effect_evidence",
)

# The closed list of log kinds.
LOG_KINDS = ("refusal", "replay", "pool", "result_staged", "usage", "alarm", "prune")
