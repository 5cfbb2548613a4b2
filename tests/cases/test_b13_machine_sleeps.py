"""B13: the machine sleeps, the lease lapses, the agent wakes and carries on."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

import fencepost
from fencepost import NewTask, Result, clock
from tests.faults.stage import Stage, until


async def test_b13_a_worker_asleep_for_three_leases_wakes_and_its_tool_call_is_stopped(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(None, task_id="t", kind="hold"))
    a = await stage.worker("A", ttl=0.6)
    await a.reaches("started")
    a.tell("go", task="nothing")
    await stage.pause(a)
    b = await stage.worker("B", ttl=0.6)
    await b.reaches("started")
    b.tell("go", task="t")
    result = await client.result("t", wait=20.0)
    assert isinstance(result, Result) and result.value == "B"
    a.tell("go", task="t")  # its tool call is queued, and its result as good as ready
    a.wake()
    stopped = await a.reaches("stopped", within=10.0)
    assert stopped["generation"] == 1
    for worker in (a, b):
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    assert a.count("used the tool") + b.count("used the tool") == 1
    assert "is dropped" in a.stderr()  # the loss is in its log
    await stage.audit()


async def test_b13_the_whole_machine_sleeps_and_no_task_is_lost_or_done_twice(stage: Stage) -> None:
    """Everybody stops: on waking every lease looks lapsed, and sweepers and owners run for it."""
    client = await stage.client()
    total = 12
    await client.submit_many([NewTask(0.5, task_id=f"t{n:02}", kind="nap", max_attempts=50) for n in range(total)])
    workers = [await stage.worker(f"w{n}", ttl=0.5, concurrency=2) for n in range(3)]
    for n in range(3):
        await workers[n].reaches("started")
        for worker in workers:
            await worker.pause()
        await asyncio.sleep(0.8)  # longer than any lease: this is the sleep
        order = workers[n:] + workers[:n]
        for worker in order:
            worker.wake()

    async def all_done() -> bool:
        page = await client.tasks(state="COMMITTED")
        return len(page.items) == total

    await until(all_done, within=40.0)
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    for n in range(total):
        ends = [attempt.end for attempt in await client.attempts(f"t{n:02}")]
        assert ends.count("COMMITTED") == 1 and set(ends) <= {"COMMITTED", "EXPIRED"}
    await stage.audit()


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system's monotonic clock counts sleep itself")
async def test_b13_the_local_deadline_counts_the_sleep_that_the_monotonic_clock_leaves_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = 0.0
    read = time.clock_gettime

    def after_a_sleep(which: int) -> float:
        return read(which) + (slept if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(clock.time, "clock_gettime", after_a_sleep)
    client = await stage.client()
    await client.submit(NewTask(None, task_id="t"))
    claims: Any = await client.claim_next(owner="A", ttl=30.0)
    with pytest.raises(fencepost.Fenced):
        async with client.hold(claims[0]) as attempt:
            attempt.check()
            assert attempt.remaining() > 20
            slept = 3600.0
            # Before anything was awaited, so before anything could be renewed or heard.
            assert attempt.remaining() == 0.0
            attempt.check()
