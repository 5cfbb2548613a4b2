"""Renewal: leases are kept from a thread of their own, and trusted no longer than they may be."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from fencepost import clock
from fencepost.app import App
from fencepost.client.attempt import Attempt
from fencepost.client.renewal import Lease, Loss, Renewal, Terms
from fencepost.client.worker import Worker
from fencepost.errors import Fenced, InvalidRequest, Unavailable
from fencepost.kernel import commands as k
from fencepost.testing import MemoryClient
from fencepost.wire import Claim, NewTask
from tests.client.faults import (
    BOUND,
    Faults,
    Working,
    acts_then_hangs,
    ends_of,
    faulty_client,
    hangs,
    lost_answer,
    never_arrived,
    reported,
)


class Losses:
    """What `on_lost` was told, awaitable from the test's loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.told: asyncio.Queue[Loss] = asyncio.Queue()

    def __call__(self, loss: Loss) -> None:
        self.loop.call_soon_threadsafe(self.told.put_nowait, loss)

    async def next(self) -> Loss:
        return await asyncio.wait_for(self.told.get(), BOUND)


async def claimed(client: MemoryClient, ttl: float) -> Claim:
    await client.submit(NewTask(1, task_id="t"))
    (claim,) = await client.claim_next(owner="me", ttl=ttl)
    return claim


async def keep(client: MemoryClient, ttl: float, **options: Any) -> tuple[Renewal, Claim, Lease, Losses]:
    sent, claim, losses = clock.elapsed(), await claimed(client, ttl), Losses()
    renewal = await client.renewal()
    return renewal, claim, renewal.register(claim, Terms.of(ttl), sent, losses, **options), losses


def renewals(faults: Faults) -> list[str]:
    return faults.request_ids(k.Renew)


async def enough(faults: Faults, count: int) -> None:
    async with asyncio.timeout(BOUND):
        while len(renewals(faults)) < count:
            await asyncio.sleep(0.005)


