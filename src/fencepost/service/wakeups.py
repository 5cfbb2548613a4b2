"""Who waits for work, and what wakes them. Only latency depends on this: every waiter also looks by itself.

Waiters with one question stand in one group, and one look is for all of them: a group that looked and found nothing
knows that until something is heard. A task that becomes READY through this process, or that a hint of another process
tells of, wakes one waiter that wants it.

Without hints, what other processes write is noticed by one poll per process, of the store's change number, and tasks
are looked at at least every `look_every` seconds, for delays that ended. With hints (see `HintingStore`), a process
glances so often: one statement for all groups, and for lapsed leases too; it wakes whoever has something to do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from fencepost import clock
from fencepost.errors import Unavailable
from fencepost.kernel.records import Pool, Task
from fencepost.service.waiters import Group, Question, Waiter
from fencepost.stores.base import Glance, HintingStore, Store

POLL = 0.05
AT_LEAST = 1.0
# A glance that took so long comes again after so many times that, at the earliest: the server has better to do.
GENTLY = 20.0
# When the time of a lease's end or a delay's is known, the next glance comes so much after it: all who wait know it.
AFTER_DUE = (0.02, 0.3)
# The shortest time between two glances.
BETWEEN = 0.2
# How long a group knows that there is nothing without a look or glance: two glances may fail.
KNOWN = 3.0

# Who found a task begins with it; only then the next one looks whether there is another.
AFTER_YOU = 0.001

MOST_GROUPS = 200


class Wakeups:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[Question | None, Group] = {}
        self._waiting = 0  # for a task
        self._watching = 0  # for a result
        self._poller: asyncio.Task[None] | None = None
        self._look_every = store.capabilities.look_every
        self._hinting = cast("HintingStore", store) if store.capabilities.hints else None
        self._glancing: asyncio.Task[None] | None = None
        self._next_glance = 0.0
        self._pools: dict[str, Pool] = {}  # as they last were, for `reclaim_grace`
        self._lapsed: Callable[[list[Pool]], None] | None = None
        self._closed = False
        if self._hinting is not None:
            self._hinting.subscribe(self._wake_heads, self._hinted, lambda: self._waiting > 0)

    # waiting ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def waiter(self, question: Question | None, wait: float, limit: int = 1) -> AsyncIterator[Waiter]:
        """Stand in line for `wait` seconds; `question` None: for a result, which is no task that became ready."""
        group = self._groups.get(question)
        if group is None:
            group = self._groups[question] = Group(question)
            self._forget_some()
        waiter = Waiter(group, wait, limit)
        if question is None:
            self._watching += 1
        else:
            self._waiting += 1
            if self._hinting is not None:
                self._hinting.listen()
        self._keep_awake()
        try:
            yield waiter
        finally:
            if question is None:
                self._watching -= 1
            else:
                self._waiting -= 1
            group.leave(waiter)
            if question is not None and waiter.signal.is_set():
                if waiter.served:
                    asyncio.get_running_loop().call_later(AFTER_YOU, self._pass_on, group)
                else:
                    self._pass_on(group)
            if self._hinting is None and not group.waiters:
                del self._groups[question]

    def _pass_on(self, group: Group) -> None:
        """Wake another who asks the same, or asks it under another epoch."""
        if not group.wake_one():
            for other in self._groups.values():
                if other is not group and other.lane == group.lane and other.wake_one():
                    break

    def knows_nothing_is_there(self, waiter: Waiter) -> bool:
        """Somebody with the same question has looked, and nothing has become ready here or was hinted at since."""
        empty_at = waiter.group.empty_at
        if empty_at is None or self._hinting is None or clock.elapsed() - empty_at > KNOWN * self._look_every:
            return False
        since = self._hinting.hears_since()
        return since is not None and since <= empty_at

    async def found_nothing_since(self, waiter: Waiter) -> bool:
        """Whether there was nothing for `waiter` after it came: by its own look, another's, or a glance."""
        if not waiter.looked and self._hinting is not None and not waiter.group.was_empty(waiter.arrived):
            await self._glance()
        return waiter.looked or waiter.group.was_empty(waiter.arrived)

    def _forget_some(self) -> None:
        if len(self._groups) > MOST_GROUPS:
            for question, group in list(self._groups.items()):
                if not group.waiters:
                    del self._groups[question]

    # being told ---------------------------------------------------------------------------------

    def ready(self, task: Task) -> None:
        """Wake the first waiter that wants `task`, and only that one. A store that hints has told already."""
        if self._waiting and self._hinting is None:
            self._hinted(task.pool, task.queue, task.kind)

    def _hinted(self, pool: str, queue: str, kind: str) -> bool:
        """Wake the first waiter for such a task; whether there is one."""
        woken = False
        for group in self._groups.values():
            if group.wants(pool, queue, kind):
                group.heard()
                woken = woken or group.wake_one()
        return woken

    def _wake_heads(self) -> None:
        """One waiter for each distinct question; whoever finds more than it takes leaves the rest to the next poll."""
        for group in self._groups.values():
            if group.question is None:
                group.wake_all()
            else:
                group.heard()
                group.wake_one()

    def _wake_watchers(self) -> None:
        """Those who wait for a result."""
        watchers = self._groups.get(None)
        if watchers is not None:
            watchers.wake_all()

    # looking by itself --------------------------------------------------------------------------

    def watch_lapses(self, lapsed: Callable[[list[Pool]], None]) -> bool:
        """Call `lapsed` whenever leases have ended in some pools. False: this store has to be asked for them."""
        if self._hinting is None:
            return False
        self._lapsed = lapsed
        self._keep_awake()
        return True

    def _keep_awake(self) -> None:
        if self._poller is None and not self._closed:
            loop = self._poll() if self._hinting is None else self._glances()
            self._poller = asyncio.create_task(loop, name="fencepost-poll")

    async def _poll(self) -> None:
        seen: int | None = None
        woken_at = watched_at = clock.elapsed()
        try:
            while self._waiting or self._watching:
                await asyncio.sleep(POLL * (0.75 + random.random() / 2))
                try:
                    version = await self._store.version()
                except Unavailable:
                    continue
                now = clock.elapsed()
                if version != seen or now - woken_at >= self._look_every:
                    seen, woken_at = version, now
                    self._wake_heads()
                elif now - watched_at >= AT_LEAST:
                    watched_at = now
                    self._wake_watchers()
        finally:
            self._poller = None

    async def _glances(self) -> None:
        watched_at = clock.elapsed()
        self._next_glance = watched_at + self._period()
        try:
            while self._waiting or self._watching or self._lapsed is not None:
                now = clock.elapsed()
                if now - watched_at >= AT_LEAST:
                    watched_at = now
                    self._wake_watchers()
                if self._next_glance > now or not (self._waiting or self._lapsed):
                    await asyncio.sleep(min(max(self._next_glance - now, POLL), BETWEEN))
                else:
                    await self._glance()
        finally:
            self._poller = None

    def _period(self) -> float:
        return self._look_every * (0.8 + random.random() * 0.4)

    async def _glance(self) -> None:
        """One at a time; who asks meanwhile waits for that one. Afterwards the next one has its time."""
        if self._glancing is None:
            self._glancing = asyncio.create_task(self._glance_once(), name="fencepost-glance")
        await asyncio.wait([self._glancing])

    async def _glance_once(self) -> None:
        assert self._hinting is not None
        began = clock.elapsed()
        self._next_glance = began + self._period()
        try:
            waited_for = [group for group in self._groups.values() if group.waiters and group.lane is not None]
            lanes = list(dict.fromkeys(group.lane for group in waited_for))
            glance = await self._hinting.glance([lane for lane in lanes if lane is not None])
            for name, version in glance.versions.items():
                pool = self._pools.get(name)
                if pool is None or pool.state_version < version:
                    self._pools = {pool.name: pool for pool in await self._store.pools()}
                    break
        except Unavailable:
            return
        finally:
            self._glancing = None
        times = [at for lane, at in zip(lanes, glance.ready, strict=True) if at is not None]
        for group in waited_for:
            group.glanced(glance, lanes.index(group.lane), began)
        times += self._lapses(glance)
        ended = clock.elapsed()
        self._next_glance = max(self._next_glance, ended + GENTLY * (ended - began))
        for at in times:
            if at > glance.now:
                due = began + (at - glance.now) / clock.MICROSECOND + random.uniform(*AFTER_DUE)
                self._next_glance = min(self._next_glance, max(due, ended + BETWEEN))

    def _lapses(self, glance: Glance) -> list[int]:
        """Tell of those who lapsed; when the next ones will."""
        lapsed: list[Pool] = []
        times: list[int] = []
        for name, at in glance.lapses.items():
            pool = self._pools.get(name)
            if pool is None:
                continue
            due = at and at + clock.to_us(pool.policy.reclaim_grace)
            times.append(due)
            if due <= glance.now:
                lapsed.append(pool)
        if lapsed and self._lapsed is not None:
            self._lapsed(lapsed)
        elif lapsed:  # a look takes back in passing
            for group in self._groups.values():
                if group.lane is not None and any(group.lane[0] == pool.name for pool in lapsed):
                    group.heard()
                    group.wake_one()
        return times

    def close(self) -> None:
        """Nobody is woken any more; whoever still waits looks once more, and hears that the client is closed."""
        self._closed = True
        under_way: list[asyncio.Task[Any] | None] = [self._poller, self._glancing]
        for task in under_way:
            if task is not None:
                task.cancel()
        for group in self._groups.values():
            group.wake_all()
