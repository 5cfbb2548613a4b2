"""B29: a result that the database cannot store wedges the task."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import Committed, Done, InvalidRequest, NewTask, Result, TaskView
from tests.conformance.worlds import WORLDS, World
from tests.faults.stage import Stage, on_every_store, until

UNSTORABLE = ["nul", "surrogate", "nan", "infinity", "huge", "large", "deep", "key"]
STORABLE = {"empty": "", "U+FFFF": "\uffff", "set": ["a", "b", "c"]}


@on_every_store
async def test_b29_a_handlers_unstorable_result_parks_its_task_with_the_reason_and_the_worker_goes_on(
    stage: Stage,
) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(name, task_id=name, kind="odd") for name in (*UNSTORABLE, *STORABLE)])
    worker = await stage.worker("A", ttl=5.0, concurrency=4)

    async def all_ended() -> bool:
        page = await client.tasks(state=["PARKED", "COMMITTED"])
        return len(page.items) == len(UNSTORABLE) + len(STORABLE)

    await until(all_ended, within=30.0)
    for name in UNSTORABLE:
        view = await client.task(name)
        assert isinstance(view, TaskView) and (view.state, view.end) == ("PARKED", "FAILED"), name
        [attempt] = await client.attempts(name)  # no retry loop: the same handler would return it again
        assert attempt.error is not None and "result" in attempt.error
    for name, value in STORABLE.items():
        result = await client.result(name)
        assert isinstance(result, Result) and result.value == value
    # Cleanly ended by a person: cancelled, or tried again after the handler was mended.
    assert isinstance(await client.cancel("nul"), Done)
    assert isinstance(await client.reopen("nan"), Done)
    await client.submit(NewTask("x", task_id="next", kind="echo"))
    assert isinstance(await client.result("next", wait=20.0), Result)
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    await stage.audit()


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return WORLDS[request.param](tmp_path)


REFUSED: dict[str, Any] = {
    "NUL in a value": {"text": "a\0b"},
    "NUL in a key": {"a\0b": 1},
    "a lone surrogate": "\ud800",
    "20 MiB": "x" * (20 << 20),
    "20 MiB of bytes": b"x" * (20 << 20),
}
KEPT: dict[str, Any] = {
    "invalid UTF-8, as bytes": b"\xff\xfe\x00\x80",
    "an empty string": "",
    "no bytes": b"",
    "U+FFFF": {"\uffff": "\uffff"},
    "right-to-left marks": "\u200f\u202eabc",
    "the escape, spelled out": "\\u0000",
}


async def test_b29_a_refused_result_names_the_field_and_leaves_the_task_to_be_ended(world: World) -> None:
    try:
        client = await world.client()
        await client.submit(NewTask(1, task_id="t"))
        [claim] = await client.claim_next(owner="A")  # type: ignore[misc]
        for name, value in REFUSED.items():
            with pytest.raises(InvalidRequest, match="result"):
                await client.commit(claim, value)
            with pytest.raises(InvalidRequest, match="content"):
                await client.stage(claim, value)
            view = await client.task("t")
            assert isinstance(view, TaskView) and view.state == "CLAIMED", name
        failed = await client.fail(claim, "error text with \0 and \ud800 in it", retry=False)
        assert isinstance(failed, Done) and failed.state == "PARKED"
        [attempt] = await client.attempts("t")
        assert attempt.error is not None and "\0" not in attempt.error and attempt.error.startswith("error text with")
        assert (await client.report("audit")).clean
    finally:
        await world.close()


async def test_b29_what_is_kept_comes_back_byte_for_byte(world: World) -> None:
    try:
        client = await world.client()
        for name, value in KEPT.items():
            await client.submit(NewTask(value, task_id=name))
            [claim] = await client.claim_next(owner="A\u200f")  # type: ignore[misc]
            assert claim.input == value and type(claim.input) is type(value), name
            assert claim.owner_id == "A\u200f"
            assert isinstance(await client.checkpoint(claim, value), Done)
            assert isinstance(await client.commit(claim, value), Committed)
            result = await client.result(name)
            assert isinstance(result, Result) and result.value == value and type(result.value) is type(value), name
        assert (await client.report("audit")).clean
    finally:
        await world.close()


async def test_b29_ids_with_marks_are_kept_exactly_and_control_characters_are_refused(world: World) -> None:
    try:
        client = await world.client()
        odd = ["x\u200f", "\u202ex", "x", "x ", "X", "\uffff", "e\u0301", "\u00e9"]
        await client.submit_many([NewTask(n, task_id=task_id) for n, task_id in enumerate(odd)])
        for n, task_id in enumerate(odd):
            view = await client.task(task_id)
            assert isinstance(view, TaskView) and (view.task_id, view.input) == (task_id, n)
        for field, call in {
            "task_id": client.submit(NewTask(1, task_id="a\0b")),
            "owner": client.claim_next(owner="a\0b"),
            "queue": client.submit(NewTask(1, queue="a\0b")),
        }.items():
            with pytest.raises(fencepost.InvalidRequest, match=field):
                await call
    finally:
        await world.close()
