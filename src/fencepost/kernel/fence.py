"""The fence: one ordered list of comparisons, and the closed list of doors that may change something.

A *guard* looks at the records inside the transaction that will write, and either lets the call pass
(None) or answers it. A door walks its guards in order; the first answer counts. Passing them all
mints a `Proof`, whose mask says which comparisons were made, and without which no write can be built.

The guards of the fence (claim.v1, section 3) in order: PROTOCOL, FENCED/EPOCH, FENCED/GENERATION or
OWNER, FENCED/EPOCH by grant, CANCELLED, STALE_INPUT, FENCED/STATE or ENDED. They stand here once;
the reference page and the pair test are made from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.kernel.digests import short_hash
from fencepost.kernel.outcomes import Outcome, Reason, Refusal
from fencepost.kernel.records import CLAIMED, End, State, Task
from fencepost.kernel.writes import Snapshot


class Compare(enum.IntFlag):
    """The bits of an event's `compared` mask."""

    PROTOCOL = 1
    EPOCH = 2
    GENERATION = 4  # and attempt
    OWNER = 8
    GRANT_EPOCH = 16
    CANCEL = 32
    INPUT = 64
    STATE = 128
    VERSION = 256
    REVISION = 512
    INTAKE = 1024
    PAYLOAD = 2048  # the effect's payload digest and downstream
    EXECUTION = 4096  # the effect's latest execution, and that this attempt prepared it
    PREPARER = 8192  # this attempt once prepared this effect


FULL_FENCE = (
    Compare.PROTOCOL
    | Compare.EPOCH
    | Compare.GENERATION
    | Compare.OWNER
    | Compare.GRANT_EPOCH
    | Compare.CANCEL
    | Compare.INPUT
    | Compare.STATE
)


class Door(msgspec.Struct, frozen=True):
    """One acceptance point. `compares` is what an accepted change through it must have compared."""

    name: str
    who: str  # "claim", "person" or "loop"
    compares: int
    events: tuple[str, ...]  # what it may write into the journal of task records
    says: str


# All doors. One that is not on this list cannot write.
DOORS: dict[str, Door] = {
    door.name: door
    for door in (
        Door(
            "claim",
            "claim",
            Compare.PROTOCOL | Compare.EPOCH | Compare.INTAKE | Compare.VERSION | Compare.STATE,
            ("attempt_started", "attempt_ended"),
            "grants a task to one owner, generation + 1",
        ),
        Door("renew", "claim", FULL_FENCE, ("attempt_renewed",), "moves the lease's end"),
        Door("checkpoint", "claim", FULL_FENCE, ("checkpoint_saved",), "keeps progress for a successor"),
        Door(
            "commit",
            "claim",
            FULL_FENCE,
            ("result_committed", "parent_committed", "submitted", "successor_added"),
            "makes a result canonical, releases successors, inserts spawned tasks",
        ),
        Door("release", "claim", FULL_FENCE, ("attempt_ended",), "gives the task back, nothing charged"),
        Door("fail", "claim", FULL_FENCE, ("attempt_ended",), "ends the attempt as failed, charged"),
        Door(
            "effect.prepare",
            "claim",
            FULL_FENCE | Compare.PAYLOAD,
            ("effect_prepared", "effect_awaiting"),
            "accepts a tool call: stores an execution before it is sent",
        ),
        Door(
            "effect.reserve",
            "claim",
            FULL_FENCE | Compare.EXECUTION,
            ("effect_reserved",),
            "keeps the reservation that alone may be confirmed",
        ),
        Door(
            "effect.settle",
            "claim",
            FULL_FENCE | Compare.EXECUTION,
            ("effect_committed", "effect_absent", "effect_unknown"),
            "records what the sender knows of its own execution",
        ),
        Door(
            "effect.reconcile",
            "claim",
            FULL_FENCE | Compare.EXECUTION,
            ("effect_committed", "effect_absent", "effect_unknown"),
            "records what the downstream says of an UNKNOWN effect",
        ),
        Door("effect.withdraw", "claim", FULL_FENCE, ("effect_denied",), "gives up an effect that awaits approval"),
        Door(
            "evidence",
            "claim",
            Compare.PROTOCOL | Compare.PREPARER,
            ("effect_evidence",),
            "keeps a late HAPPENED, and turns an effect back to UNKNOWN",
        ),
        Door(
            "approve",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.PAYLOAD | Compare.VERSION | Compare.STATE,
            ("effect_approved",),
            "allows exactly one execution of exactly this payload",
        ),
        Door(
            "deny",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.PAYLOAD | Compare.VERSION | Compare.STATE,
            ("effect_denied",),
            "refuses the effect for good",
        ),
        Door(
            "resolve",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.VERSION | Compare.STATE,
            ("effect_committed", "effect_absent", "effect_abandoned"),
            "decides an UNKNOWN effect without a claim: a person, or the reconciler within the guarantee",
        ),
        Door("submit", "person", Compare.PROTOCOL, ("submitted", "successor_added"), "adds tasks, all or nothing"),
        Door(
            "expire",
            "loop",
            Compare.PROTOCOL | Compare.VERSION | Compare.STATE,
            ("attempt_ended",),
            "takes back a claim whose lease ran out, or that an older epoch granted",
        ),
        Door(
            "cancel",
            "person",
            Compare.PROTOCOL | Compare.CANCEL | Compare.STATE,
            ("attempt_ended", "task_cancelled"),
            "cancels, cancel generation + 1",
        ),
        Door(
            "reopen",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.VERSION | Compare.STATE,
            ("task_reopened",),
            "makes a cancelled or parked task claimable again",
        ),
        Door(
            "revise",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.REVISION | Compare.STATE,
            ("attempt_ended", "input_revised"),
            "replaces the input, revision + 1",
        ),
        Door(
            "take_over",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.GENERATION | Compare.STATE,
            ("attempt_ended",),
            "ends a live attempt, nothing charged",
        ),
        Door(
            "discard",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.GENERATION,
            ("staged_discarded",),
            "discards what an attempt has staged",
        ),
        Door(
            "pool",
            "person",
            Compare.PROTOCOL | Compare.EPOCH | Compare.VERSION,
            (),
            "intake, epoch and policy of a pool",
        ),
    )
}


