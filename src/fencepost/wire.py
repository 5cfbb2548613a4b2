"""claim.v1 on the wire: the values that callers hold, and the `Backend` that a client talks to.

Everything here is a plain value with a JSON form. An answer has `outcome` and `reason`; a refusal has
`current` too, and no truth value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import msgspec
import uuid_utils

from fencepost.kernel.outcomes import Outcome, Reason

__all__ = [
    "AttemptView",
    "Backend",
    "Claim",
    "Committed",
    "Done",
    "EffectView",
    "EventView",
    "ExecutionView",
    "LateEvidenceView",
    "NewTask",
    "Outcome",
    "Page",
    "Pending",
    "PoolChanged",
    "PoolView",
    "Prepared",
    "Reason",
    "Refused",
    "Renewed",
    "Result",
    "Submitted",
    "TaskView",
    "new_id",
]


def new_id() -> str:
    """A random id, new each time: request ids, result commit ids, generated task ids (UUIDv7)."""
    return str(uuid_utils.uuid7())


def new_attempt_id() -> str:
    """An attempt id: all of it random, so that nobody can compute one from a task and a generation."""
    return str(uuid_utils.uuid4())


class NewTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task to submit. Without `task_id` one is generated (UUIDv7), once, when the object is made.

    `delay` is seconds from the store's now; `available_at` an aware datetime; at most one of the two.
    `priority`: smaller first, −1000…1000. `max_attempts` None: the pool's policy.
    `on_failure="cancel"`: a cancelled parent cancels this task too; "keep": it stays BLOCKED
    and is shown as unreachable.
    """

    input: Any
    task_id: str | None = None
    kind: str = "default"
    queue: str = "default"
    pool: str = "default"
    priority: int = 0
    depends_on: Sequence[str] = ()
    delay: float | None = None
    available_at: datetime | None = None
    max_attempts: int | None = None
    node_id: str = "main"
    graph_id: str | None = None
    on_failure: str = "keep"
    trace_context: str | None = None


class TaskView(msgspec.Struct, frozen=True):
    """A task's record as readers may see it: attempt ids appear as short hashes."""

    task_id: str
    pool: str
    queue: str
    kind: str
    state: str
    revision: int
    state_version: int
    generation: int
    cancel_generation: int
    epoch: int
    priority: int
    available_at: datetime
    created_at: datetime
    input_digest: str
    charged_attempts: int
    max_attempts: int
    deps_remaining: int
    node_id: str = "main"
    graph_id: str | None = None
    owner_id: str | None = None
    attempt: str | None = None
    end: str | None = None
    claimed_at: datetime | None = None
    lease_expires_at: datetime | None = None
    result_commit_id: str | None = None
    park_reason: str | None = None
    unreachable: tuple[str, ...] = ()  # parents that are CANCELLED or PARKED; only where the reader asked for one task
    depends_on: tuple[str, ...] = ()
    input: Any = None  # only where the reader asked for one task
    pruned_to_version: int = 0


class Refused(msgspec.Struct, frozen=True):
    """A final no to this call, with what superseded the caller. Nothing was written. Not an exception.

    `outcome` is the contract's word, `reason` narrows it down, `current` is what stands instead.
    Has no truth value, so that it cannot pass for a claim: compare `outcome`, or use isinstance.
    """

    outcome: Outcome
    reason: str | None = None
    current: dict[str, Any] = {}
    door: str = ""
    task_id: str | None = None

    def __bool__(self) -> NoReturn:
        raise TypeError(f"a refusal has no truth value (this one is {self.outcome}); use isinstance(answer, Refused)")


