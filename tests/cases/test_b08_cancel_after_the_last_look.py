"""B08: the cancel lands after the worker's last look."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost import Committed, Done, NewTask, Refused, Result, TaskView
from tests.faults.stage import Stage


async def test_b08_a_cancel_just_before_the_commit_wins_and_leaves_no_successor_and_no_result(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(1, task_id="t"), NewTask(None, task_id="child", depends_on=["t"])])
    a = await stage.hand()
    [claim] = await a.call("claim_next", owner="A")
    digest = await a.call("stage", claim, "ready to go")
    await a.call("renew", claim)  # its last look: all was well
    await a.program.pause()
    commit = a.start("commit", claim, result_digest=digest, spawn=[NewTask(1, task_id="next run")], usage={"usd": 2.5})
    assert isinstance(await client.cancel("t"), Done)
    a.program.wake()
    answer = await commit
    assert isinstance(answer, Refused) and answer.outcome == "CANCELLED"
    assert answer.current["cancel_generation"] == 1
    for door in ("renew", "release"):
        again = await a.call(door, claim)
        assert isinstance(again, Refused) and again.outcome == "CANCELLED", door
    assert isinstance(await a.call("usage", claim, usd=2.5), Done)

    result = await client.result("t")
    assert isinstance(result, Refused) and (result.outcome, result.reason) == ("NOT_COMMITTED", "CANCELLED")
    next_run, child = await client.task("next run"), await client.task("child")
    assert isinstance(next_run, Refused) and next_run.outcome == "NOT_FOUND"
    assert isinstance(child, TaskView) and (child.state, child.unreachable) == ("BLOCKED", ("t",))
    status = await client.report("status")
    assert status["discarded_compute"]["attempts"] == 1
    assert status["discarded_compute"]["usage"]["usd"] == 2.5
    await stage.audit()


async def test_b08_old_generation_cancelled_and_stale_input_at_once_are_told_in_the_fences_order(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask({"v": 1}, task_id="t"))
    a = await stage.hand()
    [claim] = await a.call("claim_next", owner="A", ttl=5.0)

    async def told() -> tuple[str, str | None]:
        answer = await a.call("commit", claim, "late")
        assert isinstance(answer, Refused)
        return str(answer.outcome), answer.reason

    await client.revise("t", {"v": 2})
    assert (await told())[0] == "STALE_INPUT"
    await client.cancel("t")
    assert (await told())[0] == "CANCELLED"
    await client.reopen("t")
    assert (await told())[0] == "CANCELLED"  # a reopen forgives no attempt of before the cancel
    assert await client.claim_next(owner="B")
    assert await told() == ("FENCED", "GENERATION")
    await stage.audit()


async def test_b08_the_handler_of_a_cancelled_task_is_stopped_by_its_next_beat_and_the_worker_goes_on(
    stage: Stage,
) -> None:
    client = await stage.client()
    await client.submit_many(
        [NewTask(60, task_id="t", kind="nap"), NewTask(1, task_id="child", kind="echo", depends_on=["t"])]
    )
    worker = await stage.worker("A", ttl=0.9)
    await worker.reaches("started")
    assert isinstance(await client.cancel("t"), Done)
    await worker.reaches("cancelled", within=10.0)
    await client.submit(NewTask("x", task_id="other", kind="echo"))
    assert isinstance(await client.result("other", wait=20.0), Result)
    child = await client.task("child")
    assert isinstance(child, TaskView) and child.state == "BLOCKED"
    [attempt] = await client.attempts("t")
    assert attempt.end == "CANCELLED"
    worker.signal(15)
    assert await worker.ended() == 0
    await stage.audit()


@pytest.mark.parametrize("rounds", [500])
async def test_b08_cancel_renew_and_commit_at_once_for_500_rounds(stage: Stage, rounds: int) -> None:
    """Three at once: whatever the renew is told, the other two never both succeed, and never both fail."""
    client, other = await stage.client(), await stage.client()
    await client.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(rounds)])
    claims = await client.claim_next(owner="A", limit=rounds)
    assert isinstance(claims, list) and len(claims) == rounds
    outcomes: dict[str, int] = {}
    for n, claim in enumerate(claims):
        calls: list[Any] = [
            client.commit(claim, n),
            other.cancel(claim.task_id, expected_cancel_generation=0),
            client.renew(claim),
        ]
        calls = calls[n % 3 :] + calls[: n % 3]
        answers = await asyncio.gather(*calls)
        committed = [a for a in answers if isinstance(a, Committed)]
        cancelled = [a for a in answers if isinstance(a, Done)]
        assert len(committed) + len(cancelled) == 1
        refused = [str(a.outcome) for a in answers if isinstance(a, Refused)]
        assert set(refused) <= ({"ALREADY_COMMITTED", "ENDED"} if committed else {"CANCELLED"})
        word = "committed" if committed else "cancelled"
        outcomes[word] = outcomes.get(word, 0) + 1
    assert len(outcomes) == 2, f"no race: {outcomes}"
    await stage.audit()
