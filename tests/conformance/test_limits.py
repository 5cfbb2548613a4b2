"""Limits and bad input: refused alike on every store, the field named, nothing lost or half-written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest
from fencepost.wire import NewTask, Result, Submitted
from tests.conformance.actions import claimed, committed, given, state_of
from tests.conformance.worlds import World


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD_VALUES = {
    "NaN": math.nan,
    "infinity": math.inf,
    "beyond 2^53": 2**53 + 1,
    "2**63": 2**63,
    "10**30": 10**30,
    "NUL in text": "a\0b",
    "NUL in a key": {"a\0b": 1},
    "lone surrogate": "\ud800",
    "too deep": nested(101),
    "far too deep": nested(100_000),
    "number as a key": {1: 2},
    "a set": {1, 2},
    "bytes inside": {"v": b"x"},
    "over a MiB": "x" * (1 << 20),
    "over a MiB of bytes": b"x" * ((1 << 20) + 1),
}

GOOD_VALUES = {
    "2^53": 2**53,
    "-0.0": -0.0,
    "1.0": 1.0,
    "1e5 as text": "1e5",
    "empty text": "",
    "U+FFFF": "\uffff",
    "right-to-left mark": "a\u200fb",
    "above the BMP": {"\U0001f600": "\U0001f600", "\ufb33": 1},
    "decomposed": "cafe\u0301",
    "bytes": bytes(range(256)),
    "null": None,
    "as deep as allowed": nested(100),
    "1e300": 1e300,
    "as large as allowed": "x" * ((1 << 20) - 2),
}


@pytest.mark.parametrize("name", sorted(BAD_VALUES))
async def test_what_has_no_lossless_json_form_is_refused_and_the_task_goes_on(client: Client, name: str) -> None:
    value = BAD_VALUES[name]  # B29, B35
    with pytest.raises(InvalidRequest, match="input"):
        await client.submit(NewTask(value, task_id="bad"))
    await given(client)
    claim = await claimed(client)
    with pytest.raises(InvalidRequest, match="result"):
        await client.commit(claim, value)
    with pytest.raises(InvalidRequest, match="checkpoint"):
        await client.checkpoint(claim, value)
    with pytest.raises(InvalidRequest, match="content"):
        await client.stage(claim, value)
    assert await state_of(client) == "CLAIMED"
    await committed(client, claim, "still commits")
    page = await client.tasks()
    assert [view.task_id for view in page.items] == ["t"]


@pytest.mark.parametrize("name", sorted(GOOD_VALUES))
async def test_what_is_taken_comes_back_as_it_was(client: Client, world: World, name: str) -> None:
    value = GOOD_VALUES[name]
    assert isinstance(await client.submit(NewTask(value, task_id="t")), Submitted)
    claim = await claimed(client)
    assert claim.input == value
    await committed(client, claim, value)
    result = await (await world.client()).result("t")
    assert isinstance(result, Result) and result.value == value and type(result.value) is type(value)


async def test_equal_json_values_have_equal_digests_whatever_their_spelling(client: Client) -> None:  # B30
    first = await client.submit(NewTask({"b": [1, {"y": 1, "x": 1.0}], "a": None}, task_id="t"))
    again = await client.submit(NewTask({"a": None, "b": [1.0, {"x": 1, "y": 1}]}, task_id="t"))
    assert isinstance(first, Submitted) and isinstance(again, Submitted)
    assert not again.created and again.task.input_digest == first.task.input_digest


BAD_IDS = ["", "x" * 201, "a\0b", "a\nb", "tab\t", "\x7f", "\x85", "\ud800", 7, None]


@pytest.mark.parametrize("bad", BAD_IDS, ids=[ascii(value)[:12] for value in BAD_IDS])
@pytest.mark.parametrize("field", ["task_id", "kind", "queue", "pool", "depends_on", "node_id"])
async def test_ids_have_1_to_200_characters_and_no_control_characters(client: Client, field: str, bad: Any) -> None:
    if bad is None and field == "task_id":
        return  # generated
    more = {field: [bad] if field == "depends_on" else bad}
    with pytest.raises(InvalidRequest, match=field):
        await client.submit(NewTask(1, **more))


async def test_ids_are_compared_exactly(client: Client) -> None:
    for name in ("A", "a", " a", "a ", "cafe\u0301", "caf\u00e9", "\u200f", "x" * 200):
        await given(client, name)
    page = await client.tasks()
    assert len(page.items) == 8


async def test_numbers_outside_their_bounds_are_wrong_calls(client: Client) -> None:
    for more in (
        {"priority": 1001},
        {"priority": -1001},
        {"priority": True},
        {"priority": 1.5},
        {"max_attempts": 0},
        {"delay": -1.0},
        {"delay": math.nan},
        {"delay": "soon"},
        {"available_at": datetime(2030, 1, 1)},  # noqa: DTZ001 (the naive datetime is what is refused)
        {"available_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1.0},
        {"on_failure": "explode"},
    ):
        with pytest.raises(InvalidRequest, match=next(iter(more)).split("_")[0]):
            await client.submit(NewTask(1, **more))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="at most 10000"):
        await client.submit_many([NewTask(1)] * 10_001)
    with pytest.raises(InvalidRequest, match="limit"):
        await client.claim_next(owner="A", limit=0)
    with pytest.raises(InvalidRequest, match="queues"):
        await client.claim_next(owner="A", queues=[])
    with pytest.raises(InvalidRequest, match="queues"):
        await client.claim_next(owner="A", queues="default")
    with pytest.raises(InvalidRequest, match="owner"):
        await client.claim_next(owner="")


async def test_usage_has_at_most_twenty_numeric_keys(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    for wrong in ({f"k{n}": 1.0 for n in range(21)}, {"usd": math.nan}, {"usd": "1"}, {"usd": -1.0}, {"usd": True}):
        with pytest.raises(InvalidRequest, match="usage"):
            await client.usage(claim, **wrong)  # type: ignore[arg-type]
    await committed(client, claim, 1, usage={"tokens": 5})
    assert (await client.attempts("t"))[0].usage == {"tokens": 5}


async def test_a_long_error_text_is_cut_with_a_mark_and_nul_is_kept_visible(client: Client) -> None:
    await given(client)
    await client.fail(await claimed(client), "boom \0 " + "é" * 40_000)
    error = (await client.attempts("t"))[0].error
    assert error is not None and len(error.encode()) <= 16 << 10
    assert "cut" in error and "\u2400" in error


async def test_structs_and_dataclasses_are_taken_as_their_fields(client: Client) -> None:
    class Doc(msgspec.Struct):
        name: str
        pages: int

    @dataclass
    class Summary:
        words: int

    class Raw(msgspec.Struct):
        data: bytes

    with pytest.raises(InvalidRequest, match="bytes has no JSON form"):  # base64 would be another value
        await client.submit(NewTask(Raw(b"x")))
    await given(client, "t", Doc("a", 3))
    claim = await claimed(client)
    assert claim.input == {"name": "a", "pages": 3}
    await committed(client, claim, Summary(7))
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == {"words": 7}


async def test_what_is_no_claim_is_a_wrong_call_at_every_door(client: Client) -> None:
    await given(client)
    refused: Any = await client.claim("t", expected_state_version=9, owner="A")
    assert refused.outcome == "CONFLICT"
    for no_claim in (refused, None, "t"):
        for call in (
            client.renew(no_claim),
            client.renew_many([no_claim]),
            client.checkpoint(no_claim, 1),
            client.stage(no_claim, 1),
            client.usage(no_claim, tokens=1),
            client.commit(no_claim, 1),
            client.release(no_claim),
            client.fail(no_claim, "why"),
        ):
            with pytest.raises(InvalidRequest, match="claim: must be a Claim"):
                await call
        with pytest.raises(InvalidRequest, match="claim: must be a Claim"):
            client.hold(no_claim)
    assert await state_of(client) == "READY"


async def test_wrong_shapes_of_calls_are_named(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    anything: Any = None
    calls = (
        ("tasks", lambda: client.submit_many(anything)),
        ("tasks", lambda: client.submit_many(NewTask(n) for n in range(2))),  # type: ignore[arg-type]
        ("spawn", lambda: client.commit(claim, 1, spawn="t")),  # type: ignore[arg-type]
        ("request_id", lambda: client.submit(NewTask(1), request_id="")),
        ("request_id", lambda: client.renew(claim, request_id="")),
        ("request_id", lambda: client.cancel("t", request_id="")),
        ("request_ids", lambda: client.renew_many([claim], request_ids=[])),
        ("retry", lambda: client.fail(claim, "why", retry="no")),  # type: ignore[arg-type]
        ("pool", lambda: client.adopt_epoch("nowhere")),
    )
    for field, call in calls:
        with pytest.raises(InvalidRequest) as raised:
            await call()
        assert raised.value.field == field
    assert await state_of(client) == "CLAIMED"
    assert len((await client.tasks()).items) == 1
