"""The numbers of claim.v1, section 8, as far as their records exist: what `fencepost status` shows.

All of them come from the journal and the records, so that a restart loses none. They cover what
retention has left of the journal. One call reads the records once, then the events once, then the
log once, page by page and without bodies: its time grows with the store. It takes no lock; on a store
in use the three parts are a moment apart.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from fencepost.clock import MICROSECOND, to_datetime, to_us
from fencepost.kernel.commands import check_id, check_seconds
from fencepost.kernel.records import Effect, EffectState, Event, Guarantee, LogEntry, State, Task
from fencepost.service.coverage import Coverage
from fencepost.service.epochs import read_epochs
from fencepost.service.journal import log_of
from fencepost.service.queries import add_usage
from fencepost.stores.base import EffectFilter, Store, TaskFilter

PAGE = 1000
# Upper bounds of the reclaim delay's histogram, in seconds; the last bucket has none.
DELAYS = (0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 3600.0)
UNSERVED_AFTER = 300.0
_LOOKED_AT = 2000  # recent claims whose kind is looked up before a kind is called unserved
_OPEN = (int(State.READY), int(State.CLAIMED), int(State.BLOCKED), int(State.PARKED))
_NAMES = ("attempt_started", "attempt_renewed", "attempt_ended", "result_committed")

Lane = tuple[str, str, str]  # pool, queue, kind


async def numbers(
    store: Store, pool: str | None = None, *, coverage: bool = True, unserved_after: float = UNSERVED_AFTER
) -> dict[str, Any]:
    """Every number, of one pool or of all. Durations are seconds; a rate over nothing is None.

    - `claims`: `granted` attempts; `held` and `conflict` refusals of claims for a task that was named;
      `contention_rate` = (held + conflict) / (granted + held + conflict). `claim_next` passes over what it
      cannot have and is refused nothing, so it counts by what it was granted.
    - `reclaim_delay`: end − lease's end of attempts whose lease ran out, ended by `expire` or by a claim in passing.
    - `renew`: `failure_rate` = refused / (renewed + refused), `by_reason`; `late`: granted after the lease's end;
      `near_misses`: granted with less than 20 % of the asked ttl left. Repeats of one call count once.
    - `fenced`: refusals FENCED, by door and reason. ENDED is not among them.
    - `attempts_per_task`: how many tasks were committed at which generation; the highest generation still open.
    - `discarded_compute`: of attempts that ended other than COMMITTED: how many, what they reported, added up by
      key, and `wall`: seconds from start to end of those (`unreported`) that reported nothing.
    - `ready_to_commit`: commit − first READY of the revision that was committed.
    - `coverage`: see `Coverage`; left out with `coverage=False`, which then reads open tasks only.
    - `backlog`: tasks by pool, queue, kind and state. `oldest_ready_age`: the longest that a claimable task of that
      lane has been waiting since it was READY and its time had come.
    - `unserved`: lanes with a task claimable for longer than `unserved_after` where no claim is live and none was
      granted within that time: nobody who asks can do this kind.
    - `unreachable`: BLOCKED tasks with a CANCELLED or PARKED parent.
    - `effects`: those that are UNKNOWN or AWAITING_APPROVAL, by pool, guarantee and state: how many, and the age in
      seconds of the oldest.

    Raises InvalidRequest (pool, unserved_after) and Unavailable.
    """
    if pool is not None:
        check_id(pool, "pool")
    found = _Numbers(await store.clock(), check_seconds(unserved_after, "unserved_after"), coverage)
    # Records before events: then every change that a record shows has its event among those that are read.
    halted: list[str] = []
    states = () if coverage else (*_OPEN, int(State.CANCELLED))
    async for task in _tasks(store, TaskFilter(pool=pool, states=states)):
        found.task(task)
        if task.successors and task.state in (State.CANCELLED, State.PARKED):
            halted.append(task.task_id)
    async for effect in _effects(store, pool) if coverage else _none():
        found.effect(effect)
    async for event in _events(store, pool, () if coverage else _NAMES):
        found.event(event)
    async for numbered in log_of(store, None, ("refusal", "usage", "replay", "alarm"), pool):
        found.entry(numbered.entry)
    if found.coverage is not None:
        for name, epochs in (await read_epochs(store, lambda invariant, says: None)).items():
            if pool is None or name == pool:
                found.coverage.pool(epochs)
    lanes: dict[Lane, dict[str, int]] = {}
    for in_pool, queue, kind, state, count in await store.counts():
        if pool is None or in_pool == pool:
            lanes.setdefault((in_pool, queue, kind), {})[State(state).name] = count
    return {
        "at": to_datetime(found.now),
        "pool": pool,
        **found.report(lanes),
        "unserved": await _unserved(store, found, lanes),
        "unreachable": await _unreachable(store, halted),
        "effects": await _backlog(store, found.now, pool),
    }


async def _tasks(store: Store, where: TaskFilter) -> AsyncIterator[Task]:
    after: str | None = None
    while True:
        page = await store.tasks(where, after, PAGE)
        for task in page:
            yield task
        if len(page) < PAGE:
            return
        after = page[-1].task_id
        await asyncio.sleep(0)  # a store that answers at once must not keep the loop from everybody else


async def _effects(store: Store, pool: str | None) -> AsyncIterator[Effect]:
    after: tuple[str, int] | None = None
    while True:
        page = await store.effects(EffectFilter(pool=pool), after, PAGE)
        for effect in page:
            yield effect
        if len(page) < PAGE:
            return
        after = (page[-1].task_id, page[-1].number)
        await asyncio.sleep(0)


async def _none() -> AsyncIterator[Effect]:
    return
    yield


async def _backlog(store: Store, now: int, pool: str | None) -> list[dict[str, Any]]:
    return [
        {
            "pool": in_pool,
            "guarantee": guarantee,
            "state": EffectState(state).name,
            "count": count,
            "oldest_age": max(0, now - oldest) / MICROSECOND,
        }
        for in_pool, guarantee, state, count, oldest in await store.unknown_backlog()
        if pool is None or in_pool == pool
    ]


async def _events(store: Store, pool: str | None, names: Sequence[str]) -> AsyncIterator[Event]:
    after = 0
    while True:
        page = await store.events(after, PAGE, pool=pool, names=names)
        for numbered in page:
            yield numbered.entry
        if len(page) < PAGE:
            return
        after = page[-1].number
        await asyncio.sleep(0)


async def _unreachable(store: Store, halted: Sequence[str]) -> int:
    blocked: set[str] = set()
    for parent in halted:
        async for child in _tasks(store, TaskFilter(parent=parent, states=(int(State.BLOCKED),))):
            blocked.add(child.task_id)
    return len(blocked)


async def _unserved(store: Store, found: _Numbers, lanes: dict[Lane, dict[str, int]]) -> list[dict[str, Any]]:
    """Events name no kind, so the kinds of recent claims are looked up; none is where every lane is served."""
    starved = {
        lane: since
        for lane, since in found.oldest_ready.items()
        if found.now - since > found.unserved_after_us and not lanes.get(lane, {}).get("CLAIMED")
    }
    for task_id in dict.fromkeys(reversed(found.recently_claimed)):
        if not starved:
            break
        history = await store.history(task_id)
        if history is not None:
            starved.pop((history.task.pool, history.task.queue, history.task.kind), None)
    return [
        {
            "pool": lane[0],
            "queue": lane[1],
            "kind": lane[2],
            "ready": lanes.get(lane, {}).get("READY", 0),
            "oldest_ready_age": (found.now - since) / MICROSECOND,
        }
        for lane, since in sorted(starved.items())
    ]


class _Numbers:
    """What one pass over records, events and log adds up to."""

    def __init__(self, now: int, unserved_after_us: int, coverage: bool) -> None:
        self.now = now
        self.unserved_after_us = unserved_after_us
        self.coverage = Coverage() if coverage else None
        self.oldest_ready: dict[Lane, int] = {}
        self.recently_claimed: deque[str] = deque(maxlen=_LOOKED_AT)
        self._pruned: set[str] = set()  # tasks with some of their events pruned: on neither side of the coverage
        self._highest = (0, "")
        self._names: Counter[str] = Counter()
        self._with_effects: set[str] = set()
        self._refused: Counter[tuple[str, str, str | None]] = Counter()
        self._kinds: Counter[str] = Counter()
        self._late = self._near = 0
        self._delays = array("q")
        self._waits = array("q")
        self._generations: Counter[int] = Counter()
        self._started: dict[str, int] = {}  # task → start of its live attempt
        self._lost: dict[tuple[str, int], int | None] = {}  # attempts that did not commit → wall microseconds
        self._reported: set[tuple[str, int]] = set()
        self._usage: dict[str, float] = {}

    def task(self, task: Task) -> None:
        if self.coverage is not None:
            if self.coverage.record(task):
                if task.effects:
                    self._with_effects.add(task.task_id)
            elif task.pruned_to_version < task.state_version:
                self._pruned.add(task.task_id)
        if task.state in _OPEN and task.claim_generation > self._highest[0]:
            self._highest = (task.claim_generation, task.task_id)
        if task.state == State.READY and task.available_at <= self.now:
            lane = (task.pool, task.queue, task.kind)
            since = max(task.available_at, task.ready_at or task.created_at)
            self.oldest_ready[lane] = min(self.oldest_ready.get(lane, since), since)

    def effect(self, effect: Effect) -> None:
        """After the record of its task, so that no execution is counted that the record does not show yet."""
        if effect.task_id in self._with_effects and effect.terms.guarantee != Guarantee.TRANSACTIONAL:
            assert self.coverage is not None
            self.coverage.executions(len(effect.executions))

    def event(self, event: Event) -> None:
        if self.coverage is not None and event.task_id not in self._pruned:
            self.coverage.event(event)
        name = event.name
        self._names[name] += 1
        detail = event.detail or {}
        if name == "attempt_started":
            self._started[event.task_id] = event.at
            if event.at >= self.now - self.unserved_after_us:
                self.recently_claimed.append(event.task_id)
        elif name == "attempt_renewed":
            self._late += bool(detail.get("late_renew"))
            self._near += bool(detail.get("near_miss"))
        elif name == "result_committed":
            self._started.pop(event.task_id, None)
            self._generations[event.generation] += 1
            if isinstance(detail.get("ready_us"), int):
                self._waits.append(detail["ready_us"])
        elif name == "attempt_ended":
            started = self._started.pop(event.task_id, None)
            self._lost[event.task_id, event.generation] = None if started is None else event.at - started
            if isinstance(detail.get("reclaim_delay_us"), int) and event.door in ("expire", "claim"):
                self._delays.append(detail["reclaim_delay_us"])

    def entry(self, entry: LogEntry) -> None:
        self._kinds[entry.kind] += entry.count
        if entry.kind == "refusal":
            self._refused[entry.door, entry.outcome or "", entry.reason] += entry.count
        elif entry.kind == "usage" and entry.task_id is not None and entry.generation is not None:
            attempt = (entry.task_id, entry.generation)
            if attempt in self._lost:
                self._reported.add(attempt)
                add_usage(self._usage, entry)

    def report(self, lanes: dict[Lane, dict[str, int]]) -> dict[str, Any]:
        granted = self._names["attempt_started"]
        held = self._count("claim", "HELD")
        conflict = self._count("claim", "CONFLICT")
        renewed = self._names["attempt_renewed"]
        by_reason: Counter[str] = Counter()
        fenced: Counter[tuple[str, str]] = Counter()
        for (door, outcome, reason), count in self._refused.items():
            if door == "renew":
                by_reason[f"{outcome}/{reason}" if reason else outcome] += count
            if outcome == "FENCED":
                fenced[door, reason or ""] += count
        refused = by_reason.total()
        silent = [wall for attempt, wall in self._lost.items() if attempt not in self._reported]
        answer: dict[str, Any] = {
            "claims": {
                "granted": granted,
                "held": held,
                "conflict": conflict,
                "contention_rate": _rate(held + conflict, granted + held + conflict),
            },
            "reclaim_delay": {**_spread(self._delays), "histogram": _histogram(self._delays)},
            "renew": {
                "renewed": renewed,
                "refused": refused,
                "failure_rate": _rate(refused, renewed + refused),
                "by_reason": dict(by_reason.most_common()),
                "late": self._late,
                "near_misses": self._near,
            },
            "fenced": [
                {"door": door, "reason": reason, "count": count} for (door, reason), count in sorted(fenced.items())
            ],
            "attempts_per_task": {
                "at_commit": {
                    str(generation): self._generations[generation] for generation in sorted(self._generations)
                },
                "highest_open": self._highest[0],
                "highest_open_task": self._highest[1] or None,
            },
            "discarded_compute": {
                "attempts": len(self._lost),
                "usage": dict(sorted(self._usage.items())),
                "unreported": len(silent),
                "wall": sum(wall or 0 for wall in silent) / MICROSECOND,
            },
            "ready_to_commit": _spread(self._waits),
            "replays": self._kinds["replay"],
            "alarms": self._kinds["alarm"],
            "backlog": [
                {
                    "pool": lane[0],
                    "queue": lane[1],
                    "kind": lane[2],
                    "states": states,
                    "oldest_ready_age": (self.now - self.oldest_ready[lane]) / MICROSECOND
                    if lane in self.oldest_ready
                    else None,
                }
                for lane, states in sorted(lanes.items())
            ],
        }
        if self.coverage is not None:
            answer["coverage"] = msgspec.to_builtins(self.coverage.rows())
            answer["coverage_left_out"] = self.coverage.left_out
        return answer

    def _count(self, door: str, outcome: str) -> int:
        return sum(count for (at, said, _), count in self._refused.items() if at == door and said == outcome)


def _rate(part: int, whole: int) -> float | None:
    return None if whole == 0 else part / whole


def _spread(values: array[int]) -> dict[str, Any]:
    """Count, percentiles by nearest rank, and the largest, in seconds."""
    ordered = sorted(values)
    answer: dict[str, Any] = {"count": len(ordered)}
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
        rank = max(1, -(-len(ordered) * percent // 100))
        answer[name] = ordered[rank - 1] / MICROSECOND if ordered else None
    return answer


def _histogram(values: array[int]) -> list[dict[str, Any]]:
    """How many fell into each bucket: above the bucket before, up to `le` seconds (None: no bound)."""
    bounds = [to_us(bound) for bound in DELAYS]
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[next((place for place, bound in enumerate(bounds) if value <= bound), len(bounds))] += 1
    return [{"le": bound, "count": count} for bound, count in zip((*DELAYS, None), counts, strict=True)]