def test_the_terms_stand_in_order_or_name_the_field_that_does_not():
    terms = Terms.of(30.0)
    assert terms.renew_interval < terms.trust_window < terms.ttl
    assert (terms.renew_interval, terms.trust_window) == (10.0, 25.0)
    for options, field in (
        ({"ttl": 30.0, "max_ttl": 20.0}, "ttl"),
        ({"ttl": 0.0}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": 30.0, "trust_window": 30.0}, "trust_window"),
        ({"ttl": 30.0, "renew_interval": 25.0}, "renew_interval"),
        ({"ttl": 30.0, "renew_interval": 10.0, "trust_window": 10.0}, "renew_interval"),
        ({"ttl": 30.0, "renew_interval": -1.0}, "renew_interval"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            Terms.of(**options)
        assert caught.value.field == field


async def test_b21_a_handler_that_blocks_the_event_loop_keeps_its_lease(client: MemoryClient):
    app = App()

    @app.task("blocks", ttl=1.5)
    async def blocks(attempt: Attempt) -> str:
        time.sleep(3.5)
        attempt.check()
        return "kept"

    await client.submit(blocks.task(task_id="t"))
    assert await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND) == 0
    (attempt,) = await client.attempts("t")
    assert attempt.end == "COMMITTED"
    assert attempt.renewals >= 3


async def test_b21_a_busy_interpreter_does_not_starve_the_renewal(client: MemoryClient):
    app = App()

    @app.task("burns", ttl=3.0)
    def burns(attempt: Any) -> int:
        end, count = clock.elapsed() + 4.0, 0
        while clock.elapsed() < end:
            count += 1
        return count

    await client.submit_many([burns.task(task_id=f"t{n}") for n in range(3)])
    assert await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND) == 0
    for n in range(3):
        assert await ends_of(client, f"t{n}") == ["COMMITTED"]


async def test_one_failed_beat_is_no_loss_and_is_asked_again_with_the_same_request_id():
    faults = Faults()
    faults.add(k.Renew, lost_answer, never_arrived)
    async with faulty_client(Faults(), faults) as client:
        renewal, _, lease, losses = await keep(client, 1.5)
        await enough(faults, 4)
        first, second, third, fourth = renewals(faults)[:4]
        assert first == second == third != fourth
        assert lease.lost is None and lease.remaining() > 0
        assert losses.told.empty()
        assert renewal.failed_beats == 2


async def test_b21_a_renewal_that_hangs_is_asked_again_before_the_window_ends():
    faults = Faults()
    faults.add(k.Renew, hangs, acts_then_hangs)
    async with faulty_client(Faults(), faults) as client:
        _, _, lease, losses = await keep(client, 1.8)
        await enough(faults, 4)
        ids = renewals(faults)
        assert ids[0] == ids[1]
        assert lease.lost is None and lease.remaining() > 0
        assert losses.told.empty()


async def test_a_store_that_never_answers_ends_the_trust_before_the_lease_ends():
    faults = Faults()
    faults.always[k.Renew] = hangs
    async with faulty_client(Faults(), faults) as client:
        started = clock.elapsed()
        _, _, lease, losses = await keep(client, 0.6)
        loss = await losses.next()
        assert clock.elapsed() - started < 0.6
        assert loss.refused is None
        assert lease.remaining() == 0
        with pytest.raises(Fenced):
            Attempt(client, lease.claim, lease).check()


async def test_a_hanging_renewal_of_one_lease_does_not_hold_up_the_others():
    faults = Faults()

    async def hangs_for_t(command: Any, act: Any) -> Any:
        return await (hangs(command, act) if command.claim.task_id == "t" else act())

    faults.always[k.Renew] = hangs_for_t
    async with faulty_client(Faults(), faults) as client:
        renewal, _, _, losses = await keep(client, 0.6)
        await client.submit(NewTask(1, task_id="u"))
        sent = clock.elapsed()
        (other,) = await client.claim_next(owner="me", ttl=2.4)
        kept = renewal.register(other, Terms.of(2.4), sent, Losses())
        await losses.next()
        assert kept.lost is None and kept.remaining() > 0.8


async def test_trust_counts_from_the_sending_of_the_last_renewal():
    faults = Faults()
    arrived = threading.Event()

    async def slow(command: Any, act: Any) -> Any:
        answer = await act()
        await asyncio.sleep(0.1)
        arrived.set()
        return answer

    faults.add(k.Renew, slow)
    async with faulty_client(Faults(), faults) as client:
        _, _, lease, _ = await keep(client, 3.0)
        await asyncio.to_thread(arrived.wait, BOUND)
        async with asyncio.timeout(BOUND):
            while lease.next_beat < clock.elapsed():
                await asyncio.sleep(0.005)
        assert lease.remaining() <= lease.terms.trust_window - 0.1


async def test_b13_a_lease_is_over_at_the_next_look_after_the_machine_slept(client: MemoryClient):
    slept = 0.0

    def now() -> float:
        return clock.elapsed() + slept

    claim, losses = await claimed(client, 30.0), Losses()
    renewal = Renewal(client, now=now)
    await renewal.start()
    try:
        lease = renewal.register(claim, Terms.of(30.0), now(), losses)
        assert lease.remaining() > 20
        slept = 60.0
        with pytest.raises(Fenced):  # at once, without waiting for the thread
            Attempt(client, claim, lease).check()
        assert (await losses.next()).refused is None
    finally:
        await renewal.stop()


async def test_b19_a_late_reply_to_a_renewal_revives_nothing_after_the_claim_is_given_up():
    faults = Faults()
    sent, answer = threading.Event(), threading.Event()

    async def held_back(command: Any, act: Any) -> Any:
        found = await act()
        sent.set()
        await asyncio.to_thread(answer.wait, BOUND)
        return found

    faults.add(k.Renew, held_back)
    async with faulty_client(Faults(), faults) as client:
        renewal, claim, lease, losses = await keep(client, 0.6)
        await asyncio.to_thread(sent.wait, BOUND)
        renewal.give_up(lease)
        before = lease.trusted_until
        assert (await client.release(claim, delay=600.0)).outcome == "RELEASED"
        answer.set()
        await client.submit(NewTask(2, task_id="u"))
        (other,) = await client.claim_next(owner="me", ttl=0.6, kinds=["default"])
        renewal.register(other, Terms.of(0.6), clock.elapsed(), Losses())
        await enough(faults, 4)  # the other's beats go on, and none is for the first
        assert lease.trusted_until == before
        assert [c.claim.task_id for c in faults.asked if isinstance(c, k.Renew)].count("t") == 1
        assert losses.told.empty()


async def test_no_beat_goes_out_once_a_commit_is_under_way():
    faults = Faults()
    commit_faults = Faults()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow_commit(command: Any, act: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await act()

    commit_faults.add(k.Commit, slow_commit)
    async with faulty_client(commit_faults, faults) as client:
        _, claim, lease, losses = await keep(client, 0.4)
        client.leases[claim.attempt_id] = lease
        committing = asyncio.ensure_future(client.commit(claim, 1))
        await asyncio.wait_for(asked.wait(), BOUND)
        before = len(renewals(faults))
        await asyncio.sleep(0.5)  # longer than a beat's interval: nothing may happen in it
        assert len(renewals(faults)) == before
        go_on.set()
        assert (await committing).outcome == "COMMITTED"
        assert lease.ended is not None and losses.told.empty()


async def test_a_commit_whose_answer_was_lost_leaves_the_lease_kept():
    faults = Faults()
    faults.add(k.Commit, never_arrived)
    beats = Faults()
    async with faulty_client(faults, beats) as client:
        _, claim, lease, _ = await keep(client, 1.5)
        client.leases[claim.attempt_id] = lease
        with pytest.raises(Unavailable):
            await client.commit(claim, 1)
        await enough(beats, 2)
        assert lease.lost is None and lease.remaining() > 0


async def test_x26_a_beat_that_meets_ones_own_commit_is_no_loss(client: MemoryClient):
    _, claim, lease, losses = await keep(client, 0.3)
    await client.commit(claim, 1)  # by another road: the lease is not among this client's
    async with asyncio.timeout(BOUND):
        while lease.ended is None:
            await asyncio.sleep(0.005)
    assert losses.told.empty() and lease.lost is None
    with pytest.raises(Fenced, match="COMMITTED"):
        Attempt(client, claim, lease).check()
    refusals = await client.events(task_id="t", names=["refusal"])
    assert all(event.outcome == "ENDED" for event in refusals.items)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("reclaimed", "FENCED/GENERATION"),
        ("cancelled", "CANCELLED"),
        ("revised", "STALE_INPUT"),
        ("raised", "FENCED/EPOCH"),
        ("taken over", "FENCED/STATE"),
    ],
)
async def test_a_refused_renewal_tells_the_holder_why(client: MemoryClient, what: str, says: str):
    _, claim, lease, losses = await keep(client, 1.8)
    match what:
        case "reclaimed":
            await client.reclaim(claim)
        case "cancelled":
            await client.cancel("t")
        case "revised":
            await client.revise("t", 2)
        case "raised":
            pool = await client.pool()
            await client.raise_epoch(expected_epoch=pool.epoch, expected_state_version=pool.state_version)
        case "taken over":
            await client.take_over("t")
    loss = await losses.next()
    assert loss.reason == says
    assert loss.refused is not None
    assert lease.remaining() == 0


