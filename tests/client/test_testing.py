"""`fencepost.testing`: what users test their handlers with."""

from __future__ import annotations

import pytest

from fencepost import testing
from fencepost.errors import FencepostError
from fencepost.testing import memory_client
from fencepost.wire import Claim, Committed, NewTask, Refused


async def test_a_memory_client_is_awaited_or_entered():
    client = await memory_client()
    assert (await client.submit(NewTask(1))).created
    await client.close()
    async with memory_client() as other:
        assert other.store_id != client.store_id
        assert (await other.tasks()).items == []


async def test_advancing_ends_delays_and_leases():
    async with memory_client() as client:
        await client.submit(NewTask(1, task_id="t", delay=60.0))
        assert await client.claim_next(owner="me") == []
        client.advance(61)
        (claim,) = await client.claim_next(owner="me", ttl=30.0)
        testing.advance(31)
        (again,) = await client.claim_next(owner="you", ttl=30.0)
        assert again.generation == claim.generation + 1


async def test_reclaiming_fences_the_old_claim():
    async with memory_client() as client:
        await client.submit(NewTask(1, task_id="t"))
        (claim,) = await client.claim_next(owner="me")
        newer = await testing.reclaim(claim)
        assert isinstance(newer, Claim) and newer.owner_id != "me"
        refused = await client.commit(claim, 1)
        assert isinstance(refused, Refused) and refused.outcome == "FENCED"
        newest = await client.reclaim(newer, owner="third")
        assert newest.owner_id == "third"
        assert isinstance(await client.commit(newest, 3), Committed)


async def test_reclaim_finds_the_client_by_the_claims_store():
    async with memory_client() as first, memory_client():
        await first.submit(NewTask(1, task_id="t"))
        (claim,) = await first.claim_next(owner="me")
        assert (await testing.reclaim(claim)).store_id == first.store_id


async def test_what_cannot_be_reclaimed_says_why():
    async with memory_client() as client:
        await client.submit(NewTask(1, task_id="t", max_attempts=1))
        (claim,) = await client.claim_next(owner="me")
        with pytest.raises(FencepostError, match="ATTEMPTS"):
            await client.reclaim(claim)
        with pytest.raises(FencepostError, match="not claimed"):
            await client.reclaim(claim)
    with pytest.raises(FencepostError, match="granted"):
        await testing.reclaim(claim)
    with pytest.raises(FencepostError, match="open"):
        testing.advance(1)