class Context:
    """What the guards look at: the records as they stand, and what the caller presents."""

    __slots__ = ("claim", "command", "now", "pool", "snapshot", "task")

    def __init__(self, snapshot: Snapshot, command: Any, pool: Any, task: Any) -> None:
        self.snapshot = snapshot
        self.command = command
        self.now = snapshot.now
        self.pool: Any = pool  # Pool; None only before the guard that says so has run
        self.task: Any = task  # Task; likewise
        self.claim: Any = getattr(command, "claim", None)


class Guard(msgspec.Struct, frozen=True):
    """One comparison. `id` is stable (`area:condition:result`); `compares` its bits in the mask."""

    id: str
    compares: int
    check: Callable[[Context], Any]
    says: str


def held_by(task: Task) -> dict[str, Any]:
    """What a refused caller is told about who holds the task: never the attempt id itself."""
    return {
        "generation": task.claim_generation,
        "epoch": task.scheduler_epoch,
        "owner": task.owner_id,
        "attempt": short_hash(task.attempt_id),
        "state": State(task.state).name,
        "lease_expires_at": task.lease_expires_at,
        "state_version": task.state_version,
    }


def _found_pool(c: Context) -> Any:
    if c.pool is None:
        return Refusal(Outcome.NOT_FOUND, Reason.POOL)
    return None


def _found_task(c: Context) -> Any:
    if c.task is None:
        return Refusal(Outcome.NOT_FOUND, Reason.TASK)
    return None


def _protocol(c: Context) -> Any:
    if c.command.protocol < c.pool.min_protocol:
        return Refusal(
            Outcome.PROTOCOL, Reason.OLD_PROTOCOL, {"min_protocol": c.pool.min_protocol, "protocol": c.command.protocol}
        )
    return None


def _protocol_and_epoch(c: Context) -> Any:
    if c.command.epoch is None:
        return Refusal(Outcome.PROTOCOL, Reason.MISSING_EPOCH, {"min_protocol": c.pool.min_protocol})
    return _protocol(c)


def refuse_epoch(presented: int, current: int) -> Refusal:
    if presented > current:
        return Refusal(Outcome.FENCED, Reason.REWOUND, {"epoch": current}, alarm=True)
    return Refusal(Outcome.FENCED, Reason.EPOCH, {"epoch": current})


def _epoch(c: Context) -> Any:
    # A claim carries its pool: one whose task has moved belongs to a domain that is over for it, whatever the numbers
    # of the new one are. So it is never REWOUND.
    if c.claim is not None and c.claim.pool != c.task.pool:
        return Refusal(Outcome.FENCED, Reason.EPOCH, {"epoch": c.pool.epoch, "pool": c.task.pool})
    if c.command.epoch != c.pool.epoch:
        return refuse_epoch(c.command.epoch, c.pool.epoch)
    return None


