"""The loop that takes back lapsed claims and prunes: in every worker host, safe in any number.

It holds no claim and no lock. It scans for what may have lapsed and asks the `expire` door with the
version it saw; whoever is first wins, the others are told CONFLICT and nothing happens twice. Where
the process glances at the store anyway (see wakeups), it scans only when a glance has seen a lease end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from fencepost.clock import elapsed
from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel import commands as k
from fencepost.kernel.outcomes import Outcome
from fencepost.kernel.records import Pool, Task
from fencepost.kernel.writes import Snapshot
from fencepost.stores.base import Apply, Load, Scan
from fencepost.wire import new_id

if TYPE_CHECKING:
    from fencepost.service.coordinator import Coordinator
    from fencepost.service.wakeups import Wakeups

logger = logging.getLogger("fencepost.maintenance")
EXPIRE_BATCH = 500
PRUNE_BATCH = 200
PRUNE_EVERY = 60.0


class Maintenance:
    def __init__(self, coordinator: Coordinator, wakeups: Wakeups) -> None:
        self._coordinator = coordinator
        self._wakeups = wakeups
        self._task: asyncio.Task[None] | None = None
        self._lapsed: list[Pool] = []  # where a glance has seen leases that ended
        self._seen = asyncio.Event()

    def start(self, interval: float) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._loop(interval), name="fencepost-maintenance")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _loop(self, interval: float) -> None:
        told = self._wakeups.watch_lapses(self._note)
        may_prune = True
        prune_at = elapsed() + PRUNE_EVERY * (0.8 + random.random() * 0.4)
        while True:
            if told:
                await self._told_or(prune_at)
            else:
                await asyncio.sleep(interval * (0.8 + random.random() * 0.4))
            try:
                if told:
                    lapsed, self._lapsed = self._lapsed, []
                    await self._round(lapsed)
                else:
                    await self.round()
                if elapsed() >= prune_at and may_prune:
                    prune_at = elapsed() + PRUNE_EVERY
                    try:
                        await self.prune()
                    except StoreRefused as error:
                        may_prune = False
                        logger.info("this process may not prune, others have to: %s", error)
            except Unavailable as error:
                logger.warning("maintenance could not reach the store, tries again: %s", error)

    def _note(self, lapsed: list[Pool]) -> None:
        self._lapsed = lapsed
        self._seen.set()

    async def _told_or(self, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(until - elapsed(), 1.0)):
                await self._seen.wait()
        self._seen.clear()

    async def round(self) -> dict[str, int]:
        """Expire what has lapsed, in every pool. How many claims were taken back, and how many of them parked."""
        return await self._round(await self._coordinator.store.pools())

    async def _round(self, pools: list[Pool]) -> dict[str, int]:
        expired = parked = 0
        for pool in pools:
            while True:
                lapsed: list[Task] = await self._coordinator.store.run(_scan(pool))
                if not lapsed:
                    break
                commands = [
                    k.Expire(request_id=new_id(), task_id=task.task_id, expected_state_version=task.state_version)
                    for task in lapsed
                ]
                taken = 0
                for answer in await self._coordinator.ask_many(commands, quiet=True):
                    if isinstance(answer, BaseException):
                        raise answer
                    if answer.outcome is Outcome.EXPIRED:
                        taken += 1
                        parked += answer.state == "PARKED"
                expired += taken
                if taken == 0:
                    break
        return {"expired": expired, "parked": parked}

    async def prune(self, older_than: float | None = None) -> dict[str, int]:
        """Remove bodies and journal entries of tasks that ended longer ago than the pools' longest retention."""
        store = self._coordinator.store
        if older_than is None:
            older_than = max(pool.policy.retention for pool in await store.pools())
        before = await store.clock() - k.check_seconds(older_than, "older_than")
        total: dict[str, int] = {}
        while True:
            removed = await store.prune(before, PRUNE_BATCH)
            for name, count in removed.items():
                total[name] = total.get(name, 0) + count
            if removed.get("tasks", 0) < PRUNE_BATCH:
                return total


def _scan(pool: Pool) -> Generator[Load | Scan | Apply, Any, list[Task]]:
    grace = round(pool.policy.reclaim_grace * 1_000_000)
    found: list[Task] = yield Scan(
        pool.name, None, None, EXPIRE_BATCH, Snapshot(), lapsed=True, epoch=pool.epoch, grace_us=grace
    )
    return found
