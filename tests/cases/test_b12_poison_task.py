"""B12: a task that kills its workers, over and over, without ever reaching the limit (the part about attempts)."""

from __future__ import annotations

import asyncio
import signal

from fencepost import Done, NewTask, Refused, TaskView
from tests.faults.programs.worker import LAST_WORDS
from tests.faults.stage import Program, Stage


async def test_b12_a_task_that_kills_its_workers_is_claimed_three_times_and_then_parked(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many(
        [
            NewTask(None, task_id="poison", kind="die", max_attempts=3),
            NewTask(None, task_id="child", kind="echo", depends_on=["poison"]),
        ]
    )
    options = {"ttl": 0.5, "concurrency": 1}
    workers = [await stage.worker(f"w{n}", **options) for n in range(3)]
    deaths = 0

    async def parked() -> bool:
        view = await client.task("poison")
        return isinstance(view, TaskView) and view.state == "PARKED"

    async with asyncio.timeout(60):
        while not await parked():
            for place, worker in enumerate(workers):
                if worker.over:
                    assert await worker.ended() == -signal.SIGKILL
                    deaths += 1
                    workers[place] = await stage.worker(f"w{place}-{deaths}", **options)
            await asyncio.sleep(0.02)
    # It stays so, with workers that ask for it.
    await client.submit(NewTask("x", task_id="healthy", kind="echo"))
    assert not isinstance(await client.result("healthy", wait=20.0), Refused)
    deaths += sum(worker.over for worker in workers)
    assert deaths == 3
    view, child = await client.task("poison"), await client.task("child")
    assert isinstance(view, TaskView)
    assert (view.state, view.generation, view.charged_attempts, view.park_reason) == ("PARKED", 3, 3, "ATTEMPTS")
    assert isinstance(child, TaskView) and (child.state, child.unreachable) == ("BLOCKED", ("poison",))
    attempts = await client.attempts("poison")
    assert [attempt.end for attempt in attempts] == ["EXPIRED"] * 3
    fourth = await client.claim("poison", expected_state_version=view.state_version, owner="somebody")
    assert isinstance(fourth, Refused) and fourth.outcome == "NOT_CLAIMABLE"
    status = await client.report("status")
    assert status["discarded_compute"]["attempts"] == 3
    assert status["attempts_per_task"]["highest_open"] == 3
    assert status["unreachable"] == 1
    await stage.audit()


async def test_b12_cancel_stops_the_loop_while_the_task_is_claimed(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(None, task_id="poison", kind="die", max_attempts=1000))
    worker: Program | None = None
    for n in range(2):
        worker = await stage.worker(f"w{n}", ttl=0.5)
        await worker.reaches(LAST_WORDS)
        assert await worker.ended() == -signal.SIGKILL
    view = await client.task("poison")
    assert isinstance(view, TaskView) and view.state == "CLAIMED"
    assert isinstance(await client.cancel("poison"), Done)
    survivor = await stage.worker("w9", ttl=0.5)
    await client.submit(NewTask("x", task_id="healthy", kind="echo"))
    assert not isinstance(await client.result("healthy", wait=20.0), Refused)
    survivor.signal(signal.SIGTERM)
    assert await survivor.ended() == 0
    view = await client.task("poison")
    assert isinstance(view, TaskView) and (view.state, view.generation) == ("CANCELLED", 2)
    await stage.audit()


async def test_b12_ten_drains_by_sigterm_use_up_no_attempts(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(3600, task_id="t", kind="nap", max_attempts=2))
    for n in range(10):
        worker = await stage.worker(f"w{n}", ttl=30.0, drain_timeout=0.0)
        assert (await worker.reaches("started"))["generation"] == n + 1
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
        view = await client.task("t")
        assert isinstance(view, TaskView)
        assert (view.state, view.charged_attempts) == ("READY", 0), "given back at once, and nothing charged"
    assert [attempt.end for attempt in await client.attempts("t")] == ["RELEASED"] * 10
    await stage.audit()
