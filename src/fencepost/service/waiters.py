"""Those who wait, in groups: all of one group ask the same question, so that one answer is good for all."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from fencepost import clock
from fencepost.stores.base import Glance

Lane = tuple[str, tuple[str, ...], tuple[str, ...] | None]


class Question(NamedTuple):
    """What a claim is decided on, beside who asks: two who ask the same are told the same."""

    pool: str
    queues: tuple[str, ...]
    kinds: tuple[str, ...] | None
    epoch: int | None
    protocol: int


class Group:
    __slots__ = ("_heard_at", "_idle", "empty_at", "lane", "question", "version", "waiters")

    def __init__(self, question: Question | None) -> None:
        self.question = question
        self.lane: Lane | None = None if question is None else (question.pool, question.queues, question.kinds)
        self.waiters: dict[Waiter, None] = {}
        self._idle: dict[Waiter, None] = {}  # who can still be told of a task, the longest unused first
        # When the last look or glance began that found nothing, where nothing was heard of since.
        self.empty_at: float | None = None
        self.version: int | None = None  # the pool's, when the last look was answered that was not refused
        self._heard_at = 0.0

    def wants(self, pool: str, queue: str, kind: str) -> bool:
        lane = self.lane
        return lane is not None and lane[0] == pool and queue in lane[1] and (lane[2] is None or kind in lane[2])

    def heard(self) -> None:
        """Something may be there."""
        self.empty_at = None
        self._heard_at = clock.elapsed()

    def wake_one(self) -> bool:
        """False where all are on their way already, each for as many tasks as it takes."""
        for waiter in self._idle:
            waiter.room -= 1
            if waiter.room <= 0:
                del self._idle[waiter]
            waiter.signal.set()
            return True
        return False

    def wake_all(self) -> None:
        for waiter in self.waiters:
            waiter.signal.set()

    def enter(self, waiter: Waiter) -> None:
        self.waiters[waiter] = None
        self.listen(waiter)

    def listen(self, waiter: Waiter) -> None:
        """What was told to `waiter` is seen to from now on."""
        waiter.signal.clear()
        waiter.room = waiter.limit
        self._idle[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        del self.waiters[waiter]
        self._idle.pop(waiter, None)

    def was_empty(self, after: float) -> bool:
        return self.empty_at is not None and self.empty_at >= after

    def found_nothing(self, began: float) -> None:
        """A look or glance that began then found nothing; nothing was heard of since, or this does not count."""
        if self._heard_at < began and (self.empty_at is None or self.empty_at < began):
            self.empty_at = began

    def glanced(self, glance: Glance, number: int, began: float) -> None:
        """Draw from a glance at this group's lane what follows, where one of it has looked before."""
        if self.version is None or self.lane is None:
            return
        due, version = glance.ready[number], glance.versions.get(self.lane[0])
        if version != self.version:  # another epoch, or the intake is closed: all must hear of it
            self.heard()
            self.wake_all()
        elif due is not None and due <= glance.now:
            self.heard()
            self.wake_one()
        else:
            self.found_nothing(began)


class Waiter:
    __slots__ = ("arrived", "deadline", "group", "limit", "looked", "room", "served", "signal")

    def __init__(self, group: Group, wait: float, limit: int) -> None:
        self.group = group
        self.limit = limit
        self.room = limit
        self.arrived = clock.elapsed()
        self.deadline = self.arrived + wait
        self.looked = False  # and found nothing, since it arrived
        self.served = False  # it found something, or was refused
        self.signal = asyncio.Event()
        group.enter(self)

    def found(self, anything: bool, began: float, version: int | None) -> None:
        """What a look gave that began then; `version` is the pool's, None where the look was refused."""
        self.group.version = version
        if anything:
            self.served = True
            self.group.heard()
            self.signal.set()  # for the next of its kind to look too: where there was one there may be more
        else:
            self.looked = True
            self.group.found_nothing(began)

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
        self.group.listen(self)
        return True
