"""The coordinator: every command passes here, once.

What was asked while the last batch was under way is the next batch (`service/lanes.py`); there is no linger timer. A
batch is one plan (`service/batch.py`), run by the store.

Order of one command's way: admission (is the call right in itself) → queue → plan → answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec

from fencepost import clock
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Granted
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.prepare import Prepared
from fencepost.kernel.records import READY
from fencepost.kernel.writes import Decision
from fencepost.service import answers, effect_views, queries
from fencepost.service.admission import admit
from fencepost.service.batch import Operation, plan
from fencepost.service.lanes import Lanes
from fencepost.service.maintenance import Maintenance
from fencepost.service.refusals import RefusalLog
from fencepost.service.waiters import Question, Waiter
from fencepost.service.wakeups import Wakeups
from fencepost.stores.base import JoiningStore, Store
from fencepost.wire import (
    AttemptView,
    Claim,
    EventView,
    Page,
    Pending,
    PoolView,
    Refused,
    Result,
    Submitted,
    TaskView,
    new_id,
)

# How many claims this process remembers having granted, to tell a rewound store from a liar.
REMEMBERED_CLAIMS = 100_000


class Coordinator:
    """The `Backend` in this process. Not thread-safe: one event loop owns it; others open their own."""

    def __init__(self, store: Store, *, kernel: Kernel | None = None) -> None:
        self.store = store
        self.store_id = store.store_id
        self.kernel = kernel if kernel is not None else Kernel()
        self._lanes = Lanes(self._run_batch, several=store.capabilities.loses_swaps)
        self._closed = False
        self._refusals = RefusalLog(store)
        self._wakeups = Wakeups(store)
        self._maintenance = Maintenance(self, self._wakeups)
        self._granted: dict[str, tuple[int, int]] = {}  # attempt id → (epoch, generation)
        self._background: set[asyncio.Future[Any]] = set()

    # asking -------------------------------------------------------------------------------------

    def _queue(self, command: Any, quiet: bool = False) -> Operation:
        """The command in the next batch; its `future` is done once it was decided."""
        command = self._admitted(command)
        operation = Operation(command, asyncio.get_running_loop().create_future(), quiet)
        self._lanes.add(operation)
        return operation

    def _admitted(self, command: Any) -> Any:
        """The command, right in itself, with what only the service knows."""
        admit(command, self.store_id)
        if self._closed:
            raise Unavailable("this client is closed")
        if type(command) is k.Prepare or (type(command) is k.Commit and command.statements):
            return msgspec.structs.replace(command, namespace=self.store.namespace)
        return command

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

    async def ask_on(self, connection: Any, command: Any) -> Pending | Refused:
        """`command` (commit or submit) inside the transaction that `connection` is in; see `Backend.ask_on`."""
        command = self._admitted(command)
        if not self.store.capabilities.joins:
            scheme = self.store.url.partition(":")[0]
            raise InvalidRequest(
                "connection",
                f"a {scheme} store writes on its own connection only, and can join no other transaction; "
                "PostgreSQL stores can",
            )
        if type(command) is k.Submit and not command.tasks:
            return Pending(Outcome.SUBMITTED, (), changed=False)
        operation = Operation(command, asyncio.get_running_loop().create_future(), False)
        await cast("JoiningStore", self.store).run_on(connection, plan(self.kernel, [operation]))
        decision = operation.decision
        if decision is None:
            raise operation.error or Unavailable("too contended: nothing was written; ask again")
        # On our own connection: what was refused is known even where the caller rolls back.
        self._journal(operation, decision)
        answer = decision.answer
        if isinstance(answer, Problem):
            raise answers.problem(answer)
        if isinstance(answer, Refusal):
            task_id = operation.task_id if operation.task_id is not None else answer.current.get("task_id")
            return answers.refused(answer, _DOOR_OF[type(command)], task_id)
        return answers.pending(answer)

    async def claim_next(self, command: Any, wait: float = 0.0, *, fresh: bool = False) -> list[Claim] | Refused:
        if wait <= 0:
            return await self.ask(command)  # type: ignore[no-any-return]
        admit(command, self.store_id)
        question = Question(command.pool, command.queues, command.kinds, command.epoch, command.protocol)
        async with self._wakeups.waiter(question, wait, len(command.attempt_ids)) as waiter:
            # In line before it looks, so that what comes in between is not slept through. A question that was asked
            # before may have been granted something already, whatever others found.
            look = not (fresh and self._wakeups.knows_nothing_is_there(waiter))
            while True:
                if look:
                    found = await self._look(command, waiter)
                    if isinstance(found, Refused) or found:
                        return found
                look = await waiter.woken()
                if not look:
                    if await self._wakeups.found_nothing_since(waiter):
                        return []
                    return await self._look(command, waiter)

    async def _look(self, command: Any, waiter: Waiter) -> list[Claim] | Refused:
        began = clock.elapsed()
        operation = self._queue(command)
        await operation.future
        found: list[Claim] | Refused = self._answer(operation)
        refused = isinstance(found, Refused)
        pool = operation.snapshot.pools.get(command.pool) if operation.snapshot is not None else None
        waiter.found(refused or bool(found), began, None if refused or pool is None else pool.state_version)
        return found

    def _answer(self, operation: Operation) -> Any:
        decision = operation.decision
        assert decision is not None
        answer = decision.answer
        kind = type(answer)
        if kind is Granted:
            snapshot = operation.snapshot
            assert snapshot is not None
            writes = decision.writes
            written = writes.effects if writes is not None and "effects" in writes.made else []
            claims = [answers.claim(task, snapshot, self.store_id, written) for task in answer.tasks]
            return claims[0] if type(operation.command) is k.Claim else claims
        if kind is Prepared:
            assert operation.snapshot is not None
            return answers.prepared(answer, operation.snapshot)
        door = _DOOR_OF[type(operation.command)]
        if kind is Refusal:
            return answers.refused(answer, door, operation.task_id)
        if kind is Problem:
            raise answers.problem(answer)
        return answers.accepted(answer, door)

    # batches ------------------------------------------------------------------------------------

    async def _run_batch(self, batch: list[Operation]) -> None:
        try:
            await self.store.run(plan(self.kernel, batch))
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
        self._journal(operation, decision)

    def _journal(self, operation: Operation, decision: Decision) -> None:
        """The refusals' journal, and alarms."""
        answer = decision.answer
        if decision.log and not operation.quiet:
            for entry in decision.log:
                if entry.kind == "refusal":
                    self._refusals.add(entry)
        if type(answer) is Refusal and answer.alarm:
            self._raise_alarm(operation, answer)

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

    async def effects(self, where: dict[str, Any], cursor: str | None, limit: int) -> Page:
        return await effect_views.effects(self.store, where, cursor, limit)

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
        async with self._wakeups.waiter(None, wait) as waiter:
            while True:
                if self._closed:
                    raise Unavailable("this client is closed")
                found = await queries.result(self.store, task_id)
                if isinstance(found, Result) or not await waiter.woken():
                    return found

    async def report(self, name: str, **arguments: Any) -> Any:
        """Reports by name: status, audit, doctor, history, prune, maintain, end_sessions."""
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
        if name == "end_sessions" and self.store.capabilities.joins:
            return await cast("JoiningStore", self.store).end_sessions(**arguments)
        raise InvalidRequest("report", f"there is no report {name!r}")

    def start_maintenance(self, interval: float = 1.0) -> None:
        """Expire and prune from now on, in the background. Safe in any number of processes."""
        self._maintenance.start(interval)

    async def close(self) -> None:
        """Finish what is queued, write the last refusals, close the store."""
        if self._closed:
            return
        await self._maintenance.stop()
        while working := [*self._background, *self._lanes.running()]:
            await asyncio.wait(working)
        self._closed = True
        self._wakeups.close()
        await self._refusals.close()
        await self.store.close()


_DOOR_OF: dict[type, str] = {operation.command: operation.door for operation in Kernel().operations}
