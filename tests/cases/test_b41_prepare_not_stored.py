"""B41: if PREPARED could not be stored, nothing is sent. Counted at the downstream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import fencepost
from fencepost.client.client import Client
from fencepost.effects.base import Call, Declaration, Guarantee, Happened
from fencepost.kernel.commands import Prepare
from fencepost.wire import Committed, NewTask
from tests.cases.test_b41_full_disk_and_wal import fill, small_disk
from tests.faults.between import client_behind
from tests.faults.stage import STORES, Stage, on_every_store, until

__all__ = ["small_disk"]


class Counting:
    """Keeps every call that reaches it."""

    declaration = Declaration(name="counting", guarantee=Guarantee.IDEMPOTENT, retention=3600.0)

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def execute(self, call: Call) -> Happened:
        self.calls.append(call)
        return Happened({"number": len(self.calls)})


async def sent_once_by_a_successor(stage: Stage, client: Client, counting: Counting) -> None:
    """When the store is back: the lease is out, whoever comes next sends, and it is in the world once."""

    async def again() -> Any:
        found = await client.claim_next(owner="B", ttl=30.0)
        return found if isinstance(found, list) else None

    [claim] = await until(again)
    assert claim.generation == 2
    async with client.hold(claim) as held:
        assert await held.effect("send", {"n": 1}, using=counting) == {"number": 1}
        assert isinstance(await client.commit(claim, "sent"), Committed)
    assert [call.generation for call in counting.calls] == [2]
    await stage.audit()


async def test_b41_on_a_full_disk_nothing_is_sent_and_the_attempt_ends_without_knowing_more(small_disk: Stage) -> None:
    stage = small_disk
    client, counting = await stage.client(), Counting()
    await client.submit(NewTask(1, task_id="t"))
    [claim] = await client.claim_next(owner="A", ttl=1.0)  # type: ignore[misc]
    with pytest.raises((fencepost.Unavailable, fencepost.Fenced)):
        async with client.hold(claim) as held:
            filler = fill(stage)
            try:
                await held.effect("send", {"n": 1}, using=counting)
            finally:
                filler.unlink()
    assert counting.calls == []
    # What was being asked for while the lease ran out may be stored once there is room: nobody is left to send it.
    assert all(view.state in ("PREPARED", "UNKNOWN") for view in (await client.effects(task_id="t")).items)
    await sent_once_by_a_successor(stage, client, counting)


async def test_b41_what_was_asked_for_on_a_full_disk_is_sent_once_when_there_is_room_while_the_lease_lasts(
    small_disk: Stage,
) -> None:
    stage = small_disk
    client, counting = await stage.client(), Counting()
    await client.submit(NewTask(1, task_id="t"))
    [claim] = await client.claim_next(owner="A", ttl=60.0)  # type: ignore[misc]
    async with client.hold(claim) as held:
        filler = fill(stage)
        sending = asyncio.create_task(held.effect("send", {"n": 1}, using=counting))
        with pytest.raises(fencepost.Unavailable, match="full"):
            await client.prepare(claim, "another", 1, counting.declaration.terms)
        assert not sending.done() and counting.calls == []
        filler.unlink()
        assert await sending == {"number": 1}
        assert isinstance(await client.commit(claim, "sent"), Committed)
    assert len(counting.calls) == 1
    await stage.audit()


@on_every_store
async def test_b41_a_store_that_does_not_answer_any_more_has_nothing_sent_and_the_handler_is_stopped(
    stage: Stage,
) -> None:
    counting, asked, dead = Counting(), 0, False

    async def dying(command: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        nonlocal asked
        if dead:
            asked += isinstance(command, Prepare)
            raise fencepost.Unavailable("nobody answers")
        return await send()

    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    async with await client_behind(stage.url, dying) as cut:
        [claim] = await cut.claim_next(owner="A", ttl=1.0)  # type: ignore[misc]
        with pytest.raises((fencepost.Unavailable, fencepost.Fenced)):
            async with cut.hold(claim) as held:
                dead = True
                await held.effect("send", {"n": 1}, using=counting)
    assert asked > 0 and counting.calls == []
    assert (await client.effects(task_id="t")).items == []
    await sent_once_by_a_successor(stage, client, counting)


@on_every_store
async def test_b41_a_prepare_whose_answer_is_lost_is_asked_again_and_sent_once(stage: Stage) -> None:
    """It is stored; the second answer is the first one's, with its `send_by`."""
    counting, answers = Counting(), []

    async def losing(command: Any, send: Callable[[], Awaitable[Any]]) -> Any:
        answer = await send()
        if isinstance(command, Prepare):
            answers.append(answer)
            if len(answers) == 1:
                raise fencepost.Unavailable("the answer was lost")
        return answer

    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    async with await client_behind(stage.url, losing) as cut:
        [claim] = await cut.claim_next(owner="A", ttl=30.0)  # type: ignore[misc]
        async with cut.hold(claim) as held:
            assert await held.effect("send", {"n": 1}, using=counting) == {"number": 1}
            assert isinstance(await cut.commit(claim, "sent"), Committed)
    first, second = answers
    assert (first.outcome, second.outcome, second.execution) == ("EXECUTE", "EXECUTE", 1)
    assert second.send_by_us == first.send_by_us
    assert len(counting.calls) == 1
    await stage.audit()


@pytest.mark.soak  # it takes the client's whole patience for a server that is gone
@pytest.mark.skipif("postgres" not in STORES, reason="takes a real server")
@pytest.mark.parametrize("stage", ["postgres"], indirect=True)
async def test_b41_a_database_that_is_killed_before_the_prepare_has_nothing_sent_until_it_is_back(stage: Stage) -> None:
    client, counting = await stage.client(), Counting()
    await client.submit(NewTask(1, task_id="t"))
    [claim] = await client.claim_next(owner="A", ttl=60.0)  # type: ignore[misc]
    server: Any = stage.server  # type: ignore[attr-defined]
    async with client.hold(claim) as held:
        await asyncio.to_thread(server.stop)
        try:
            sending = asyncio.create_task(held.effect("send", {"n": 1}, using=counting))
            with pytest.raises(fencepost.Unavailable):
                await client.prepare(claim, "another", 1, counting.declaration.terms)
            assert not sending.done() and counting.calls == []
        finally:
            await asyncio.to_thread(server.start)
        assert await sending == {"number": 1}
        assert isinstance(await client.commit(claim, "sent"), Committed)
    assert len(counting.calls) == 1
    await stage.audit()
