"""A worker that was stopped beyond its lease wakes up: whatever it does then, its successor's result stands."""

from __future__ import annotations

import asyncio
import signal

import apsw

from fencepost.wire import Claim, Committed, Done, NewTask, Refused, Renewed, Result, TaskView
from tests.faults.stage import PATIENCE, Hand, Stage, on_every_store


async def claimed(hand: Hand, owner: str, **more: object) -> Claim:
    answer = await hand.call("claim_next", owner=owner, **more)
    assert len(answer) == 1, answer
    assert isinstance(answer[0], Claim)
    return answer[0]


@on_every_store
async def test_a_paused_owner_is_fenced_at_every_door_after_its_successor_has_committed(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask({"n": 1}, task_id="t"))
    a, b = await stage.hand(), await stage.hand()
    late = await claimed(a, "A", ttl=5.0)
    await a.program.pause()
    stage.advance(6.0)
    successor = await claimed(b, "B", ttl=5.0)
    assert (successor.task_id, successor.generation) == ("t", 2)
    assert isinstance(await b.call("commit", successor, "of B"), Committed)
    # Sent while it sleeps: it finds these orders in its pipe when it wakes, and acts at once.
    doors = {
        "commit": a.start("commit", late, "of A"),
        "renew": a.start("renew", late),
        "checkpoint": a.start("checkpoint", late, {"half": True}),
        "release": a.start("release", late),
        "fail": a.start("fail", late, "gave up"),
    }
    a.program.wake()
    for door, call in doors.items():
        answer = await call
        assert isinstance(answer, Refused), door
        assert (answer.outcome, answer.reason) == ("FENCED", "GENERATION"), door
        assert answer.current["owner"] == "B", door
    # What has no fence is kept beside the records, and changes none of them.
    assert str(await a.call("stage", late, "of A")).startswith("sha256:")
    assert isinstance(await a.call("usage", late, tokens=5), Done)
    assert await a.end() == 0

    result = await client.result("t")
    assert isinstance(result, Result) and (result.value, result.generation) == ("of B", 2)
    first, second = await client.attempts("t")
    assert (first.end, first.usage.get("tokens"), second.end) == ("EXPIRED", 5, "COMMITTED")
    await stage.audit()


@on_every_store
async def test_a_paused_owner_whose_successor_is_still_at_work_is_fenced_and_takes_nothing_from_it(
    stage: Stage,
) -> None:
    client = await stage.client()
    await client.submit(NewTask({"n": 1}, task_id="t"))
    a, b = await stage.hand(), await stage.hand()
    late = await claimed(a, "same name", ttl=5.0)
    await a.program.pause()
    stage.advance(6.0)
    successor = await claimed(b, "same name", ttl=5.0)
    before = await client.task("t")
    calls = [a.start("commit", late, "of A"), a.start("renew", late), a.start("release", late)]
    a.program.wake()
    for call in calls:
        answer = await call
        assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "GENERATION")
    assert await client.task("t") == before
    assert isinstance(await b.call("renew", successor), Renewed)
    assert isinstance(await b.call("commit", successor, "of B"), Committed)
    await stage.audit()


@on_every_store
async def test_a_worker_that_was_paused_drops_the_task_goes_on_and_ends_with_0(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(None, task_id="t", kind="hold"))
    a = await stage.worker("A", ttl=0.6)
    await a.reaches("started")
    await stage.pause(a)
    b = await stage.worker("B", ttl=0.6)
    assert (await b.reaches("started"))["generation"] == 2
    b.tell("go", task="t")
    await b.reaches("used the tool")
    result = await client.result("t", wait=20.0)
    assert isinstance(result, Result) and result.value == "B"
    b.signal(signal.SIGTERM)
    assert await b.ended() == 0
    a.tell("go", task="t")  # it is free to use the tool and to commit as soon as it wakes
    a.wake()
    await a.reaches("stopped")
    assert a.count("used the tool") == 0
    # It is none the worse for it: the next task is its.
    await client.submit(NewTask({"n": 2}, task_id="next", kind="echo"))
    following = await client.result("next", wait=20.0)
    assert isinstance(following, Result)
    a.signal(signal.SIGTERM)
    assert await a.ended() == 0
    result = await client.result("t")
    assert isinstance(result, Result) and (result.value, result.generation) == ("B", 2)
    assert [attempt.end for attempt in await client.attempts("t")] == ["EXPIRED", "COMMITTED"]
    await stage.audit()


@on_every_store
async def test_an_owner_paused_in_the_middle_of_its_commit_commits_late_or_is_fenced_never_both(stage: Stage) -> None:
    """SIGSTOP lands anywhere between the request and its answer; a successor may have come meanwhile, or not."""
    client = await stage.client()
    a, b = await stage.hand(), await stage.hand()
    for n in range(12):
        with_the_lock = False
        await client.submit(NewTask({"n": n}, task_id=f"t{n}"))
        claim = await claimed(a, "A", ttl=5.0)
        call = a.start("commit", claim, "of A")
        await asyncio.sleep(0.0004 * n)
        await a.program.pause()
        try:
            stage.advance(6.0, wait=0.2)
        except apsw.BusyError:
            with_the_lock = True  # nobody gets in until it wakes or dies
        taking = b.start("claim_next", owner="B", ttl=5.0)
        if not with_the_lock:
            await asyncio.wait({taking}, timeout=PATIENCE)
        a.program.wake()
        answer, found = await call, await taking
        if isinstance(answer, Committed):
            assert found == []
        else:
            assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "GENERATION")
            assert isinstance(await b.call("commit", found[0], "of B"), Committed)
        view = await client.task(f"t{n}")
        assert isinstance(view, TaskView) and view.state == "COMMITTED"
    await stage.audit()
