"""cancel, reopen, revise, take over, discard, pools: the doors of people (claim.v1, sections 4 and 7)."""

from __future__ import annotations

import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest
from fencepost.wire import Done, PoolChanged, Refused, Result, TaskView
from tests.conformance.actions import claimed, committed, done, given, raised, refusal, state_of, taken_over
from tests.conformance.worlds import World


async def test_cancel_ends_a_running_attempt_and_says_so_once(client: Client) -> None:
    await given(client)
    await claimed(client)
    first = await client.cancel("t", who="ann@desk")
    assert isinstance(first, Done) and first.changed and first.state == "CANCELLED"
    again = await client.cancel("t")
    assert isinstance(again, Done) and not again.changed
    view = await client.task("t")
    assert isinstance(view, TaskView) and view.cancel_generation == 1
    assert [a.end for a in await client.attempts("t")] == ["CANCELLED"]


async def test_cancel_of_a_committed_task_changes_nothing(client: Client) -> None:
    await done(client, "t", "kept")
    assert refusal(await client.cancel("t"))[0] == "ALREADY_COMMITTED"
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == "kept"


async def test_a_late_copy_of_a_cancel_does_not_cancel_the_reopened_task(client: Client) -> None:  # X34
    await given(client)
    await client.cancel("t", expected_cancel_generation=0)
    await client.reopen("t")
    late = await client.cancel("t", expected_cancel_generation=0)
    assert isinstance(late, Done) and not late.changed and late.info["cancel_generation"] == 1
    assert await state_of(client) == "READY"


async def test_a_cancelled_task_is_refused_as_cancelled_to_a_claimer(client: Client) -> None:
    await given(client)
    await client.cancel("t")
    view = await client.task("t")
    assert isinstance(view, TaskView)
    answer = await client.claim("t", expected_state_version=view.state_version, owner="A")
    assert refusal(answer)[0] == "CANCELLED"


async def test_reopen_wants_the_version_and_a_cancelled_or_parked_task(client: Client) -> None:
    view = await given(client)
    assert refusal(await client.reopen("t")) == ("CONFLICT", "STATE")
    await client.cancel("t")
    assert refusal(await client.reopen("t", expected_state_version=view.state_version)) == ("CONFLICT", "VERSION")
    answer = await client.reopen("t", request_id="once")
    again = await client.reopen("t", request_id="once", expected_state_version=1)
    assert isinstance(answer, Done) and answer.changed
    assert isinstance(again, Done) and not again.changed


async def test_a_committed_task_is_never_reopened_or_revised(client: Client) -> None:
    await done(client, "t")
    assert refusal(await client.reopen("t"))[0] == "ALREADY_COMMITTED"
    assert refusal(await client.revise("t", 2))[0] == "ALREADY_COMMITTED"


async def test_revise_gives_the_next_claim_the_new_input_and_drops_the_checkpoint(client: Client) -> None:
    await given(client, "t", {"n": 1})
    claim = await claimed(client)
    await client.checkpoint(claim, "half of the old work")
    answer = await client.revise("t", {"n": 2}, expected_revision=1)
    assert isinstance(answer, Done) and answer.state == "READY" and answer.info["revision"] == 2
    assert refusal(await client.revise("t", {"n": 3}, expected_revision=1)) == ("CONFLICT", "REVISION")
    second = await claimed(client)
    assert (second.input, second.revision, second.checkpoint_data) == ({"n": 2}, 2, None)
    assert [a.end for a in await client.attempts("t")] == ["SUPERSEDED", None]


async def test_a_late_copy_of_the_submit_after_a_revise_is_no_conflict(client: Client) -> None:  # X29
    await given(client, "t", {"n": 1})
    await client.revise("t", {"n": 2})
    view = await given(client, "t", {"n": 1})
    assert view.revision == 2


async def test_take_over_ends_a_live_attempt_without_charging(client: Client) -> None:
    await given(client)
    claim = await claimed(client, ttl=3600.0)
    assert refusal(await client.take_over("t", expected_generation=2)) == ("CONFLICT", "GENERATION")
    answer = await client.take_over("t", who="ann")
    assert isinstance(answer, Done) and answer.state == "READY"
    assert refusal(await client.take_over("t")) == ("CONFLICT", "STATE")
    assert refusal(await client.commit(claim, 1))[0] == "FENCED"
    assert (await claimed(client, "B")).charged_attempts == 0


