"""B09: the database's COMMIT may or may not have happened when its process died (kill -9 around COMMIT)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost import Claim, Committed, NewTask, Refused, Renewed, Result, Submitted, TaskView
from tests.faults.crowd import none_open
from tests.faults.stage import Stage, on_every_store, until

REQUEST = "the same call again"
# The call that dies; None: it claims.
CALLS: dict[str, Any] = {
    "claim_next": lambda claim: (("claim_next",), {"owner": "A", "ttl": 30.0}),
    "renew": lambda claim: (("renew", claim, 99.0), {}),
    "checkpoint": lambda claim: (("checkpoint", claim, {"half": 1}), {"number": 1}),
    "commit": lambda claim: (("commit", claim, "done"), {"spawn": [NewTask(1, task_id="spawned", queue="later")]}),
    "release": lambda claim: (("release", claim), {}),
    "fail": lambda claim: (("fail", claim, "no luck"), {}),
    "cancel": lambda claim: (("cancel", "t"), {"expected_cancel_generation": 0}),
    "submit": lambda claim: (("submit", NewTask({"n": 2}, task_id="another", queue="later")), {}),
}


# Calls a method of a client somewhere.
Call = Callable[..., Awaitable[Any]]


@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("door", CALLS)
@on_every_store
async def test_b09_a_call_whose_process_died_at_commit_was_made_whole_or_not_at_all_and_is_asked_again(
    stage: Stage, door: str, point: str
) -> None:
    a = await stage.hand()

    async def lose(method: str, *args: Any, **named: Any) -> None:
        await a.die_at(point)
        dying = a.start(method, *args, **named)
        assert await a.program.ended() == -9
        await asyncio.wait({dying})
        assert isinstance(dying.exception(), ConnectionError)

    async def other() -> Call:
        return (await stage.hand()).call

    await whole_or_nothing(stage, door, point == "after", a.call, lose, other)


async def whole_or_nothing(
    stage: Stage, door: str, made: bool, call: Call, lose: Call, other: Callable[[], Awaitable[Call]]
) -> None:
    """`lose` makes a call whose answer is lost, after it was `made` or before; `other()` asks again."""
    client = await stage.client()
    await client.submit_many([NewTask(1, task_id="t"), NewTask(2, task_id="child", depends_on=["t"], queue="later")])
    claim: Claim | None = None
    if door != "claim_next":
        [claim] = await call("claim_next", owner="A", ttl=30.0)
    (method, *args), named = CALLS[door](claim)
    before = await client.task("t")
    await lose(method, *args, **named, request_id=REQUEST)

    # Whole, or nothing of it.
    after = await client.task("t")
    assert isinstance(before, TaskView) and isinstance(after, TaskView)
    # The end of the attempt and the cancel are two events of one transaction.
    steps = {"submit": 0, "cancel": 2}.get(door, 1)
    assert after.state_version == before.state_version + steps * made
    spawned, child = await client.task("spawned"), await client.task("child")
    committed = door == "commit" and made
    assert isinstance(spawned, TaskView) == committed
    assert isinstance(child, TaskView) and child.state == ("READY" if committed else "BLOCKED")
    assert isinstance(await client.result("t"), Result) == committed
    assert isinstance(await client.task("another"), TaskView) == (door == "submit" and made)
    assert stage.integrity() == "ok"
    await stage.audit()

    # Who asks again with the same request id is answered as if nothing had happened, and nothing happens twice.
    ask = await other()
    again = await ask(method, *args, **named, request_id=REQUEST)
    right_after = await client.task("t")
    expected = {
        "claim_next": lambda: isinstance(again[0], Claim) and again[0].generation == 1,
        "renew": lambda: isinstance(again, Renewed),
        "commit": lambda: isinstance(again, Committed) and again.replayed == made,
        "submit": lambda: isinstance(again, Submitted) and again.created != made,
    }
    if door in expected:
        assert expected[door](), again
    else:
        assert not isinstance(again, Refused), again
    assert isinstance(right_after, TaskView) and right_after.state_version == before.state_version + steps
    # Nothing is stuck: the task is committed, or somebody can still work on it.
    stage.advance(400.0)
    if door == "cancel":
        await client.reopen("t")
    if door != "commit":
        # A store that was slow to find nothing lapsed may take a moment before it looks for that again.
        [next_claim] = await until(lambda: ask("claim_next", owner="B"), within=20.0)
        assert isinstance(await ask("commit", next_claim, "by B"), Committed)
    assert isinstance(await client.result("t"), Result)
    await stage.audit()


@on_every_store
async def test_b09_another_result_under_the_same_attempt_is_not_taken_for_the_repeat(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    a = await stage.hand()
    [claim] = await a.call("claim_next", owner="A")
    await a.die_at("after")
    dying = a.start("commit", claim, "first", request_id=REQUEST)
    assert await a.program.ended() == -9
    await asyncio.wait({dying})
    b = await stage.hand()
    other = await b.call("commit", claim, "second", request_id=REQUEST)
    assert isinstance(other, Refused) and (other.outcome, other.reason) == ("ENDED", "COMMITTED")
    same = await b.call("commit", claim, "first")  # without the request id: the record itself answers
    assert isinstance(same, Committed) and same.replayed
    result = await client.result("t")
    assert isinstance(result, Result)
    assert (result.value, result.result_commit_id) == ("first", same.result_commit_id)
    await stage.audit()


async def kill_in_a_storm(stage: Stage, kills: int, seed: int) -> None:
    """Whatever was answered stands; whatever was not answered is committed or can be claimed."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    client = await stage.client()
    await client.set_policy(max_attempts=1000)
    await client.submit_many([NewTask(n, task_id=f"t{n:05}") for n in range(100)])
    told: dict[str, str] = {}
    for n in range(kills):
        storm = [await stage.program("storm", stage.url, f"w{n}-{m}") for m in range(2)]
        for program in storm:
            await program.reaches("committed")
        await asyncio.sleep(dice.uniform(0.0, 0.15))
        codes = [await program.kill() for program in storm]
        assert codes == [-9, -9]
        stage.advance(61.0)  # past the leases that the dead leave behind
        for program in storm:
            for said in program.seen:
                if said["did"] == "committed":
                    told[said["task"]] = said["id"]
    assert len(told) > kills * 4
    for task_id, commit_id in told.items():
        result = await client.result(task_id)
        assert isinstance(result, Result) and result.result_commit_id == commit_id
    assert stage.integrity() == "ok"
    await stage.audit()
    stage.advance(120.0)
    b = await stage.program("storm", stage.url, "last", "until empty")
    await b.reaches("empty", within=60.0)
    assert none_open(stage)
    await stage.audit()


@on_every_store
async def test_b09_what_was_answered_before_a_kill_stands_and_nothing_else_is_stuck(stage: Stage) -> None:
    await kill_in_a_storm(stage, kills=5, seed=909)
