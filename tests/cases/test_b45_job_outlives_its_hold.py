"""B45: the baseline: a job outlives its hold."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import fencepost
from fencepost import Committed, NewTask, Refused, Renewed, Result, TaskView
from tests.faults.stage import Stage, on_every_store, until


@on_every_store
async def test_b45_a_long_job_with_renewals_is_one_attempt_however_many_wait_for_it(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(3.0, task_id="t", kind="nap"))
    workers = [await stage.worker(f"w{n}", ttl=0.6) for n in range(3)]
    result = await client.result("t", wait=30.0)
    assert isinstance(result, Result) and result.generation == 1
    assert len(await client.attempts("t")) == 1
    assert sum(worker.count("started") for worker in workers) == 1
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    await stage.audit()


@on_every_store
async def test_b45_without_renewals_the_first_is_fenced_and_the_second_commits(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(None, task_id="t"))
    a, b = await stage.hand(), await stage.hand()
    [late] = await a.call("claim_next", owner="A", ttl=2.0)
    stage.advance(10.0)  # its work takes this long
    [fresh] = await b.call("claim_next", owner="B", ttl=2.0)
    answer = await a.call("commit", late, "of A")
    assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "GENERATION")
    assert isinstance(await b.call("commit", fresh, "of B"), Committed)
    again = await a.call("commit", late, "of A")
    assert isinstance(again, Refused) and again.outcome == "FENCED"
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == "of B"
    await stage.audit()


@on_every_store
async def test_b45_a_batch_claimed_ahead_is_kept_to_its_tail_and_a_worker_claims_none_ahead(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(20)])
    claims = await client.claim_next(owner="A", ttl=4.0, limit=20)
    assert isinstance(claims, list)
    for n, claim in enumerate(claims):
        stage.advance(1.0)  # one second of work each: twenty, under leases of four
        answers = await client.renew_many(claims[n:])
        assert all(isinstance(each, Renewed) and not each.late for each in answers)
        assert isinstance(await client.commit(claim, n), Committed)
    for n in range(20):
        assert len(await client.attempts(f"t{n:02}")) == 1

    await client.submit_many([NewTask(0.3, task_id=f"nap{n}", kind="nap") for n in range(6)])
    worker = await stage.worker("one at a time", ttl=0.6, concurrency=1)
    for _ in range(6):
        await worker.reaches("started")
        page = await client.tasks(kind="nap", state="CLAIMED")
        assert len(page.items) <= 1
    assert isinstance(await client.result("nap5", wait=20.0), Result)
    for n in range(6):
        assert len(await client.attempts(f"nap{n}")) == 1
    await stage.audit()


@on_every_store
async def test_b45_at_the_longest_claim_age_the_handler_is_stopped_before_its_lease_ends(stage: Stage) -> None:
    client = await stage.client()
    await client.set_policy(max_ttl=1.0, max_claim_age=1.6, max_attempts=2)
    await client.submit(NewTask(60.0, task_id="t", kind="nap"))
    worker = await stage.worker("A", ttl=0.9)
    await worker.reaches("started")
    await worker.reaches("cancelled", within=10.0)
    view = await client.task("t")
    assert isinstance(view, TaskView)
    [attempt, *_] = await client.attempts("t")
    assert attempt.end in (None, "RELEASED"), "it was told before the store took the task back"
    await worker.reaches("started", within=20.0)  # the process is up, and gets the task again
    await until(lambda: parked(client), within=20.0)
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    await stage.audit()


async def parked(client: fencepost.Client) -> bool:
    view = await client.task("t")
    return isinstance(view, TaskView) and view.state == "PARKED"


@on_every_store
async def test_b45_two_workers_that_fence_each_other_stay_up_and_their_attempts_are_bounded(stage: Stage) -> None:
    await fence_each_other(stage, 4.0)


async def fence_each_other(stage: Stage, seconds: float) -> None:
    """Each is paused beyond its lease in turn, over and over, on a task that is longer than that."""
    client = await stage.client()
    await client.submit(NewTask(1.5, task_id="t", kind="nap", max_attempts=1_000))
    workers = [await stage.worker(f"w{n}", ttl=0.5, concurrency=1) for n in range(2)]
    end = asyncio.get_running_loop().time() + seconds
    turns = 0
    while asyncio.get_running_loop().time() < end:
        view: Any = await client.task("t")
        holder = next((w for n, w in enumerate(workers) if view.owner_id == f"w{n}"), None)
        if view.state != "CLAIMED" or holder is None:
            if view.state == "COMMITTED":
                break
            await asyncio.sleep(0.02)
            continue
        await stage.pause(holder)
        try:
            await until(lambda g=view.generation: moved_on(client, g), within=10.0)  # type: ignore[misc]
        finally:
            holder.wake()
        turns += 1
    result = await client.result("t", wait=30.0)
    assert isinstance(result, Result)
    attempts = await client.attempts("t")
    assert [attempt.end for attempt in attempts] == ["EXPIRED"] * (len(attempts) - 1) + ["COMMITTED"]
    assert turns >= 2 and len(attempts) <= turns + 2, "attempts come from pauses, and from nothing else"
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    # Fenced, dropped, and not tried again in a loop.
    refusals = await client.events(task_id="t", limit=500, names=["refusal"])
    assert sum(item.count for item in refusals.items) <= 2 * turns + 2
    await stage.audit()


async def moved_on(client: fencepost.Client, generation: int) -> bool:
    view = await client.task("t")
    return isinstance(view, TaskView) and (view.generation > generation or view.state == "COMMITTED")
