"""B25: an idempotency key that is too fresh, too broad, or goes along with another call."""

from __future__ import annotations

import pytest

from fencepost import NewTask
from fencepost.effects.failures import EffectUnknown, PayloadConflict
from tests.cases.sending import Job, Tool, job, keyed

__all__ = ["job"]


async def test_b25_two_slots_with_one_payload_are_two_effects_whatever_their_order_and_however_often_they_are_tried(
    job: Job,
) -> None:
    """Two tips of 5 EUR are meant to be two. `lose`: each is tried by three generations before it is known."""
    tip = {"tip": 5, "currency": "EUR"}
    tool = keyed(lose=4)
    claim = await job.claim()
    orders = [("s1", "s2"), ("s2", "s1"), ("s1", "s2")]  # the model plans anew, and calls in another order
    for generation, order in enumerate(orders, 1):
        for slot in order:
            if generation < len(orders):
                with pytest.raises(EffectUnknown):
                    await job.send(claim, tip, tool, slot)
            else:
                await job.send(claim, tip, tool, slot, patience=10.0)
        if generation < len(orders):
            claim = await job.next(claim, f"W{generation}")
    one, other = await job.effect("s1"), await job.effect("s2")
    keys = {slot: {call.key for call in tool.calls if call.slot == slot} for slot in ("s1", "s2")}
    assert keys == {"s1": {one.effect_id}, "s2": {other.effect_id}}
    assert one.effect_id != other.effect_id
    for slot in ("s1", "s2"):  # the fencing token changes, and the key does not
        generations = [call.generation for call in tool.calls if call.slot == slot]
        assert len(set(generations)) == len(generations) == 3 and generations == sorted(generations)
    assert (one.state, other.state) == ("COMMITTED", "COMMITTED")
    await job.audit()


async def test_b25_another_tool_or_payload_in_a_slot_is_a_conflict_and_gets_no_key(job: Job) -> None:
    pay, post = keyed("pay"), keyed("post")
    claim = await job.claim()
    await job.send(claim, {"amount": 5}, pay)
    for payload, tool in (({"amount": 5}, post), ({"amount": 6}, pay), ({"amount": 5}, Tool("pay", account="other"))):
        with pytest.raises(PayloadConflict):
            await job.send(claim, payload, tool)
        with pytest.raises(PayloadConflict):  # nor is another tool's receipt adopted as if it were this one's
            await job.send(claim, payload, post, on_conflict="adopt")
    assert ([call.key for call in pay.calls], post.calls) == ([(await job.effect()).effect_id], [])
    await job.audit()


async def test_b25_no_key_is_used_for_two_tasks_tools_nodes_or_revisions(job: Job) -> None:
    pay, post = keyed("pay"), keyed("post")
    claim = await job.claim()
    await job.send(claim, "same", pay, "a")
    await job.send(claim, "same", post, "b")
    await job.send(claim, "same", pay, "a", node_id="another")
    await job.client.release(claim)
    await job.client.revise(job.task_id, {"n": 2}, accept_effects=True)
    await job.send(await job.claim("B"), "same", pay, "a")
    await job.client.submit(NewTask({"n": 1}))
    await job.send(await job.claim("C"), "same", pay, "a")
    keys = [call.key for call in (*pay.calls, *post.calls)]
    assert len(keys) == len(set(keys)) == 5
    await job.audit()
