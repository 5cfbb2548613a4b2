"""Commands: what a caller asks, with everything that a decision needs and the kernel may not make up
(new ids, jitter). Also the limits of ids and numbers, in one place.

Every command carries `request_id`, `protocol`, and, at doors that compare it, `epoch`: the one that
the *client* learnt when it connected, not the one of the claim.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fencepost.errors import InvalidRequest
from fencepost.kernel.records import PROTOCOL, Content, Policy, Terms

MAX_ID_LENGTH = 200
MAX_BATCH = 10_000
MAX_ERROR_BYTES = 16 << 10
MAX_USAGE_KEYS = 20
MAX_PRIORITY = 1000
MAX_ATTEMPTS_LIMIT = 1_000_000
MAX_EFFECTS = 1_000  # of one task, in all its revisions
MAX_STATEMENTS = 100  # TRANSACTIONAL effects in one commit
MAX_EXECUTIONS = 100  # of one effect
MAX_EVIDENCE = 20  # late reports kept with one effect
MAX_RECEIPT_BYTES = 256 << 10
MAX_NOTE_BYTES = 4 << 10
MAX_SECONDS = 10 * 366 * 86400.0
DEFAULT_TTL = 30.0


class Presented(msgspec.Struct, frozen=True, gc=False):
    """What a claim's holder shows at a door."""

    store_id: str
    pool: str
    task_id: str
    attempt_id: str
    generation: int
    cancel_generation: int
    input_digest: str
    owner_id: str | None = None


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task as submitted, checked and digested."""

    task_id: str
    pool: str
    queue: str
    kind: str
    node_id: str
    input: Content
    submitted_digest: str
    graph_id: str | None = None
    priority: int = 0
    delay_us: int = 0
    available_at: int | None = None
    max_attempts: int | None = None
    depends_on: tuple[str, ...] = ()
    cancel_with_parent: bool = False
    trace_context: str | None = None


class NewStatement(msgspec.Struct, frozen=True, gc=False):
    """A TRANSACTIONAL effect that comes with a commit."""

    slot: str
    payload: Content
    downstream: str
    node_id: str | None = None  # None: the task's own


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    request_id: str
    protocol: int = PROTOCOL


# doors of a claim -------------------------------------------------------------------------------


class Claim(Command, kw_only=True, frozen=True):
    task_id: str
    expected_state_version: int
    epoch: int | None
    owner_id: str
    ttl_us: int
    attempt_id: str


class ClaimNext(Command, kw_only=True, frozen=True):
    pool: str
    queues: tuple[str, ...]
    kinds: tuple[str, ...] | None
    epoch: int | None
    owner_id: str
    ttl_us: int
    attempt_ids: tuple[str, ...]  # as many as the limit


class ClaimCommand(Command, kw_only=True, frozen=True):
    """Base of what a claim's holder asks."""

    epoch: int | None
    claim: Presented


class Renew(ClaimCommand, kw_only=True, frozen=True):
    ttl_us: int


class SaveCheckpoint(ClaimCommand, kw_only=True, frozen=True):
    number: int
    content: Content


class Commit(ClaimCommand, kw_only=True, frozen=True):
    result_digest: str
    content: Content | None
    result_commit_id: str
    spawn: tuple[NewTask, ...] = ()
    usage: dict[str, float] | None = None
    statements: tuple[NewStatement, ...] = ()
    namespace: str = ""  # the store's; filled in by the service


class Release(ClaimCommand, kw_only=True, frozen=True):
    delay_us: int = 0
    wait: bool = False  # PARKED until a person has decided, where only a person can


class Fail(ClaimCommand, kw_only=True, frozen=True):
    error: str
    retry: bool = True
    jitter: float = 0.0  # -1 … 1
    usage: dict[str, float] | None = None


class Stage(Command, kw_only=True, frozen=True):
    claim: Presented
    content: Content


class Usage(Command, kw_only=True, frozen=True):
    claim: Presented
    usage: dict[str, float]


# effects, by a claim's holder -------------------------------------------------------------------


class Prepare(ClaimCommand, kw_only=True, frozen=True):
    """Tool acceptance: may this be sent?"""

    slot: str
    payload: Content
    terms: Terms
    node_id: str | None = None  # None: the task's own
    precondition: str | None = None
    repeat: bool = False
    namespace: str = ""  # the store's; filled in by the service


class EffectCommand(ClaimCommand, kw_only=True, frozen=True):
    effect_id: str


