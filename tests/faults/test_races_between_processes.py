"""Two processes at once: whichever order the store takes them in, one wins, and the other is told what stands."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from fencepost.wire import Claim, Committed, Done, NewTask, Refused, Renewed, Result, TaskView
from tests.faults.stage import Stage, on_every_store

ROUNDS = 500


@on_every_store
async def test_the_input_is_revised_while_claimed_and_the_old_work_is_stale_at_every_door(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask({"doc": 1}, task_id="t"))
    await client.submit(NewTask(None, task_id="child", depends_on=["t"]))
    worker, person = await stage.hand(), await stage.hand()
    [claim] = await worker.call("claim_next", owner="A")
    digest = await worker.call("stage", claim, "of the old input")
    await worker.program.pause()
    assert isinstance(await person.call("revise", "t", {"doc": 2}, expected_revision=1), Done)
    view = await client.task("t")
    assert isinstance(view, TaskView) and (view.state, view.revision) == ("READY", 2)
    calls = {
        "commit": worker.start("commit", claim, result_digest=digest),
        "renew": worker.start("renew", claim),
        "checkpoint": worker.start("checkpoint", claim, "half"),
        "release": worker.start("release", claim),
        "fail": worker.start("fail", claim, "gave up"),
    }
    worker.program.wake()
    for door, call in calls.items():
        answer = await call
        assert isinstance(answer, Refused) and answer.outcome == "STALE_INPUT", door
        assert answer.current["revision"] == 2, door
    assert await client.task("t") == view
    # Still stale once somebody works on the new input: the generation is told first, as the fence's order says.
    [fresh] = await person.call("claim_next", owner="B")
    assert isinstance(fresh, Claim) and fresh.input == {"doc": 2}
    answer = await worker.call("commit", claim, "of the old input")
    assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "GENERATION")
    assert isinstance(await person.call("commit", fresh, "of the new input"), Committed)
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == "of the new input"
    [unlocked] = await person.call("claim_next", owner="B")
    assert isinstance(unlocked, Claim) and unlocked.parents == {"t": "of the new input"}
    await stage.audit()


@on_every_store
async def test_cancel_races_commit_from_another_process_for_500_rounds_and_one_of_the_two_stands(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(ROUNDS)])
    await client.submit_many([NewTask(n, task_id=f"child{n:03}", depends_on=[f"t{n:03}"]) for n in range(ROUNDS)])
    worker, person = await stage.hand(), await stage.hand()
    claims: dict[str, Claim] = {
        claim.task_id: claim for claim in await worker.call("claim_next", owner="A", limit=ROUNDS)
    }
    seen: Counter[str] = Counter()
    for n in range(ROUNDS):
        task_id = f"t{n:03}"
        # The generation is named, so that the cancel needs no read before it and comes as close as it can.
        calls = [
            lambda t=task_id: worker.start("commit", claims[t], t),
            lambda t=task_id: person.start("cancel", t, expected_cancel_generation=0),
        ]
        first, second = calls if n % 2 else reversed(calls)
        answers = [await each for each in (first(), second())]
        by_kind = {type(answer): answer for answer in answers}
        refused = by_kind[Refused]
        if Committed in by_kind:
            assert refused.outcome == "ALREADY_COMMITTED"
            seen["committed"] += 1
        else:
            assert Done in by_kind and refused.outcome == "CANCELLED"
            seen["cancelled"] += 1
    assert sum(seen.values()) == ROUNDS and min(seen.values()) > ROUNDS // 20, f"no race: {seen}"
    states = await states_of_all(client)
    for n in range(ROUNDS):
        state, child = states[f"t{n:03}"], states[f"child{n:03}"]
        assert (state, child) in (("COMMITTED", "READY"), ("CANCELLED", "BLOCKED"))
    assert Counter(states.values())["COMMITTED"] == seen["committed"]
    await stage.audit()


@on_every_store
async def test_sixty_four_parents_committed_at_once_by_four_processes_release_their_child_once(stage: Stage) -> None:
    client = await stage.client()
    hands = [await stage.hand() for _ in range(4)]
    for n in range(8):
        parents = [f"{n}-parent-{m:02}" for m in range(64)]
        await client.submit_many([NewTask(m, task_id=name, queue="parents") for m, name in enumerate(parents)])
        await client.submit(NewTask(None, task_id=f"{n}-child", depends_on=parents))
        shares = [await hand.call("claim_next", owner="A", queues=["parents"], limit=16) for hand in hands]
        calls = [
            hand.start("commit", claim, claim.input)
            for each in zip(*shares, strict=True)
            for hand, claim in zip(hands, each, strict=True)
        ]
        answers = await asyncio.gather(*calls)
        assert all(isinstance(answer, Committed) for answer in answers)
        view = await client.task(f"{n}-child")
        assert isinstance(view, TaskView) and (view.state, view.deps_remaining) == ("READY", 0)
        page = await client.events(task_id=f"{n}-child", limit=500)
        counted = [item for item in page.items if item.accepted and item.name == "parent_committed"]
        assert len(counted) == 64
        assert [item.state for item in counted].count("READY") == 1 and counted[-1].state == "READY"
        claims: list[Any] = [await hand.call("claim_next", owner="B") for hand in hands]
        assert sorted(map(len, claims)) == [0, 0, 0, 1]
        [child] = [claim for share in claims for claim in share]
        assert len(child.parents) == 64
        await client.commit(child, "done")
    await stage.audit()


@on_every_store
async def test_two_operations_on_one_task_in_one_batch_of_another_process(stage: Stage) -> None:
    """One transaction holds both: the second is decided on what the first wrote, and the journal shows no gap."""
    client = await stage.client()
    hand = await stage.hand()
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(20)])
    claims = await hand.call("claim_next", owner="A", limit=20)
    for n, claim in enumerate(claims):
        first, second = [
            ("commit", (claim, "right"), {}),
            ("cancel", (claim.task_id,), {"expected_cancel_generation": 0}),
        ][:: 1 if n % 2 else -1]
        renewed, one, other, again = await hand.together(
            ("renew", (claim, 60.0), {}), first, second, ("commit", (claim, "wrong"), {})
        )
        assert isinstance(renewed, Renewed)
        if n % 2:
            assert isinstance(one, Committed)
            assert isinstance(other, Refused) and other.outcome == "ALREADY_COMMITTED"
            assert isinstance(again, Refused) and (again.outcome, again.reason) == ("ENDED", "COMMITTED")
        else:
            assert isinstance(one, Done)
            assert isinstance(other, Refused) and other.outcome == "CANCELLED"
            assert isinstance(again, Refused) and again.outcome == "CANCELLED"
        view = await client.task(claim.task_id)
        assert isinstance(view, TaskView)
        page = await client.events(task_id=claim.task_id)
        assert [item.state_version for item in page.items if item.accepted] == list(range(1, view.state_version + 1))
    await stage.audit()


async def states_of_all(client: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    cursor = None
    while True:
        page = await client.tasks(cursor=cursor, limit=500)
        found.update({item.task_id: item.state for item in page.items})
        cursor = page.next_cursor
        if cursor is None:
            return found
