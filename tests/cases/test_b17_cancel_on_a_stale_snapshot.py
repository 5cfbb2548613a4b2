"""B17: a cancel is decided on a snapshot that is stale by the time it is written."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from fencepost import Claim, Committed, Done, NewTask, Refused, Result, TaskView
from tests.faults.stage import Stage, on_every_store

ROUNDS = 300


async def later(seconds: float, call: Awaitable[Any]) -> Any:
    if seconds:
        await asyncio.sleep(seconds)
    return await call


@pytest.mark.parametrize("move", ["is claimed", "is committed", "is reclaimed"])
@on_every_store
async def test_b17_a_cancel_that_races_the_task_moving_on_is_never_lost_and_never_overwrites(
    stage: Stage, move: str
) -> None:
    person, worker = await stage.client(), await stage.client()
    await person.set_policy(max_ttl=3600.0)
    await person.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(ROUNDS)])
    old: list[Claim] = []
    if move != "is claimed":
        old = await worker.claim_next(owner="A", limit=ROUNDS, ttl=1.0)  # type: ignore[assignment]
    if move == "is reclaimed":
        stage.advance(2.0)
    seen: Counter[str] = Counter()
    for n in range(ROUNDS):
        task_id = f"t{n:03}"
        view = await person.task(task_id)
        assert isinstance(view, TaskView)
        if move == "is committed":
            moving: Any = worker.commit(old[n], n)
        else:
            moving = worker.claim(task_id, expected_state_version=view.state_version, owner="B", ttl=900.0)
        # Now and then a little later: on some stores a cancel that starts with the claim always comes first.
        cancelling = later(
            n // 2 % 5 * 0.0005, person.cancel(task_id, expected_cancel_generation=view.cancel_generation)
        )
        pair = [cancelling, moving] if n % 2 else [moving, cancelling]
        answers = await asyncio.gather(*pair)
        cancelled, moved = answers if n % 2 else reversed(answers)
        view = await person.task(task_id)
        assert isinstance(view, TaskView)
        if isinstance(cancelled, Done):
            assert cancelled.changed and view.state == "CANCELLED" and view.cancel_generation == 1
            # Nobody is left who could still commit.
            for claim in (*([old[n]] if old else []), *([moved] if isinstance(moved, Claim) else [])):
                for late in (await worker.commit(claim, "late"), await worker.renew(claim)):
                    assert isinstance(late, Refused) and str(late.outcome) in ("CANCELLED", "FENCED")
            seen["cancelled"] += 1
            seen["cancelled a claim"] += isinstance(moved, Claim)
        else:
            assert isinstance(moved, Committed) and cancelled.outcome == "ALREADY_COMMITTED"
            assert view.state == "COMMITTED"
            seen["was committed"] += 1
    assert seen["cancelled"] + seen["was committed"] == ROUNDS
    if move == "is committed":
        assert min(seen["cancelled"], seen["was committed"]) > 0, f"no race: {seen}"
    else:
        assert 0 < seen["cancelled a claim"] < ROUNDS, f"no race: {seen}"
    await stage.audit()


@on_every_store
async def test_b17_a_cancel_prepared_before_a_pause_meets_the_task_as_it_stands_when_it_arrives(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(n, task_id=name) for n, name in enumerate(("done", "taken", "reopened"))])
    person = await stage.hand()
    seen = {}
    for name in ("done", "taken", "reopened"):
        view = await person.call("task", name)
        seen[name] = view.cancel_generation
    await person.program.pause()
    calls = {name: person.start("cancel", name, expected_cancel_generation=number) for name, number in seen.items()}
    claims = {claim.task_id: claim for claim in await client.claim_next(owner="A", limit=3)}  # type: ignore[union-attr]
    await client.commit(claims["done"], "kept")
    await client.cancel("reopened")
    await client.reopen("reopened")
    person.program.wake()
    answers = {name: await call for name, call in calls.items()}
    assert isinstance(answers["done"], Refused) and answers["done"].outcome == "ALREADY_COMMITTED"
    result = await client.result("done")
    assert isinstance(result, Result) and result.value == "kept"
    assert isinstance(answers["taken"], Done) and answers["taken"].changed
    late = await client.commit(claims["taken"], "late")
    assert isinstance(late, Refused) and late.outcome == "CANCELLED"
    # Cancelled and reopened since: what this cancel wanted has happened already, and is over.
    assert isinstance(answers["reopened"], Done) and not answers["reopened"].changed
    view = await client.task("reopened")
    assert isinstance(view, TaskView) and view.state == "READY"
    await stage.audit()


@on_every_store
async def test_b17_cancelling_twice_says_so_and_changes_nothing_more(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    first = await client.cancel("t")
    second = await client.cancel("t")
    assert isinstance(first, Done) and isinstance(second, Done)
    assert (first.changed, second.changed) == (True, False)
    assert first.state_version == second.state_version
    assert await client.claim_next(owner="A") == []
    await stage.audit()
