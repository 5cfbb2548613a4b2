"""What a decision reads and what it writes. A store compares and writes it; it never interprets it."""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.kernel.records import (
    Checkpoint,
    Content,
    Dependency,
    Effect,
    Event,
    LogEntry,
    Pool,
    Request,
    ResultCommit,
    Staged,
    Statement,
    Task,
)


class Keys(msgspec.Struct):
    """What to load. Sets are filled by `Kernel.keys`; a store loads what it finds and leaves the rest out."""

    pools: set[str] = msgspec.field(default_factory=set)
    tasks: set[str] = msgspec.field(default_factory=set)
    requests: set[str] = msgspec.field(default_factory=set)
    results: set[str] = msgspec.field(default_factory=set)  # by task id
    staged: set[str] = msgspec.field(default_factory=set)  # by task id
    inputs: set[str] = msgspec.field(default_factory=set)  # by task id
    checkpoints: set[str] = msgspec.field(default_factory=set)  # by task id
    children: set[str] = msgspec.field(default_factory=set)  # by parent id
    parents: set[str] = msgspec.field(default_factory=set)  # by child id
    starts: set[tuple[str, int]] = msgspec.field(default_factory=set)  # attempt_started of (task, generation)
    effects: set[str] = msgspec.field(default_factory=set)  # by task id: all of the task's, of every revision
    payloads: set[tuple[str, int]] = msgspec.field(default_factory=set)  # payload of (task, number of the effect)

    def __bool__(self) -> bool:
        return bool(
            self.tasks
            or self.requests
            or self.pools
            or self.results
            or self.staged
            or self.inputs
            or self.checkpoints
            or self.children
            or self.parents
            or self.starts
            or self.effects
            or self.payloads
        )


class Snapshot(msgspec.Struct):
    """Records as they stood when read, and the store's clock. Absent keys were not found."""

    now: int = 0
    pools: dict[str, Pool] = msgspec.field(default_factory=dict)
    tasks: dict[str, Task] = msgspec.field(default_factory=dict)
    requests: dict[str, Request] = msgspec.field(default_factory=dict)
    results: dict[str, ResultCommit] = msgspec.field(default_factory=dict)
    staged: dict[str, list[Staged]] = msgspec.field(default_factory=dict)
    inputs: dict[str, Content] = msgspec.field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = msgspec.field(default_factory=dict)
    children: dict[str, list[str]] = msgspec.field(default_factory=dict)
    parents: dict[str, list[str]] = msgspec.field(default_factory=dict)
    starts: dict[tuple[str, int], Event] = msgspec.field(default_factory=dict)
    effects: dict[str, list[Effect]] = msgspec.field(default_factory=dict)  # by task id, in order of their numbers
    payloads: dict[tuple[str, int], Content] = msgspec.field(default_factory=dict)  # absent once it was pruned
    guessed: bool = False  # not all of it was read: what stands here may only be tried


_MINT = object()


class Proof:
    """That a door's comparisons were passed; the only key to building a write. Made by `Kernel.decide` alone.

    `compared` says which comparisons were made; the journal keeps it beside the change.
    """

    __slots__ = ("compared", "door")

    def __init__(self, door: str, compared: int, mint: object) -> None:
        if mint is not _MINT:
            raise TypeError("a Proof comes from passing a door's guards, it cannot be made")
        self.door = door
        self.compared = compared


def _prove(door: str, compared: int) -> Proof:
    return Proof(door, compared, _MINT)


class TaskWrite(msgspec.Struct, frozen=True, gc=False):
    """One task record: insert (`expected_version` 0), or replace if it still stands at `expected_version`.

    `family` names the columns that changed, for stores with a statement per family:
    `claim`, `renew`, `commit`, `effect` (see `FAMILIES`); `any` is the whole record.
    """

    expected_version: int
    task: Task
    family: str


