"""B35, for effects: numbers of payloads and receipts come back exactly, or are refused before anything is sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost import InvalidRequest
from fencepost.effects.base import Call, Happened, Outcome
from fencepost.effects.failures import EffectUnknown, PayloadConflict
from tests.cases.cli import answered, fencepost
from tests.cases.sending import Job, Tool, job, keyed
from tests.cases.test_b35_numbers import BAD_LINES, EXACT, LOSSY, deep

__all__ = ["job"]


class Telling(Tool):
    """Acts, and says this."""

    def __init__(self, receipt: Any) -> None:
        super().__init__("telling")
        self.receipt = receipt

    async def execute(self, call: Call) -> Outcome:
        self.calls.append(call)
        return Happened(self.receipt)


async def test_b35_a_payload_that_cannot_come_back_exactly_is_refused_and_nothing_is_sent(job: Job) -> None:
    tool = keyed()
    claim = await job.claim()
    for value in (*LOSSY.values(), deep(100_000)):
        for payload in (value, {"in": [value]}):
            with pytest.raises(InvalidRequest, match="payload"):
                await job.send(claim, payload, tool)
    assert tool.calls == []
    assert (await job.client.effects(task_id=job.task_id)).items == []
    await job.client.commit(claim, "done")
    await job.audit()


async def test_b35_the_digits_of_a_payload_reach_the_tool_a_successor_and_every_list(job: Job) -> None:
    tool = keyed(lose=len(EXACT))
    a = await job.claim()
    for name, value in EXACT.items():
        with pytest.raises(EffectUnknown):
            await job.send(a, {"is": value}, tool, name)
    b = await job.next(a)
    for name, value in EXACT.items():
        await job.send(b, {"is": value}, tool, name, patience=10.0)
        sent = [call.payload["is"] for call in tool.calls if call.slot == name]
        for got in (*sent, (await job.effect(name)).payload["is"]):
            assert repr(got) == repr(value), name
    await job.client.commit(b, "done")
    await job.audit()


async def test_b35_1_and_1_point_0_are_one_payload_and_the_text_is_another(job: Job) -> None:
    tool = keyed()
    claim = await job.claim()
    await job.send(claim, {"n": 1}, tool)
    for same in (1.0, 1e0):
        assert await job.send(claim, {"n": same}, tool) == {"call": 1}
    for other in ("1", True, 1.5):
        with pytest.raises(PayloadConflict):
            await job.send(claim, {"n": other}, tool)
    assert len(tool.calls) == 1


@pytest.mark.parametrize("name", [*LOSSY, "100 000 levels"])
async def test_b35_a_receipt_with_a_number_that_has_no_exact_form_is_kept_visibly_and_the_effect_happened(
    job: Job, name: str
) -> None:
    value = LOSSY[name] if name in LOSSY else deep(100_000)
    tool = Telling({"amount": value})
    a = await job.claim()
    receipt = await job.send(a, "X", tool)
    assert receipt["cut"] is True
    if isinstance(value, int) and value < 10**100:
        assert str(value) in receipt["text"], "the digits are there, as text"
    assert (await job.effect()).receipt == receipt
    assert await job.send(await job.next(a), "X", tool) == receipt
    assert len(tool.calls) == 1
    assert len((await job.client.effects()).items) >= 1  # one odd receipt breaks no list
    await job.audit()


@pytest.mark.parametrize("name", EXACT)
async def test_b35_the_digits_of_a_receipt_come_back(job: Job, name: str) -> None:
    a = await job.claim()
    first = await job.send(a, "X", Telling({"is": EXACT[name]}))
    again = await job.send(await job.next(a), "X", Telling(None))
    for got in (first, again, (await job.effect()).receipt):
        assert repr(got["is"]) == repr(EXACT[name])


TOOL = """
import json
from fencepost.effects.base import Happened

class Echo:
    def __init__(self, declaration):
        self.declaration = declaration

    async def execute(self, call):
        with open("calls.jsonl", "a") as calls:
            calls.write(json.dumps(call.payload) + "\\n")
        return Happened(call.payload)
"""


def test_b35_the_command_line_keeps_the_digits_and_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    spelled = '{"exact": 9007199254740992, "text": "1e5", "minus": -0.0, "tenth": 0.1, "one": 1.0}'
    (tmp_path / "echo_tool.py").write_text(TOOL)
    (tmp_path / "fencepost.toml").write_text('[downstreams.echo]\ntype = "echo_tool:Echo"\n')
    (tmp_path / "good.json").write_text(spelled)
    effect = f"{sys.executable} -m fencepost effect"
    lines = [f"{effect} good --using echo < good.json > receipt.json"]
    for n, name in enumerate(("2^53+1", "NaN")):
        (tmp_path / f"bad{n}.json").write_text(f'{{"n": {BAD_LINES[name]}}}')
        lines.append(f"{{ {effect} bad{n} --using echo < bad{n}.json 2>> refused.txt; test $? = 2; }}")
    answered(tmp_path, "submit", "--input", "1", "--task-id", "t")
    done = fencepost(tmp_path, "work", "--until-idle", "--", "sh", "-c", " && ".join(lines) + " && echo 1")
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in (tmp_path / "refused.txt").read_bytes()
    assert (tmp_path / "calls.jsonl").read_text().splitlines() == [spelled]
    for text in (
        (tmp_path / "receipt.json").read_text(),
        fencepost(tmp_path, "effects", "--task", "t").stdout.decode(),
    ):
        for digits in ("9007199254740992", '"1e5"', "-0.0", "0.1", "1.0"):
            assert digits in text, text
    [effect_shown] = answered(tmp_path, "effects", "--task", "t")["items"]
    assert repr(effect_shown["payload"]) == repr(effect_shown["receipt"]) == repr(json.loads(spelled))
