"""B19: a heartbeat in flight revives what was just released."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from fencepost import Claim, Client, Committed, Done, NewTask, Refused, Renewed, TaskView
from fencepost.client.client import Client as TheClient
from fencepost.kernel import commands as k
from tests.faults.between import client_behind
from tests.faults.stage import Stage, until

ENDS = {
    "commit": lambda client, claim: client.commit(claim, "done"),
    "release": lambda client, claim: client.release(claim),
    "fail": lambda client, claim: client.fail(claim, "no luck"),
}


class HeldUp:
    """Lets every call through but renewals: their requests, or their answers, wait until they are let go.

    Used from two event loops, the test's and the renewal thread's, so it waits on a thread's event.
    """

    def __init__(self, what: str) -> None:
        self.what = what  # "request" or "answer"
        self.sent = 0
        self.gate = threading.Event()
        self.gate.set()

    async def __call__(self, command: Any, go: Any) -> Any:
        if not isinstance(command, k.Renew):
            return await go()
        self.sent += 1
        if self.what == "request":
            await self._wait()
            return await go()
        answer = await go()
        await self._wait()
        return answer

    async def _wait(self) -> None:
        async with asyncio.timeout(30):
            while not self.gate.is_set():
                await asyncio.sleep(0.005)


async def one_claim(client: TheClient, **more: Any) -> Claim:
    found = await client.claim_next(owner="A", **more)
    assert isinstance(found, list)
    return found[0]


@pytest.mark.parametrize("end", ENDS)
async def test_b19_a_renew_that_arrives_after_the_end_is_told_so_and_changes_nothing(stage: Stage, end: str) -> None:
    held = HeldUp("request")
    async with await client_behind(stage.url, held) as client:
        await client.submit(NewTask(1, task_id="t"))
        claim = await one_claim(client)
        held.gate.clear()
        renewing = asyncio.create_task(client.renew(claim))
        await until(lambda: held.sent == 1)
        assert not isinstance(await ENDS[end](client, claim), Refused)
        before = await client.task("t")
        held.gate.set()
        late = await renewing
        assert isinstance(late, Refused) and late.outcome == "ENDED"
        assert await client.task("t") == before
        assert isinstance(before, TaskView) and before.lease_expires_at is None
    await stage.audit()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("what", ["request", "answer"])
async def test_b19_after_the_end_no_beat_goes_out_whenever_the_last_ones_answer_comes(
    stage: Stage, end: str, what: str
) -> None:
    held = HeldUp(what)
    async with await client_behind(stage.url, held) as client:
        await client.submit(NewTask(1, task_id="t"))
        claim = await one_claim(client, ttl=0.9)
        async with client.hold(claim):
            entering = held.sent
            held.gate.clear()
            await until(lambda: held.sent > entering)  # a beat is under way
            ended = await ENDS[end](client, claim)
            assert isinstance(ended, Committed | Done)
            held.gate.set()
            beats = held.sent
            # A beat every 0.3 s while the lease is kept: none in the time of two.
            await asyncio.sleep(0.7)
            assert held.sent == beats
        view = await client.task("t")
        assert isinstance(view, TaskView) and view.lease_expires_at is None and view.state != "CLAIMED"
    await stage.audit()


async def test_b19_a_release_never_fails_because_of_its_own_renewals(stage: Stage) -> None:
    client: Client = await stage.client()
    await client.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(150)])
    claims = await client.claim_next(owner="A", limit=150)
    assert isinstance(claims, list)
    for claim in claims:
        first, released, second = await asyncio.gather(
            client.renew(claim, 60.0), client.release(claim, delay=3600.0), client.renew(claim, 90.0)
        )
        assert isinstance(first, Renewed) and isinstance(released, Done)
        assert isinstance(second, Refused) and (second.outcome, second.reason) == ("ENDED", "RELEASED")
        view = await client.task(claim.task_id)
        assert isinstance(view, TaskView) and (view.state, view.lease_expires_at) == ("READY", None)
    await stage.audit()


async def test_b19_overlapping_renewals_reach_no_further_than_the_longest_of_them(stage: Stage) -> None:
    client = await stage.client()
    await client.set_policy(max_ttl=30.0, max_claim_age=40.0)
    await client.submit(NewTask(1, task_id="t"))
    claim = await one_claim(client, ttl=10.0)
    answers = await asyncio.gather(*(client.renew(claim, ttl) for ttl in (20.0, 15.0, 20.0, 12.0)))
    ends = [answer.lease_expires_at for answer in answers if isinstance(answer, Renewed)]
    assert len(ends) == 4
    assert ends == sorted(ends)  # never back
    view = await client.task("t")
    assert isinstance(view, TaskView) and view.lease_expires_at == ends[-1] and view.claimed_at is not None
    assert (ends[-1] - view.claimed_at).total_seconds() < 21
    stage.advance(30.0)
    last = await client.renew(claim, 20.0)
    assert isinstance(last, Renewed)
    assert (last.lease_expires_at - view.claimed_at).total_seconds() == pytest.approx(40.0)
    await stage.audit()
