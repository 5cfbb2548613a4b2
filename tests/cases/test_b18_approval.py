"""B18: a person's approval attaches to a position, and not to the exact call."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fencepost import Claim, Done, Refused
from fencepost.effects.failures import ApprovalRequired, EffectUnknown, PayloadConflict, PersonRequired
from tests.cases.sending import Job, Tool, job
from tests.conformance.actions import raised, refusal

__all__ = ["job"]


def guarded(**more: object) -> Tool:
    return Tool("guarded", approval=True, **more)


async def asked(job: Job, tool: Tool, owner: str = "A") -> Claim:
    """A claims, asks for X, and somebody has to approve it."""
    claim = await job.claim(owner)
    with pytest.raises(ApprovalRequired):
        await job.send(claim, "X", tool)
    assert tool.calls == []
    return claim


async def test_b18_an_approval_is_for_its_payload_alone_and_for_one_call(job: Job) -> None:
    tool = guarded()
    claim = await asked(job, tool)
    assert isinstance(await job.client.approve(await job.effect(), who="eve"), Done)
    with pytest.raises(PayloadConflict) as conflict:  # on resuming, the model words it differently
        await job.send(claim, "Y", tool)
    assert (conflict.value.payload, tool.calls) == ("X", [])
    assert await job.send(claim, "X", tool) == {"call": 1}
    assert await job.send(claim, "X", tool) == {"call": 1}  # called twice: the kept receipt
    with pytest.raises(ApprovalRequired):  # the same text in another slot is another effect, and needs its own
        await job.send(claim, "X", tool, slot="second")
    assert [call.payload for call in tool.calls] == ["X"]
    await job.audit()


async def test_b18_what_was_read_is_what_is_approved(job: Job) -> None:
    """The digest and the version that the person saw go along; the effect of another slot is none of its business."""
    tool = guarded()
    claim = await asked(job, tool)
    seen = await job.effect()
    await job.client.withdraw(claim, seen.effect_id)
    assert refusal(await job.client.approve(seen, who="eve"))[0] == "CONFLICT"
    with pytest.raises(ApprovalRequired):
        await job.send(claim, "Z", tool, slot="other")
    other = await job.effect("other")
    forged = replace(other, payload_digest=seen.payload_digest)
    assert refusal(await job.client.approve(forged, who="eve"))[0] == "PAYLOAD_CONFLICT"
    assert tool.calls == []


async def test_b18_a_double_click_and_two_browsers_are_one_approval(job: Job) -> None:
    tool = guarded(lose=1)
    claim = await asked(job, tool)
    seen = await job.effect()
    first = await job.client.approve(seen, who="eve", request_id="click")
    twice = await job.client.approve(seen, who="eve", request_id="click")
    browser = await job.client.approve(seen, who="bob")
    assert isinstance(first, Done) and first.changed
    assert isinstance(twice, Done) and not twice.changed
    assert refusal(browser)[0] == "CONFLICT"
    with pytest.raises(EffectUnknown):
        await job.send(claim, "X", tool)  # its answer is lost: UNKNOWN, and the approval used up
    late = await job.client.approve(seen, who="bob", request_id="late")
    assert refusal(late)[0] == "CONFLICT"
    with pytest.raises(PersonRequired):
        await job.send(claim, "X", tool)
    assert len(tool.calls) == 1
    await job.audit()


async def test_b18_a_reclaim_before_the_call_uses_the_approval_and_one_after_it_does_not_run_it_again(job: Job) -> None:
    tool = guarded(lose=1)
    a = await asked(job, tool)
    await job.client.approve(await job.effect(), who="eve")
    b = await job.next(a)
    late = await job.client.prepare(a, "send", "X", tool.declaration.terms)
    assert isinstance(late, Refused), "of the current generation alone"
    with pytest.raises(EffectUnknown):
        await job.send(b, "X", tool)
    c = await job.next(b, "C")
    for _ in range(2):
        with pytest.raises(PersonRequired) as person:
            await job.send(c, "X", tool)
        assert not isinstance(person.value, ApprovalRequired), "an approval must not look as if it would help"
    assert ((await job.effect()).state, len(tool.calls)) == ("UNKNOWN", 1)
    await job.audit()


async def test_b18_a_cancel_voids_the_approval(job: Job) -> None:
    tool = guarded()
    await asked(job, tool)
    await job.client.approve(await job.effect(), who="eve")
    await job.client.cancel(job.task_id)
    assert refusal(await job.client.approve(await job.effect(), who="eve"))[0] in ("CANCELLED", "CONFLICT")
    await job.client.reopen(job.task_id)
    with pytest.raises(ApprovalRequired):
        await job.send(await job.claim("B"), "X", tool)
    assert tool.calls == []
    await job.audit()


async def test_b18_an_epoch_raise_voids_the_approval(job: Job) -> None:
    tool = guarded()
    a = await asked(job, tool)
    await job.client.approve(await job.effect(), who="eve")
    await raised(job.client)
    b = await job.next(a)
    with pytest.raises(ApprovalRequired):
        await job.send(b, "X", tool)
    assert tool.calls == []
    await job.audit()


async def test_b18_a_restart_between_approval_and_call_neither_loses_nor_doubles_it(job: Job) -> None:
    tool = guarded()
    a = await asked(job, tool)
    await job.client.approve(await job.effect(), who="eve")
    job.client = await job.world.client()  # another service on the same store
    assert await job.send(a, "X", tool) == {"call": 1}
    job.client = await job.world.client()
    b = await job.next(a)
    assert await job.send(b, "X", tool) == {"call": 1}
    assert len(tool.calls) == 1
    await job.audit()
