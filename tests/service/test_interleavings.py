"""Forced interleavings: one side is held between its decision and its write while the other side acts.

Only on a store that loses swaps can anything come in between; there the held side must notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.client.client import Client
from fencepost.service.coordinator import Coordinator
from fencepost.stores.base import Apply, Plan
from fencepost.stores.memory import MemoryStore
from fencepost.wire import Claim, Committed, Done, NewTask, PoolChanged, Refused, Renewed, Submitted
from tests.conformance.actions import claimed, given, refusal, state_of


class Held:
    """Holds the next plan that this handle drives, right before it applies."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def run(self, plan: Plan) -> Any:
        answer: Any = None
        while True:
            try:
                step = plan.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(step, Apply) and step.sets and self.armed:
                self.armed = False
                self.reached.set()
                await asyncio.wait_for(self.go_on.wait(), 10)
            answer = self._store._step(step)


async def client_on(store: Any) -> Client:
    async def reopen() -> Coordinator:
        return Coordinator(store)

    client = Client(await reopen(), url="memory://", reopen=reopen, epochs={})
    await client.epoch()
    return client


async def raised(client: Client) -> Any:
    return await client.raise_epoch(expected_epoch=1, expected_state_version=1)


async def submitted_child(client: Client) -> Any:
    return await client.submit(NewTask(1, task_id="child", depends_on=["t"]))


async def expired(client: Client) -> Any:
    return await client.expire("t")


Act = Callable[[Client, Claim], Awaitable[Any]]
HELD: dict[str, Act] = {
    "commit": lambda client, claim: client.commit(claim, "held"),
    "renew": lambda client, claim: client.renew(claim),
    "checkpoint": lambda client, claim: client.checkpoint(claim, "held"),
    "release": lambda client, claim: client.release(claim),
    "fail": lambda client, claim: client.fail(claim, "held"),
}
BETWEEN: dict[str, tuple[Callable[[Client], Awaitable[Any]], tuple[str, str | None]]] = {
    "raise": (raised, ("FENCED", "EPOCH")),
    "cancel": (lambda client: client.cancel("t"), ("CANCELLED", None)),
    "revise": (lambda client: client.revise("t", "other"), ("STALE_INPUT", None)),
    "take_over": (lambda client: client.take_over("t"), ("FENCED", "STATE")),
    "expire": (expired, ("FENCED", "STATE")),
}


@pytest.mark.parametrize("between", sorted(BETWEEN))
@pytest.mark.parametrize("held", sorted(HELD))
async def test_what_comes_between_decision_and_write_refuses_the_write(held: str, between: str) -> None:
    store = MemoryStore(optimistic=True)
    gate = Held(store)
    slow, quick = await client_on(gate), await client_on(store)
    await given(quick)
    claim = await claimed(quick, ttl=5.0)
    store.advance(6)
    gate.armed = True
    writing = asyncio.create_task(HELD[held](slow, claim))  # type: ignore[arg-type]
    await asyncio.wait_for(gate.reached.wait(), 10)
    act, expected = BETWEEN[between]
    acted = await act(quick)
    assert isinstance(acted, Done | PoolChanged), acted
    gate.go_on.set()
    assert refusal(await writing) == expected
    assert refusal(await quick.result("t"))[0] == "NOT_COMMITTED"
    await slow.close()
    await quick.close()


async def test_a_claim_under_way_when_the_intake_closes_is_not_granted_after_it_closed() -> None:
    store = MemoryStore(optimistic=True)
    gate = Held(store)
    slow, quick = await client_on(gate), await client_on(store)
    await given(quick)
    gate.armed = True
    asking = asyncio.create_task(slow.claim_next(owner="A"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    assert isinstance(await quick.close_intake(), PoolChanged)
    gate.go_on.set()
    assert refusal(await asking) == ("INTAKE_CLOSED", None)
    assert await state_of(quick) == "READY"
    await slow.close()
    await quick.close()


async def test_a_claim_under_way_when_somebody_else_takes_the_task_gets_another_one() -> None:
    store = MemoryStore(optimistic=True)
    gate = Held(store)
    slow, quick = await client_on(gate), await client_on(store)
    await quick.submit_many([NewTask(n, task_id=f"t{n}") for n in range(2)])
    gate.armed = True
    asking = asyncio.create_task(slow.claim_next(owner="slow"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    assert (await claimed(quick, "quick")).task_id == "t0"
    gate.go_on.set()
    answer = await asking
    assert not isinstance(answer, Refused) and [claim.task_id for claim in answer] == ["t1"]
    await slow.close()
    await quick.close()


async def test_a_child_submitted_while_its_parent_commits_is_released_whoever_is_held() -> None:  # X30
    for held in ("commit", "submit"):
        store = MemoryStore(optimistic=True)
        gate = Held(store)
        slow, quick = await client_on(gate), await client_on(store)
        await given(quick)
        claim = await claimed(quick)
        gate.armed = True
        first = slow.commit(claim, 1) if held == "commit" else submitted_child(slow)
        second = submitted_child(quick) if held == "commit" else quick.commit(claim, 1)
        waiting: asyncio.Task[Any] = asyncio.ensure_future(first)  # type: ignore[arg-type]
        await asyncio.wait_for(gate.reached.wait(), 10)
        assert isinstance(await second, Committed | Submitted)
        gate.go_on.set()
        assert isinstance(await waiting, Committed | Submitted)
        assert await state_of(quick, "child") == "READY"
        await slow.close()
        await quick.close()


async def test_a_renewal_under_way_keeps_the_task_from_the_sweeper_or_loses_to_it() -> None:  # B32
    store = MemoryStore(optimistic=True)
    gate = Held(store)
    slow, quick = await client_on(gate), await client_on(store)
    await given(quick)
    claim = await claimed(quick, ttl=5.0)
    store.advance(6)
    gate.armed = True
    sweeping = asyncio.create_task(slow.expire("t"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    assert isinstance(await quick.renew(claim), Renewed)
    gate.go_on.set()
    assert refusal(await sweeping) == ("CONFLICT", "VERSION")
    assert await state_of(quick) == "CLAIMED"
    await slow.close()
    await quick.close()