async def test_b45_at_the_longest_claim_age_the_holder_is_told_before_the_lease_ends(
    client: MemoryClient, caplog: pytest.LogCaptureFixture
):
    await client.set_policy(max_ttl=1.2, max_claim_age=2.0)
    started = clock.elapsed()
    _, _, lease, losses = await keep(client, 1.2)
    async with asyncio.timeout(BOUND):
        while not lease.exhausted:
            await asyncio.sleep(0.005)
    assert clock.elapsed() - started < 1.9
    assert "max_claim_age" in caplog.text
    loss = await losses.next()
    assert "max_claim_age" in loss.reason
    assert clock.elapsed() - started > 1.9  # to the lease's own end, not only for a window after the last renewal


async def test_a_handler_that_shows_no_sign_of_life_is_not_renewed_for_ever(client: MemoryClient):
    app = App()
    started, cancelled = asyncio.Event(), asyncio.Event()

    @app.task("hung", ttl=0.6, silence=0.3)
    async def hung(attempt: Attempt) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await client.submit(hung.task(task_id="t", max_attempts=1))
    async with Working(Worker(client, app)) as working:
        await asyncio.wait_for(started.wait(), BOUND)
        await asyncio.wait_for(cancelled.wait(), BOUND)
        await reported(client, "t")
    assert working.code == 0


async def test_a_handler_that_says_that_it_is_alive_is_kept(client: MemoryClient):
    app = App()

    @app.task("lively", ttl=1.5, silence=0.8)
    async def lively(attempt: Attempt) -> str:
        end = clock.elapsed() + 2.5
        while clock.elapsed() < end:
            await asyncio.sleep(0.1)
            attempt.alive()
        return "done"

    await client.submit(lively.task(task_id="t"))
    await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND)
    assert await ends_of(client, "t") == ["COMMITTED"]


async def test_the_renewal_thread_ends_with_its_client(client: MemoryClient):
    await client.renewal()
    assert any(thread.name == "fencepost-renewal" for thread in threading.enumerate())
    await client.close()
    async with asyncio.timeout(BOUND):
        while any(thread.name == "fencepost-renewal" for thread in threading.enumerate()):
            await asyncio.sleep(0.005)