async def test_discard_takes_back_what_a_live_attempt_has_staged(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    assert refusal(await client.discard("t", generation=1)) == ("CONFLICT", "STATE")
    assert refusal(await client.discard("t", generation=4)) == ("NOT_FOUND", "GENERATION")
    digest = await client.stage(claim, "draft")
    assert isinstance(digest, str)
    assert isinstance(await client.discard("t", generation=1), Done)
    await committed(client, claim, "final")


async def test_expire_leaves_a_running_lease_alone_and_one_expiry_is_one_end(client: Client, world: World) -> None:
    await given(client)
    await claimed(client, ttl=5.0)
    assert refusal(await client.expire("t"))[0] == "HELD"
    await world.advance(6)
    view = await client.task("t")
    assert isinstance(view, TaskView)
    first = await client.expire("t", expected_state_version=view.state_version)
    again = await client.expire("t", expected_state_version=view.state_version)
    assert isinstance(first, Done) and first.state == "READY"
    assert refusal(again) == ("CONFLICT", "VERSION")
    view = await client.task("t")
    assert isinstance(view, TaskView) and view.charged_attempts == 1


async def test_people_and_loops_prepared_before_a_raise_are_fenced_after_it(
    client: Client, world: World
) -> None:  # X35
    await given(client, "t")
    await claimed(client)
    await raised(await world.client())
    view = await client.task("t")
    assert isinstance(view, TaskView)
    for answer in (
        await client.reopen("t"),
        await client.revise("t", 2),
        await client.take_over("t"),
        await client.discard("t", generation=1),
        await client.close_intake(),
        await client.open_intake(expected_state_version=1),
        await client.raise_epoch(expected_epoch=1, expected_state_version=2),
        await client.claim_next(owner="A"),
        await client.claim("t", expected_state_version=view.state_version, owner="A"),
    ):
        assert refusal(answer) == ("FENCED", "EPOCH")
    # Reading, submitting, cancelling and expiring compare no epoch.
    await given(client, "new")
    assert isinstance(await client.cancel("new"), Done)
    assert isinstance(await client.expire("t"), Done)


async def test_opening_an_intake_that_an_alarm_closed_since_is_a_conflict(client: Client) -> None:  # X36
    prepared = await client.pool()
    assert not isinstance(prepared, Refused)
    await client.close_intake(who="alarm")
    answer = await client.open_intake(expected_state_version=prepared.state_version)
    assert refusal(answer) == ("CONFLICT", "VERSION")


async def test_a_pool_command_asked_again_after_a_lost_answer_is_said_again(client: Client) -> None:
    first = await client.close_intake(request_id="close")
    again = await client.close_intake(request_id="close")
    assert isinstance(first, PoolChanged) and isinstance(again, PoolChanged)
    assert (first.changed, again.changed, again.pool) == (True, False, first.pool)
    version = first.pool.state_version
    opened = await client.open_intake(expected_state_version=version, request_id="open")
    repeated = await client.open_intake(expected_state_version=version, request_id="open")
    assert isinstance(opened, PoolChanged) and isinstance(repeated, PoolChanged) and not repeated.changed
    # A raise changes what is presented: who asks again under the old epoch is told which one stands.
    raising = {"expected_epoch": 1, "expected_state_version": opened.pool.state_version, "request_id": "raise"}
    assert isinstance(await client.raise_epoch(**raising), PoolChanged)  # type: ignore[arg-type]
    late = await client.raise_epoch(**raising)  # type: ignore[arg-type]
    assert refusal(late) == ("FENCED", "EPOCH")
    assert isinstance(late, Refused) and late.current["epoch"] == 2


async def test_a_raise_is_a_compare_and_swap_and_only_grows(client: Client) -> None:
    pool = await client.pool()
    assert not isinstance(pool, Refused)
    first = await client.raise_epoch(expected_epoch=1, expected_state_version=pool.state_version, to=10)
    assert isinstance(first, PoolChanged) and first.pool.epoch == 10
    second = await client.raise_epoch(expected_epoch=1, expected_state_version=pool.state_version)
    assert refusal(second) == ("FENCED", "EPOCH")
    with pytest.raises(InvalidRequest, match="to"):
        await client.raise_epoch(expected_epoch=10, expected_state_version=first.pool.state_version, to=10)


async def test_pools_are_fencing_domains_of_their_own(client: Client) -> None:
    created = await client.create_pool("mail", max_ttl=60.0)
    again = await client.create_pool("mail")
    assert isinstance(created, PoolChanged) and created.changed
    assert isinstance(again, PoolChanged) and not again.changed and again.pool.policy["max_ttl"] == 60.0
    await given(client, "m", pool="mail")
    claim = await claimed(client, pool="mail")
    await raised(client, "default")
    await committed(client, claim)
    assert refusal(await client.claim_next(owner="A", pool="none")) == ("NOT_FOUND", "POOL")


async def test_a_policy_that_cannot_be_safe_is_a_wrong_call(client: Client) -> None:
    for wrong in ({"max_ttl": 0}, {"max_attempts": 0}, {"max_ttl": 90_000.0}, {"nonsense": 1}, {"backoff_jitter": 2.0}):
        with pytest.raises(InvalidRequest, match="policy"):
            await client.set_policy(**wrong)


async def test_what_was_fenced_before_a_takeover_stays_fenced(client: Client, world: World) -> None:
    await given(client)
    late = await claimed(client, ttl=5.0)
    successor = await taken_over(world, client, late)
    await client.release(successor)
    third = await claimed(client, "C")
    for claim in (late, successor):
        assert refusal(await client.commit(claim, "late")) == ("FENCED", "GENERATION")
    await committed(client, third)
