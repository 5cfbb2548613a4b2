"""B30, for effects: the same payload has one digest, however, wherever and by whomever it is spelled."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost import InvalidRequest
from fencepost.effects.failures import EffectUnknown, PayloadConflict
from tests.cases.cli import answered, fencepost
from tests.cases.sending import Job, job, keyed
from tests.cases.test_b30_canonical_order import DIFFERENT, VECTORS, expected, shuffled

__all__ = ["job"]


@dataclass
class Order:
    number: int
    to: str


class Parcel(msgspec.Struct):
    number: int
    to: str


async def test_b30_a_retry_spelled_otherwise_is_the_same_effect_and_a_changed_payload_a_conflict(job: Job) -> None:
    tool, dice = keyed(lose=len(VECTORS)), random.Random(30)
    a = await job.claim()
    for name, value in VECTORS.items():
        with pytest.raises(EffectUnknown):
            await job.send(a, value, tool, name)
        view = await job.effect(name)
        assert view.payload_digest == expected(value), name
    b = await job.next(a)
    for name, value in VECTORS.items():
        stored = (await job.effect(name)).payload
        for again in (shuffled(value, dice), json.loads(json.dumps(value)), stored):
            await job.send(b, again, tool, name, patience=10.0)
    for one, other in DIFFERENT:
        with pytest.raises(PayloadConflict):
            await job.send(b, VECTORS[one], tool, other)
    assert {name: len([call for call in tool.calls if call.slot == name]) for name in VECTORS} == dict.fromkeys(
        VECTORS, 2
    )
    await job.client.commit(b, "done")
    await job.audit()


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"n": 1.0, "b": [1, 2]}, {"b": (1.0, 2), "n": 1}),
        (Order(7, "bob"), {"to": "bob", "number": 7}),
        ({"to": "bob", "number": 7}, Parcel(7, "bob")),
    ],
    ids=["numbers and tuples", "a dataclass", "a struct"],
)
async def test_b30_every_call_carries_the_payload_as_it_was_bound(job: Job, first: Any, again: Any) -> None:
    """What a repeat sends is, to the last digit, what the first call sent: a service that compares texts sees one."""
    tool = keyed(lose=1)
    a = await job.claim()
    with pytest.raises(EffectUnknown):
        await job.send(a, first, tool)
    b = await job.next(a)
    await job.send(b, again, tool, patience=10.0)
    sent, repeated = (call.payload for call in tool.calls)
    assert repr(sent) == repr(repeated) == repr((await job.effect()).payload)
    assert tool.calls[0].key == tool.calls[1].key
    await job.audit()


async def test_b30_what_a_handler_changes_while_it_waits_is_not_sent(job: Job) -> None:
    """What is bound and what is sent are the same value, although the handler still holds the object."""
    tool, basket = keyed(), {"items": ["a"]}
    claim = await job.claim()
    prepare = job.client.prepare

    async def prepared(*arguments: Any, **more: Any) -> Any:
        answer = await prepare(*arguments, **more)
        basket["items"].append("b")  # another coroutine of the handler, in the meantime
        return answer

    job.client.prepare = prepared  # type: ignore[method-assign]
    await job.send(claim, basket, tool)
    assert tool.calls[0].payload == (await job.effect()).payload == {"items": ["a"]}
    await job.audit()


TOOL = """
from fencepost.effects.base import Happened

class Echo:
    def __init__(self, declaration):
        self.declaration = declaration

    async def execute(self, call):
        return Happened(call.payload)
"""


def test_b30_the_command_line_binds_alike_under_every_locale_and_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "echo_tool.py").write_text(TOOL)
    (tmp_path / "fencepost.toml").write_text('[downstreams.echo]\ntype = "echo_tool:Echo"\n')
    value = {name: VECTORS[name] for name in ("keys at three levels", "above the BMP", "case and dots", "numbers")}
    answered(tmp_path, "submit", "--input", "1", "--task-id", "t")
    lines = []
    for n, (locale, seed) in enumerate([("C", "0"), ("tr_TR.UTF-8", "1")]):
        (tmp_path / f"{n}.json").write_text(
            json.dumps(shuffled(value, random.Random(n)), ensure_ascii=bool(n), indent=n or None)
        )
        environment = f"LANG={locale} LC_ALL={locale} PYTHONHASHSEED={seed}"
        lines.append(f"{environment} {sys.executable} -m fencepost effect say --using echo < {n}.json")
    (tmp_path / "twice.json").write_text('{"a": 1, "a": 2}')
    doubled = f"{sys.executable} -m fencepost effect other --using echo < twice.json"
    script = f"{' && '.join(lines)} > said.json && ! {doubled} 2> refused.txt"
    done = fencepost(tmp_path, "work", "--until-idle", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    [effect] = answered(tmp_path, "effects", "--task", "t")["items"]
    assert (effect["state"], effect["payload_digest"]) == ("COMMITTED", expected(value))
    assert expected(json.loads((tmp_path / "said.json").read_text())) == expected(value)
    assert "duplicate keys" in (tmp_path / "refused.txt").read_text()


async def test_b30_a_set_has_no_order_and_is_no_payload(job: Job) -> None:
    claim = await job.claim()
    for payload in ({"a", "b"}, {"tags": {"a", "b"}}):
        with pytest.raises(InvalidRequest, match="payload"):
            await job.send(claim, payload, keyed())
