"""The reference store: plain dictionaries behind one lock. What the other stores must behave like.

With `optimistic=True` it gives other plans a turn between a plan's steps, and so loses
compare-and-swaps as a server does: the conformance suite and the simulation run on both.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import uuid_utils

from fencepost import clock
from fencepost.errors import InvalidRequest
from fencepost.kernel.records import (
    Checkpoint,
    Content,
    Effect,
    Event,
    LogEntry,
    Pool,
    Request,
    ResultCommit,
    Staged,
    StagedState,
    State,
    Task,
)
from fencepost.kernel.writes import Keys, Snapshot, WriteSet
from fencepost.stores.base import (
    REQUEST_RETENTION_US,
    Apply,
    EffectFilter,
    Load,
    Numbered,
    Plan,
    Scan,
    StoreCapabilities,
    TaskFilter,
    TaskHistory,
)
from fencepost.stores.memory_effects import MemoryEffects

_replace = msgspec.structs.replace
_REMOVED = ("tasks", "events", "inputs", "checkpoints", "staged", "payloads", "receipts", "log", "requests")


class MemoryStore:
    """Lives and dies with the process. Threads and event loops may share it."""

    url = "memory://"

    def __init__(self, *, optimistic: bool = False, namespace: str | None = None) -> None:
        self.capabilities = StoreCapabilities(durable=False, shared=False, loses_swaps=optimistic)
        self.store_id = str(uuid_utils.uuid4())
        self.namespace = namespace or str(uuid_utils.uuid4())
        self._lock = threading.RLock()
        self._started = clock.wall_us() - clock.to_us(clock.elapsed())
        self._version = 0
        self._pools: dict[str, Pool] = {"default": Pool("default")}
        self._tasks: dict[str, Task] = {}
        self._inputs: dict[str, tuple[int, Content]] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._parents: dict[str, list[str]] = {}
        self._children: dict[str, list[str]] = defaultdict(list)
        self._staged: dict[str, dict[tuple[int, str], Staged]] = defaultdict(dict)
        self._results: dict[str, ResultCommit] = {}
        self._effects = MemoryEffects()
        self._requests: dict[str, Request] = {}
        self._events: list[Numbered] = []
        self._by_task: dict[str, list[Event]] = defaultdict(list)
        self._log: list[Numbered] = []
        self._numbers = 0
        self._ready: dict[tuple[str, str, str], list[tuple[int, int, str]]] = defaultdict(list)  # heaps, lazily cleaned

    # time ---------------------------------------------------------------------------------------

    def _now(self) -> int:
        return self._started + clock.to_us(clock.elapsed())

    def advance(self, seconds: float) -> None:
        """Move this store's clock on: leases run out, delays end. For tests."""
        if seconds < 0:
            raise ValueError("a store's clock never goes back")
        with self._lock:
            self._started += clock.to_us(seconds)
            self._version += 1

    async def clock(self) -> int:
        return self._now()

    async def version(self) -> int:
        return self._version

    # plans --------------------------------------------------------------------------------------

    async def run(self, plan: Plan) -> Any:
        answer: Any = None
        if not self.capabilities.loses_swaps:
            with self._lock:
                try:
                    while True:
                        answer = self._step(plan.send(answer))
                except StopIteration as stop:
                    return stop.value
        while True:
            try:
                step = plan.send(answer)
            except StopIteration as stop:
                return stop.value
            await asyncio.sleep(0)
            with self._lock:
                answer = self._step(step)

    def _step(self, step: Load | Scan | Apply) -> Any:
        if isinstance(step, Load):
            return self._load(step.keys, step.into)
        if isinstance(step, Scan):
            return self._scan(step)
        for writes in step.sets:
            if "statements" in writes.made and writes.statements:
                raise InvalidRequest(
                    "statements", "a memory store has no database to execute them in; SQLite and PostgreSQL stores do"
                )
        won = [self._apply(writes) for writes in step.sets]
        self._append_log(step.log)
        if step.sets or step.log:
            self._version += 1
        return won

    def _load(self, keys: Keys, into: Snapshot) -> None:
        into.now = self._now()
        for source, wanted, found in (
            (self._pools, keys.pools, into.pools),
            (self._tasks, keys.tasks, into.tasks),
            (self._results, keys.results, into.results),
            (self._checkpoints, keys.checkpoints, into.checkpoints),
            (self._parents, keys.parents, into.parents),
        ):
            for key in wanted:
                if key in source:
                    found[key] = source[key]  # type: ignore[assignment]
        horizon = into.now - REQUEST_RETENTION_US
        for key in keys.requests:
            request = self._requests.get(key)
            if request is not None and request.at >= horizon:
                into.requests[key] = request
        for key in keys.inputs:
            if key in self._inputs:
                into.inputs[key] = self._inputs[key][1]
        for key in keys.children:
            into.children[key] = list(self._children.get(key, ()))
        for key in keys.staged:
            into.staged[key] = list(self._staged[key].values()) if key in self._staged else []
        for task_id, generation in keys.starts:
            for event in self._by_task.get(task_id, ()):
                if event.name == "attempt_started" and event.generation == generation:
                    into.starts[(task_id, generation)] = event
        if keys.effects or keys.payloads:
            self._effects.load(keys, into)

    def _scan(self, step: Scan) -> list[Task]:
        into = step.into
        into.now = now = self._now()
        if step.lapsed:
            found = [
                task
                for task in self._tasks.values()
                if task.state == State.CLAIMED
                and task.pool == step.pool
                and (step.queues is None or task.queue in step.queues)
                and (step.kinds is None or task.kind in step.kinds)
                and (
                    task.scheduler_epoch < step.epoch
                    or (task.lease_expires_at is not None and task.lease_expires_at + step.grace_us <= now)
                )
            ]
            found.sort(key=lambda task: (task.priority, task.available_at, task.task_id))
            return found[: step.limit]
        lanes = [
            self._lane(lane, now)
            for lane in list(self._ready)
            if lane[0] == step.pool
            and (step.queues is None or lane[1] in step.queues)
            and (step.kinds is None or lane[2] in step.kinds)
        ]
        ready: list[Task] = []
        for _, _, task_id in heapq.merge(*lanes):
            task = self._tasks[task_id]
            into.inputs[task_id] = self._inputs[task_id][1]
            ready.append(task)
            if len(ready) == step.limit:
                break
        return ready

    def _lane(self, lane: tuple[str, str, str], now: int) -> Iterator[tuple[int, int, str]]:
        """One lane's READY tasks in order. Entries whose task has moved on are dropped when met at the head."""
        heap = self._ready[lane]
        while heap and not self._stands(heap[0]):
            heapq.heappop(heap)
        last: tuple[int, int, str] | None = None
        for entry in sorted(heap):
            if entry != last and entry[1] <= now and self._stands(entry):
                last = entry
                yield entry

    def _stands(self, entry: tuple[int, int, str]) -> bool:
        task = self._tasks.get(entry[2])
        return (
            task is not None
            and task.state == State.READY
            and task.priority == entry[0]
            and task.available_at == entry[1]
        )

    def _apply(self, writes: WriteSet) -> bool:
        if writes.epoch is not None:
            pool = self._pools[writes.pool]
            if pool.epoch != writes.epoch or writes.pool_version not in (None, pool.state_version):
                return False
        for write in writes.tasks:
            there = self._tasks.get(write.task.task_id)
            if (there.state_version if there is not None else 0) != write.expected_version:
                return False
        horizon = self._now() - REQUEST_RETENTION_US
        for request in writes.requests:
            used = self._requests.get(request.request_id)
            if used is not None and used.at >= horizon:
                return False
        self._effects.check(writes)
        if writes.pool_write is not None:
            expected, pool = writes.pool_write
            standing = self._pools.get(pool.name)
            if (standing.state_version if standing is not None else 0) != expected:
                return False
            self._pools[pool.name] = pool
        for write in writes.tasks:
            if write.family != "compare":
                self._put(write.task)
        for task_id, revision, content in writes.inputs:
            self._inputs[task_id] = (revision, content)
        for dependency in writes.dependencies:
            self._parents.setdefault(dependency.task_id, []).append(dependency.parent_id)
            self._children[dependency.parent_id].append(dependency.task_id)
        for checkpoint in writes.checkpoints:
            self._checkpoints[checkpoint.task_id] = checkpoint
        for task_id in writes.drop_checkpoints:
            self._checkpoints.pop(task_id, None)
        for staged in writes.staged:
            self._staged[staged.task_id].setdefault((staged.generation, staged.content.digest), staged)
        for task_id, generation in writes.discard_attempts:
            self._settle(task_id, lambda key, generation=generation: key[0] == generation, None)
        for task_id, generation, digest in writes.discard_rivals:
            self._settle(task_id, lambda key: True, (generation, digest))
        for result in writes.results:
            self._results[result.task_id] = result
        self._effects.apply(writes)
        for request in writes.requests:
            self._requests[request.request_id] = request
        for event in writes.events:
            self._numbers += 1
            self._events.append(Numbered(self._numbers, event))
            self._by_task[event.task_id].append(event)
        self._append_log(writes.log)
        return True

    def _put(self, task: Task) -> None:
        self._tasks[task.task_id] = task
        if task.state == State.READY:
            heapq.heappush(
                self._ready[(task.pool, task.queue, task.kind)], (task.priority, task.available_at, task.task_id)
            )

    def _settle(self, task_id: str, chosen: Any, winner: tuple[int, str] | None) -> None:
        rows = self._staged.get(task_id)
        for key, staged in rows.items() if rows else ():
            if staged.state == StagedState.STAGED and chosen(key):
                state = StagedState.COMMITTED if key == winner else StagedState.DISCARDED
                rows[key] = _replace(staged, state=int(state))  # type: ignore[index]

    def _append_log(self, entries: Sequence[LogEntry]) -> None:
        for entry in entries:
            self._numbers += 1
            self._log.append(Numbered(self._numbers, entry))

    # read side ----------------------------------------------------------------------------------

    async def pools(self) -> list[Pool]:
        with self._lock:
            return [self._pools[name] for name in sorted(self._pools)]

    async def tasks(self, where: TaskFilter, after: str | None, limit: int) -> list[Task]:
        with self._lock:
            if where.parent is not None:
                pick = [self._tasks[child] for child in self._children.get(where.parent, ())]
            else:
                pick = list(self._tasks.values())
        pick = [
            task
            for task in pick
            if (after is None or task.task_id > after)
            and (where.pool is None or task.pool == where.pool)
            and (where.queue is None or task.queue == where.queue)
            and (where.kind is None or task.kind == where.kind)
            and (not where.states or task.state in where.states)
        ]
        pick.sort(key=lambda task: task.task_id)
        return pick[:limit]

    async def records(self, task_ids: Sequence[str]) -> list[Task]:
        with self._lock:
            return [self._tasks[task_id] for task_id in task_ids if task_id in self._tasks]

    async def history(self, task_id: str) -> TaskHistory | None:
        with self._lock:
            task = self._tasks.get(task_id)
            return None if task is None else self._history(task)

    def _history(self, task: Task) -> TaskHistory:
        task_id = task.task_id
        effects = self._effects.of(task_id)
        return TaskHistory(
            task,
            list(self._by_task.get(task_id, ())),
            self._inputs.get(task_id),
            list(self._parents.get(task_id, ())),
            list(self._children.get(task_id, ())),
            self._results.get(task_id),
            list(self._staged[task_id].values()) if task_id in self._staged else [],
            self._checkpoints.get(task_id),
            effects,
            self._effects.digests(effects),
        )

    async def histories(self, after: str | None, limit: int) -> list[TaskHistory]:
        with self._lock:
            ids = sorted(task_id for task_id in self._tasks if after is None or task_id > after)
            return [self._history(self._tasks[task_id]) for task_id in ids[:limit]]

    async def result(self, task_id: str) -> ResultCommit | None:
        with self._lock:
            result = self._results.get(task_id)
            if result is None or result.content is not None:
                return result
            staged = self._staged.get(task_id, {}).get((result.generation, result.result_digest))
            return result if staged is None else _replace(result, content=staged.content)

    async def effects(self, where: EffectFilter, after: tuple[str, int] | None, limit: int) -> list[Effect]:
        with self._lock:
            return self._effects.listed(where, after, limit)

    async def payloads(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Content]:
        with self._lock:
            return self._effects.payloads(keys)

    async def unknown_backlog(self) -> list[tuple[str, str, int, int, int]]:
        with self._lock:
            return self._effects.backlog()

    async def events(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, names: Sequence[str] = ()
    ) -> list[Numbered]:
        found: list[Numbered] = []
        with self._lock:
            for numbered in self._events:
                entry = numbered.entry
                if (
                    numbered.number > after
                    and (task_id is None or entry.task_id == task_id)
                    and (not names or entry.name in names)
                    and (pool is None or self._tasks[entry.task_id].pool == pool)
                ):
                    found.append(numbered)
                    if len(found) == limit:
                        break
        return found

    async def log(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, kinds: Sequence[str] = ()
    ) -> list[Numbered]:
        found: list[Numbered] = []
        with self._lock:
            for numbered in self._log:
                entry = numbered.entry
                if (
                    numbered.number > after
                    and (task_id is None or entry.task_id == task_id)
                    and (pool is None or entry.pool == pool)
                    and (not kinds or entry.kind in kinds)
                ):
                    found.append(numbered)
                    if len(found) == limit:
                        break
        return found

    async def counts(self) -> list[tuple[str, str, str, int, int]]:
        totals: dict[tuple[str, str, str, int], int] = defaultdict(int)
        with self._lock:
            for task in self._tasks.values():
                totals[(task.pool, task.queue, task.kind, task.state)] += 1
        return [(*key, count) for key, count in sorted(totals.items())]

    async def last_numbers(self) -> tuple[int, int]:
        with self._lock:
            return (
                self._events[-1].number if self._events else 0,
                self._log[-1].number if self._log else 0,
            )

    async def prune(self, before_us: int, limit: int) -> dict[str, int]:
        removed: dict[str, int] = dict.fromkeys(_REMOVED, 0)
        with self._lock:
            done = [
                task
                for task in self._tasks.values()
                if task.state in (State.COMMITTED, State.CANCELLED)
                and task.pruned_to_version < task.state_version
                and (events := self._by_task.get(task.task_id))
                and events[-1].at < before_us
            ][:limit]
            for task in done:
                task_id = task.task_id
                removed["tasks"] += 1
                removed["events"] += len(self._by_task.pop(task_id, ()))
                if task.state == State.COMMITTED:  # a cancelled one may be reopened, and then wants its input
                    removed["inputs"] += self._inputs.pop(task_id, None) is not None
                    removed["checkpoints"] += self._checkpoints.pop(task_id, None) is not None
                removed["staged"] += len(self._staged.pop(task_id, ()))
                if task_id in self._results:
                    self._results[task_id] = _replace(self._results[task_id], content=None)
                if task.state == State.COMMITTED:
                    self._effects.prune(task_id, removed)
                self._tasks[task_id] = _replace(task, pruned_to_version=task.state_version)
            gone = {task.task_id for task in done}
            self._events = [n for n in self._events if n.entry.task_id not in gone]
            kept = [n for n in self._log if n.entry.at >= before_us]
            removed["log"] += len(self._log) - len(kept)
            self._log = kept
            horizon = self._now() - REQUEST_RETENTION_US
            old = [key for key, request in self._requests.items() if request.at < horizon]
            for key in old:
                del self._requests[key]
            removed["requests"] += len(old)
        return removed

    async def orphans(self) -> dict[str, int]:
        with self._lock:
            tables: dict[str, Any] = {
                "input": self._inputs,
                "checkpoint": self._checkpoints,
                "result": self._results,
                "staged": self._staged,
                "dependency": self._parents,
                "event": self._by_task,
                "effect": self._effects.rows,
                "effect_payload": [task_id for task_id, _ in self._effects.bound],
            }
            return {name: sum(1 for key in table if key not in self._tasks) for name, table in tables.items()}

    async def diagnose(self) -> dict[str, Any]:
        return {"store": "memory", "durable": False, "tasks": len(self._tasks)}

    async def close(self) -> None:
        return None
