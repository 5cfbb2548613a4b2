"""B35: numbers: big integers, NaN, the spelling of floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import Claim, InvalidRequest, NewTask, Result, Submitted
from tests.cases.cli import answered
from tests.cases.cli import fencepost as run
from tests.conformance.worlds import WORLDS, World


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return WORLDS[request.param](tmp_path)


LOSSY: dict[str, Any] = {
    "2^53+1": 2**53 + 1,
    "-2^53-1": -(2**53) - 1,
    "2^63": 2**63,
    "10^30": 10**30,
    "5000 digits": 10**4999,
    "1e400": float("1e400"),
    "NaN": float("nan"),
    "-Infinity": float("-inf"),
}
EXACT: dict[str, Any] = {
    "2^53": 2**53,
    "-2^53": -(2**53),
    "-0.0": -0.0,
    "1.0": 1.0,
    "the text 1e5": "1e5",
    "the text of 2^63": str(2**63),
    "a tenth": 0.1,
    "the least": 5e-324,
    "the largest": 1.7976931348623157e308,
    "a bool": True,
}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


async def test_b35_what_cannot_come_back_exactly_is_refused_with_its_field_and_the_rest_comes_back_exactly(
    world: World,
) -> None:
    try:
        client = await world.client()
        await client.submit(NewTask(1, task_id="t"))
        [claim] = await client.claim_next(owner="A")  # type: ignore[misc]
        for name, value in {**LOSSY, "100 000 levels": deep(100_000)}.items():
            for wrapped in (value, {"in": [value]}):
                with pytest.raises(InvalidRequest, match="input"):
                    await client.submit(NewTask(wrapped, task_id=name))
                with pytest.raises(InvalidRequest, match="result"):
                    await client.commit(claim, wrapped)
                with pytest.raises(InvalidRequest, match="checkpoint"):
                    await client.checkpoint(claim, wrapped)
        assert await client.commit(claim, "fine")
        for name, value in EXACT.items():
            await client.submit(NewTask({"is": value}, task_id=name))
            [claim] = await client.claim_next(owner="A")  # type: ignore[misc]
            there = Claim.from_json(claim.to_json())  # a hop over JSON
            committed = await client.commit(there, there.input)
            result = await client.result(name)
            assert isinstance(result, Result) and isinstance(committed, fencepost.Committed)
            for got in (claim.input, there.input, result.value):
                assert repr(got["is"]) == repr(value), name
            assert result.result_digest == claim.input_digest
        assert len((await client.tasks()).items) == len(EXACT) + 1
        assert (await client.report("audit")).clean
    finally:
        await world.close()


async def test_b35_1_and_1_point_0_are_the_same_number_and_the_text_is_not(world: World) -> None:
    try:
        client = await world.client()
        first = await client.submit(NewTask({"n": 1}, task_id="t"))
        assert isinstance(first, Submitted)
        for same in (1.0, 1e0):
            again = await client.submit(NewTask({"n": same}, task_id="t"))
            assert isinstance(again, Submitted) and not again.created
        for other in ("1", True, 1.5):
            refused = await client.submit(NewTask({"n": other}, task_id="t"))
            assert isinstance(refused, fencepost.Refused) and refused.outcome == "CONFLICT", other
    finally:
        await world.close()


BAD_LINES = {
    "2^53+1": "9007199254740993",
    "a long integer": "1" + "0" * 4999,
    "1e400": "1e400",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "100 000 levels": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_b35_a_bad_number_in_a_file_is_wrong_usage_with_its_line_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"input": 1}}\n{{"input": {{"n": {BAD_LINES[name]}}}}}\n')
    answered(tmp_path, "submit", "--input", "0", "--task-id", "before")
    done = run(tmp_path, "submit", "t.jsonl", "--json")
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr and b"line 2" in done.stdout
    assert [item["task_id"] for item in answered(tmp_path, "tasks")["items"]] == ["before"]


def test_b35_the_command_line_prints_the_digits_as_they_are(tmp_path: Path) -> None:
    spelled = '{"exact": 9007199254740992, "text": "1e5", "minus": -0.0, "tenth": 0.1, "one": 1.0}'
    answered(tmp_path, "submit", "--input", spelled, "--task-id", "t")
    done = run(tmp_path, "work", "--until-idle", "--result", "json", "--", "cat")
    assert done.returncode == 0, done.stderr
    printed = run(tmp_path, "result", "t").stdout.decode()
    for digits in ("9007199254740992", '"1e5"', "-0.0", "0.1"):
        assert digits in printed, printed
    shown = answered(tmp_path, "show", "t")
    assert shown["task"]["input"] == json.loads(spelled)
    listed = answered(tmp_path, "tasks")
    assert listed["items"][0]["state"] == "COMMITTED"
