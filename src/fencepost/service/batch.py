"""One batch: load what the decisions read, let the kernel decide each command, apply what it wrote as
compare-and-swap, decide again what lost.

An acceptance is answered only after a won swap, a refusal only from records that this very plan has read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Granted
from fencepost.kernel.records import LogEntry, Task
from fencepost.kernel.writes import Decision, Keys, Snapshot, WriteSet
from fencepost.stores.base import Apply, Load, Scan

logger = logging.getLogger("fencepost.coordinator")

# A command that loses this many swaps in a row is given up as Unavailable: nothing was written by it.
MAX_TRIES = 200

Lane = tuple[str, tuple[str, ...], tuple[str, ...] | None]


class Operation:
    """A queued command, and what became of it."""

    __slots__ = ("alone", "command", "decision", "error", "future", "lane", "quiet", "snapshot", "task_id", "tries")

    def __init__(self, command: Any, future: asyncio.Future[None], quiet: bool) -> None:
        self.command = command
        self.future = future
        self.quiet = quiet  # a loop's own look: its refusals are no events
        self.decision: Decision | None = None
        self.error: Exception | None = None  # a fault in deciding it; nobody else's
        self.snapshot: Snapshot | None = None
        # Where claim_next looks: (pool, queues, kinds); None for every other command.
        self.lane: Lane | None = None
        self.task_id: str | None = None  # the record that any other command is about, where it names one
        if type(command) is k.ClaimNext:
            self.lane = (command.pool, command.queues, command.kinds)
        else:
            claim = getattr(command, "claim", None)
            self.task_id = claim.task_id if claim is not None else getattr(command, "task_id", None)
        self.tries = 0
        self.alone = type(command) is k.Commit and bool(command.statements)


class Candidates:
    """What the scan offered to one lane's claims. In a wave no task is offered twice: who looked at it has taken
    it, or was refused it by comparisons that would refuse it to the next as well."""

    __slots__ = ("_tasks", "drawn")

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = iter(tasks)
        self.drawn = False  # this wave has moved a task of it

    def untouched(self, touched: set[Any]) -> Iterator[Task]:
        for task in self._tasks:
            if task.task_id not in touched:
                yield task
            else:
                self.drawn = True


def plan(kernel: Kernel, batch: Sequence[Operation]) -> Generator[Load | Scan | Apply, Any, None]:
    """Waves: no record is moved twice in one Apply, so what touches a moved record waits for the next."""
    pending = list(batch)
    log: list[LogEntry] = []
    guess = True  # the first wave may try on what the store only remembers
    while pending:
        snapshot = Snapshot()
        candidates = yield from _load(kernel, pending, snapshot, guess)
        guess = False
        deferred: list[Operation] = []
        sets: list[WriteSet] = []
        setters: list[Operation] = []
        touched: set[Any] = set()
        claims: list[Operation] = []
        for operation in pending:
            if operation.task_id in touched and operation.task_id is not None:
                deferred.append(operation)
                continue
            lane = candidates.get(operation.lane) if operation.lane is not None else None
            offered = lane.untouched(touched) if lane is not None else ()
            try:
                decision = kernel.decide(snapshot, operation.command, offered)
            except Exception as error:
                logger.exception("deciding %s failed", type(operation.command).__name__)
                operation.error = error
                continue
            writes = decision.writes
            if writes is not None:
                records = writes.records()
                if not touched.isdisjoint(records):
                    touched.update(records)  # keeps the order of what follows it
                    deferred.append(operation)
                    continue
                touched.update(records)
                if lane is not None:
                    lane.drawn = True
                sets.append(writes)
                setters.append(operation)
            elif snapshot.guessed or (lane is not None and lane.drawn) or _reads_moved(operation, touched):
                # Nothing, or no, must not be said from records that were not read, nor from such that this wave has
                # moved: there may be more tasks behind those that others of the wave took.
                deferred.append(operation)
                continue
            operation.decision = decision
            operation.snapshot = snapshot
            if type(decision.answer) is Granted and decision.answer.tasks:
                claims.append(operation)
            if decision.log:
                log.extend(entry for entry in decision.log if entry.kind != "refusal")
        if claims:
            yield from _load_for_claims(claims, snapshot)
        if sets or log:
            won = yield Apply(sets, log)
            log = []
            for operation, success in zip(setters, won, strict=True):
                if success and _parked_all(operation) and operation.tries < MAX_TRIES:
                    operation.decision = None
                    operation.tries += 1
                    deferred.append(operation)
                elif not success:
                    operation.decision = None
                    operation.tries += 1
                    if operation.tries < MAX_TRIES:
                        deferred.append(operation)
        pending = deferred


def _load(
    kernel: Kernel, pending: Sequence[Operation], snapshot: Snapshot, guess: bool
) -> Generator[Load | Scan | Apply, Any, dict[Lane, Candidates]]:
    need = kernel.need
    loaded = missing = Keys()
    for operation in pending:
        need(operation.command, snapshot, missing)
    while missing:
        yield Load(missing, snapshot, guess)
        keys = Keys()
        for operation in pending:
            need(operation.command, snapshot, keys)
        missing = _subtract(keys, loaded)
    wanted: dict[Lane, int] = {}
    for operation in pending:
        lane = operation.lane
        if lane is not None:
            wanted[lane] = wanted.get(lane, 0) + len(operation.command.attempt_ids)
    found: dict[Lane, Candidates] = {}
    for lane, limit in wanted.items():
        pool_name, queues, kinds = lane
        pool = snapshot.pools.get(pool_name)
        if pool is None or not pool.intake_open:
            continue
        tasks = yield Scan(pool_name, queues, kinds, limit, snapshot)
        if len(tasks) < limit:
            grace = round(pool.policy.reclaim_grace * 1_000_000)
            lapsed = yield Scan(
                pool_name,
                queues,
                kinds,
                limit - len(tasks),
                snapshot,
                lapsed=True,
                epoch=pool.epoch,
                grace_us=grace,
            )
            tasks = [*tasks, *lapsed]
        found[lane] = Candidates(tasks)
        # A claim in passing ends an attempt, and so moves what it was sending.
        sending = {task.task_id for task in tasks if task.effects and task.task_id not in snapshot.effects}
        if sending:
            now = snapshot.now
            yield Load(Keys(effects=sending), snapshot)
            snapshot.now = now
    return found


def _load_for_claims(claims: Sequence[Operation], snapshot: Snapshot) -> Generator[Load | Scan | Apply, Any, None]:
    """What a granted claim carries: its input, the last checkpoint, its parents' results."""
    claims = [operation for operation in claims if _carries_more(operation, snapshot)]
    loaded = Keys()
    while True:
        keys = Keys()
        for operation in claims:
            assert operation.decision is not None
            for task in operation.decision.answer.tasks:
                if task.task_id not in snapshot.inputs:
                    keys.inputs.add(task.task_id)
                if task.checkpoint_generation:
                    keys.checkpoints.add(task.task_id)
                if task.deps_total:
                    keys.parents.add(task.task_id)
                    keys.results.update(snapshot.parents.get(task.task_id, ()))
        missing = _subtract(keys, loaded)
        if not missing:
            return
        now = snapshot.now
        yield Load(missing, snapshot)
        snapshot.now = now


