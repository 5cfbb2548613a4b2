"""The coordinator: every command passes here, once.

What was asked while the last batch was under way is the next batch; there is no linger timer. A batch
is one plan: load what the decisions read, let the kernel decide each command, apply what it wrote as
compare-and-swap, decide again what lost. An acceptance is answered only after a won swap, a refusal
only from records that this very plan has read.

Order of one command's way: admission (is the call right in itself) → queue → plan → answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any

from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Granted
from fencepost.kernel.outcomes import Problem, Refusal
from fencepost.kernel.records import READY, LogEntry, Task
from fencepost.kernel.writes import Decision, Keys, Snapshot, WriteSet
from fencepost.service import answers, queries
from fencepost.service.admission import admit
from fencepost.service.maintenance import Maintenance
from fencepost.service.refusals import RefusalLog
from fencepost.service.wakeups import Wakeups
from fencepost.stores.base import Apply, Load, Scan, Store
from fencepost.wire import AttemptView, Claim, EventView, Page, PoolView, Refused, Result, Submitted, TaskView, new_id

logger = logging.getLogger("fencepost.coordinator")

MAX_BATCH = 512
# A command that loses this many swaps in a row is given up as Unavailable: nothing was written by it.
MAX_TRIES = 200
# How many claims this process remembers having granted, to tell a rewound store from a liar.
REMEMBERED_CLAIMS = 100_000


Lane = tuple[str, tuple[str, ...], tuple[str, ...] | None]


class Operation:
    """A queued command, and what became of it."""

    __slots__ = ("command", "decision", "error", "future", "lane", "quiet", "snapshot", "task_id", "tries")

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


class Coordinator:
    """The `Backend` in this process. Not thread-safe: one event loop owns it; others open their own."""

    def __init__(self, store: Store, *, kernel: Kernel | None = None) -> None:
        self.store = store
        self.store_id = store.store_id
        self.kernel = kernel if kernel is not None else Kernel()
        self._waiting: list[Operation] = []
        self._lane: asyncio.Task[None] | None = None
        self._closed = False
        self._refusals = RefusalLog(store)
        self._wakeups = Wakeups(store)
        self._maintenance = Maintenance(self)
        self._granted: dict[str, tuple[int, int]] = {}  # attempt id → (epoch, generation)
        self._background: set[asyncio.Future[Any]] = set()

    # asking -------------------------------------------------------------------------------------

    def _queue(self, command: Any, quiet: bool = False) -> Operation:
        """The command in the next batch; its `future` is done once it was decided."""
        admit(command, self.store_id)
        if self._closed:
            raise Unavailable("this client is closed")
        operation = Operation(command, asyncio.get_running_loop().create_future(), quiet)
        self._waiting.append(operation)
        if self._lane is None:
            self._lane = asyncio.create_task(self._run_lane(), name="fencepost-lane")
        return operation

    async def ask(self, command: Any, *, quiet: bool = False) -> Any:
        operation = self._queue(command, quiet)
        await operation.future
        return self._answer(operation)

    async def ask_many(self, commands: Sequence[Any], *, quiet: bool = False) -> list[Any]:
        return await asyncio.gather(*(self.ask(c, quiet=quiet) for c in commands), return_exceptions=True)

    async def submit(self, command: Any) -> list[Submitted] | Refused:
        if not command.tasks:
            return []
        operation = self._queue(command)
        await operation.future
        assert operation.decision is not None
        answer = operation.decision.answer
        if isinstance(answer, Problem):
            raise answers.problem(answer)
        if isinstance(answer, Refusal):
            return answers.refused(answer, "submit", answer.current.get("task_id"))
        return [Submitted(answers.task_view(task), created) for task, created in answer.info["tasks"]]

    async def claim_next(self, command: Any, wait: float = 0.0) -> list[Claim] | Refused:
        found: list[Claim] | Refused = await self.ask(command)
        if wait <= 0 or isinstance(found, Refused) or found:
            return found
        async with self._wakeups.waiter(command.pool, command.queues, command.kinds, wait) as waiter:
            while True:
                # Asked again after registering, so that what came in between is not slept through.
                found = await self.ask(command)
                if isinstance(found, Refused) or found:
                    waiter.pass_on()  # where there was one there may be more
                    return found
                if not await waiter.woken():
                    return []

    def _answer(self, operation: Operation) -> Any:
        decision = operation.decision
        assert decision is not None
        answer = decision.answer
        kind = type(answer)
        if kind is Granted:
            snapshot = operation.snapshot
            assert snapshot is not None
            claims = [answers.claim(task, snapshot, self.store_id) for task in answer.tasks]
            return claims[0] if type(operation.command) is k.Claim else claims
        door = _DOOR_OF[type(operation.command)]
        if kind is Refusal:
            return answers.refused(answer, door, operation.task_id)
        if kind is Problem:
            raise answers.problem(answer)
        return answers.accepted(answer, door)

    # batches ------------------------------------------------------------------------------------

    async def _run_lane(self) -> None:
        try:
            while self._waiting:
                batch = self._waiting[:MAX_BATCH]
                del self._waiting[: len(batch)]
                await self._run_batch(batch)
        finally:
            self._lane = None

    async def _run_batch(self, batch: list[Operation]) -> None:
        try:
            await self.store.run(self._plan(batch))
        except BaseException as error:
            # Nothing may be concluded about any of them: a commit may or may not have happened.
            for operation in batch:
                if not operation.future.done():
                    operation.future.set_exception(
                        error if isinstance(error, Exception) else Unavailable("stopped while the store was asked")
                    )
            if not isinstance(error, Exception):
                raise
            return
        for operation in batch:
            decision = operation.decision
            if not operation.future.done():
                if decision is not None:
                    operation.future.set_result(None)
                else:
                    operation.future.set_exception(
                        operation.error or Unavailable("too contended: nothing was written; ask again")
                    )
            elif decision is not None and type(decision.answer) is Granted:
                self._give_back(decision.answer)
            if decision is not None:
                self._after(operation, decision)

    def _after(self, operation: Operation, decision: Decision) -> None:
        """What follows a decision outside its transaction: wake-ups, the refusals' journal, alarms."""
        answer = decision.answer
        writes = decision.writes
        if writes is not None:
            for write in writes.tasks:
                if write.task.state == READY:
                    self._wakeups.ready(write.task)
        if type(answer) is Granted:
            for task in answer.tasks:
                self._granted[task.attempt_id] = (task.scheduler_epoch, task.claim_generation)  # type: ignore[index]
            while len(self._granted) > REMEMBERED_CLAIMS:
                del self._granted[next(iter(self._granted))]
        if decision.log and not operation.quiet:
            for entry in decision.log:
                if entry.kind == "refusal":
                    self._refusals.add(entry)
        if type(answer) is Refusal and answer.alarm:
            self._raise_alarm(operation, answer)

    def _plan(self, batch: Sequence[Operation]) -> Generator[Load | Scan | Apply, Any, None]:
        """Waves: no record is moved twice in one Apply, so what touches a moved record waits for the next."""
        pending = list(batch)
        log: list[LogEntry] = []
        while pending:
            snapshot = Snapshot()
            candidates = yield from self._load(pending, snapshot)
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
                    decision = self.kernel.decide(snapshot, operation.command, offered)
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
                elif (lane is not None and lane.drawn) or _reads_moved(operation, touched):
                    # Nothing, or no, must not be said from records that this wave has moved: there may be more
                    # tasks behind those that others of the wave took.
                    deferred.append(operation)
                    continue
                operation.decision = decision
                operation.snapshot = snapshot
                if type(decision.answer) is Granted and decision.answer.tasks:
                    claims.append(operation)
                if decision.log:
                    log.extend(entry for entry in decision.log if entry.kind != "refusal")
            if claims:
                yield from self._load_for_claims(claims, snapshot)
            if sets or log:
                won = yield Apply(sets, log)
                log = []
                for operation, success in zip(setters, won, strict=True):
                    if not success:
                        operation.decision = None
                        operation.tries += 1
                        if operation.tries < MAX_TRIES:
                            deferred.append(operation)
            pending = deferred

    def _load(
        self, pending: Sequence[Operation], snapshot: Snapshot
    ) -> Generator[Load | Scan | Apply, Any, dict[Lane, Candidates]]:
        need = self.kernel.need
        loaded = missing = Keys()
        for operation in pending:
            need(operation.command, snapshot, missing)
        while missing:
            yield Load(missing, snapshot)
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
        return found

    def _load_for_claims(
        self, claims: Sequence[Operation], snapshot: Snapshot
    ) -> Generator[Load | Scan | Apply, Any, None]:
        """What a granted claim carries: its input, the last checkpoint, its parents' results."""
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

    def _give_back(self, granted: Granted) -> None:
        """The caller of a claim went away before its answer came: release at once what nobody will ever hold."""
        if granted.repeated or not granted.tasks or self._closed:
            return
        releases = [
            k.Release(
                request_id=new_id(),
                epoch=task.scheduler_epoch,
                claim=k.Presented(
                    self.store_id,
                    task.pool,
                    task.task_id,
                    task.attempt_id or "",
                    task.claim_generation,
                    task.cancel_generation,
                    task.input_digest,
                    task.owner_id,
                ),
            )
            for task in granted.tasks
        ]
        self._in_background(self.ask_many(releases))

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # alarms -------------------------------------------------------------------------------------

    def _raise_alarm(self, operation: Operation, refusal: Refusal) -> None:
        """The store may have gone back in time. Only a claim that this very process was granted proves it."""
        claim: Any = getattr(operation.command, "claim", None)
        snapshot = operation.snapshot
        granted = self._granted.get(claim.attempt_id) if claim is not None else None
        pool = snapshot.pools.get(claim.pool) if snapshot is not None and claim is not None else None
        if granted is None or pool is None or not pool.intake_open or self._closed:
            return
        epoch, generation = granted
        for_these_numbers = "generation" in refusal.current and claim.generation == generation
        if not for_these_numbers and epoch <= pool.epoch:
            return
        command = k.CloseIntake(
            request_id=new_id(), pool=pool.name, expected_epoch=pool.epoch, who="alarm: store rewound"
        )
        self._in_background(self.ask_many([command], quiet=True))

    # read side ----------------------------------------------------------------------------------

    async def pools(self) -> list[PoolView]:
        return [answers.pool_view(pool) for pool in await self.store.pools()]

    async def task(self, task_id: str) -> TaskView | None:
        return await queries.task(self.store, k.check_id(task_id, "task_id"))

    async def record(self, task_id: str) -> TaskView | None:
        return await queries.record(self.store, k.check_id(task_id, "task_id"))

    async def tasks(self, where: dict[str, Any], cursor: str | None, limit: int) -> Page:
        return await queries.tasks(self.store, where, cursor, limit)

    async def attempts(self, task_id: str) -> list[AttemptView]:
        return await queries.attempts(self.store, k.check_id(task_id, "task_id"))

    async def events(
        self, *, task_id: str | None, pool: str | None, cursor: str | None, limit: int, names: Sequence[str]
    ) -> Page:
        await self._refusals.flush()
        return await queries.events(
            self.store, task_id=task_id, pool=pool, cursor=cursor, limit=limit, names=tuple(names)
        )

    def watch(self, pool: str | None, cursor: str | None) -> AsyncIterator[EventView]:
        return queries.watch(self.store, pool, cursor)

    async def result(self, task_id: str, wait: float | None) -> Result | Refused:
        k.check_id(task_id, "task_id")
        found = await queries.result(self.store, task_id)
        if not wait or isinstance(found, Result) or found.outcome == "NOT_FOUND":
            return found
        async with self._wakeups.waiter(None, (), None, wait) as waiter:
            while True:
                found = await queries.result(self.store, task_id)
                if isinstance(found, Result) or not await waiter.woken():
                    return found

    async def report(self, name: str, **arguments: Any) -> Any:
        """Reports by name: status, audit, doctor, history, prune, maintain."""
        await self._refusals.flush()
        if name == "status":
            from fencepost.service.numbers import numbers

            return await numbers(self.store, **arguments)
        if name == "audit":
            from fencepost.service.audit import audit

            return await audit(self.store, **arguments)
        if name == "history":
            return await queries.history(self.store, **arguments)
        if name == "doctor":
            return {**await self.store.diagnose(), "clock": await self.store.clock(), "pools": await self.pools()}
        if name == "prune":
            return await self._maintenance.prune(**arguments)
        if name == "maintain":
            return await self._maintenance.round()
        raise InvalidRequest("report", f"there is no report {name!r}")

    def start_maintenance(self, interval: float = 1.0) -> None:
        """Expire and prune from now on, in the background. Safe in any number of processes."""
        self._maintenance.start(interval)

    async def close(self) -> None:
        """Finish what is queued, write the last refusals, close the store."""
        if self._closed:
            return
        await self._maintenance.stop()
        while self._lane is not None or self._background:
            await asyncio.wait([*self._background, *([self._lane] if self._lane is not None else [])])
        self._closed = True
        self._wakeups.close()
        await self._refusals.close()
        await self.store.close()


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


_DOOR_OF: dict[type, str] = {operation.command: operation.door for operation in Kernel().operations}
