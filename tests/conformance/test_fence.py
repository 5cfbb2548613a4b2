"""The fence on every door of a claim: a late worker changes nothing (claim.v1, section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest, NotStaged
from fencepost.wire import Claim, Committed, Done, Page, Refused, Renewed, Result, TaskView
from tests.conformance.actions import claimed, committed, done, given, raised, refusal, state_of, taken_over
from tests.conformance.worlds import World

Door = Callable[[Client, Claim], Awaitable[Any]]

DOORS: dict[str, Door] = {
    "renew": lambda client, claim: client.renew(claim, 600.0),
    "checkpoint": lambda client, claim: client.checkpoint(claim, {"late": True}, number=99),
    "commit": lambda client, claim: client.commit(claim, "late"),
    "release": lambda client, claim: client.release(claim),
    "fail": lambda client, claim: client.fail(claim, "late"),
}


def changed(claim: Claim, **fields: Any) -> Claim:
    return msgspec.structs.replace(claim, **fields)


@pytest.fixture(params=sorted(DOORS))
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


async def record(client: Client) -> Any:
    view = await client.task("t")
    assert isinstance(view, TaskView)
    return view


async def test_a_late_worker_is_fenced_and_its_write_changes_nothing(client: Client, world: World, door: Door) -> None:
    await given(client)
    late = await claimed(client, "A", ttl=5.0)
    successor = await taken_over(world, client, late, "B")
    before = await record(client)
    answer = await door(client, late)
    assert refusal(answer) == ("FENCED", "GENERATION")
    assert answer.current["owner"] == "B" and answer.current["generation"] == 2
    assert await record(client) == before
    await committed(client, successor, "right")
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == "right"
    assert refusal(await door(client, late)) == ("FENCED", "GENERATION")


async def test_a_lease_that_merely_ran_out_refuses_nobody(client: Client, world: World, door: Door) -> None:
    await given(client)
    claim = await claimed(client, ttl=5.0)
    await world.advance(3600)
    assert not isinstance(await door(client, claim), Refused)


async def test_an_expired_and_recorded_end_refuses_the_old_owner(client: Client, world: World, door: Door) -> None:
    await given(client)
    claim = await claimed(client, ttl=5.0)
    await world.advance(6)
    assert isinstance(await client.expire("t"), Done)
    assert refusal(await door(client, claim)) == ("FENCED", "STATE")


async def test_a_cancelled_attempt_is_cancelled_for_ever(client: Client, door: Door) -> None:
    await given(client)
    claim = await claimed(client)
    await client.cancel("t")
    assert refusal(await door(client, claim)) == ("CANCELLED", None)
    await client.reopen("t")
    assert refusal(await door(client, claim)) == ("CANCELLED", None)


async def test_a_revised_input_makes_the_attempt_stale(client: Client, door: Door) -> None:
    await given(client)
    claim = await claimed(client)
    await client.revise("t", {"n": 2})
    assert refusal(await door(client, claim)) == ("STALE_INPUT", None)


async def test_a_raise_refuses_a_client_that_presents_the_old_epoch(client: Client, world: World, door: Door) -> None:
    await given(client)
    claim = await claimed(client)
    await raised(await world.client())
    assert refusal(await door(client, claim)) == ("FENCED", "EPOCH")


async def test_a_claim_of_an_older_epoch_does_not_pass_by_presenting_the_new_one(
    client: Client, world: World, door: Door
) -> None:  # X01
    await given(client)
    claim = await claimed(client)
    await raised(client)
    answer = await door(client, claim)
    assert refusal(answer) == ("FENCED", "EPOCH")
    assert answer.current["granted_under"] == 1


async def test_numbers_above_the_current_ones_are_rewound_and_the_intake_stays_open(
    client: Client, world: World, door: Door
) -> None:  # X31
    await given(client)
    claim = await claimed(client)
    assert refusal(await door(client, changed(claim, generation=2))) == ("FENCED", "REWOUND")
    assert refusal(await door(client, changed(claim, attempt_id="made-up"))) == ("FENCED", "REWOUND")
    liar = await world.client(epoch=7)
    assert refusal(await door(liar, claim)) == ("FENCED", "REWOUND")
    pool = await client.pool()
    assert not isinstance(pool, Refused) and pool.intake == "OPEN"
    page = await client.events(names=["alarm"])
    assert {item.reason for item in page.items} == {"REWOUND"}


async def test_another_owner_is_refused_where_an_owner_is_presented(client: Client, door: Door) -> None:
    await given(client)
    claim = await claimed(client, "A")
    assert refusal(await door(client, changed(claim, owner_id="B"))) == ("FENCED", "OWNER")


async def test_a_claim_of_another_store_is_a_wrong_call(client: Client, door: Door) -> None:
    await given(client)
    claim = await claimed(client)
    with pytest.raises(InvalidRequest, match="another store"):
        await door(client, changed(claim, store_id="elsewhere"))


async def test_an_attempt_that_ended_by_its_own_doing_is_told_so_and_not_counted_as_fenced(
    client: Client, door: Door
) -> None:  # X26
    await given(client)
    claim = await claimed(client)
    await committed(client, claim)
    assert refusal(await door(client, claim)) == ("ENDED", "COMMITTED")


async def test_a_commit_repeated_is_committed_again_even_after_a_raise(client: Client, world: World) -> None:  # X27
    await given(client)
    claim = await claimed(client)
    first = await committed(client, claim, {"x": 1})
    again = await client.commit(claim, {"x": 1.0})
    assert isinstance(again, Committed)
    assert (again.result_commit_id, again.replayed) == (first.result_commit_id, True)
    await raised(await world.client())
    later = await client.commit(claim, {"x": 1})
    assert isinstance(later, Committed) and later.replayed
    page = await client.events(task_id="t")
    assert [item.name for item in page.items if item.accepted].count("result_committed") == 1
    assert [item.name for item in page.items if not item.accepted].count("replay") == 2


async def test_another_result_after_the_commit_is_no_replay(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    await committed(client, claim, 1)
    assert refusal(await client.commit(claim, 2)) == ("ENDED", "COMMITTED")
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == 1


async def test_renew_moves_the_lease_and_never_back(client: Client) -> None:
    await given(client)
    claim = await claimed(client, ttl=100.0)
    shorter = await client.renew(claim, 5.0)
    assert isinstance(shorter, Renewed) and shorter.lease_expires_at == claim.lease_expires_at
    longer = await client.renew(claim, 200.0)
    assert isinstance(longer, Renewed) and longer.lease_expires_at > claim.lease_expires_at


async def test_a_renew_after_expiry_that_nobody_used_is_granted_and_counted(client: Client, world: World) -> None:
    await given(client)
    claim = await claimed(client, ttl=5.0)
    await world.advance(60)
    answer = await client.renew(claim, 30.0)
    assert isinstance(answer, Renewed) and answer.late


async def test_a_claim_as_old_as_the_pool_lets_one_grow_is_exhausted_and_may_still_commit(
    client: Client, world: World
) -> None:
    await client.set_policy(max_claim_age=100.0, max_ttl=60.0)
    await given(client)
    claim = await claimed(client, ttl=60.0)
    await world.advance(50)
    capped = await client.renew(claim, 60.0)
    assert isinstance(capped, Renewed)
    assert refusal(await client.renew(claim, 60.0)) == ("EXHAUSTED", "MAX_CLAIM_AGE")
    await committed(client, claim)


async def test_a_repeated_renew_gives_the_first_times_again(client: Client, world: World) -> None:
    await given(client)
    claim = await claimed(client, ttl=30.0)
    first = await client.renew(claim, 60.0, request_id="beat")
    await world.advance(20)
    assert await client.renew(claim, 60.0, request_id="beat") == first
    await client.cancel("t")
    assert refusal(await client.renew(claim, 60.0, request_id="beat")) == ("CANCELLED", None)


async def test_a_late_copy_of_a_checkpoint_does_not_replace_the_newer_one(client: Client, world: World) -> None:  # X32
    await given(client)
    claim = await claimed(client, ttl=5.0)
    await client.checkpoint(claim, "one", number=1, request_id="c1")
    await client.checkpoint(claim, "two", number=2)
    said_again = await client.checkpoint(claim, "one", number=1, request_id="c1")
    assert isinstance(said_again, Done) and not said_again.changed
    assert refusal(await client.checkpoint(claim, "one", number=1)) == ("CONFLICT", "NUMBER")
    assert (await taken_over(world, client, claim)).checkpoint_data == "two"


async def test_release_and_fail_repeated_say_again_what_they_said(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    first = await client.release(claim, request_id="r")
    again = await client.release(claim, request_id="r")
    assert isinstance(first, Done) and isinstance(again, Done)
    assert (first.outcome, first.changed, again.outcome, again.changed) == ("RELEASED", True, "RELEASED", False)
    assert refusal(await client.release(claim)) == ("ENDED", "RELEASED")


async def test_release_charges_nothing_and_fail_does(client: Client, world: World) -> None:
    await given(client, max_attempts=2)
    for _ in range(5):
        await client.release(await claimed(client))
    answer = await client.fail(await claimed(client), "first")
    assert isinstance(answer, Done) and answer.state == "READY" and answer.info["charged_attempts"] == 1
    assert await client.claim_next(owner="A") == []  # the backoff runs
    await world.advance(600)
    answer = await client.fail(await claimed(client), "second")
    assert isinstance(answer, Done) and answer.state == "PARKED"


async def test_a_final_failure_parks_at_once(client: Client) -> None:
    await given(client)
    answer = await client.fail(await claimed(client), "no such model", retry=False)
    assert isinstance(answer, Done) and answer.state == "PARKED"
    attempts = await client.attempts("t")
    assert attempts[0].error == "no such model"


async def test_commit_by_digest_wants_a_staged_result_of_this_attempt(client: Client, world: World) -> None:
    await given(client)
    first = await claimed(client, ttl=5.0)
    digest = await client.stage(first, {"r": 1})
    assert isinstance(digest, str)
    second = await taken_over(world, client, first)
    with pytest.raises(NotStaged):
        await client.commit(second, result_digest=digest)
    assert await client.stage(second, {"r": 1}) == digest
    await committed(client, second, None, result_digest=digest)
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == {"r": 1}


async def test_staging_by_a_late_attempt_is_kept_and_changes_nothing_else(client: Client, world: World) -> None:
    await given(client)
    late = await claimed(client, ttl=5.0)
    successor = await taken_over(world, client, late)
    before = await record(client)
    for _ in range(2):  # asked again after a lost answer: noted once
        assert isinstance(await client.stage(late, "late", request_id="s"), str)
    page = await client.events(task_id="t", names=["result_staged"])
    assert [item.generation for item in page.items] == [1]
    assert await record(client) == before
    await committed(client, successor, "right")
    history = await client.report("history", task_id="t")
    assert '"late"' not in str(await client.result("t"))
    assert history is not None
    assert refusal(await client.stage(changed(late, attempt_id="never"), "x"))[0] == "NOT_FOUND"


async def test_usage_is_taken_from_an_attempt_that_lost(client: Client, world: World) -> None:
    await given(client)
    late = await claimed(client, ttl=5.0)
    await taken_over(world, client, late)
    assert not isinstance(await client.usage(late, tokens=1200, usd=0.02), Refused)
    attempts = await client.attempts("t")
    assert attempts[0].usage == {"tokens": 1200, "usd": 0.02}
    for _ in range(2):  # asked again after a lost answer: counted once
        assert isinstance(await client.usage(late, request_id="u", tokens=800), Done)
    assert (await client.attempts("t"))[0].usage == {"tokens": 2000, "usd": 0.02}


async def test_a_ttl_over_the_pools_limit_is_a_wrong_call_and_not_clamped(client: Client) -> None:
    await client.set_policy(max_ttl=60.0)
    await given(client)
    with pytest.raises(InvalidRequest, match="ttl"):
        await client.claim_next(owner="A", ttl=61.0)
    claim = await claimed(client, ttl=60.0)
    with pytest.raises(InvalidRequest, match="ttl"):
        await client.renew(claim, 61.0)
    for wrong in (0, -1, float("nan"), float("inf"), "30", True):
        with pytest.raises(InvalidRequest, match="ttl"):
            await client.claim_next(owner="A", ttl=wrong)  # type: ignore[arg-type]


async def test_no_answer_and_no_page_shows_an_attempt_id(client: Client, world: World) -> None:  # X40
    await given(client)
    late = await claimed(client, ttl=5.0)
    current = await taken_over(world, client, late)
    shown: list[Any] = [await door(client, late) for door in DOORS.values()]
    shown.append(await client.claim("t", expected_state_version=1, owner="C"))
    await client.stage(current, 1)
    await client.usage(current, tokens=1)
    await done(client, "other")
    page = await client.events(limit=1000)
    assert isinstance(page, Page) and len(page.items) > 10
    shown += [page, await client.task("t"), await client.attempts("t"), await client.report("history", task_id="t")]
    text = str([msgspec.to_builtins(item) for item in shown])
    for claim in (late, current):
        assert claim.attempt_id not in text


async def test_a_refusal_has_no_truth_value(client: Client) -> None:
    await given(client)
    await claimed(client)
    answer = await client.result("t")
    with pytest.raises(TypeError, match="truth value"):
        bool(answer)
    assert await state_of(client) == "CLAIMED"