def _carries_more(operation: Operation, snapshot: Snapshot) -> bool:
    """Whether its tasks come with more than the inputs that the scan has read already."""
    assert operation.decision is not None
    for task in operation.decision.answer.tasks:
        if task.task_id not in snapshot.inputs or task.checkpoint_generation or task.deps_total:
            return True
    return False


def _parked_all(operation: Operation) -> bool:
    """A claim_next that granted nothing and only parked, in passing, whatever it was offered: there may be more
    behind these, so it looks again before it says that there is nothing."""
    if operation.lane is None or operation.decision is None:
        return False
    answer = operation.decision.answer
    return type(answer) is Granted and not answer.tasks


def _reads_moved(operation: Operation, touched: set[Any]) -> bool:
    """A decision without writes (a refusal, a repeat, an empty claim) must not rest on a record that this
    wave has moved before it."""
    if not touched:
        return False
    command = operation.command
    if isinstance(command, (k.PoolCommand, k.CreatePool, k.ClaimNext)) and ("pool", command.pool) in touched:
        return True
    new = command.tasks if type(command) is k.Submit else getattr(command, "spawn", ())
    return any(task.task_id in touched or not touched.isdisjoint(task.depends_on) for task in new)


def _subtract(keys: Keys, loaded: Keys) -> Keys:
    """What of `keys` is not in `loaded` yet; and count it as loaded."""
    missing = Keys()
    for name in Keys.__struct_fields__:
        wanted: set[Any] = getattr(keys, name)
        if wanted:
            have: set[Any] = getattr(loaded, name)
            new = wanted - have
            if new:
                setattr(missing, name, new)
                have |= new
    return missing