class ExecutionCommand(EffectCommand, kw_only=True, frozen=True):
    execution: int


class Reserve(ExecutionCommand, kw_only=True, frozen=True):
    reservation_id: str


class Settle(ExecutionCommand, kw_only=True, frozen=True):
    """`finding`: HAPPENED, ABSENT or UNKNOWN. `why` narrows ABSENT (`ABSENT_REASONS`) and UNKNOWN down."""

    finding: str
    why: str | None = None
    receipt: Content | None = None
    etag: str | None = None
    note: str | None = None


class Reconcile(ExecutionCommand, kw_only=True, frozen=True):
    """`finding`: HAPPENED, ABSENT or STILL_UNKNOWN. `asked_at`: the store's time in the RECONCILE that it followed."""

    asked_at: int
    finding: str
    ground: str | None = None  # of ABSENT: one of `GROUNDS`
    receipt: Content | None = None
    etag: str | None = None
    note: str | None = None


class Withdraw(EffectCommand, kw_only=True, frozen=True):
    note: str | None = None


class Evidence(Command, kw_only=True, frozen=True):
    """HAPPENED, from an attempt that once prepared this effect and may settle it no longer."""

    claim: Presented
    effect_id: str
    execution: int
    receipt: Content | None = None
    etag: str | None = None


# effects, by people and the reconciler ----------------------------------------------------------


class DecideEffect(Command, kw_only=True, frozen=True):
    task_id: str
    effect_id: str
    expected_version: int  # of the effect
    epoch: int | None
    who: str


class Approve(DecideEffect, kw_only=True, frozen=True):
    payload_digest: str


class Deny(DecideEffect, kw_only=True, frozen=True):
    payload_digest: str
    note: str | None = None


class Resolve(DecideEffect, kw_only=True, frozen=True):
    """`finding`: HAPPENED, ABSENT or ABANDONED. `asked_at`: the store's time of the read that the finding followed."""

    finding: str
    asked_at: int
    evidence: str
    reconciler: bool = False  # a loop that asked the downstream: records only what the guarantee allows
    ground: str | None = None  # of ABSENT, by the reconciler: one of `GROUNDS`; by a person: None or RESERVATION_*
    late_evidence: int = 0  # how many late reports were seen in deciding
    receipt: Content | None = None
    etag: str | None = None


# doors of people and loops ----------------------------------------------------------------------


class Submit(Command, kw_only=True, frozen=True):
    tasks: tuple[NewTask, ...]


class Expire(Command, kw_only=True, frozen=True):
    task_id: str
    expected_state_version: int


class Cancel(Command, kw_only=True, frozen=True):
    task_id: str
    expected_cancel_generation: int  # the SDK reads it once a call, so that a late copy cancels nothing
    who: str = ""


class Reopen(Command, kw_only=True, frozen=True):
    task_id: str
    expected_state_version: int
    epoch: int | None
    who: str = ""


class Revise(Command, kw_only=True, frozen=True):
    task_id: str
    input: Content
    expected_revision: int
    epoch: int | None
    who: str = ""
    accept_effects: bool = False  # what happened, or may have, under the old revision is done with


class TakeOver(Command, kw_only=True, frozen=True):
    task_id: str
    expected_generation: int
    epoch: int | None
    who: str = ""


class Discard(Command, kw_only=True, frozen=True):
    task_id: str
    generation: int
    epoch: int | None
    who: str = ""


class PoolCommand(Command, kw_only=True, frozen=True):
    pool: str
    expected_epoch: int | None
    expected_state_version: int | None = None
    who: str = ""


class CloseIntake(PoolCommand, kw_only=True, frozen=True):
    pass


class OpenIntake(PoolCommand, kw_only=True, frozen=True):
    pass


class RaiseEpoch(PoolCommand, kw_only=True, frozen=True):
    to: int | None = None  # None: expected + 1


class SetPolicy(PoolCommand, kw_only=True, frozen=True):
    policy: Policy


class CreatePool(Command, kw_only=True, frozen=True):
    pool: str
    policy: Policy = Policy()
    who: str = ""


AnyCommand = (
    Claim
    | ClaimNext
    | Renew
    | SaveCheckpoint
    | Commit
    | Release
    | Fail
    | Stage
    | Usage
    | Prepare
    | Reserve
    | Settle
    | Reconcile
    | Withdraw
    | Evidence
    | Approve
    | Deny
    | Resolve
    | Submit
    | Expire
    | Cancel
    | Reopen
    | Revise
    | TakeOver
    | Discard
    | CloseIntake
    | OpenIntake
    | RaiseEpoch
    | SetPolicy
    | CreatePool
)


