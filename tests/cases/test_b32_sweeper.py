"""B32: a sweeper punishes a task that already finished, or punishes it twice."""

from __future__ import annotations

import asyncio
from collections import Counter

from fencepost import Committed, Done, NewTask, Refused, Renewed, TaskView
from tests.faults.stage import Hand, Stage, on_every_store

ROUNDS = 200


async def version(client: object, task_id: str) -> int:
    view = await client.task(task_id)  # type: ignore[attr-defined]
    assert isinstance(view, TaskView)
    return view.state_version


@on_every_store
async def test_b32_a_sweeper_paused_between_its_look_and_its_write_undoes_nothing_that_came_between(
    stage: Stage,
) -> None:
    client = await stage.client()
    names = ["committed", "renewed", "reclaimed", "released"]
    await client.submit_many([NewTask(name, task_id=name) for name in names])
    claims = {claim.task_id: claim for claim in await client.claim_next(owner="A", ttl=5.0, limit=4)}  # type: ignore[union-attr]
    stage.advance(6.0)
    sweeper = await stage.hand()
    # What it saw: four leases that have lapsed.
    seen = {name: (await sweeper.call("task", name)).state_version for name in names}
    await sweeper.program.pause()
    verdicts = {name: sweeper.start("expire", name, expected_state_version=seen[name]) for name in names}
    assert isinstance(await client.commit(claims["committed"], "in time"), Committed)
    assert isinstance(await client.renew(claims["renewed"], 60.0), Renewed)
    assert isinstance(await client.release(claims["released"], delay=3600.0), Done)
    fresh = await client.claim("reclaimed", expected_state_version=seen["reclaimed"], owner="B", ttl=60.0)
    assert not isinstance(fresh, Refused) and fresh.generation == 2
    before = {name: await client.task(name) for name in names}
    sweeper.program.wake()
    for name, verdict in verdicts.items():
        answer = await verdict
        assert isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("CONFLICT", "VERSION"), name
    assert {name: await client.task(name) for name in names} == before
    # The fresh attempt is judged by its own lease: a sweep of now finds nothing to take.
    assert (await sweeper.call("report", "maintain"))["expired"] == 0
    assert isinstance(await client.commit(fresh, "by B"), Committed)
    assert isinstance(await client.commit(claims["renewed"], "in time too"), Committed)
    await stage.audit()


@on_every_store
async def test_b32_five_sweepers_in_five_processes_count_each_expiry_once(stage: Stage) -> None:
    client = await stage.client()
    total = 60
    await client.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(total)])
    assert len(await client.claim_next(owner="A", ttl=5.0, limit=total)) == total  # type: ignore[arg-type]
    stage.advance(6.0)
    sweepers: list[Hand] = [await stage.hand() for _ in range(5)]
    found = await asyncio.gather(*(sweeper.call("report", "maintain") for sweeper in sweepers))
    found += await asyncio.gather(*(sweeper.call("report", "maintain") for sweeper in sweepers))
    assert sum(each["expired"] for each in found) == total
    for n in range(total):
        view = await client.task(f"t{n:02}")
        assert isinstance(view, TaskView) and (view.state, view.charged_attempts) == ("READY", 1)
    status = await client.report("status")
    assert status["reclaim_delay"]["count"] == total
    await stage.audit()


@on_every_store
async def test_b32_a_sweeper_races_a_commit_and_a_renewal_and_committed_never_leaves_committed(stage: Stage) -> None:
    client = await stage.client()
    sweeper = await stage.hand()
    await client.submit_many([NewTask(n, task_id=f"t{n:03}", max_attempts=99) for n in range(ROUNDS)])
    claims = await client.claim_next(owner="A", ttl=1.0, limit=ROUNDS)
    assert isinstance(claims, list)
    stage.advance(2.0)
    seen: Counter[str] = Counter()
    for n, claim in enumerate(claims):
        expected = await version(client, claim.task_id)
        verdict = sweeper.start("expire", claim.task_id, expected_state_version=expected)
        await asyncio.sleep(n % 10 * 0.0002)
        answer = await (client.commit(claim, n) if n % 2 else client.renew(claim, 3000.0))
        swept = await verdict
        view = await client.task(claim.task_id)
        assert isinstance(view, TaskView)
        if isinstance(answer, Committed | Renewed):
            assert isinstance(swept, Refused) and swept.outcome == "CONFLICT"
            assert view.state == ("COMMITTED" if n % 2 else "CLAIMED")
            seen["the owner"] += 1
        else:
            assert isinstance(swept, Done) and answer.outcome == "FENCED"
            assert (view.state, view.charged_attempts) == ("READY", 1)
            seen["the sweeper"] += 1
    assert len(seen) == 2, f"no race: {seen}"
    await client.report("maintain")
    for claim in claims[1::2]:
        result = await client.result(claim.task_id)
        view = await client.task(claim.task_id)
        assert isinstance(view, TaskView) and (view.state == "COMMITTED") != isinstance(result, Refused)
    await stage.audit()
