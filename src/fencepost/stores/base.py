"""The store protocol: what a store does, and all that it does (architecture: a store holds no rules).

A *plan* is a generator that the coordinator writes: it yields `Load`, `Scan` and `Apply` requests and
is sent their answers. A store runs it the way that is right for it: SQLite drives a whole plan inside
one BEGIN IMMEDIATE transaction on its writer thread (what was read cannot have moved, nothing is lost
to other processes); a server drives it step by step and loses compare-and-swaps, which the plan sees
and answers by loading again. Rules are in the kernel in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import msgspec

from fencepost.kernel.records import (
    Checkpoint,
    Content,
    Effect,
    Event,
    LogEntry,
    Pool,
    ResultCommit,
    Staged,
    Task,
)
from fencepost.kernel.writes import Keys, Snapshot, WriteSet

# What a request id is remembered for, and so the least that a store keeps a Request.
REQUEST_RETENTION_US = 600 * 1_000_000
# Request ids are kept in buckets of time, and looked up in as many of them as their retention can span.
REQUEST_BUCKET_US = 300 * 1_000_000
REQUEST_BUCKETS = -(-REQUEST_RETENTION_US // REQUEST_BUCKET_US) + 1


class Load(msgspec.Struct):
    """Read `keys` into `into` (which keeps what it has), and set `into.now`. Answer: None.

    With `guess` a store may answer from what it has written itself lately, and then sets `into.guessed`: enough to
    try an acceptance on, which Apply compares, never to refuse or to find nothing.
    """

    keys: Keys
    into: Snapshot
    guess: bool = False


class Scan(msgspec.Struct):
    """Candidates in claim order: (priority, available_at, task_id). Answer: list[Task], at most `limit`.

    `lapsed=False`: READY tasks with available_at <= now, of these queues and kinds (None: every kind).
    `lapsed=True`: CLAIMED tasks whose lease ended at or before `now - grace_us`, or whose claim was
    granted under an epoch below `epoch`. A store that has read the inputs on the way puts them into
    `into.inputs`. Both are offers: the kernel decides.
    """

    pool: str
    queues: tuple[str, ...] | None  # None: every queue (the expiry loop)
    kinds: tuple[str, ...] | None
    limit: int
    into: Snapshot
    lapsed: bool = False
    epoch: int = 0
    grace_us: int = 0


class Apply(msgspec.Struct):
    """Compare and write each set, atomically, independent of the others. Answer: list[bool], won or lost.

    No record appears in two sets of one Apply. A set is compared on: its pool's epoch (where it names
    one) under a lock that a raise conflicts with, and the state version of every task and pool that it
    writes. `log` is appended whatever is won.

    A set's `statements` come after everything else that is written. One that the database refuses raises
    StatementFailed out of `Store.run`, and nothing of the plan is written: whoever applies a set that has some applies
    it alone. A store whose capabilities do not say `statements` raises InvalidRequest for them.
    """

    sets: Sequence[WriteSet]
    log: Sequence[LogEntry] = ()


Plan = Generator[Load | Scan | Apply, Any, Any]


class StoreCapabilities(msgspec.Struct, frozen=True):
    """What a store can and cannot do: declared, tested, no surprise."""

    durable: bool  # survives the process
    shared: bool  # several processes may open it at once
    loses_swaps: bool  # Apply may answer False although the plan loaded just before
    hints: bool = False  # `subscribe` calls back when something became ready, whoever made it so
    look_every: float = 1.0  # seconds between looks of an idle process at tasks, or with `hints` between its glances
    joins: bool = False  # `run_on` runs a plan inside a caller's own transaction
    statements: bool = False  # executes `WriteSet.statements`, in the same transaction


class TaskFilter(msgspec.Struct, frozen=True):
    pool: str | None = None
    queue: str | None = None
    kind: str | None = None
    states: tuple[int, ...] = ()
    parent: str | None = None


class EffectFilter(msgspec.Struct, frozen=True):
    """`pool`: where the task was when the effect was first prepared. `downstream`: with its account."""

    pool: str | None = None
    task_id: str | None = None
    states: tuple[int, ...] = ()  # of kernel.records.EffectState; none: every state
    guarantee: str | None = None
    downstream: str | None = None


class TaskHistory(msgspec.Struct):
    """Everything stored about one task: what audit and `show` read."""

    task: Task
    events: list[Event]
    input: tuple[int, Content] | None  # (revision, content)
    parents: list[str]
    children: list[str]
    result: ResultCommit | None
    staged: list[Staged]
    checkpoint: Checkpoint | None
    effects: list[Effect] = []  # in order of their numbers
    payload_digests: dict[int, str] = {}  # by number; stored beside a payload, and kept when that is pruned


class Numbered(msgspec.Struct, frozen=True):
    """An event or log entry with the number by which a reader pages on. Numbers grow in order of commit."""

    number: int
    entry: Any


class Store(Protocol):
    """Every method may raise `Unavailable`. Nothing else is part of a store."""

    capabilities: StoreCapabilities
    url: str
    store_id: str
    namespace: str

    async def run(self, plan: Plan) -> Any:
        """Drive `plan` to its end and return its value.

        When it returns, what `Apply` won is durable. Raises Unavailable when the store could not be
        asked or when it is not known whether a commit happened; then nothing may be concluded.
        """

    async def version(self) -> int:
        """A number that differs when anybody has written since it was last asked. Cheap: watchers poll it, and idle
        workers of stores that do not hint."""

    # read side: consistent for the one call, on connections that hold no transaction afterwards

    async def clock(self) -> int: ...

    async def pools(self) -> list[Pool]: ...

    async def tasks(self, where: TaskFilter, after: str | None, limit: int) -> list[Task]:
        """In order of task id, beyond `after`."""

    async def records(self, task_ids: Sequence[str]) -> list[Task]:
        """The records that exist of these, in no particular order: nothing but the records."""

    async def history(self, task_id: str) -> TaskHistory | None: ...

    async def histories(self, after: str | None, limit: int) -> list[TaskHistory]:
        """Everything, in order of task id, beyond `after`: audit's pages."""

    async def result(self, task_id: str) -> ResultCommit | None:
        """With its content, also where that was staged beforehand (None only when it was pruned)."""

    async def effects(self, where: EffectFilter, after: tuple[str, int] | None, limit: int) -> list[Effect]:
        """In order of (task id, number), beyond `after`.

        Asked for the states AWAITING_APPROVAL and UNKNOWN alone, a store looks at no effect in another state, however
        many there are. With any other state among them it may walk over all that the rest of `where` leaves.
        """

    async def payloads(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Content]:
        """The payloads bound to the effects (task id, number). One that is missing was pruned, or never was."""

    async def unknown_backlog(self) -> list[tuple[str, str, int, int, int]]:
        """(pool, guarantee, state, how many, the oldest `first_prepared_at`) of all effects that are AWAITING_APPROVAL
        or UNKNOWN, in that order. Looks at no other."""

    async def events(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, names: Sequence[str] = ()
    ) -> list[Numbered]:
        """Journal entries of task records beyond number `after`, in order of commit."""

    async def log(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, kinds: Sequence[str] = ()
    ) -> list[Numbered]: ...

    async def counts(self) -> list[tuple[str, str, str, int, int]]:
        """(pool, queue, kind, state, how many)."""

    async def last_numbers(self) -> tuple[int, int]:
        """The highest event number and log number so far: where a watcher starts."""

    async def prune(self, before_us: int, limit: int) -> dict[str, int]:
        """Remove bodies, events and log entries that ended before `before_us` (of at most `limit` tasks), and
        request ids past their ten minutes. Never: task ids, digests, generations, result commits, effects. How many of
        what.

        Payloads and receipts go with a COMMITTED task: a cancelled one may be reopened and then finds its effects as
        they were, and those that wait for a decision keep what it is about."""

    async def orphans(self) -> dict[str, int]:
        """Rows whose task record is missing, by table: audit's question."""

    async def diagnose(self) -> dict[str, Any]:
        """For `doctor`: versions, file, journal mode, sizes, integrity."""

    async def close(self) -> None: ...


