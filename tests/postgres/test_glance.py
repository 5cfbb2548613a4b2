"""A glance: one statement that says what there is to do, and when there will be something."""

from __future__ import annotations

import itertools
import random
from typing import Any

import fencepost
from fencepost.kernel.records import CLAIMED, READY
from fencepost.stores.base import TaskFilter
from fencepost.stores.postgres import PostgresStore
from fencepost.wire import NewTask
from tests.postgres.conftest import Open


async def test_a_glance_says_of_each_lane_when_its_first_task_is_due(url: str, opened: Open) -> None:
    dice = random.Random(1)
    store = await opened()
    queues, kinds = ("a", "b", "c"), ("k", "l", "m")
    async with await fencepost.connect(url) as client:
        await client.submit_many(
            [
                NewTask(
                    n,
                    queue=dice.choice(queues),
                    kind=dice.choice(kinds),
                    priority=dice.randrange(-2, 3),
                    delay=dice.choice([0.0, 100.0, 200.0]),
                )
                for n in range(25)
            ]
        )
    tasks = [task for task in await _all(store) if task.state == READY]
    some = [chosen for size in (1, 2) for chosen in itertools.combinations(queues, size)]
    lanes: list[Any] = [
        ("default", chosen, wanted) for chosen in some for wanted in (None, ("k",), ("l", "m"), ("no",))
    ]
    lanes += [("elsewhere", queues, None), ("default", ("a", "a"), ("k", "k"))]
    glance = await store.glance(lanes)
    for (pool, chosen, wanted), due in zip(lanes, glance.ready, strict=True):
        fitting = [
            task.available_at
            for task in tasks
            if task.pool == pool and task.queue in chosen and (wanted is None or task.kind in wanted)
        ]
        assert due == min(fitting, default=None), (pool, chosen, wanted)
    assert abs(glance.now - await store.clock()) < 5_000_000
    assert glance.versions == {pool.name: pool.state_version for pool in await store.pools()}
    assert glance.lapses == {}


async def test_a_glance_says_when_the_first_lease_of_each_pool_ends_and_that_an_old_epochs_have(
    url: str, store: PostgresStore
) -> None:
    async with await fencepost.connect(url) as client:
        await client.create_pool("other")
        await client.submit_many([NewTask(n, pool=pool) for n in range(3) for pool in ("default", "other")])
        for ttl in (50.0, 30.0, 40.0):
            await client.claim_next(owner="w", ttl=ttl)
        glance = await store.glance([])
        claimed = [task for task in await _all(store) if task.state == CLAIMED]
        assert glance.lapses == {"default": min(task.lease_expires_at for task in claimed)}
        assert glance.ready == []
        pool = await client.pool()
        await client.raise_epoch(expected_epoch=pool.epoch, expected_state_version=pool.state_version)
        raised = await store.glance([])
        assert raised.lapses == {"default": 0}
        assert raised.versions["default"] > glance.versions["default"]


async def _all(store: PostgresStore) -> list[Any]:
    return await store.tasks(TaskFilter(), None, 100)
