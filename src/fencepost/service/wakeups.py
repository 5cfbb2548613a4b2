"""Who waits for work, and what wakes them. Only latency depends on this: every waiter also polls.

A task that becomes READY through this process wakes one waiter that asked for its queue and kind.
What other processes write is noticed by one poll per process, of the store's change number, not of
its tasks, or by the store's own hints; and at least every `look_every` seconds, for delays that ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from fencepost import clock
from fencepost.errors import Unavailable
from fencepost.kernel.records import Task
from fencepost.stores.base import HintingStore, Store

POLL = 0.05
AT_LEAST = 1.0


class Waiter:
    __slots__ = ("deadline", "kinds", "pool", "queues", "signal")

    def __init__(self, pool: str | None, queues: tuple[str, ...], kinds: tuple[str, ...] | None, wait: float) -> None:
        self.pool = pool
        self.queues = queues
        self.kinds = kinds
        self.deadline = clock.elapsed() + wait
        self.signal = asyncio.Event()

    def pass_on(self) -> None:
        """Whoever found work leaves its signal set, for the next of its kind to look too."""
        self.signal.set()

    def wants(self, task: Task) -> bool:
        return self.pool == task.pool and task.queue in self.queues and (self.kinds is None or task.kind in self.kinds)

    async def woken(self) -> bool:
        """Wait for a reason to look again; False once the deadline has passed."""
        left = self.deadline - clock.elapsed()
        if left <= 0:
            return False
        try:
            # Not wait_for, which forgets a cancellation that comes in the moment in which the signal does.
            async with asyncio.timeout(left):
                await self.signal.wait()
        except TimeoutError:
            return False
        self.signal.clear()
        return True


class Wakeups:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiters: dict[Waiter, None] = {}  # in order of arrival
        self._poller: asyncio.Task[None] | None = None
        self._look_every = store.capabilities.look_every
        self._hinting = cast("HintingStore", store) if store.capabilities.hints else None
        if self._hinting is not None:
            self._hinting.subscribe(self._wake_heads, self._hinted, lambda: bool(self._waiters))

    @property
    def anybody(self) -> bool:
        """Whether anybody waits at all."""
        return bool(self._waiters)

    def ready(self, task: Task) -> None:
        """Wake the first waiter that wants `task`, and only that one."""
        for waiter in self._waiters:
            if not waiter.signal.is_set() and waiter.wants(task):
                waiter.signal.set()
                return

    def _hinted(self, pool: str, queue: str, kind: str) -> bool:
        """Wake the first waiter for such a task; whether there is one."""
        for waiter in self._waiters:
            if waiter.pool == pool and queue in waiter.queues and (waiter.kinds is None or kind in waiter.kinds):
                if not waiter.signal.is_set():
                    waiter.signal.set()
                    return True
        return False

    @asynccontextmanager
    async def waiter(
        self, pool: str | None, queues: tuple[str, ...], kinds: tuple[str, ...] | None, wait: float
    ) -> AsyncIterator[Waiter]:
        waiter = Waiter(pool, queues, kinds, wait)
        self._waiters[waiter] = None
        if self._hinting is not None:
            self._hinting.listen()
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="fencepost-poll")
        try:
            yield waiter
        finally:
            del self._waiters[waiter]
            if waiter.signal.is_set() and pool is not None:
                self._pass_on(waiter)

    def _pass_on(self, left: Waiter) -> None:
        """A waiter that leaves with its signal unread hands it to the next of its kind."""
        for waiter in self._waiters:
            if (waiter.pool, waiter.queues, waiter.kinds) == (left.pool, left.queues, left.kinds):
                waiter.signal.set()
                return

    async def _poll(self) -> None:
        seen: int | None = None
        woken_at = watched_at = clock.elapsed()
        try:
            while self._waiters:
                await asyncio.sleep(POLL * (0.75 + random.random() / 2))
                try:
                    version = seen if self._hinting is not None else await self._store.version()
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

    def _wake_heads(self) -> None:
        """One waiter for each distinct question; whoever finds more than it takes leaves the rest to the next poll."""
        asked = set()
        for waiter in self._waiters:
            question = (waiter.pool, waiter.queues, waiter.kinds)
            if waiter.pool is None or question not in asked:
                asked.add(question)
                waiter.signal.set()

    def _wake_watchers(self) -> None:
        """Those who wait for a result, which is no task that became ready."""
        for waiter in self._waiters:
            if waiter.pool is None:
                waiter.signal.set()

    def close(self) -> None:
        """Nobody is woken any more; whoever still waits looks once more, and hears that the client is closed."""
        if self._poller is not None:
            self._poller.cancel()
        for waiter in self._waiters:
            waiter.signal.set()
