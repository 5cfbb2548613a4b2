"""Who waits for a task looks no more often than it must, and misses nothing, on a store that hints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio

from fencepost import clock
from fencepost.client.client import Client
from fencepost.errors import Unavailable
from fencepost.kernel.records import CLAIMED, READY, Task
from fencepost.service.waiters import Group, Question
from fencepost.stores.base import Glance, Scan, StoreCapabilities
from fencepost.stores.memory import MemoryStore
from fencepost.wire import Claim, NewTask, Refused
from tests.service.lives import client_of, expire, raise_epoch

BOUND = 10.0
PERIOD = 0.1


class Hinting(MemoryStore):
    """Says to nobody what was written, unless a test does: `hint`. Counts looks and glances."""

    def __init__(self, period: float = PERIOD) -> None:
        super().__init__()
        self.capabilities = StoreCapabilities(
            durable=False, shared=True, loses_swaps=False, hints=True, look_every=period
        )
        self.looks = 0
        self.glances = 0
        self.since: float | None = clock.elapsed()
        self.away = False
        self._ready_calls: list[Callable[[str, str, str], bool]] = []

    def subscribe(self, changed: Any, ready: Callable[[str, str, str], bool], anybody: Any) -> None:
        self._ready_calls.append(ready)

    def listen(self) -> None:
        return

    def hears_since(self) -> float | None:
        return self.since

    def hint(self, kind: str = "default") -> bool:
        return any([ready("default", "default", kind) for ready in self._ready_calls])  # noqa: C419 - each hears it

    async def glance(self, lanes: Sequence[tuple[str, tuple[str, ...], tuple[str, ...] | None]]) -> Glance:
        if self.away:
            raise Unavailable("away")
        self.glances += 1
        tasks = self._tasks.values()
        lapses = [
            0 if task.scheduler_epoch < self._pools[task.pool].epoch else task.lease_expires_at
            for task in tasks
            if task.state == CLAIMED
        ]
        ready = [
            min((task.available_at for task in tasks if task.state == READY and _in(task, lane)), default=None)
            for lane in lanes
        ]
        versions = {name: pool.state_version for name, pool in self._pools.items()}
        return Glance(self._now(), versions, {"default": min(lapses)} if lapses else {}, ready)

    def _scan(self, step: Scan) -> Any:
        self.looks += not step.lapsed
        return super()._scan(step)


def _in(task: Task, lane: tuple[str, tuple[str, ...], tuple[str, ...] | None]) -> bool:
    return task.pool == lane[0] and task.queue in lane[1] and (lane[2] is None or task.kind in lane[2])


@pytest_asyncio.fixture
async def store() -> AsyncIterator[Hinting]:
    yield Hinting()


@pytest_asyncio.fixture
async def quiet() -> AsyncIterator[Hinting]:
    """Glances so rarely that no test sees one."""
    yield Hinting(period=1000.0)


def waiting(client: Client, owner: str, wait: float = 60.0, **more: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(client.claim_next(owner=owner, wait=wait, **more))


async def ends(*tasks: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*tasks), BOUND)


async def settled(store: Hinting) -> None:
    """Nobody has anything to do any more, but for glances."""
    before = -1
    while before != store.looks:
        before = store.looks
        for _ in range(20):
            await asyncio.sleep(0)


async def give_up(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_of_fifty_who_wait_for_the_same_one_has_looked_for_all(quiet: Hinting) -> None:  # B42
    client = await client_of(quiet)
    first = waiting(client, "w0")
    await settled(quiet)
    others = [waiting(client, f"w{n}") for n in range(1, 50)]
    await settled(quiet)
    assert quiet.looks == 1
    await give_up(first, *others)
    await client.close()


async def test_a_hint_wakes_one_of_fifty_and_the_next_hint_another(quiet: Hinting) -> None:  # B42
    client = await client_of(quiet)
    tasks = [waiting(client, f"w{n}") for n in range(50)]
    await settled(quiet)
    quiet.looks = 0
    await client.submit_many([NewTask(n) for n in range(2)])
    assert quiet.hint() and quiet.hint()
    done, rest = await asyncio.wait(tasks, timeout=0.2)
    assert len(done) == 2
    # Each who found one has another look whether there is more.
    assert quiet.looks <= 4
    await give_up(*rest)
    await client.close()


async def test_a_hint_that_nobody_here_can_use_is_answered_so(quiet: Hinting) -> None:
    client = await client_of(quiet)
    task = waiting(client, "w", kinds=["mine"])
    await settled(quiet)
    assert not quiet.hint("other")
    assert quiet.hint("mine")
    assert not quiet.hint("mine")  # it takes one, and is on its way already
    await give_up(task)
    await client.close()


async def test_who_asks_for_several_takes_as_many_hints(quiet: Hinting) -> None:
    client = await client_of(quiet)
    task = waiting(client, "w", limit=3)
    await settled(quiet)
    assert [quiet.hint() for _ in range(4)] == [True, True, True, False]
    await give_up(task)
    await client.close()


async def test_who_comes_after_a_hint_looks_although_nobody_found_anything_before(quiet: Hinting) -> None:
    client = await client_of(quiet)
    assert await client.claim_next(owner="first", wait=0.001) == []
    await client.submit(NewTask(1))
    assert not quiet.hint()  # nobody waits; it is remembered
    [claim] = await asyncio.wait_for(client.claim_next(owner="second", wait=60.0), BOUND)
    assert isinstance(claim, Claim)
    await client.close()


@pytest.mark.parametrize("since", [None, "now"])
async def test_who_comes_where_hints_may_have_gone_by_looks_for_itself(quiet: Hinting, since: str | None) -> None:
    client = await client_of(quiet)
    assert await client.claim_next(owner="first", wait=0.001) == []
    await client.submit(NewTask(1))
    quiet.since = None if since is None else clock.elapsed()  # no longer on the list of those who wait, or anew
    [claim] = await asyncio.wait_for(client.claim_next(owner="second", wait=60.0), BOUND)
    assert isinstance(claim, Claim)
    await client.close()


def test_a_look_during_which_something_was_heard_of_does_not_count_as_nothing() -> None:
    group = Group(Question("default", ("default",), None, 1, 1))
    began = clock.elapsed()
    group.heard()
    group.found_nothing(began)
    assert not group.was_empty(began)
    began = clock.elapsed()
    group.found_nothing(began)
    assert group.was_empty(began)


async def test_a_question_that_is_asked_again_is_looked_up_whatever_others_found(quiet: Hinting) -> None:
    client = await client_of(quiet)
    await client.submit(NewTask(1))
    [claim] = await client.claim_next(owner="w", request_id="asked-before")
    other = waiting(client, "other")
    await settled(quiet)
    [again] = await asyncio.wait_for(client.claim_next(owner="w", wait=60.0, request_id="asked-before"), BOUND)
    assert again.attempt_id == claim.attempt_id
    await give_up(other)
    await client.close()


async def test_nothing_is_only_said_after_a_look_or_glance_that_began_since_it_was_asked(quiet: Hinting) -> None:
    client = await client_of(quiet)
    first = waiting(client, "first")
    await settled(quiet)
    await give_up(first)
    await client.submit(NewTask(1))  # and the hint is lost
    [claim] = await client.claim_next(owner="second", wait=0.02)
    assert isinstance(claim, Claim)
    assert quiet.glances == 1
    assert await client.claim_next(owner="third", wait=0.02) == []
    await client.close()


async def test_where_the_glance_fails_the_last_answer_is_a_look_of_its_own(quiet: Hinting) -> None:
    client = await client_of(quiet)
    first = waiting(client, "first")
    await settled(quiet)
    looks, quiet.away = quiet.looks, True
    assert await client.claim_next(owner="second", wait=0.02) == []
    assert quiet.looks == looks + 1
    await give_up(first)
    await client.close()


async def test_a_task_whose_hint_was_lost_is_found_by_a_glance(store: Hinting) -> None:
    client, elsewhere = await client_of(store), await client_of(store)
    task = waiting(client, "w")
    await settled(store)
    await elsewhere.submit(NewTask(1))
    [[claim]] = await ends(task)
    assert isinstance(claim, Claim)
    for each in (client, elsewhere):
        await each.close()


async def test_a_glance_comes_when_a_delay_ends_not_only_when_its_turn_is(quiet: Hinting) -> None:
    client = await client_of(quiet)
    await client.submit(NewTask(1, delay=0.4))
    first = waiting(client, "first")
    await settled(quiet)
    assert await client.claim_next(owner="second", wait=0.01) == []  # glances, and so knows of it
    [[claim]] = await ends(first)
    assert isinstance(claim, Claim)
    await client.close()


async def test_all_who_wait_hear_of_a_raised_epoch_at_the_next_glance(store: Hinting) -> None:
    client, elsewhere = await client_of(store), await client_of(store)
    await client.epoch()
    tasks = [waiting(client, f"w{n}") for n in range(5)]
    await settled(store)
    await raise_epoch(elsewhere)
    for answer in await ends(*tasks):
        assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "EPOCH")
    for each in (client, elsewhere):
        await each.close()


@pytest.mark.parametrize("maintained", [True, False])
async def test_a_lapsed_claim_is_taken_back_for_who_waits(store: Hinting, maintained: bool) -> None:
    client = await client_of(store)
    if maintained:
        client.start_maintenance()
    await client.submit(NewTask(1, task_id="t"))
    [lost] = await client.claim_next(owner="lost", ttl=0.3)
    task = waiting(client, "w")
    [[claim]] = await ends(task)
    assert (claim.task_id, claim.generation) == ("t", lost.generation + 1)
    await client.close()


async def test_maintenance_scans_only_where_a_glance_has_seen_a_lease_end(store: Hinting) -> None:  # B42
    scans = 0
    scan = store._scan

    def count(step: Scan) -> Any:
        nonlocal scans
        scans += step.lapsed
        return scan(step)

    store._scan = count  # type: ignore[method-assign]
    client = await client_of(store)
    client.start_maintenance()
    async with asyncio.timeout(BOUND):
        while store.glances < 4:
            await asyncio.sleep(0.01)
        assert scans == 0
        await client.submit(NewTask(1, task_id="t"))
        await client.claim_next(owner="lost", ttl=0.2)
        scans = 0
        while (await client.task("t")).state != "READY":
            await asyncio.sleep(0.01)
    assert scans >= 1
    await client.close()


async def test_a_waiter_that_goes_away_leaves_its_hint_to_another(quiet: Hinting) -> None:
    client = await client_of(quiet)
    first, second = waiting(client, "first"), waiting(client, "second", kinds=None)
    await settled(quiet)
    await client.submit(NewTask(1))
    assert quiet.hint()
    first.cancel()
    [[claim]] = await ends(second)
    assert claim.owner_id == "second"
    await asyncio.gather(first, return_exceptions=True)
    await client.close()


async def test_who_waits_for_a_result_is_told_of_no_task(quiet: Hinting) -> None:
    client = await client_of(quiet)
    await client.submit(NewTask(1, task_id="t", delay=1000.0))
    task = asyncio.create_task(client.result("t", wait=60.0))
    await settled(quiet)
    assert not quiet.hint()
    await give_up(task)
    await client.close()


async def test_what_lapsed_by_somebody_elses_hand_is_no_work_for_maintenance(store: Hinting) -> None:
    client = await client_of(store)
    await client.submit(NewTask(1, task_id="t"))
    await client.claim_next(owner="lost", ttl=0.05)
    await expire(client, "t")
    client.start_maintenance()
    async with asyncio.timeout(BOUND):
        while store.glances < 3:
            await asyncio.sleep(0.01)
    assert store.looks == 1
    await client.close()
