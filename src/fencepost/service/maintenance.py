"""The loop that takes back lapsed claims and prunes: in every worker host, safe in any number.

It holds no claim and no lock. It scans for what may have lapsed and asks the `expire` door with the
version it saw; whoever is first wins, the others are told CONFLICT and nothing happens twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel import commands as k
from fencepost.kernel.outcomes import Outcome
from fencepost.kernel.records import Pool, Task
from fencepost.kernel.writes import Snapshot
from fencepost.stores.base import Apply, Load, Scan
from fencepost.wire import new_id

if TYPE_CHECKING:
    from fencepost.service.coordinator import Coordinator

logger = logging.getLogger("fencepost.maintenance")
EXPIRE_BATCH = 500
PRUNE_BATCH = 200
PRUNE_EVERY = 60.0


class Maintenance:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._task: asyncio.Task[None] | None = None

    def start(self, interval: float) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._loop(interval), name="fencepost-maintenance")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _loop(self, interval: float) -> None:
        since_prune = 0.0
        may_prune = True
        interval *= self._coordinator.store.capabilities.look_every
        while True:
            await asyncio.sleep(interval * (0.8 + random.random() * 0.4))
            since_prune += interval
            try:
                await self.round()
                if since_prune >= PRUNE_EVERY and may_prune:
                    since_prune = 0.0
                    try:
                        await self.prune()
                    except StoreRefused as error:
                        may_prune = False
                        logger.info("this process may not prune, others have to: %s", error)
            except Unavailable as error:
                logger.warning("maintenance could not reach the store, tries again: %s", error)

    async def round(self) -> dict[str, int]:
        """Expire what has lapsed, in every pool. How many claims were taken back, and how many of them parked."""
        expired = parked = 0
        for pool in await self._coordinator.store.pools():
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
