"""The coordinator's own duties: lost answers, faults of one command, the refusals' journal, alarms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fencepost.client.client import Client
from fencepost.errors import Unavailable
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.writes import Snapshot
from fencepost.service.coordinator import Coordinator
from fencepost.stores.base import Plan
from fencepost.stores.memory import MemoryStore
from fencepost.wire import Claim, Committed, Done, NewTask, Refused, Submitted
from tests.conformance.actions import claimed, given, refusal, state_of


class CutStore(MemoryStore):
    """A store whose answer is lost once `cut` is set: `before` the plan ran, or `after` it did."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: str | None = None

    async def run(self, plan: Plan) -> Any:
        cut, self.cut = self.cut, None
        if cut == "before":
            raise Unavailable("cut before the store acted")
        answer = await super().run(plan)
        if cut == "after":
            raise Unavailable("cut after the store acted")
        return answer


async def client_on(store: MemoryStore, kernel: Kernel | None = None) -> Client:
    async def reopen() -> Coordinator:
        return Coordinator(store, kernel=kernel)

    client = Client(await reopen(), url=store.url, reopen=reopen, epochs={})
    await client.epoch()
    return client


@pytest_asyncio.fixture
async def cut() -> AsyncIterator[tuple[CutStore, Client]]:
    store = CutStore()
    client = await client_on(store)
    yield store, client
    await client.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_answer_is_unavailable_and_asking_again_with_the_same_request_id_finds_it(
    cut: tuple[CutStore, Client], when: str
) -> None:
    store, client = cut
    await given(client)
    store.cut = when
    with pytest.raises(Unavailable):
        await client.claim_next(owner="A", request_id="r")
    (claim,) = await client.claim_next(owner="A", request_id="r")  # type: ignore[misc]
    assert isinstance(claim, Claim) and claim.generation == 1
    store.cut = when
    with pytest.raises(Unavailable):
        await client.checkpoint(claim, 1, number=1, request_id="c")
    assert isinstance(await client.checkpoint(claim, 1, number=1, request_id="c"), Done)
    store.cut = when
    with pytest.raises(Unavailable):
        await client.renew(claim, request_id="n")
    assert not isinstance(await client.renew(claim, request_id="n"), Refused)
    store.cut = when
    with pytest.raises(Unavailable):
        await client.commit(claim, "x")
    again = await client.commit(claim, "x")
    assert isinstance(again, Committed) and again.replayed is (when == "after")


async def test_one_command_that_cannot_be_decided_hurts_no_other_of_its_batch() -> None:
    class Faulty(Kernel):
        def decide(self, snapshot: Snapshot, command: Any, candidates: Any = ()) -> Any:
            if getattr(command, "task_id", None) == "poison":
                raise ZeroDivisionError("a bug")
            return super().decide(snapshot, command, candidates)

    client = await client_on(MemoryStore(), Faulty())
    await given(client, "poison")
    await given(client, "fine")
    poisoned, fine, new = await asyncio.gather(
        client.cancel("poison"), client.cancel("fine"), client.submit(NewTask(1)), return_exceptions=True
    )
    assert isinstance(poisoned, ZeroDivisionError)
    assert isinstance(fine, Done) and isinstance(new, Submitted)
    await client.close()


async def test_a_zombie_in_a_loop_is_one_entry_with_a_count() -> None:
    client = await client_on(MemoryStore())
    await given(client)
    late = await claimed(client)
    await client.take_over("t")
    await claimed(client, "B")
    for _ in range(500):
        assert refusal(await client.commit(late, "late")) == ("FENCED", "GENERATION")
    page = await client.events(task_id="t", names=["refusal"])
    entries = [item for item in page.items if item.door == "commit"]
    assert sum(item.count for item in entries) == 500
    assert len(entries) <= 3
    await client.close()


async def test_refusals_survive_a_store_that_cannot_be_reached_for_a_while(cut: tuple[CutStore, Client]) -> None:
    store, client = cut
    await given(client)
    await client.take_over("t", expected_generation=3)
    store.cut = "before"
    with pytest.raises(Unavailable):
        await client.events()
    page = await client.events(names=["refusal"])
    assert [item.door for item in page.items] == ["take_over"]


class SlowStore(MemoryStore):
    """A store that does what it is asked at once, and answers when `gate` opens."""

    gate: asyncio.Event | None = None
    asked: asyncio.Event

    async def run(self, plan: Plan) -> Any:
        answer = await super().run(plan)
        if self.gate is not None:
            self.asked.set()
            await self.gate.wait()
        return answer


async def test_a_refusal_that_is_being_written_while_the_client_closes_is_written_once() -> None:
    store = SlowStore()
    client, reader = await client_on(store), await client_on(store)
    await given(client, "t")
    assert refusal(await client.claim("t", expected_state_version=9, owner="A"))[0] == "CONFLICT"
    store.asked, store.gate = asyncio.Event(), asyncio.Event()
    await asyncio.wait_for(store.asked.wait(), 5)  # the entry is in the store, and its writer waits for the answer
    closing = asyncio.ensure_future(client.close())
    await asyncio.sleep(0)
    store.gate.set()
    await asyncio.wait_for(closing, 5)
    assert [event.count for event in (await reader.events(names=["refusal"])).items] == [1]
    await reader.close()


async def test_a_store_that_went_back_in_time_closes_the_intake_only_for_a_claim_that_was_granted_here() -> None:
    store = MemoryStore()
    client = await client_on(store)
    await given(client)
    before = store._tasks["t"]
    claim = await claimed(client)
    store._tasks["t"] = before  # restored from an old backup
    stranger = await client_on(store)
    assert refusal(await stranger.commit(claim, 1)) == ("FENCED", "REWOUND")
    await stranger.close()
    pool = await client.pool()
    assert not isinstance(pool, Refused) and pool.intake == "OPEN"
    assert refusal(await client.commit(claim, 1)) == ("FENCED", "REWOUND")
    async with asyncio.timeout(10):
        while not isinstance(pool, Refused) and pool.intake == "OPEN":
            await asyncio.sleep(0)
            pool = await client.pool()
    page = await client.events(names=["alarm"])
    assert len(page.items) >= 1
    await client.close()


async def test_a_claim_whose_caller_went_away_is_given_back_at_once() -> None:
    store = MemoryStore(optimistic=True)
    client = await client_on(store)
    await given(client)
    async with asyncio.timeout(10):
        while client.backend._lanes.running():  # type: ignore[attr-defined]
            await asyncio.sleep(0)
    asking = asyncio.create_task(client.claim_next(owner="gone"))
    async with asyncio.timeout(10):
        while not client.backend._lanes.running():  # type: ignore[attr-defined]
            await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(10):
        while await state_of(client) != "READY" or not (await client.attempts("t")):
            await asyncio.sleep(0)
    assert [a.end for a in await client.attempts("t")] == ["RELEASED"]
    assert (await claimed(client, "B")).charged_attempts == 0
    await client.close()


async def test_a_closed_client_is_unavailable_and_closes_twice() -> None:
    client = await client_on(MemoryStore())
    await client.close()
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await client.submit(NewTask(1))


async def test_what_was_asked_before_the_close_is_answered() -> None:
    client = await client_on(MemoryStore(optimistic=True))
    submits = [asyncio.create_task(client.submit(NewTask(n))) for n in range(20)]
    await asyncio.sleep(0)
    await client.close()
    assert all(isinstance(answer, Submitted) for answer in await asyncio.gather(*submits))