class Claim(msgspec.Struct, frozen=True):
    """A granted task: a plain value. Handed to another process as JSON, it works there.

    It says who may move the task forward; every write is compared again inside its own transaction.
    The epoch is the one it was granted under.
    """

    store_id: str
    pool: str
    task_id: str
    revision: int
    queue: str
    kind: str
    node_id: str
    owner_id: str
    attempt_id: str
    epoch: int
    generation: int
    cancel_generation: int
    lease_expires_at: datetime
    ttl: float
    input_digest: str
    input: Any
    charged_attempts: int = 0
    max_attempts: int = 0
    checkpoint_data: Any = None
    checkpoint_number: int = 0  # of this attempt: 0 when granted
    parents: dict[str, Any] = {}  # parent task id → its result
    effects: tuple[EffectView, ...] = ()  # this revision's, without their payloads
    trace_context: str | None = None
    outcome: Outcome = Outcome.CLAIMED
    reason: str | None = None

    def to_json(self) -> str:
        """As JSON text; a binary input or result travels as {"$bytes": base64}."""
        return msgspec.json.encode(_pack(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim:
        """The claim that `to_json` wrote. Raises InvalidRequest where it is none."""
        from fencepost.errors import InvalidRequest

        try:
            return msgspec.convert(_unpack(msgspec.json.decode(text)), cls)
        except msgspec.MsgspecError as error:
            raise InvalidRequest("claim", f"is not a claim's JSON ({error})") from None


def _pack(value: Any) -> Any:
    """Builtins with bytes marked, since JSON has none."""
    if isinstance(value, bytes):
        import base64

        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, msgspec.Struct):
        return {name: _pack(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$bytes"}:
            import base64

            return base64.b64decode(value["$bytes"])
        return {key: _unpack(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    return value


class Submitted(msgspec.Struct, frozen=True):
    """`created` is False where the very same submission stood already."""

    task: TaskView
    created: bool
    outcome: Outcome = Outcome.SUBMITTED
    reason: str | None = None


class Renewed(msgspec.Struct, frozen=True):
    lease_expires_at: datetime
    late: bool = False  # granted after expiry, because nobody had used it
    outcome: Outcome = Outcome.RENEWED
    reason: str | None = None


class Committed(msgspec.Struct, frozen=True):
    task_id: str
    result_commit_id: str
    result_digest: str
    commit_digest: str
    replayed: bool = False  # the answer of an earlier, identical commit by this attempt
    outcome: Outcome = Outcome.COMMITTED
    reason: str | None = None


class Prepared(msgspec.Struct, frozen=True):
    """What prepare says of its slot. EXECUTE alone allows a call: of `execution`, before `send_by_us`.

    `outcome` is EXECUTE, REPLAY (it happened: `receipt`, no call), RECONCILE (`open` says what may be done: ASK,
    REPEAT, PERSON), IN_FLIGHT, APPROVAL_REQUIRED, PAYLOAD_CONFLICT, BUSY (`busy` names what is in the way), DENIED
    or ABANDONED. `payload`, `downstream` and `guarantee` are those that the slot is *bound* to, whatever was
    presented. `now_us` is the store's time: the `asked_at` of a reconcile that follows a look at the downstream.
    Times of the store are microseconds.
    """

    outcome: Outcome
    effect_id: str
    slot: str
    node_id: str
    state: str
    version: int
    downstream: str
    guarantee: str
    payload_digest: str
    now_us: int
    execution: int = 0
    send_by_us: int | None = None
    send_window: float = 0.0
    settle_time: float = 0.0
    precondition: str | None = None
    reservation_id: str | None = None
    open: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    payload: Any = None  # None, too, where it is the presented one and nothing was bound before
    receipt: Any = None
    etag: str | None = None
    contested: bool = False  # late evidence says that it happened
    reason: str | None = None


class ExecutionView(msgspec.Struct, frozen=True):
    execution: int
    generation: int
    attempt: str  # short hash
    epoch: int
    prepared_at: datetime
    send_by: datetime
    precondition: str | None = None
    reservation_id: str | None = None
    repeats: bool = False
    approved_by: str | None = None


class LateEvidenceView(msgspec.Struct, frozen=True):
    at: datetime
    execution: int
    generation: int
    receipt: Any = None
    receipt_digest: str | None = None
    etag: str | None = None


class EffectView(msgspec.Struct, frozen=True):
    """An effect as readers may see it. `open` is what may be done about an UNKNOWN one now; `age` counts seconds
    since it was first prepared; `now_us` is the store's time of this read: the `asked_at` of a resolve."""

    effect_id: str
    task_id: str
    pool: str
    revision: int
    node_id: str
    slot: str
    state: str
    version: int
    downstream: str
    guarantee: str
    payload_digest: str
    first_prepared_at: datetime
    changed_at: datetime
    age: float
    open: tuple[str, ...] = ()
    executions: tuple[ExecutionView, ...] = ()
    payload: Any = None  # only where the reader asked for it
    receipt: Any = None
    receipt_digest: str | None = None
    etag: str | None = None
    absent_ground: str | None = None
    approved_by: str | None = None
    evidence: tuple[LateEvidenceView, ...] = ()
    contested: bool = False
    decided_by: str | None = None
    note: str | None = None
    now_us: int = 0


class Pending(msgspec.Struct, frozen=True):
    """Accepted inside the caller's own transaction: `will_be` is true once that transaction has committed, and nothing
    is true if it does not. Nobody can supersede it in between; `client.task` and `client.result` say what became of it.

    `changed` is False where the very same stood already, as far as the transaction sees.
    """

    will_be: Outcome  # SUBMITTED or COMMITTED
    task_ids: tuple[str, ...]  # in the order of the call
    result_commit_id: str | None = None  # with COMMITTED, as the two digests
    result_digest: str | None = None
    commit_digest: str | None = None
    changed: bool = True
    outcome: str = "PENDING"
    reason: str | None = None

    @property
    def task_id(self) -> str:
        """The one task's, or the first's."""
        return self.task_ids[0]


class Done(msgspec.Struct, frozen=True):
    """What the other doors answer. `changed` is False where nothing had to change (it was so already)."""

    outcome: Outcome
    task_id: str
    state: str
    state_version: int
    changed: bool = True
    info: dict[str, Any] = {}
    reason: str | None = None


class PoolView(msgspec.Struct, frozen=True):
    name: str
    epoch: int
    state_version: int
    intake: str  # OPEN or CLOSED
    stage: str
    min_protocol: int
    policy: dict[str, Any]


class PoolChanged(msgspec.Struct, frozen=True):
    outcome: Outcome
    pool: PoolView
    changed: bool = True
    reason: str | None = None


class Result(msgspec.Struct, frozen=True):
    """The canonical result. `value` is None with `pruned` True once retention has removed the body."""

    task_id: str
    value: Any
    result_digest: str
    result_commit_id: str
    revision: int
    generation: int
    attempt: str
    committed_at: datetime
    parents: tuple[str, ...] = ()
    pruned: bool = False
    outcome: Outcome = Outcome.COMMITTED
    reason: str | None = None


class AttemptView(msgspec.Struct, frozen=True):
    """What the journal says between a claim and that claim's end."""

    task_id: str
    generation: int
    attempt: str
    epoch: int
    cancel_generation: int
    revision: int
    owner_id: str
    started_at: datetime
    ended_at: datetime | None = None
    end: str | None = None  # COMMITTED, EXPIRED, RELEASED, FAILED, CANCELLED, SUPERSEDED; None: live
    error: str | None = None
    renewals: int = 0
    usage: dict[str, float] = {}


class EventView(msgspec.Struct, frozen=True):
    """One line of the journal: an accepted change (`accepted` True) or a log entry (refusal, replay, pool, …)."""

    cursor: str
    at: datetime
    accepted: bool
    name: str
    door: str
    pool: str | None
    task_id: str | None
    state_version: int | None = None
    epoch: int | None = None
    generation: int | None = None
    cancel_generation: int | None = None
    attempt: str | None = None
    compared: tuple[str, ...] = ()
    state: str | None = None
    outcome: str | None = None
    reason: str | None = None
    detail: dict[str, Any] = {}
    count: int = 1


class Page(msgspec.Struct, frozen=True):
    """`next_cursor` is None at the end."""

    items: list[Any]
    next_cursor: str | None = None


class Backend(Protocol):
    """What a client talks to: the coordinator in this process, or a server over HTTP.

    Commands are the kernel's (`fencepost.kernel.commands`); answers are this module's. Wrong calls raise
    the exceptions of `fencepost.errors`; an unreachable store raises Unavailable. No backend ever sends
    a changing command twice by itself.
    """

    store_id: str

    async def ask(self, command: Any) -> Any:
        """Any command but claim_next and submit; a Refused, or that door's answer."""

    async def ask_many(self, commands: Sequence[Any]) -> list[Any]:
        """Several independent commands in one go; an exception of one is returned in its place."""

    async def submit(self, command: Any) -> list[Submitted] | Refused: ...

    async def ask_on(self, connection: Any, command: Any) -> Pending | Refused:
        """A commit or submit inside the transaction that `connection`, the caller's own, is in.

        A refusal is journalled whatever becomes of that transaction. Raises InvalidRequest where the store cannot
        join it; whatever is raised, nothing of the command stands there."""

    async def claim_next(self, command: Any, wait: float = 0.0, *, fresh: bool = False) -> list[Claim] | Refused:
        """Look, and wait up to `wait` seconds for something. `fresh`: nobody has asked with this request id before, so
        that nothing was granted under it; it may then wait at once where others have just found nothing."""

    async def pools(self) -> list[PoolView]: ...

    async def task(self, task_id: str) -> TaskView | None: ...

    async def record(self, task_id: str) -> TaskView | None:
        """As `task`, without the input and whatever else has to be read besides the record."""

    async def tasks(self, where: dict[str, Any], cursor: str | None, limit: int) -> Page: ...

    async def effects(self, where: dict[str, Any], cursor: str | None, limit: int) -> Page: ...

    async def attempts(self, task_id: str) -> list[AttemptView]: ...

    async def events(
        self, *, task_id: str | None, pool: str | None, cursor: str | None, limit: int, names: Sequence[str]
    ) -> Page: ...

    def watch(self, pool: str | None, cursor: str | None) -> AsyncIterator[EventView]: ...

    async def result(self, task_id: str, wait: float | None) -> Result | Refused: ...

    async def report(self, name: str, **arguments: Any) -> Any:
        """Read-side reports by name: `status`, `audit`, `doctor`, `prune`, `history`."""

    async def close(self) -> None: ...
