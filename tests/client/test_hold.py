"""`client.hold(claim)`: the lease is kept while the block runs, and the block ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from fencepost.client.attempt import Attempt
from fencepost.errors import Fenced, InvalidRequest
from fencepost.kernel import commands as k
from fencepost.testing import MemoryClient
from fencepost.wire import Claim, Committed, NewTask, Refused
from tests.client.faults import BOUND, Faults, ends_of, faulty_client, lost_answer


async def claimed(client: MemoryClient, ttl: float = 1.5, **task: Any) -> Claim:
    await client.submit(NewTask({"x": 1}, task_id="t", **task))
    (claim,) = await client.claim_next(owner="me", ttl=ttl)
    return claim


async def refusals(client: MemoryClient) -> list[tuple[str, str | None]]:
    page = await client.events(task_id="t", names=["refusal"])
    return [(event.door, event.outcome) for event in page.items]


async def test_a_body_that_commits_ends_the_hold_by_that(client: MemoryClient):
    claim = await claimed(client)
    async with client.hold(claim) as attempt:
        assert attempt.input == {"x": 1}
        assert 0 < attempt.remaining() <= 1.5
        attempt.check()
        attempt.usage(tokens=3)
        digest = await attempt.stage({"r": 1})
        assert isinstance(await client.commit(claim, result_digest=digest), Committed)
    assert await ends_of(client, "t") == ["COMMITTED"]
    assert await refusals(client) == []
    assert (await client.attempts("t"))[0].usage == {"tokens": 3}


@pytest.mark.parametrize("end", ["release", "fail"])
async def test_a_body_that_releases_or_fails_ends_the_hold_by_that(client: MemoryClient, end: str):
    claim = await claimed(client)
    async with client.hold(claim) as attempt:
        await (client.release(claim) if end == "release" else client.fail(claim, "no"))
        with pytest.raises(Fenced):
            attempt.check()
    assert await ends_of(client, "t") == ["RELEASED" if end == "release" else "FAILED"]
    assert await refusals(client) == []


async def test_a_body_that_raises_releases(client: MemoryClient):
    claim = await claimed(client)
    with pytest.raises(ValueError, match="mine"):
        async with client.hold(claim):
            raise ValueError("mine")
    assert await ends_of(client, "t") == ["RELEASED"]


async def test_a_body_that_ends_without_anything_releases(client: MemoryClient):
    claim = await claimed(client)
    async with client.hold(claim):
        pass
    assert await ends_of(client, "t") == ["RELEASED"]
    assert (await client.task("t")).charged_attempts == 0


async def test_the_lease_is_renewed_while_the_body_runs(client: MemoryClient):
    claim = await claimed(client, ttl=0.9)
    async with client.hold(claim) as attempt:
        async with asyncio.timeout(BOUND):
            while (await client.task("t")).state_version < 6:
                await asyncio.sleep(0.01)
        attempt.check()
        await client.commit(claim, 1)
    assert await ends_of(client, "t") == ["COMMITTED"]


async def test_a_fenced_body_is_cancelled_and_fenced_comes_out(client: MemoryClient):
    claim = await claimed(client)
    seen: list[BaseException] = []
    with pytest.raises(Fenced) as caught:
        async with client.hold(claim) as attempt:
            newer = await client.reclaim(claim)
            try:
                await asyncio.wait_for(asyncio.Event().wait(), BOUND)
            except Exception as error:  # noqa: BLE001 - as agents' loops do
                seen.append(error)
            except asyncio.CancelledError as error:
                seen.append(error)
                assert attempt.remaining() == 0
                raise
    assert [type(error) for error in seen] == [asyncio.CancelledError]
    assert caught.value.reason == "FENCED/GENERATION"
    assert isinstance(caught.value.refused, Refused)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert isinstance(await client.commit(newer, 2), Committed)


async def test_a_body_that_swallows_its_cancellation_still_ends_in_fenced(client: MemoryClient):
    claim = await claimed(client)
    with pytest.raises(Fenced):
        async with client.hold(claim):
            await client.cancel("t")
            with contextlib.suppress(BaseException):  # the stubborn one
                await asyncio.wait_for(asyncio.Event().wait(), BOUND)
    assert (await client.task("t")).state == "CANCELLED"


async def test_a_claim_that_is_over_never_runs_the_body(client: MemoryClient):
    claim = await claimed(client)
    await client.reclaim(claim)
    with pytest.raises(Fenced, match="GENERATION"):
        async with client.hold(claim):
            raise AssertionError("the body ran")


async def test_a_cancellation_from_outside_releases_and_goes_on(client: MemoryClient):
    claim = await claimed(client)
    inside = asyncio.Event()

    async def body() -> None:
        async with client.hold(claim):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await asyncio.wait_for(inside.wait(), BOUND)
    task.cancel()
    await asyncio.wait({task}, timeout=BOUND)
    assert task.cancelled()
    assert await ends_of(client, "t") == ["RELEASED"]


async def test_a_claim_handed_to_another_process_is_held_there(client: MemoryClient):
    claim = await claimed(client)
    await client.checkpoint(claim, "first", number=1)
    other = await client.clone()
    handed = Claim.from_json(claim.to_json())
    async with other.hold(handed) as attempt:
        await attempt.checkpoint("second")  # counts on from what the first process wrote
        assert isinstance(await other.commit(handed, 2), Committed)
    await other.close()
    assert (await client.result("t")).value == 2


async def test_checkpoints_at_once_keep_their_order():
    faults = Faults()
    first, go_on = asyncio.Event(), asyncio.Event()

    async def slow(command: Any, act: Any) -> Any:
        first.set()
        await go_on.wait()
        return await act()

    faults.add(k.SaveCheckpoint, slow)
    async with faulty_client(faults) as client:
        claim = await claimed(client)
        async with client.hold(claim) as attempt:
            saving = asyncio.gather(*(attempt.checkpoint(n) for n in range(5)))
            await asyncio.wait_for(first.wait(), BOUND)
            go_on.set()
            await asyncio.wait_for(saving, BOUND)
            assert attempt.checkpoint_data == 4
        numbers = [each.number for each in faults.asked if isinstance(each, k.SaveCheckpoint)]
        assert numbers == [1, 2, 3, 4, 5]
        (again,) = await client.claim_next(owner="you")
        assert again.checkpoint_data == 4
        assert await refusals(client) == []


async def test_a_checkpoint_whose_answer_was_lost_is_asked_for_again():
    faults = Faults()
    faults.add(k.SaveCheckpoint, lost_answer)
    async with faulty_client(faults) as client:
        claim = await claimed(client)
        async with client.hold(claim) as attempt:
            await attempt.checkpoint("x")
        first, second = faults.request_ids(k.SaveCheckpoint)
        assert first == second


async def test_a_checkpoint_that_cannot_be_kept_is_a_wrong_call_and_no_loss(client: MemoryClient):
    claim = await claimed(client)
    async with client.hold(claim) as attempt:
        with pytest.raises(InvalidRequest, match="checkpoint"):
            await attempt.checkpoint(float("nan"))
        await attempt.checkpoint("fine")
        attempt.check()
        await client.commit(claim, 1)


async def test_usage_takes_numbers_only_and_not_too_many(client: MemoryClient):
    claim = await claimed(client)
    async with client.hold(claim) as attempt:
        for wrong in ({"tokens": -1}, {"tokens": float("nan")}, {"tokens": "3"}):
            with pytest.raises(InvalidRequest):
                attempt.usage(**wrong)  # type: ignore[arg-type]
        attempt.usage(**{f"k{n}": 1 for n in range(19)})
        with pytest.raises(InvalidRequest, match="20 keys"):
            attempt.usage(one_more=1)
        assert len(attempt.spent()) == 19
        assert isinstance(attempt, Attempt)