class Glance(msgspec.Struct):
    """What an idle process wants to know, read at once. Times are microseconds of the store's clock.

    It is an offer, as a scan is: nothing is granted or refused on it.
    """

    now: int
    versions: dict[str, int]  # of every pool: its state version
    lapses: dict[str, int]  # of every pool that has claims: when the first of their leases ends, 0 under an old epoch
    ready: list[int | None]  # for each lane asked about: when its first READY task is due, None without one


class HintingStore(Store, Protocol):
    """A store whose capabilities say `hints`."""

    async def glance(self, lanes: Sequence[tuple[str, tuple[str, ...], tuple[str, ...] | None]]) -> Glance:
        """One statement, for whoever waits: see `Glance`. A lane is a pool, queues, and kinds (None: any)."""

    def hears_since(self) -> float | None:
        """Since when, by `clock.elapsed`, whoever makes a task ready hints here or at somebody else who waits; None
        where nobody does: nothing is said to this process then, and it must look by itself."""

    def subscribe(
        self, changed: Callable[[], None], ready: Callable[[str, str, str], bool], anybody: Callable[[], bool]
    ) -> None:
        """Call `ready`, on the store's event loop, with the pool, queue and kind of a task that became ready, whoever
        made it so, this process too; it answers whether anybody here wanted it: then nobody else hears of it soon.
        Call `changed` where anything may be ready. Hints: they may come for nothing, and may be lost. `anybody`
        answers whether anybody waits here at all."""

    def listen(self) -> None:
        """Somebody waits: hear what other processes say from now on."""


class JoiningStore(Store, Protocol):
    """A store whose capabilities say `joins`."""

    async def run_on(self, connection: Any, plan: Plan) -> None:
        """Drive `plan`, which scans nothing, inside the transaction that `connection` is in.

        When it returns, what `Apply` won stands in that transaction, and is compared for good: nobody can supersede
        it before the transaction has ended. Whatever it raises, nothing of it stands there.
        Raises InvalidRequest where `connection` is not fit, Unavailable as `run` does.
        """

    async def end_sessions(self, sessions: Sequence[tuple[int, str]]) -> int:
        """End the sessions that an `InTheWay` named, where they are in the way still. How many."""
