"""B21: the renewer starves: a blocked event loop, the interpreter's lock, beats that fail or hang."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

import fencepost
from fencepost import NewTask, Refused, Result, Unavailable, clock
from fencepost.kernel import commands as k
from tests.faults.between import client_behind
from tests.faults.stage import Stage


async def kept_through(stage: Stage, kind: str, *, tasks: int, seconds: float, ttl: float) -> None:
    """Handlers of `kind` for `seconds`, each far longer than its lease: one attempt each."""
    client = await stage.client()
    await client.submit_many([NewTask(seconds, task_id=f"t{n}", kind=kind) for n in range(tasks)])
    worker = await stage.worker("A", ttl=ttl, concurrency=tasks)
    for _ in range(tasks):
        await worker.reaches("started")
    # Somebody who takes whatever is lost, at once.
    rival = await stage.worker("B", ttl=ttl, concurrency=tasks)
    for n in range(tasks):
        answer = await client.result(f"t{n}", wait=seconds * tasks + 30.0)
        assert isinstance(answer, Result)
        [attempt] = await client.attempts(f"t{n}")
        assert (attempt.end, attempt.owner_id) == ("COMMITTED", "A")
    for each in (worker, rival):
        each.signal(signal.SIGTERM)
        assert await each.ended() == 0
    status = await client.report("status")
    assert status["renew"]["renewed"] >= tasks * 2
    # A beat may meet the task's own commit, and be told ENDED; nothing else refuses one.
    assert all(reason.startswith("ENDED") for reason in status["renew"]["by_reason"]), status["renew"]
    await stage.audit()


async def test_b21_a_handler_that_blocks_the_event_loop_keeps_its_lease(stage: Stage) -> None:
    await kept_through(stage, "block", tasks=1, seconds=3.0, ttl=1.0)


async def test_b21_eight_threads_that_burn_the_interpreter_keep_their_leases(stage: Stage) -> None:
    await kept_through(stage, "burn", tasks=8, seconds=5.0, ttl=2.0)


def napping_app(seconds: float, seen: dict[str, Any]) -> fencepost.App:
    app = fencepost.App()

    @app.task("nap", ttl=0.9)
    async def nap(attempt: fencepost.Attempt, input: Any) -> str:
        seen["started"] = clock.elapsed()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            seen["cancelled"] = clock.elapsed()
            with pytest.raises(fencepost.Fenced):
                attempt.check()  # no tool call any more
            raise
        return "rested"

    return app


async def test_b21_two_of_three_beats_that_fail_do_not_kill_the_task(stage: Stage) -> None:
    boss = await stage.client()
    await boss.submit(NewTask(None, task_id="t", kind="nap"))
    beats = 0

    async def rule(command: Any, go: Any) -> Any:
        nonlocal beats
        if isinstance(command, k.Renew):
            beats += 1
            if beats % 3:
                raise Unavailable("500")
        return await go()

    async with await client_behind(stage.url, rule) as client:
        worker = fencepost.Worker(client, napping_app(3.0, {}), owner="A", handle_signals=False)
        assert await worker.run_until_idle() == 0
    assert beats >= 6
    [attempt] = await boss.attempts("t")
    assert attempt.end == "COMMITTED"
    await stage.audit()


async def test_b21_beats_that_hang_stop_the_handler_before_its_lease_is_over(stage: Stage) -> None:
    boss = await stage.client()
    await boss.submit(NewTask(None, task_id="t", kind="nap", max_attempts=1))
    sent: list[float] = []
    hang = asyncio.Event

    async def rule(command: Any, go: Any) -> Any:
        if isinstance(command, k.Renew):
            if len(sent) >= 2:
                await hang().wait()  # for ever
            sent.append(clock.elapsed())
        return await go()

    seen: dict[str, Any] = {}
    async with await client_behind(stage.url, rule) as client:
        worker = fencepost.Worker(client, napping_app(30.0, seen), owner="A", handle_signals=False, cancel_grace=1.0)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(20):
            while "cancelled" not in seen:
                await asyncio.sleep(0.01)
        worker.stop()
        assert await running == 0
    # Counted from when the last granted renewal was *sent*: trust ends at 5/6 of the ttl, the lease after it.
    after = seen["cancelled"] - sent[1]
    assert after < 0.9, f"the handler ran on for {after:.2f} s after the last good beat was sent, past its lease"
    assert after > 0.5
    await stage.audit()


async def test_b21_refused_beats_move_the_published_rate(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    found = await client.claim_next(owner="A", ttl=5.0)
    assert isinstance(found, list)
    await client.renew(found[0])
    await client.take_over("t")
    for _ in range(3):
        assert isinstance(await client.renew(found[0]), Refused)
    rates = (await client.report("status"))["renew"]
    assert (rates["renewed"], rates["refused"], rates["failure_rate"]) == (1, 3, 0.75)
    assert sum(rates["by_reason"].values()) == 3