# limits -----------------------------------------------------------------------------------------


def check_id(value: Any, field: str) -> str:
    """An id, compared exactly: 1 to 200 characters, no control characters, nothing trimmed or folded."""
    if type(value) is not str:
        raise InvalidRequest(field, f"must be text, got {type(value).__name__}")
    if not 0 < len(value) <= MAX_ID_LENGTH:
        raise InvalidRequest(field, f"must have 1 to {MAX_ID_LENGTH} characters, got {len(value)}")
    if value.isascii() and value.isprintable():
        return value
    for character in value:
        code = ord(character)
        if code < 0x20 or 0x7F <= code < 0xA0:
            raise InvalidRequest(field, f"control character U+{code:04X} is not allowed")
        if 0xD800 <= code <= 0xDFFF:
            raise InvalidRequest(field, "lone surrogates are not allowed")
    return value


def check_seconds(value: Any, field: str, *, least: float = 0.0, above: bool = False, most: float = MAX_SECONDS) -> int:
    """Seconds as microseconds; a number that is finite and within bounds, and not a bool."""
    kind = type(value)
    if (kind is not float and kind is not int) or not math.isfinite(value):
        raise InvalidRequest(field, f"must be a finite number of seconds, got {value!r}"[:200])
    if value < least or (above and value <= least):
        raise InvalidRequest(field, f"must be {'above' if above else 'at least'} {least:g} seconds, got {value!r}")
    if value > most:
        raise InvalidRequest(field, f"must be at most {most:g} seconds, got {value!r}"[:200])
    us: int = round(value * 1_000_000)
    if above and us < 1:
        raise InvalidRequest(field, "must be at least one microsecond")
    return us


def check_integer(value: Any, field: str, least: int, most: int = (1 << 53)) -> int:
    if type(value) is not int:
        raise InvalidRequest(field, f"must be a whole number, got {type(value).__name__}")
    if not least <= value <= most:
        raise InvalidRequest(field, f"must lie within {least}…{most}, got {str(value)[:40]}")
    return value


def check_usage(usage: Any) -> dict[str, float]:
    """At most 20 numeric keys: what an attempt cost (seconds, tokens, money)."""
    if not isinstance(usage, dict):
        raise InvalidRequest("usage", "must be an object of numbers")
    if len(usage) > MAX_USAGE_KEYS:
        raise InvalidRequest("usage", f"at most {MAX_USAGE_KEYS} keys, got {len(usage)}")
    for key, value in usage.items():
        check_id(key, "usage key")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InvalidRequest(f"usage.{key}", "must be a finite number")
        if value < 0:
            raise InvalidRequest(f"usage.{key}", "must not be negative")
        if abs(value) > 1 << 53:
            raise InvalidRequest(f"usage.{key}", "must lie within ±2^53")
    return usage


def cut_error(text: str) -> str:
    """Error text as it is kept: at most 16 KiB, cut with a mark; what cannot be stored is replaced visibly."""
    text = text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode("utf-8")
    data = text.encode()
    if len(data) <= MAX_ERROR_BYTES:
        return text
    mark = f"\n… cut: {len(data)} bytes in all"
    return data[: MAX_ERROR_BYTES - len(mark.encode())].decode("utf-8", "ignore") + mark


def check_policy(policy: Policy) -> Policy:
    """Refuses combinations that cannot be safe."""
    check_seconds(policy.max_ttl, "policy.max_ttl", above=True, most=86400.0 * 7)
    check_seconds(policy.max_claim_age, "policy.max_claim_age", above=True)
    check_integer(policy.max_attempts, "policy.max_attempts", 1, MAX_ATTEMPTS_LIMIT)
    if not 1.0 <= policy.backoff_base <= 10.0:
        raise InvalidRequest("policy.backoff_base", "must lie within 1…10")
    check_seconds(policy.backoff_max, "policy.backoff_max")
    if not 0.0 <= policy.backoff_jitter <= 1.0:
        raise InvalidRequest("policy.backoff_jitter", "must lie within 0…1")
    check_seconds(policy.reclaim_grace, "policy.reclaim_grace")
    check_seconds(policy.retention, "policy.retention", above=True)
    if policy.max_ttl > policy.max_claim_age:
        raise InvalidRequest("policy.max_ttl", "must not exceed policy.max_claim_age")
    return policy
