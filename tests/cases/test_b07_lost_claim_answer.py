"""B07: the claim succeeded, its answer got lost."""

from __future__ import annotations

import asyncio
from typing import Any

import fencepost
from fencepost import Claim, NewTask, Refused, Result, TaskView, Unavailable
from fencepost.kernel import commands as k
from tests.faults.between import client_behind
from tests.faults.stage import Stage, on_every_store, until


@on_every_store
async def test_b07_a_worker_whose_claim_answer_was_lost_asks_again_and_works_on_that_very_claim(stage: Stage) -> None:
    boss = await stage.client()
    await boss.set_policy(max_attempts=1)  # an attempt too many, and the task would be parked
    await boss.submit_many([NewTask(n, task_id=f"t{n}", kind="echo") for n in range(9)])
    asked: list[str] = []
    lost: set[str] = set()

    async def rule(command: Any, go: Any) -> Any:
        answer = await go()
        if isinstance(command, k.ClaimNext) and answer:
            asked.append(command.request_id)
            # The answer to every other question is lost on its first way.
            if command.request_id not in lost and len(set(asked)) % 2:
                lost.add(command.request_id)
                raise Unavailable("the connection broke while the answer was on its way")
        return answer

    app = fencepost.App()

    @app.task("echo")
    async def echo(attempt: fencepost.Attempt, input: int) -> int:
        return input

    async with await client_behind(stage.url, rule) as client:
        worker = fencepost.Worker(client, app, owner="W", concurrency=1, handle_signals=False)
        assert await worker.run_until_idle() == 0
    assert len(lost) >= 4 and all(asked.count(each) == 2 for each in lost)
    for n in range(9):
        [attempt] = await boss.attempts(f"t{n}")
        assert (attempt.generation, attempt.end) == (1, "COMMITTED")
    await stage.audit()


@on_every_store
async def test_b07_the_repeated_claim_is_the_same_and_another_process_of_that_name_does_not_get_it(
    stage: Stage,
) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    w, twin = await stage.hand(), await stage.hand()
    [claim] = await w.call("claim_next", owner="W", ttl=30.0, request_id="q1")
    stage.advance(10.0)
    assert await twin.call("claim_next", owner="W") == []
    view = await client.task("t")
    assert isinstance(view, TaskView)
    held = await twin.call("claim", "t", expected_state_version=view.state_version, owner="W")
    assert isinstance(held, Refused) and held.outcome == "HELD"
    [again] = await w.call("claim_next", owner="W", ttl=30.0, request_id="q1")
    assert isinstance(again, Claim)
    assert (again.attempt_id, again.generation) == (claim.attempt_id, 1)
    assert again.lease_expires_at == claim.lease_expires_at  # the repeat extends nothing
    assert await client.task("t") == view
    await stage.audit()


@on_every_store
async def test_b07_a_claim_whose_worker_died_before_it_heard_of_it_comes_back_after_one_lease(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    w = await stage.hand()
    await w.die_at("after")
    dying = w.start("claim_next", owner="W", ttl=5.0)
    assert await w.program.ended() == -9
    await asyncio.wait({dying})
    view = await client.task("t")
    assert isinstance(view, TaskView) and (view.state, view.owner_id) == ("CLAIMED", "W")
    assert await client.claim_next(owner="W") == []
    stage.advance(6.0)
    answer = await client.claim_next(owner="V")
    assert isinstance(answer, list)
    assert (answer[0].generation, answer[0].charged_attempts) == (2, 1)
    await stage.audit()


@on_every_store
async def test_b07_a_worker_that_stops_before_it_heard_of_its_claim_gives_it_back_at_once(stage: Stage) -> None:
    boss = await stage.client()
    held = asyncio.Event()

    async def rule(command: Any, go: Any) -> Any:
        answer = await go()
        if isinstance(command, k.ClaimNext) and answer and not held.is_set():
            held.set()
            await asyncio.Event().wait()  # for as long as the worker cares to wait
        return answer

    app = fencepost.App()

    @app.task("echo")
    async def echo(attempt: fencepost.Attempt, input: int) -> int:
        return input

    async with await client_behind(stage.url, rule) as client:
        worker = fencepost.Worker(client, app, owner="W", handle_signals=False)
        running = asyncio.create_task(worker.run())
        await boss.submit(NewTask(1, task_id="t", kind="echo"))
        await asyncio.wait_for(held.wait(), 20)
        worker.stop()
        assert await asyncio.wait_for(running, 20) == 0

    async def free() -> bool:
        view = await boss.task("t")
        return isinstance(view, TaskView) and (view.state, view.charged_attempts) == ("READY", 0)

    await until(free, within=5.0)
    assert await fencepost.Worker(boss, app, owner="V", handle_signals=False).run_until_idle() == 0
    assert isinstance(await boss.result("t"), Result)
    await stage.audit()
