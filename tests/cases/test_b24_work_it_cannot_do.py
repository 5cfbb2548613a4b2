"""B24: a worker takes work that it cannot do, and kills it."""

from __future__ import annotations

import signal

from fencepost import Committed, Done, NewTask, Refused, Result, TaskView
from tests.faults.stage import Stage


async def test_b24_an_old_worker_never_claims_the_new_kind_and_its_maintenance_leaves_it_alone(stage: Stage) -> None:
    client = await stage.client()
    old = await stage.worker("v1", kinds=["echo"], ttl=1.0)
    new_kind = {"task": "nap@2", "unknown": {"to": ["v1"]}}
    await client.submit_many(
        [
            *[NewTask(new_kind, task_id=f"new{n}", kind="nap@2", priority=-5) for n in range(3)],
            *[NewTask({"n": n, "future": True}, task_id=f"common{n}", kind="echo") for n in range(5)],
        ]
    )
    for n in range(5):
        result = await client.result(f"common{n}", wait=20.0)
        # Fields that this version does not know come through it unharmed.
        assert isinstance(result, Result) and result.value == {"n": n, "future": True}
    for round_ in range(3):
        await client.report("maintain")
        await client.report("prune", older_than=0.0 if round_ else 3600.0)
    for n in range(3):
        view = await client.task(f"new{n}")
        assert isinstance(view, TaskView)
        assert (view.state, view.generation, view.charged_attempts, view.input) == ("READY", 0, 0, new_kind)
    # That nobody can do them is a number of its own.
    stage.advance(60.0)
    unserved = (await client.report("status", unserved_after=30.0))["unserved"]
    assert [lane["kind"] for lane in unserved] == ["nap@2"]
    old.signal(signal.SIGTERM)
    assert await old.ended() == 0
    # The new version comes and does them, at their first attempt.
    claims = await client.claim_next(owner="v2", kinds=["nap@2", "echo"], limit=10)
    assert isinstance(claims, list) and len(claims) == 3
    for claim in claims:
        assert (claim.generation, claim.input) == (1, new_kind)
        assert isinstance(await client.commit(claim, "done by v2"), Committed)


async def test_b24_work_claimed_by_mistake_is_handed_back_without_a_charge(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t", kind="exotic", max_attempts=1))
    for n in range(5):
        claims = await client.claim_next(owner="takes any kind")
        assert isinstance(claims, list) and claims[0].kind == "exotic"
        answer = await client.release(claims[0])
        assert isinstance(answer, Done) and answer.state == "READY"
        view = await client.task("t")
        assert isinstance(view, TaskView) and (view.charged_attempts, view.generation) == (0, n + 1)
    await stage.audit()


async def test_b24_two_versions_side_by_side_empty_the_queue_and_neither_touches_the_others_kind(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(n, task_id=f"common{n:02}", kind="echo") for n in range(20)])
    await client.submit_many([NewTask(0.0, task_id=f"second{n:02}", kind="nap") for n in range(20)])
    workers = [
        await stage.worker("v1", kinds=["echo"], ttl=2.0, concurrency=2),
        await stage.worker("v2", kinds=["echo", "nap"], ttl=2.0, concurrency=2),
    ]
    for n in range(20):
        for prefix in ("common", "second"):
            assert not isinstance(await client.result(f"{prefix}{n:02}", wait=20.0), Refused)
            [attempt] = await client.attempts(f"{prefix}{n:02}")
            assert prefix == "common" or attempt.owner_id == "v2"
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    assert not [said for said in workers[0].seen if said.get("kind") == "nap"]
    await stage.audit()
