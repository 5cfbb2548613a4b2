"""claim and claim_next: who gets what, in which order, and how a repeat is answered (claim.v1, section 4)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest
from fencepost.wire import Claim, NewTask, Refused, Renewed, Submitted, TaskView
from tests.conformance.actions import claimed, committed, given, raised, refusal, state_of, taken_over
from tests.conformance.worlds import World


async def test_the_same_submission_again_gives_the_standing_task(client: Client) -> None:
    first = await client.submit(NewTask({"a": 1, "b": 2}, task_id="t"))
    again = await client.submit(NewTask({"b": 2.0, "a": 1}, task_id="t", priority=5))
    assert isinstance(first, Submitted) and first.created
    assert isinstance(again, Submitted) and not again.created
    assert again.task.priority == 0


async def test_a_submission_asked_again_with_its_request_id_adds_no_second_task(client: Client) -> None:
    batch = [NewTask(1), NewTask(1), NewTask(2, task_id="own", depends_on=[])]
    first = await client.submit_many(batch, request_id="r")
    again = await client.submit_many(batch, request_id="r")
    other = await client.submit_many(batch[:2], request_id="s")
    assert isinstance(first, list) and isinstance(again, list) and isinstance(other, list)
    assert [item.task.task_id for item in again] == [item.task.task_id for item in first]
    assert not any(item.created for item in again) and all(item.created for item in other)
    assert [UUID(item.task.task_id).version for item in first[:2]] == [7, 7]
    assert len((await client.tasks()).items) == 5


async def test_the_same_id_for_anything_else_is_a_conflict_and_nothing_of_the_batch_is_written(client: Client) -> None:
    await given(client, "t", {"a": 1})
    answer = await client.submit_many([NewTask({"x": 1}, task_id="new"), NewTask({"a": 2}, task_id="t")])
    assert refusal(answer) == ("CONFLICT", "DIFFERENT_TASK")
    assert refusal(await client.task("new"))[0] == "NOT_FOUND"


async def test_an_id_twice_in_a_batch_is_a_wrong_call(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        await client.submit_many([NewTask(1, task_id="t"), NewTask(1, task_id="t")])


async def test_submitting_to_a_pool_that_does_not_exist_is_refused(client: Client) -> None:
    assert refusal(await client.submit(NewTask(1, pool="nowhere"))) == ("NOT_FOUND", "POOL")


async def test_tasks_come_by_priority_then_availability_then_id(client: Client, world: World) -> None:
    for task_id, priority in (("c", 5), ("a", 5), ("b", -5)):
        await given(client, task_id, priority=priority)
    answer = await client.claim_next(owner="A", limit=10)
    assert not isinstance(answer, Refused)
    assert answer[0].task_id == "b"
    assert {claim.task_id for claim in answer} == {"a", "b", "c"}
    await client.submit_many([NewTask(1, task_id=name) for name in ("z", "y", "x")])
    answer = await client.claim_next(owner="A", limit=10)
    assert not isinstance(answer, Refused)
    assert [claim.task_id for claim in answer] == ["x", "y", "z"]


async def test_a_claim_never_takes_more_than_its_limit(client: Client) -> None:
    await client.submit_many([NewTask(n) for n in range(7)])
    answer = await client.claim_next(owner="A", limit=3)
    assert not isinstance(answer, Refused) and len(answer) == 3


async def test_a_worker_gets_only_the_queues_and_kinds_that_it_asked_for(client: Client) -> None:
    await given(client, "other-kind", kind="b", priority=-9)
    await given(client, "other-queue", queue="q2", kind="a", priority=-9)
    await given(client, "mine", kind="a")
    answer = await client.claim_next(owner="A", kinds=["a"], limit=10)
    assert not isinstance(answer, Refused) and [claim.task_id for claim in answer] == ["mine"]
    assert await client.claim_next(owner="A", kinds=["c"]) == []
    both = await client.claim_next(owner="A", queues=["default", "q2"], limit=10)
    assert not isinstance(both, Refused) and {claim.task_id for claim in both} == {"other-kind", "other-queue"}


async def test_a_delayed_task_is_not_claimable_before_its_time_nor_in_the_way_of_others(
    client: Client, world: World
) -> None:
    view = await given(client, "later", delay=60.0, priority=-5)
    await given(client, "now")
    assert (await claimed(client)).task_id == "now"
    early = await client.claim("later", expected_state_version=view.state_version, owner="A")
    assert refusal(early) == ("NOT_CLAIMABLE", "NOT_YET")
    assert isinstance(early, Refused) and early.current["available_at"] == view.available_at
    await world.advance(61)
    assert (await claimed(client)).task_id == "later"


async def test_a_claim_carries_what_the_work_needs(client: Client) -> None:
    await given(client, "t", {"doc": "x"}, kind="k", queue="q")
    claim = await claimed(client, "A", queues=["q"], ttl=12.0)
    assert (claim.input, claim.kind, claim.queue, claim.owner_id) == ({"doc": "x"}, "k", "q", "A")
    assert (claim.generation, claim.epoch, claim.revision, claim.cancel_generation) == (1, 1, 1, 0)
    assert claim.store_id == client.store_id
    assert Claim.from_json(claim.to_json()) == claim


async def test_a_claim_as_json_works_in_another_client(client: Client, world: World) -> None:
    await given(client, "t", b"\x00\xff raw")
    claim = await claimed(client)
    other = await world.client()
    handed = Claim.from_json(claim.to_json())
    assert handed.input == b"\x00\xff raw"
    await committed(other, handed)


async def test_a_held_task_is_refused_with_its_holder_and_the_end_of_the_lease(client: Client) -> None:
    await given(client)
    claim = await claimed(client, "A")
    view = await client.task("t")
    assert isinstance(view, TaskView)
    answer = await client.claim("t", expected_state_version=view.state_version, owner="A")
    assert refusal(answer) == ("HELD", None)
    assert isinstance(answer, Refused)
    assert answer.current["owner"] == "A" and answer.current["lease_expires_at"] == claim.lease_expires_at


async def test_a_claim_of_another_version_is_a_conflict(client: Client) -> None:
    view = await given(client)
    answer = await client.claim("t", expected_state_version=view.state_version + 1, owner="A")
    assert refusal(answer) == ("CONFLICT", "VERSION")


async def test_an_unknown_task_is_not_found_at_every_door(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    ghost = Claim.from_json(claim.to_json().replace('"task_id":"t"', '"task_id":"ghost"'))
    for answer in (
        await client.claim("ghost", expected_state_version=1, owner="A"),
        await client.renew(ghost),
        await client.checkpoint(ghost, 1),
        await client.stage(ghost, 1),
        await client.usage(ghost, tokens=1),
        await client.commit(ghost, 1),
        await client.release(ghost),
        await client.fail(ghost, "x"),
        await client.cancel("ghost"),
        await client.reopen("ghost"),
        await client.revise("ghost", 1),
        await client.take_over("ghost"),
        await client.discard("ghost", generation=1),
        await client.expire("ghost"),
        await client.result("ghost"),
        await client.task("ghost"),
    ):
        assert refusal(answer) == ("NOT_FOUND", "TASK")


async def test_a_lapsed_task_is_taken_back_in_passing_and_the_generation_counts(client: Client, world: World) -> None:
    await given(client)
    first = await claimed(client, "A", ttl=5.0)
    second = await taken_over(world, client, first, "B")
    assert second.generation == first.generation + 1
    assert second.attempt_id != first.attempt_id
    assert second.charged_attempts == 1
    attempts = await client.attempts("t")
    assert [(a.generation, a.end) for a in attempts] == [(1, "EXPIRED"), (2, None)]


async def test_attempts_used_up_parks_the_task_instead_of_granting_it(client: Client, world: World) -> None:
    await given(client, max_attempts=2)
    for _ in range(2):
        await claimed(client, ttl=5.0)
        await world.advance(6)
    assert await client.claim_next(owner="C") == []
    view = await client.task("t")
    assert isinstance(view, TaskView) and (view.state, view.park_reason) == ("PARKED", "ATTEMPTS")
    # X19: a reopened task is charged from 0 again.
    await client.reopen("t")
    assert (await claimed(client)).charged_attempts == 0


async def test_a_claim_that_only_parks_what_it_is_offered_looks_at_what_is_behind(client: Client, world: World) -> None:
    for n in range(3):
        await given(client, f"worn-{n}", priority=-5, max_attempts=1)
    await given(client, "fresh")
    assert len(await client.claim_next(owner="A", limit=4)) == 4  # type: ignore[arg-type]
    await world.advance(31)
    found = await claimed(client, "B")
    assert found.task_id == "fresh"
    assert [await state_of(client, f"worn-{n}") for n in range(3)] == ["PARKED"] * 3
    assert await client.claim_next(owner="B") == []


async def test_ends_under_an_older_epoch_are_free_and_hold_nobody_up(client: Client, world: World) -> None:  # X20
    await given(client, max_attempts=2)
    for epoch in (1, 2, 3):
        claim = await claimed(client, f"worker of epoch {epoch}", ttl=600.0)
        assert (claim.epoch, claim.charged_attempts) == (epoch, 0)
        await raised(client)


async def test_a_repeated_claim_request_gives_the_same_claim_again(client: Client, world: World) -> None:  # B07
    await client.submit_many([NewTask(n) for n in range(3)])
    first = await client.claim_next(owner="A", request_id="r1")
    again = await client.claim_next(owner="A", request_id="r1")
    assert first == again
    assert not isinstance(first, Refused)
    attempts = await client.attempts(first[0].task_id)
    assert len(attempts) == 1
    other = await world.client()
    assert await other.claim_next(owner="A", request_id="r1") == first


async def test_a_repeated_claim_request_after_the_claim_ended_is_ended(client: Client, world: World) -> None:  # X24
    await given(client)
    lost = await client.claim_next(owner="A", ttl=5.0, request_id="lost")
    assert not isinstance(lost, Refused)
    await taken_over(world, client, lost[0])
    assert refusal(await client.claim_next(owner="A", ttl=5.0, request_id="lost"))[0] == "ENDED"


async def test_a_request_id_of_another_owner_is_a_wrong_call(client: Client) -> None:  # X25
    await client.submit_many([NewTask(n) for n in range(2)])
    await client.claim_next(owner="A", request_id="mine")
    with pytest.raises(InvalidRequest, match="request_id"):
        await client.claim_next(owner="B", request_id="mine")


async def test_an_empty_claim_leaves_its_request_id_unused(client: Client) -> None:
    assert await client.claim_next(owner="A", request_id="r") == []
    await given(client)
    answer = await client.claim_next(owner="A", request_id="r")
    assert not isinstance(answer, Refused) and len(answer) == 1


async def test_a_waiting_claim_gets_the_task_that_comes(client: Client, world: World) -> None:
    other = await world.client()
    waiting = asyncio.create_task(client.claim_next(owner="A", wait=30.0))
    await asyncio.sleep(0)
    await given(other, "late")
    answer = await asyncio.wait_for(waiting, 10)
    assert not isinstance(answer, Refused) and answer[0].task_id == "late"


async def test_a_waiting_claim_ends_empty_after_its_wait(client: Client) -> None:
    assert await asyncio.wait_for(client.claim_next(owner="A", wait=0.05), 10) == []


async def test_twenty_waiting_workers_share_twenty_tasks(client: Client, world: World) -> None:
    workers = [asyncio.create_task(client.claim_next(owner=f"w{n}", wait=20.0)) for n in range(20)]
    await asyncio.sleep(0)
    await (await world.client()).submit_many([NewTask(n) for n in range(20)])
    answers = await asyncio.wait_for(asyncio.gather(*workers), 20)
    taken = [claim.task_id for answer in answers if not isinstance(answer, Refused) for claim in answer]
    assert len(taken) == len(set(taken)) == 20


async def test_a_closed_intake_stops_claims_and_neither_submits_nor_running_work(client: Client, world: World) -> None:
    await given(client, "running")
    claim = await claimed(client, ttl=5.0)
    pool = await client.close_intake()
    assert not isinstance(pool, Refused) and pool.pool.intake == "CLOSED"
    await given(client, "waiting")
    assert refusal(await client.claim_next(owner="B")) == ("INTAKE_CLOSED", None)
    assert isinstance(await client.renew(claim), Renewed)
    await world.advance(60)
    # X18: what lapses is taken back all the same, so that a drain reaches zero.
    assert await client.report("maintain") == {"expired": 1, "parked": 0}
    assert await state_of(client, "running") == "READY"
    await client.open_intake(expected_state_version=pool.pool.state_version)
    assert {(await claimed(client)).task_id, (await claimed(client)).task_id} == {"running", "waiting"}


async def test_the_checkpoint_and_not_the_charge_goes_to_the_successor(client: Client, world: World) -> None:
    await given(client)
    first = await claimed(client, ttl=5.0)
    await client.checkpoint(first, {"step": 1})
    await client.checkpoint(first, {"step": 2})
    second = await taken_over(world, client, first)
    assert second.checkpoint_data == {"step": 2}
    assert second.checkpoint_number == 0


async def test_a_reclaim_grace_holds_the_task_that_much_longer(client: Client, world: World) -> None:
    await client.set_policy(reclaim_grace=30.0)
    await given(client)
    await claimed(client, ttl=5.0)
    await world.advance(20)
    assert await client.claim_next(owner="B") == []
    await world.advance(20)
    assert (await claimed(client, "B")).generation == 2
