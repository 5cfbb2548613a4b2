"""Worker: a claim that is lost while its handler runs, and handlers that do not stop when they are told to."""

from __future__ import annotations

import asyncio
import threading

from fencepost.app import App
from fencepost.client.attempt import Attempt, SyncAttempt
from fencepost.client.worker import Worker
from fencepost.testing import MemoryClient
from fencepost.wire import Claim, Committed, Refused
from tests.client.faults import BOUND, Working, ends_of, reported, run, state_of


async def test_b45_a_late_worker_is_fenced_drops_the_task_and_goes_on(client: MemoryClient):
    app = App()
    started, cancelled = asyncio.Event(), asyncio.Event()

    @app.task("long", ttl=0.9)
    async def long(attempt: Attempt) -> str:
        attempt.usage(tokens=7)
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "late"

    @app.task("next")
    async def following(attempt: Attempt) -> str:
        return "next"

    await client.submit(long.task(task_id="t"))
    async with Working(Worker(client, app, owner="A")) as working:
        await asyncio.wait_for(started.wait(), BOUND)
        newer = await client.reclaim(await claim_of(client, "t"), owner="B")
        await asyncio.wait_for(cancelled.wait(), BOUND)
        assert isinstance(await client.commit(newer, "B's"), Committed)
        await client.submit(following.task(task_id="n"))
        assert (await client.result("n", wait=BOUND)).value == "next"
    assert working.code == 0
    assert (await client.result("t")).value == "B's"
    first, second = await client.attempts("t")
    assert (first.owner_id, first.end, second.end) == ("A", "EXPIRED", "COMMITTED")
    assert first.usage["tokens"] == 7
    assert first.usage["seconds"] > 0


async def claim_of(client: MemoryClient, task_id: str) -> Claim:
    """Enough of a claim for `reclaim`, which only looks at the task and the ttl."""
    view = await client.task(task_id)
    return Claim(
        client.store_id, view.pool, task_id, 1, "default", view.kind, "main", "x", "x", 1, 1, 0,
        view.lease_expires_at, 30.0, "x", None,
    )  # fmt: skip


async def test_a_commit_that_comes_too_late_is_dropped_and_not_sent_again(client: MemoryClient):
    app = App()

    @app.task("overtaken")
    async def overtaken(attempt: Attempt) -> str:
        await client.commit(await client.reclaim(attempt.claim), "first")
        return "second"

    await client.submit(overtaken.task(task_id="t"))
    assert await run(client, app) == 0
    assert (await client.result("t")).value == "first"
    page = await client.events(task_id="t", names=["refusal"])
    assert [(event.door, event.count) for event in page.items if event.door == "commit"] == [("commit", 1)]


async def test_except_exception_cannot_swallow_the_loss(client: MemoryClient):
    app = App()
    started = asyncio.Event()
    swallowed: list[BaseException] = []

    @app.task("agent", ttl=0.6)
    async def agent(attempt: Attempt) -> str:
        while True:
            try:
                started.set()
                await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001 - as agents' loops do
                swallowed.append(error)

    await client.submit(agent.task(task_id="t"))
    async with Working(Worker(client, app)) as working:
        await asyncio.wait_for(started.wait(), BOUND)
        await client.cancel("t")
        await reported(client, "t")
    assert working.code == 0
    assert swallowed == []
    assert await state_of(client, "t") == "CANCELLED"


async def test_fenced_out_of_a_door_passes_except_exception_too(client: MemoryClient):
    app = App()
    swallowed: list[BaseException] = []

    @app.task("agent")
    async def agent(attempt: Attempt) -> str:
        await client.cancel(attempt.claim.task_id)
        try:
            await attempt.checkpoint(1)
        except Exception as error:  # noqa: BLE001 - as agents' loops do
            swallowed.append(error)
        return "still here"

    await client.submit(agent.task(task_id="t"))
    assert await run(client, app) == 0
    assert swallowed == []
    assert await ends_of(client, "t") == ["CANCELLED"]


async def test_a_handler_that_swallows_its_cancellation_cannot_commit(client: MemoryClient):
    app = App()
    started = asyncio.Event()

    @app.task("stubborn", ttl=0.6)
    async def stubborn(attempt: Attempt) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except BaseException:  # noqa: BLE001 - the stubborn one
            return "swallowed"
        return "never"

    await client.submit(stubborn.task(task_id="t"))
    async with Working(Worker(client, app)) as working:
        await asyncio.wait_for(started.wait(), BOUND)
        await client.revise("t", {"new": True})
        await reported(client, "t")
        # The next attempt, of the new revision, is left to the drain.
        working.worker.stop()
        working.worker.stop()
    assert working.code == 0
    first, *_ = await client.attempts("t")
    assert first.end == "SUPERSEDED"


async def test_the_slot_of_a_thread_that_does_not_stop_is_taken_until_it_ends(client: MemoryClient):
    app = App()
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @app.task("deaf", ttl=0.6)
    def deaf(attempt: SyncAttempt) -> str:
        started.set()
        go_on.wait(BOUND)
        ended.set()
        return "too late"

    @app.task("next")
    async def following(attempt: Attempt) -> str:
        return "next"

    await client.submit(deaf.task(task_id="t"))
    async with Working(Worker(client, app, concurrency=1)) as working:
        await asyncio.to_thread(started.wait, BOUND)
        await client.cancel("t")
        await reported(client, "t")
        await client.submit(following.task(task_id="n"))
        assert isinstance(await client.result("n", wait=0.2), Refused)
        go_on.set()
        assert (await client.result("n", wait=BOUND)).value == "next"
        assert ended.is_set()
    assert working.code == 0
    assert await state_of(client, "t") == "CANCELLED"


async def test_a_thread_that_never_stops_does_not_keep_the_worker_from_ending(client: MemoryClient):
    app = App()
    started, go_on = threading.Event(), threading.Event()

    @app.task("deaf")
    def deaf(attempt: SyncAttempt) -> None:
        started.set()
        go_on.wait(BOUND)

    await client.submit(deaf.task(task_id="t"))
    worker = Worker(client, app, drain_timeout=0.05)
    async with Working(worker) as working:
        await asyncio.to_thread(started.wait, BOUND)
    assert working.code == 0
    assert worker.leftovers == 1
    view = await client.task("t")
    assert (view.state, view.end, view.charged_attempts) == ("READY", "RELEASED", 0)
    go_on.set()
