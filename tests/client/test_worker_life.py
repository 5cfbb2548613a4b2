"""Worker: starting, stopping, lost answers, epochs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import Any

import pytest

from fencepost import clock
from fencepost.app import App
from fencepost.client import serving, worker
from fencepost.client.attempt import Attempt, SyncAttempt
from fencepost.client.worker import Worker
from fencepost.kernel import commands as k
from fencepost.testing import MemoryClient
from fencepost.wire import Committed, Refused
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
    state_of,
    until,
)


class Gated:
    """An app whose handler says that it has started and waits to be let go."""

    def __init__(self, **options: Any) -> None:
        self.app = App()
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

        @self.app.task("gated", **options)
        async def gated(attempt: Attempt) -> str:
            self.started.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return "done"

        self.gated = gated

    async def begun(self) -> None:
        await asyncio.wait_for(self.started.wait(), BOUND)


async def raised(client: MemoryClient) -> None:
    """Raise the epoch as another client, which has its own."""
    other = await client.clone()
    pool = await other.pool()
    changed = await other.raise_epoch(expected_epoch=pool.epoch, expected_state_version=pool.state_version)
    assert changed.outcome == "EPOCH_RAISED"
    await other.close()


async def test_a_stop_lets_running_handlers_finish_and_claims_nothing_more(client: MemoryClient):
    play = Gated()
    await client.submit(play.gated.task(task_id="t"))
    async with Working(Worker(client, play.app, concurrency=1)) as working:
        await play.begun()
        working.worker.stop()
        await client.submit(play.gated.task(task_id="u"))
        play.go_on.set()
        assert (await client.result("t", wait=BOUND)).value == "done"
        assert await asyncio.wait_for(working.task, BOUND) == 0
    assert (await client.task("u")).generation == 0


async def test_what_is_not_done_within_the_drain_time_is_released_and_charged_nothing(client: MemoryClient):
    play = Gated()
    await client.submit(play.gated.task(task_id="t"))
    async with Working(Worker(client, play.app, drain_timeout=0.05)) as working:
        await play.begun()
    assert working.code == 0
    assert play.cancelled == 1
    view = await client.task("t")
    assert (view.state, view.end, view.charged_attempts) == ("READY", "RELEASED", 0)


async def test_ten_drains_use_up_no_attempt(client: MemoryClient):
    play = Gated(max_attempts=2)
    await client.submit(play.gated.task(task_id="t"))
    for _ in range(10):
        play.started.clear()
        async with Working(Worker(client, play.app, drain_timeout=0.0)):
            await play.begun()
    view = await client.task("t")
    assert (view.state, view.generation, view.charged_attempts) == ("READY", 10, 0)


async def test_sigterm_drains_and_a_second_one_does_not_wait(client: MemoryClient):
    play = Gated()
    await client.submit(play.gated.task(task_id="t"))
    running = asyncio.ensure_future(Worker(client, play.app, drain_timeout=600.0).run())
    await play.begun()
    os.kill(os.getpid(), signal.SIGTERM)
    done, _ = await asyncio.wait({running}, timeout=0.1)
    assert not done, "the first one waits for the handler"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, BOUND) == 0
    assert await ends_of(client, "t") == ["RELEASED"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_a_handler_that_uses_its_last_moment_to_finish_is_committed(client: MemoryClient):
    app = App()
    started = asyncio.Event()

    @app.task("quick")
    async def quick(attempt: Attempt) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await attempt.checkpoint("so far")
            return "as far as I came"
        return "never"

    await client.submit(quick.task(task_id="t"))
    async with Working(Worker(client, app, drain_timeout=0.0)):
        await asyncio.wait_for(started.wait(), BOUND)
    assert (await client.result("t")).value == "as far as I came"


async def test_cancelling_run_releases_what_runs(client: MemoryClient):
    play = Gated()
    await client.submit(play.gated.task(task_id="t"))
    running = asyncio.ensure_future(Worker(client, play.app).run())
    await play.begun()
    running.cancel()
    await asyncio.wait({running}, timeout=BOUND)
    assert running.cancelled()
    assert await ends_of(client, "t") == ["RELEASED"]


async def test_b07_a_claim_whose_answer_was_lost_is_asked_for_again_and_granted_once():
    faults = Faults()
    faults.add(k.ClaimNext, lost_answer, never_arrived)
    play = Gated()
    play.go_on.set()
    async with faulty_client(faults) as client:
        await client.submit(play.gated.task(task_id="t"))
        async with Working(Worker(client, play.app)):
            assert (await client.result("t", wait=BOUND)).value == "done"
        first, second, third, *_ = faults.request_ids(k.ClaimNext)
        assert first == second == third
        view = await client.task("t")
        assert (view.generation, view.charged_attempts) == (1, 0)


async def test_b07_a_grant_that_was_long_in_coming_is_confirmed_before_any_work():
    faults = Faults()

    async def overtaken(command: Any, act: Any) -> Any:
        claims = await act()
        await client.commit(await client.reclaim(claims[0]), "somebody else's")
        await asyncio.sleep(0.4)  # beyond a beat of the lease
        return claims

    faults.add(k.ClaimNext, overtaken)
    play = Gated(ttl=0.9)
    client = faulty_client(faults)
    async with client:
        await client.submit(play.gated.task(task_id="t"))
        assert await asyncio.wait_for(Worker(client, play.app).run_until_idle(), BOUND) == 0
        assert not play.started.is_set()
        assert (await client.result("t")).value == "somebody else's"


async def test_what_an_interrupted_claim_was_granted_goes_back_at_once():
    faults = Faults()
    granted = asyncio.Event()

    async def granted_then_hangs(command: Any, act: Any) -> Any:
        granted_claims = await act()
        assert len(granted_claims) == 1
        granted.set()
        await asyncio.Event().wait()

    faults.add(k.ClaimNext, granted_then_hangs)
    play = Gated()
    async with faulty_client(faults) as client:
        await client.submit(play.gated.task(task_id="t"))
        async with Working(Worker(client, play.app)) as working:
            await asyncio.wait_for(granted.wait(), BOUND)
        assert working.code == 0
        assert await ends_of(client, "t") == ["RELEASED"]
        assert (await client.task("t")).generation == 1
        assert not play.started.is_set()


async def test_a_commit_whose_answer_was_lost_is_asked_for_again_and_counts_once():
    faults = Faults()
    faults.add(k.Commit, lost_answer, never_arrived)
    play = Gated()
    play.go_on.set()
    async with faulty_client(faults) as client:
        await client.submit(play.gated.task(task_id="t"))
        assert await asyncio.wait_for(Worker(client, play.app).run_until_idle(), BOUND) == 0
        assert await ends_of(client, "t") == ["COMMITTED"]
        assert len(faults.request_ids(k.Commit)) == 3
        assert (await client.events(task_id="t", names=["refusal"])).items == []


async def test_a_failure_whose_answer_was_lost_is_charged_once():
    faults = Faults()
    faults.add(k.Fail, lost_answer)
    app = App()

    @app.task("fails")
    async def fails(attempt: Attempt) -> None:
        raise ValueError("no")

    async with faulty_client(faults) as client:
        await client.submit(fails.task(task_id="t"))
        assert await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND) == 0
        first, second = faults.request_ids(k.Fail)
        assert first == second
        view = await client.task("t")
        assert (view.state, view.charged_attempts) == ("READY", 1)


async def test_a_store_that_never_answers_a_commit_does_not_keep_the_worker_from_ending(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(serving, "INSIST_AT_END", 0.3)
    monkeypatch.setattr(worker, "INSIST_AT_END", 0.3)
    faults = Faults()
    faults.always[k.Commit] = never_arrived
    play = Gated()
    async with faulty_client(faults) as client:
        await client.submit(play.gated.task(task_id="t"))
        async with Working(Worker(client, play.app, drain_timeout=0.05)) as working:
            await play.begun()
            play.go_on.set()
            await until(lambda: asked(faults), "no commit was sent")
            stopped = clock.elapsed()
            working.worker.stop()
            assert await asyncio.wait_for(working.task, BOUND) == 0
            assert clock.elapsed() - stopped < 4


async def asked(faults: Faults) -> bool:
    return bool(faults.request_ids(k.Commit))


async def test_a_closed_intake_is_waited_for(client: MemoryClient):
    play = Gated()
    play.go_on.set()
    closed = await client.close_intake()
    await client.submit(play.gated.task(task_id="t"))
    assert await asyncio.wait_for(Worker(client, play.app).run_until_idle(), BOUND) == 0
    async with Working(Worker(client, play.app)) as working:
        assert isinstance(await client.result("t", wait=0.3), Refused)
        await client.open_intake(expected_state_version=closed.pool.state_version)
        assert (await client.result("t", wait=BOUND)).value == "done"
    assert working.code == 0


async def test_a_raised_epoch_stops_the_worker_with_code_4(client: MemoryClient):
    play = Gated(ttl=0.6)
    await client.submit(play.gated.task(task_id="t"))
    running = asyncio.ensure_future(Worker(client, play.app).run())
    await play.begun()
    await raised(client)
    assert await asyncio.wait_for(running, BOUND) == 4
    assert play.cancelled == 1
    await reported(client, "t")


async def test_a_raised_epoch_is_heard_of_while_a_thread_that_does_not_stop_holds_the_only_slot(client: MemoryClient):
    app = App()
    started, go_on = threading.Event(), threading.Event()

    @app.task("deaf", ttl=0.6)
    def deaf(attempt: SyncAttempt) -> None:
        started.set()
        go_on.wait(BOUND)

    await client.submit(deaf.task(task_id="t"))
    running = asyncio.ensure_future(Worker(client, app, concurrency=1).run())
    await asyncio.to_thread(started.wait, BOUND)
    await raised(client)
    assert await asyncio.wait_for(running, BOUND / 2) == 4
    go_on.set()


async def test_an_idle_worker_stops_with_code_4_too(client: MemoryClient):
    play = Gated()
    running = asyncio.ensure_future(Worker(client, play.app).run())
    await raised(client)
    assert await asyncio.wait_for(running, BOUND) == 4


async def test_on_epoch_adopt_drops_what_ran_and_goes_on_once_the_intake_is_open(client: MemoryClient):
    play = Gated(ttl=0.6)
    await client.submit(play.gated.task(task_id="t"))
    async with Working(Worker(client, play.app, on_epoch="adopt")) as working:
        await play.begun()
        closed = await client.close_intake()
        assert closed.outcome == "INTAKE_CLOSED"
        await raised(client)
        await reported(client, "t")
        assert isinstance(await client.result("t", wait=0.3), Refused)
        assert await client.epoch() == 1, "adopted although the intake is closed"
        play.go_on.set()
        other = await client.clone()
        other._epochs = {}  # as one that connects now
        pool = await other.pool()
        opened = await other.open_intake(expected_state_version=pool.state_version)
        assert opened.outcome == "INTAKE_OPENED", opened
        await other.close()
        assert (await client.result("t", wait=BOUND)).value == "done"
    assert working.code == 0
    assert (await client.task("t")).epoch == 2


async def test_a_store_that_went_back_stops_even_a_worker_that_adopts(client: MemoryClient):
    play = Gated()
    await client.adopt_epoch("default", 7)
    assert await asyncio.wait_for(Worker(client, play.app, on_epoch="adopt").run(), BOUND) == 4


async def test_an_epoch_that_another_user_of_the_client_adopted_is_no_reason_to_stop(client: MemoryClient):
    play = Gated(ttl=0.6)
    await client.submit(play.gated.task(task_id="t"))
    async with Working(Worker(client, play.app)) as working:
        await play.begun()
        pool = await client.pool()
        await client.raise_epoch(expected_epoch=pool.epoch, expected_state_version=pool.state_version)
        await client.adopt_epoch("default")
        play.go_on.clear()
        await until(lambda: taken_again(client), "the task was not claimed again")
        play.go_on.set()
        assert (await client.result("t", wait=BOUND)).value == "done"
    assert working.code == 0


async def taken_again(client: MemoryClient) -> bool:
    return (await client.task("t")).generation == 2


async def test_the_worker_takes_back_what_others_left_behind(client: MemoryClient):
    play = Gated()
    play.go_on.set()
    await client.submit(play.gated.task(task_id="t"))
    assert len(await client.claim_next(owner="gone", ttl=30.0)) == 1
    async with Working(Worker(client, play.app)):
        client.advance(31)
        assert (await client.result("t", wait=BOUND)).value == "done"
    assert await ends_of(client, "t") == ["EXPIRED", "COMMITTED"]


async def test_b12_a_task_that_kills_every_attempt_is_parked_when_its_attempts_are_used_up(client: MemoryClient):
    app = App()
    runs: list[int] = []

    @app.task("poison", max_attempts=3)
    async def poison(attempt: Attempt) -> None:
        runs.append(1)
        raise MemoryError("as if it had been killed")

    await client.submit(poison.task(task_id="t"))
    for _ in range(6):
        assert await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND) == 0
        client.advance(600)
    assert len(runs) == 3
    assert await state_of(client, "t") == "PARKED"


async def test_a_fenced_worker_does_not_send_its_commit_again(client: MemoryClient):
    faults = Faults()
    app = App()

    async with faulty_client(faults) as client:

        @app.task("late")
        async def late(attempt: Attempt) -> str:
            assert isinstance(await client.commit(await client.reclaim(attempt.claim), "newer"), Committed)
            return "older"

        await client.submit(late.task(task_id="t"))
        started = clock.elapsed()
        assert await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND) == 0
        assert clock.elapsed() - started < 5
        assert len(faults.request_ids(k.Commit)) == 2  # the newer one's and the late one
        assert (await client.result("t")).value == "newer"


async def test_what_a_handler_returns_after_the_trust_is_over_is_not_even_sent():
    beats = Faults()
    beats.always[k.Renew] = never_arrived
    faults = Faults()
    app = App()

    @app.task("stubborn", ttl=0.5)
    async def stubborn(attempt: Attempt) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "swallowed"

    async with faulty_client(faults, beats) as client:
        await client.submit(stubborn.task(task_id="t"))
        assert await asyncio.wait_for(Worker(client, app).run_until_idle(), BOUND) == 0
        assert faults.request_ids(k.Commit) == []
        await reported(client, "t")


async def test_a_claim_call_that_hangs_does_not_keep_the_worker_from_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "INSIST_AT_END", 0.3)
    monkeypatch.setattr(worker, "INSIST_AT_END", 0.3)
    faults = Faults()
    faults.always[k.ClaimNext] = acts_then_hangs
    play = Gated()
    async with faulty_client(faults) as client:
        async with Working(Worker(client, play.app)) as working:
            await until(lambda: asked_to_claim(faults), "no claim was sent")
        assert working.code == 0


async def asked_to_claim(faults: Faults) -> bool:
    return bool(faults.request_ids(k.ClaimNext))


async def test_a_max_ttl_that_is_lowered_under_a_running_worker_ends_neither_it_nor_what_it_runs(client: MemoryClient):
    play = Gated(ttl=0.9)
    await client.submit(play.gated.task(task_id="t"))
    async with Working(Worker(client, play.app, concurrency=2)) as working:
        await play.begun()
        await client.set_policy(max_ttl=0.6)
        (lease,) = client.leases.values()
        await until(lambda: _says(lease.terms.ttl == 0.6), "the lease is kept within the new limit")
        assert lease.terms.renew_interval < lease.terms.trust_window < 0.6
        renewed = lease.trusted_until
        await until(lambda: _says(lease.trusted_until > renewed), "it is renewed again")
        await client.submit(play.gated.task(task_id="u"))
        await until(lambda: _claimed(client, "u"), "the worker goes on claiming")
        play.go_on.set()
        assert (await client.result("t", wait=BOUND)).value == "done"
        assert (await client.result("u", wait=BOUND)).value == "done"
    assert working.code == 0 and play.cancelled == 0
    assert await ends_of(client, "t") == ["COMMITTED"]


async def test_a_worker_that_stops_just_after_max_ttl_was_lowered_ends_well():
    faults = Faults()
    faults.add(k.ClaimNext, hangs)
    async with faulty_client(faults) as client, Working(Worker(client, Gated(ttl=0.9).app)) as working:
        await until(lambda: _says(bool(faults.request_ids(k.ClaimNext))), "the worker has asked for a task")
        await client.set_policy(max_ttl=0.6)
        working.worker.stop()  # the open question is asked once more, for what it may have been granted
    assert working.code == 0


async def _says(so: bool) -> bool:
    return so


async def _claimed(client: MemoryClient, task_id: str) -> bool:
    return await state_of(client, task_id) == "CLAIMED"
