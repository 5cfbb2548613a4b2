"""Worker: what becomes of results, errors and refusals."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import msgspec
import pytest

from fencepost.app import App, Final, Snooze
from fencepost.client.attempt import Attempt, SyncAttempt
from fencepost.client.worker import Worker
from fencepost.errors import InvalidRequest
from fencepost.testing import MemoryClient
from fencepost.wire import NewTask
from tests.client.faults import BOUND, Working, ends_of, run, state_of


class Doc(msgspec.Struct):
    title: str


class Summary(msgspec.Struct):
    words: int


async def test_what_a_handler_returns_is_committed_with_its_usage(client: MemoryClient):
    app = App()

    @app.task("summarise")
    async def summarise(attempt: Attempt, input: Doc) -> Summary:
        attempt.usage(tokens=10, usd=0.5)
        attempt.usage(tokens=5)
        return Summary(len(input.title.split()))

    await client.submit(summarise.task(Doc("two words"), task_id="t"))
    assert await run(client, app) == 0
    assert (await client.result("t")).value == {"words": 2}
    (attempt,) = await client.attempts("t")
    assert attempt.end == "COMMITTED"
    assert (attempt.usage["tokens"], attempt.usage["usd"]) == (15, 0.5)
    assert attempt.usage["seconds"] >= 0


async def test_a_handler_may_take_the_attempt_alone(client: MemoryClient):
    app = App()

    @app.task("alone")
    async def alone(attempt: Attempt) -> Any:
        return attempt.input

    await client.submit(alone.task({"x": 1}, task_id="t"))
    await run(client, app)
    assert (await client.result("t")).value == {"x": 1}


async def test_a_plain_function_runs_in_a_thread_with_the_same_names(client: MemoryClient):
    app = App()

    @app.task("plain")
    def plain(attempt: SyncAttempt, input: Doc) -> Any:
        attempt.check()
        attempt.alive()
        attempt.checkpoint({"page": 1})
        attempt.checkpoint({"page": 2})
        attempt.usage(tokens=1)
        assert attempt.remaining() > 0
        return {
            "staged": attempt.stage(["x"]),
            "thread": threading.current_thread() is threading.main_thread(),
            "checkpoint": attempt.checkpoint_data,
        }

    await client.submit(plain.task(Doc("x"), task_id="t"))
    await run(client, app)
    value = (await client.result("t")).value
    assert value["staged"].startswith("sha256:")
    assert value["thread"] is False
    assert value["checkpoint"] == {"page": 2}


async def test_a_checkpoint_goes_to_the_successor_and_parents_bring_their_results(client: MemoryClient):
    app = App()
    seen: list[Any] = []

    @app.task("step")
    async def step(attempt: Attempt, input: Any) -> Any:
        seen.append((attempt.checkpoint_data, attempt.parents))
        if attempt.checkpoint_data is None:
            await attempt.checkpoint({"done": 1})
            raise Snooze(0)
        return "end"

    await client.submit_many([NewTask(1, task_id="p", kind="other"), step.task(2, task_id="t", depends_on=["p"])])
    (parent,) = await client.claim_next(owner="me", kinds=["other"])
    await client.commit(parent, {"r": 7})
    await run(client, app)
    assert seen == [(None, {"p": {"r": 7}}), ({"done": 1}, {"p": {"r": 7}})]
    assert await ends_of(client, "t") == ["RELEASED", "COMMITTED"]


async def test_an_exception_is_a_failure_that_is_tried_again_after_a_backoff(client: MemoryClient):
    app = App()
    tries: list[int] = []

    @app.task("flaky")
    async def flaky(attempt: Attempt, input: Any) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("the first one fails")
        return len(tries)

    await client.submit(flaky.task(task_id="t"))
    await run(client, app)
    (first,) = await client.attempts("t")
    assert first.end == "FAILED"
    assert "ValueError: the first one fails" in first.error
    assert "Traceback" in first.error
    client.advance(10)
    await run(client, app)
    assert (await client.result("t")).value == 2


async def test_the_end_of_a_long_traceback_is_what_is_kept(client: MemoryClient):
    app = App()

    @app.task("long")
    async def long(attempt: Attempt) -> None:
        raise ValueError("x" * 100_000 + " the point\0")

    await client.submit(long.task(task_id="t"))
    await run(client, app)
    (attempt,) = await client.attempts("t")
    assert attempt.error.rstrip().endswith("the point\N{SYMBOL FOR NULL}")
    assert attempt.error.startswith("… cut: ")
    assert len(attempt.error.encode()) <= 16 << 10


async def test_final_parks_the_task(client: MemoryClient):
    app = App()

    @app.task("never")
    async def never(attempt: Attempt) -> None:
        raise Final("no such document")

    await client.submit(never.task(task_id="t"))
    await run(client, app)
    assert await state_of(client, "t") == "PARKED"
    (attempt,) = await client.attempts("t")
    assert attempt.error == "no such document"


async def test_snooze_gives_the_task_back_later_and_charges_nothing(client: MemoryClient):
    app = App()
    calls: list[int] = []

    @app.task("later")
    async def later(attempt: Attempt) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise Snooze(60)
        return "now"

    await client.submit(later.task(task_id="t"))
    await run(client, app)
    view = await client.task("t")
    assert (view.state, view.charged_attempts, view.end) == ("READY", 0, "RELEASED")
    await run(client, app)
    assert len(calls) == 1
    client.advance(61)
    await run(client, app)
    assert (await client.result("t")).value == "now"


async def test_an_input_that_does_not_fit_is_a_final_failure_that_says_why(client: MemoryClient):
    app = App()

    @app.task("doc")
    async def doc(attempt: Attempt, input: Doc) -> None: ...

    await client.submit(NewTask({"titel": "x"}, task_id="t", kind="doc"))
    await run(client, app)
    assert await state_of(client, "t") == "PARKED"
    (attempt,) = await client.attempts("t")
    assert "does not fit" in attempt.error
    assert "title" in attempt.error


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("a\0b", "U+0000"),
        ({"k\0": 1}, "U+0000"),
        ("\ud800", "surrogates"),
        (float("nan"), "NaN"),
        (float("inf"), "NaN"),
        (1 << 60, "2^53"),
        ("x" * (2 << 20), "limit of 1048576"),
        (b"x" * (2 << 20), "limit of 1048576"),
        (object(), "result cannot be kept"),
        ({1: "a number as a key"}, "keys must be strings"),
    ],
    ids=["nul", "nul-key", "surrogate", "nan", "inf", "2^60", "large", "large-binary", "object", "number-key"],
)
async def test_b29_a_result_that_cannot_be_kept_is_a_final_failure_not_a_loop(
    client: MemoryClient, result: Any, says: str
):
    app = App()

    @app.task("odd")
    async def odd(attempt: Attempt) -> Any:
        return result

    await client.submit(odd.task(task_id="t"))
    assert await run(client, app) == 0
    assert await state_of(client, "t") == "PARKED"
    (attempt,) = await client.attempts("t")
    assert attempt.end == "FAILED"
    assert says in attempt.error


@pytest.mark.parametrize("result", ["", "\uffff", b"", b"\0\xff", None, [], "\u202eright to left"])
async def test_b29_odd_but_storable_results_come_back_exactly(client: MemoryClient, result: Any):
    app = App()

    @app.task("odd")
    async def odd(attempt: Attempt) -> Any:
        return result

    await client.submit(odd.task(task_id="t"))
    await run(client, app)
    assert (await client.result("t")).value == result


async def test_a_time_limit_fails_the_attempt_and_says_so(client: MemoryClient):
    app = App()

    @app.task("slow", timeout=0.05)
    async def slow(attempt: Attempt) -> None:
        await asyncio.Event().wait()

    await client.submit(slow.task(task_id="t"))
    await run(client, app)
    view = await client.task("t")
    assert (view.state, view.charged_attempts) == ("READY", 1)
    (attempt,) = await client.attempts("t")
    assert "time limit of 0.05 s" in attempt.error


async def test_b24_only_kinds_that_the_app_has_are_claimed(client: MemoryClient):
    app = App()

    @app.task("common")
    async def common(attempt: Attempt) -> str:
        return "done"

    await client.submit_many([NewTask(1, task_id="new", kind="common@2"), common.task(task_id="old")])
    await run(client, app)
    assert await state_of(client, "old") == "COMMITTED"
    view = await client.task("new")
    assert (view.state, view.generation, view.charged_attempts) == ("READY", 0, 0)


async def test_a_worker_never_claims_more_than_it_can_start(client: MemoryClient):
    app = App()
    gate = asyncio.Event()
    running = asyncio.Semaphore(0)

    @app.task("gated")
    async def gated(attempt: Attempt) -> None:
        running.release()
        await gate.wait()

    await client.submit_many([gated.task(task_id=f"t{n}") for n in range(5)])
    async with Working(Worker(client, app, concurrency=2)) as working:
        for _ in range(2):
            await asyncio.wait_for(running.acquire(), BOUND)
        assert len((await client.tasks(state="CLAIMED")).items) == 2
        gate.set()
        for n in range(5):
            await client.result(f"t{n}", wait=BOUND)
    assert working.code == 0


async def test_sys_exit_in_a_handler_is_its_failure_and_not_the_workers_end(client: MemoryClient):
    app = App()

    @app.task("quits")
    async def quits(attempt: Attempt) -> None:
        sys.exit(3)

    @app.task("quits-in-thread")
    def quits_in_thread(attempt: SyncAttempt) -> None:
        sys.exit(3)

    await client.submit_many([quits.task(task_id="t"), quits_in_thread.task(task_id="u")])
    assert await run(client, app) == 0
    assert await ends_of(client, "t") == ["FAILED"]
    assert await ends_of(client, "u") == ["FAILED"]


async def test_a_cancellation_from_inside_is_a_failure(client: MemoryClient):
    app = App()

    @app.task("odd")
    async def odd(attempt: Attempt) -> None:
        raise asyncio.CancelledError

    await client.submit(odd.task(task_id="t"))
    await run(client, app)
    assert await ends_of(client, "t") == ["FAILED"]


async def test_a_handler_that_ends_its_claim_itself_is_left_alone(client: MemoryClient):
    app = App()

    @app.task("own")
    async def own(attempt: Attempt) -> str:
        await client.commit(attempt.claim, "mine")
        return "ignored"

    await client.submit(own.task(task_id="t"))
    assert await run(client, app) == 0
    assert (await client.result("t")).value == "mine"
    assert (await client.events(task_id="t", names=["refusal"])).items == []


async def test_settings_that_cannot_be_safe_are_refused(client: MemoryClient):
    app = App()

    @app.task("a", ttl=30)
    async def a(attempt: Attempt) -> None: ...

    for options, field in (
        ({"renew_interval": 26.0}, "renew_interval"),
        ({"trust_window": 30.0}, "trust_window"),
        ({"concurrency": 0}, "concurrency"),
        ({"queues": "default"}, "queues"),
        ({"queues": []}, "queues"),
        ({"on_epoch": "ignore"}, "on_epoch"),
        ({"owner": ""}, "owner"),
        ({"drain_timeout": -1.0}, "drain_timeout"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            Worker(client, app, **options)
    await client.set_policy(max_ttl=20.0)
    with pytest.raises(InvalidRequest, match="max_ttl"):
        await run(client, app)


async def test_an_unknown_pool_ends_the_worker_with_code_1(client: MemoryClient):
    app = App()

    @app.task("a")
    async def a(attempt: Attempt) -> None: ...

    assert await run(client, app, pool="nowhere") == 1
