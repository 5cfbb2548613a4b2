"""B44: a resumed agent redoes work that was undone or superseded."""

from __future__ import annotations

import asyncio

from fencepost import Claim, Committed, Done, NewTask, Refused, Result, TaskView
from tests.faults.stage import Stage, on_every_store


@on_every_store
async def test_b44_an_agent_resumed_from_its_transcript_cannot_land_the_old_plan(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask({"issue": 1, "plan": "old"}, task_id="t", max_attempts=9))
    await client.submit(NewTask(None, task_id="publish", depends_on=["t"]))
    agent = await stage.hand()
    [claim] = await agent.call("claim_next", owner="agent", ttl=30.0)
    await agent.call("checkpoint", claim, {"commits": ["re-apply"]})
    transcript = claim.to_json()
    await agent.program.kill()

    stage.advance(4 * 3600.0)  # hours later
    assert isinstance(await client.revise("t", {"issue": 1, "plan": "reverted by a person"}), Done)
    resumed = await stage.hand()
    old = Claim.from_json(transcript)
    staged = await resumed.call("stage", old, "three commits from the old plan")
    for door, args in {
        "renew": (old,),
        "checkpoint": (old, {"commits": ["again"]}),
        "commit": (old, "three commits from the old plan"),
    }.items():
        answer = await resumed.call(door, *args)
        assert isinstance(answer, Refused) and answer.outcome == "STALE_INPUT", door
        assert answer.current["revision"] == 2
    by_digest = await resumed.call("commit", old, result_digest=staged)
    assert isinstance(by_digest, Refused) and by_digest.outcome == "STALE_INPUT"
    assert isinstance(await resumed.call("usage", old, usd=7.0), Done)

    # Whoever comes next gets the new plan, and nothing of the old one: no checkpoint, no staged result.
    found = await client.claim_next(owner="another")
    assert isinstance(found, list)
    assert (found[0].input["plan"], found[0].checkpoint_data) == ("reverted by a person", None)
    late = await resumed.call("commit", old, "three commits from the old plan")
    assert isinstance(late, Refused) and (late.outcome, late.reason) == ("FENCED", "GENERATION")
    assert isinstance(await client.commit(found[0], "nothing to do"), Committed)
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == "nothing to do"
    history = await client.report("history", task_id="t")
    assert [(each.generation, each.state) for each in history.staged if each.generation == 1] == [(1, "DISCARDED")]
    assert history.conflict and history.canonical == result.result_digest
    status = await client.report("status")
    assert status["discarded_compute"]["usage"]["usd"] == 7.0
    await stage.audit()


@on_every_store
async def test_b44_a_task_that_was_cancelled_and_replaced_takes_no_late_work(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask({"v": 1}, task_id="t"))
    agent = await stage.hand()
    [claim] = await agent.call("claim_next", owner="agent")
    await client.cancel("t")
    # An input is never changed under an id: the replacement is a new task.
    same_id = await client.submit(NewTask({"v": 2}, task_id="t"))
    assert isinstance(same_id, Refused) and same_id.outcome == "CONFLICT"
    await client.submit(NewTask({"v": 2, "replaces": "t"}, task_id="t2"))
    for door in ("renew", "release"):
        answer = await agent.call(door, claim)
        assert isinstance(answer, Refused) and answer.outcome == "CANCELLED"
    answer = await agent.call("commit", claim, "late", spawn=[NewTask("follow-up", task_id="follow-up")])
    assert isinstance(answer, Refused) and answer.outcome == "CANCELLED"
    assert isinstance(await client.task("follow-up"), Refused)
    found = await client.claim_next(owner="another", limit=5)
    assert isinstance(found, list) and [each.task_id for each in found] == ["t2"]
    await stage.audit()


@on_every_store
async def test_b44_twenty_agents_in_five_processes_race_for_a_task_that_all_saw_ready(stage: Stage) -> None:
    client = await stage.client()
    hands = [await stage.hand() for _ in range(5)]
    for n in range(20):
        await client.submit(NewTask(n, task_id=f"t{n}"))
        views = await asyncio.gather(*(hand.call("task", f"t{n}") for hand in hands))
        assert all(isinstance(view, TaskView) and view.state == "READY" for view in views)
        answers = await asyncio.gather(
            *(
                hands[m % 5].call(
                    "claim", f"t{n}", expected_state_version=views[m % 5].state_version, owner=f"agent-{m}", ttl=60.0
                )
                for m in range(20)
            )
        )
        [winner] = [each for each in answers if isinstance(each, Claim)]
        for each in answers:
            if isinstance(each, Refused):
                assert each.outcome == "CONFLICT"
                # Who holds it, and until when; never the key to it.
                assert each.current["owner"] == winner.owner_id
                assert "lease_expires_at" in each.current and winner.attempt_id not in str(each.current)
        assert isinstance(await client.commit(winner, n), Committed)
    await stage.audit()