def _generation(c: Context) -> Any:
    presented, task = c.claim, c.task
    if presented.generation != task.claim_generation:
        if presented.generation > task.claim_generation:
            return Refusal(Outcome.FENCED, Reason.REWOUND, {"generation": task.claim_generation}, alarm=True)
        return Refusal(Outcome.FENCED, Reason.GENERATION, held_by(task))
    if presented.attempt_id != task.attempt_id:
        return Refusal(Outcome.FENCED, Reason.REWOUND, {"generation": task.claim_generation}, alarm=True)
    return None


def _owner(c: Context) -> Any:
    if c.claim.owner_id is not None and c.claim.owner_id != c.task.owner_id:
        return Refusal(Outcome.FENCED, Reason.OWNER, held_by(c.task))
    return None


def _owner_always(c: Context) -> Any:
    if c.claim.owner_id != c.task.owner_id:
        return Refusal(Outcome.FENCED, Reason.OWNER, held_by(c.task))
    return None


def _grant_epoch(c: Context) -> Any:
    if c.task.scheduler_epoch != c.pool.epoch:
        return Refusal(Outcome.FENCED, Reason.EPOCH, {"epoch": c.pool.epoch, "granted_under": c.task.scheduler_epoch})
    return None


def _cancel(c: Context) -> Any:
    if c.claim.cancel_generation != c.task.cancel_generation:
        return Refusal(
            Outcome.CANCELLED,
            None,
            {"cancel_generation": c.task.cancel_generation, "state": State(c.task.state).name},
        )
    return None


def _input(c: Context) -> Any:
    if c.claim.input_digest != c.task.input_digest:
        return Refusal(Outcome.STALE_INPUT, None, {"revision": c.task.revision, "input_digest": c.task.input_digest})
    return None


def _state(c: Context) -> Any:
    task = c.task
    if task.state != CLAIMED:
        if task.end in (End.COMMITTED, End.RELEASED, End.FAILED):
            return Refusal(
                Outcome.ENDED, End(task.end).name, {"end": End(task.end).name, "state": State(task.state).name}
            )
        return Refusal(
            Outcome.FENCED,
            Reason.STATE,
            {
                "state": State(task.state).name,
                "end": End(task.end).name,
                "generation": task.claim_generation,
                "state_version": task.state_version,
            },
        )
    return None


FOUND_POOL = Guard("any:unknown-pool:not-found", 0, _found_pool, "the pool exists")
FOUND_TASK = Guard("any:unknown-task:not-found", 0, _found_task, "the task exists")
PROTOCOL = Guard(
    "fence:no-epoch-or-old-protocol:protocol",
    Compare.PROTOCOL,
    _protocol_and_epoch,
    "an epoch is presented, and the protocol is at least the pool's minimum",
)
PROTOCOL_ONLY = Guard(
    "any:old-protocol:protocol", Compare.PROTOCOL, _protocol, "the protocol is at least the pool's minimum"
)
EPOCH = Guard("fence:other-epoch:fenced", Compare.EPOCH, _epoch, "presented epoch = the pool's")
GENERATION = Guard(
    "fence:other-generation-or-attempt:fenced",
    Compare.GENERATION,
    _generation,
    "generation and attempt = those of the task's latest claim",
)
OWNER = Guard("fence:other-owner:fenced", Compare.OWNER, _owner, "owner, where presented, = the latest claim's")
OWNER_ALWAYS = Guard("fence:other-or-no-owner:fenced", Compare.OWNER, _owner_always, "owner = the latest claim's")
GRANT_EPOCH = Guard(
    "fence:granted-under-older-epoch:fenced",
    Compare.GRANT_EPOCH,
    _grant_epoch,
    "the epoch under which the claim was granted = the pool's",
)
CANCEL = Guard(
    "fence:other-cancel-generation:cancelled", Compare.CANCEL, _cancel, "presented cancel generation = the task's"
)
INPUT = Guard("fence:other-input:stale-input", Compare.INPUT, _input, "presented input digest = the task's current one")
STATE = Guard("fence:not-claimed:fenced-or-ended", Compare.STATE, _state, "the task is CLAIMED")

# The fence of a claim's doors, in order. Rows 0 and 1 come first so that a repeat is looked up after them.
FENCE_HEAD = (FOUND_TASK, PROTOCOL, EPOCH)
FENCE_TAIL = (GENERATION, OWNER, GRANT_EPOCH, CANCEL, INPUT, STATE)
FENCE_TAIL_RENEW = (GENERATION, OWNER_ALWAYS, GRANT_EPOCH, CANCEL, INPUT, STATE)