# The columns that each family changes, besides task_id. `any` changes every column; `insert` is an insert.
FAMILIES: dict[str, tuple[str, ...]] = {
    "claim": (
        "state",
        "state_version",
        "scheduler_epoch",
        "claim_generation",
        "attempt_id",
        "owner_id",
        "claimed_at",
        "lease_expires_at",
        "charged_attempts",
        "checkpoint_number",
        "end",
        "park_reason",
    ),
    "renew": ("state_version", "lease_expires_at", "checkpoint_number", "checkpoint_generation"),
    "commit": ("state", "state_version", "lease_expires_at", "result_commit_id", "end"),
    "effect": ("state_version", "effects"),
}


class WriteSet:
    """One operation: everything or nothing. Stores compare `epoch` and `pool_version` (unless None) and
    every task's version, then write.

    Most operations write few kinds of rows, so the lists of the others are made when they are first asked for.
    `made` names those that were: nothing else holds a row.
    """

    __slots__ = (
        "checkpoints",
        "dependencies",
        "discard_attempts",
        "discard_rivals",
        "drop_checkpoints",
        "effects",
        "epoch",
        "events",
        "inputs",
        "log",
        "made",
        "payloads",
        "pool",
        "pool_version",
        "pool_write",
        "proof",
        "requests",
        "results",
        "staged",
        "statements",
        "tasks",
    )

    inputs: list[tuple[str, int, Content]]  # (task, revision, content): replaces the task's input
    dependencies: list[Dependency]
    checkpoints: list[Checkpoint]  # replaces the task's checkpoint
    drop_checkpoints: list[str]  # task ids
    staged: list[Staged]  # insert; the same (task, generation, digest) again changes nothing
    discard_attempts: list[tuple[str, int]]  # STAGED of (task, generation) → DISCARDED
    discard_rivals: list[tuple[str, int, str]]  # STAGED of task: (generation, digest) → COMMITTED, rest → DISCARDED
    results: list[ResultCommit]
    requests: list[Request]
    log: list[LogEntry]
    effects: list[Effect]  # insert, or replace the row of the same (task, number)
    payloads: list[tuple[str, int, Content]]  # (task, number, payload): insert
    statements: list[Statement]  # executed last, inside the same transaction; one that fails takes the whole set along

    def __init__(self, proof: Proof, pool: str, epoch: int | None, pool_version: int | None = None) -> None:
        if type(proof) is not Proof:
            raise TypeError("a WriteSet needs the Proof of a passed fence")
        self.proof = proof
        self.pool = pool
        self.epoch = epoch  # the pool's, under which this was decided; None: the door compares none
        # The pool's record that this was decided on, so that a closed intake, too, stops what was under way.
        self.pool_version = pool_version
        self.tasks: list[TaskWrite] = []
        self.events: list[Event] = []
        self.pool_write: tuple[int, Pool] | None = None  # (expected state_version; 0: insert, pool)
        self.made: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name not in LISTS:
            raise AttributeError(name)
        self.made += (name,)
        found: list[Any] = []
        setattr(self, name, found)
        return found

    def records(self) -> list[Any]:
        """Keys of the records that this set compares and moves; a request id is one, it counts once."""
        found: list[Any] = [write.task.task_id for write in self.tasks]
        if "requests" in self.made:
            found += [("request", request.request_id) for request in self.requests]
        if self.pool_write is not None:
            found.append(("pool", self.pool_write[1].name))
        return found


# The lists of a WriteSet that are made on demand.
LISTS = frozenset(
    {
        "checkpoints",
        "dependencies",
        "discard_attempts",
        "discard_rivals",
        "drop_checkpoints",
        "effects",
        "inputs",
        "log",
        "payloads",
        "requests",
        "results",
        "staged",
        "statements",
    }
)


class Decision(msgspec.Struct, gc=False):
    """`answer` is a Refusal, a Problem, or the door's own value; `writes` is None where nothing changes."""

    answer: Any
    writes: WriteSet | None = None
    log: tuple[LogEntry, ...] = ()
