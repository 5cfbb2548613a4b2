"""B29, for effects: what the database cannot store neither wedges the task nor loses what is known of a call."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost import InvalidRequest
from fencepost.effects.base import Call, Gone, Guarantee, Happened, Outcome, Unknown
from fencepost.effects.failures import EffectAbsent, EffectUnknown
from tests.cases.sending import Job, Tool, job, keyed
from tests.cases.test_b29_unstorable_result import KEPT, REFUSED

__all__ = ["job"]

TEXTS = {"NUL": "a\0b", "surrogate": "a\ud800b", "long": "x" * 70_000, "controls": "a\r\n\x1b[31mb", "empty": ""}


class Answering(Tool):
    """Does what it is told to, once."""

    def __init__(self, answer: Any) -> None:
        super().__init__("answering")
        self.answer = answer

    async def execute(self, call: Call) -> Outcome:
        self.calls.append(call)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


async def test_b29_a_payload_that_cannot_be_stored_is_refused_by_name_and_nothing_is_sent(job: Job) -> None:
    tool = keyed()
    claim = await job.claim()
    for name, value in REFUSED.items():
        for payload in (value, {"in": [value]}):
            with pytest.raises(InvalidRequest, match="payload"):
                await job.send(claim, payload, tool)
        assert tool.calls == [], name
    for slot in ("a\0b", "", "x" * 2000):
        with pytest.raises(InvalidRequest, match="slot"):
            await job.send(claim, "fine", tool, slot)
    assert (await job.client.effects(task_id=job.task_id)).items == []
    assert await job.send(claim, "fine", tool) == {"call": 1}
    await job.client.commit(claim, "done")
    await job.audit()


async def test_b29_what_is_kept_reaches_the_tool_and_a_successor_byte_for_byte(job: Job) -> None:
    tool = keyed(lose=len(KEPT))
    a = await job.claim()
    for name, value in KEPT.items():
        with pytest.raises(EffectUnknown):
            await job.send(a, value, tool, name)
    b = await job.next(a)
    for name, value in KEPT.items():
        await job.send(b, "worded differently", tool, name, on_conflict="adopt", patience=10.0)
        view = await job.effect(name)
        sent = [call.payload for call in tool.calls if call.slot == name]
        assert len(sent) == 2
        for got in (*sent, view.payload):
            assert got == value and type(got) is type(value), name
    await job.client.commit(b, "done")
    await job.audit()


@pytest.mark.parametrize("name", REFUSED)
async def test_b29_a_receipt_that_cannot_be_stored_leaves_an_effect_that_happened(job: Job, name: str) -> None:
    tool = Answering(Happened({"id": 1, "odd": REFUSED[name]}))
    claim = await job.claim()
    receipt = await job.send(claim, "X", tool)
    assert receipt["cut"] is True and receipt["why"]
    view = await job.effect()
    assert (view.state, view.receipt) == ("COMMITTED", receipt)
    assert await job.send(await job.next(claim), "X", tool) == receipt
    assert len(tool.calls) == 1
    await job.audit()


@pytest.mark.parametrize("name", KEPT)
async def test_b29_a_receipt_that_can_be_stored_comes_back_as_it_was(job: Job, name: str) -> None:
    tool = Answering(Happened(KEPT[name]))
    claim = await job.claim()
    first = await job.send(claim, "X", tool)
    again = await job.send(await job.next(claim), "X", tool)
    for got in (first, again, (await job.effect()).receipt):
        assert got == KEPT[name] and type(got) is type(KEPT[name])
    await job.audit()


@pytest.mark.parametrize("name", TEXTS)
async def test_b29_texts_of_the_downstream_do_not_cost_the_finding(job: Job, name: str) -> None:
    """Its ETag, its reasons, and what its library raises: none of it keeps an outcome from being recorded."""
    claim = await job.claim()
    await job.send(claim, "X", Answering(Happened("sent", etag=TEXTS[name])), "tagged")
    assert ((await job.effect("tagged")).state, (await job.effect("tagged")).receipt) == ("COMMITTED", "sent")
    for slot, answer in (("says", Unknown(TEXTS[name])), ("raises", RuntimeError(TEXTS[name]))):
        tool = Answering(answer)
        with pytest.raises(EffectUnknown):
            await job.send(claim, "X", tool, slot)
        view = await job.effect(slot)
        assert (view.state, len(tool.calls)) == ("UNKNOWN", 1)
        assert "\0" not in (view.note or "")
        await job.client.resolve(view, "HAPPENED", who="eve", evidence="seen")
    await job.client.commit(claim, "done")
    await job.audit()


async def test_b29_a_receipt_refused_at_the_door_names_it_and_the_execution_can_still_be_settled(job: Job) -> None:
    claim = await job.claim()
    sent = await job.client.prepare(claim, "send", "X", keyed().declaration.terms)
    for value in REFUSED.values():
        with pytest.raises(InvalidRequest, match="receipt"):
            await job.client.settle(claim, sent.effect_id, 1, "HAPPENED", receipt=value)
    for field, fields in {
        "etag": {"etag": "a\0b"},
        "note": {"note": "a\0b"},
    }.items():
        with pytest.raises(InvalidRequest, match=field):
            await job.client.settle(claim, sent.effect_id, 1, "HAPPENED", receipt=1, **fields)
    assert (await job.effect()).state == "PREPARED"
    await job.client.settle(claim, sent.effect_id, 1, "HAPPENED", receipt=1)
    await job.client.commit(claim, "done")
    await job.audit()


@pytest.mark.parametrize("name", list(TEXTS))
async def test_b29_a_reservation_whose_id_cannot_be_stored_is_none(job: Job, name: str) -> None:
    """It can be confirmed by nobody, so the effect did not happen, for certain."""

    class Seats(Tool):
        confirmed = 0

        async def reserve(self, call: Call) -> str:
            return TEXTS[name]

        async def confirm(self, call: Call) -> Outcome:
            self.confirmed += 1
            return Happened("confirmed")

        async def cancel(self, call: Call) -> Gone:
            return Gone("RESERVATION_CANCELLED")

    tool = Seats("seats", guarantee=Guarantee.RESERVATION)
    claim = await job.claim()
    with pytest.raises(EffectAbsent, match="not reserved"):
        await job.send(claim, "X", tool)
    assert ((await job.effect()).state, tool.confirmed) == ("ABSENT", 0)
    await job.client.commit(claim, "without")
    await job.audit()
