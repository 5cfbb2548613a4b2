"""Side effects, whole behaviours: what one attempt sent and another must not send again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest, Unsettled
from fencepost.wire import Claim, NewTask, Refused, TaskView
from tests.conformance.actions import claimed, committed, given, raised, refusal, state_of, taken_over
from tests.conformance.effect_actions import (
    LETTER,
    LOOK,
    MAIL,
    REF,
    RETENTION,
    SEAT,
    WINDOW,
    effect,
    executing,
    past_the_window,
    prepared,
    settled,
    terms,
)
from tests.conformance.worlds import World


async def test_another_text_for_the_slot_is_refused_and_the_bound_one_reconciled(client: Client, world: World) -> None:
    """The negative test of the contract: A's answer is lost, B writes another mail, and nothing is sent twice."""
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a, {"text": "X"})
    b = await taken_over(world, client, a)
    assert [(view.slot, view.state, view.open) for view in b.effects] == [("send", "UNKNOWN", ("ASK", "REPEAT"))]
    answer = await prepared(client, b, {"text": "Y"})
    assert (answer.outcome, answer.payload, answer.state) == ("PAYLOAD_CONFLICT", {"text": "X"}, "UNKNOWN")
    asked = await prepared(client, b, {"text": "X"})
    assert asked.outcome == "RECONCILE"
    done = await client.reconcile(b, sent.effect_id, 1, "HAPPENED", asked_at=asked.now_us, receipt={"id": 1})
    assert settled(done) == "COMMITTED"
    again = await prepared(client, b, {"text": "X"})
    assert (again.outcome, again.receipt, again.execution) == ("REPLAY", {"id": 1}, 1)
    assert (await prepared(client, b, {"text": "Y"})).outcome == "PAYLOAD_CONFLICT"  # X39: not after it, either
    await committed(client, b)


async def test_one_effect_id_for_every_attempt_and_payload_and_another_for_a_new_revision(
    client: Client, world: World
) -> None:
    await given(client)
    a = await claimed(client)
    first = await executing(client, a)
    await client.settle(a, first.effect_id, 1, "ABSENT", why="REFUSED")
    b = await taken_over(world, client, a)
    assert (await executing(client, b)).effect_id == first.effect_id
    await client.settle(b, first.effect_id, 2, "ABSENT", why="REFUSED")
    await client.revise("t", {"n": 2})
    c = await claimed(client, "C")
    assert c.effects == ()
    assert (await executing(client, c)).effect_id != first.effect_id


async def test_a_lost_prepare_answer_is_the_same_execution_with_its_first_send_by(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    first = await executing(client, a, request_id="r1")
    await world.advance(1)
    again = await executing(client, a, request_id="r1")  # X15
    assert (again.execution, again.send_by_us) == (1, first.send_by_us)
    other = await prepared(client, a)
    assert (other.outcome, other.execution) == ("IN_FLIGHT", 1)


async def test_not_found_counts_only_when_it_was_asked_after_the_window(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client, ttl=2)
    await executing(client, a)
    b = await taken_over(world, client, a)  # X02, X03
    early = await prepared(client, b)
    assert early.now_us < (early.send_by_us or 0)

    async def not_found(asked_at: int) -> Any:
        return await client.reconcile(b, early.effect_id, 1, "ABSENT", ground="NOT_FOUND", asked_at=asked_at)

    answer = await not_found(early.now_us)
    assert refusal(answer) == ("TOO_EARLY", None)
    await past_the_window(world)
    assert refusal(await not_found(early.now_us)) == ("TOO_EARLY", None)
    with pytest.raises(InvalidRequest, match="asked_at"):
        await not_found(early.now_us + 10**12)
    late = await prepared(client, b)
    assert settled(await not_found(late.now_us)) == "ABSENT"
    assert (await executing(client, b)).execution == 2


async def test_a_repeat_goes_under_the_same_key_within_the_retention_and_no_longer(
    client: Client, world: World
) -> None:
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a)
    assert settled(await client.settle(a, sent.effect_id, 1, "UNKNOWN", why="no answer")) == "UNKNOWN"
    again = await executing(client, a, repeat=True)
    assert (again.effect_id, again.execution) == (sent.effect_id, 2)
    # X14: what the repeat says of itself says nothing about what it repeats.
    assert settled(await client.settle(a, sent.effect_id, 2, "ABSENT", why="REFUSED")) == "UNKNOWN"
    await client.settle(a, sent.effect_id, 2, "UNKNOWN", why="no answer")
    await client.release(a)
    await world.advance(RETENTION - WINDOW + 1)
    b = await claimed(client, "B")
    answer = await prepared(client, b, repeat=True)  # X04: its send_by would be after the retention
    assert (answer.outcome, answer.open) == ("RECONCILE", ("PERSON",))
    late = await client.reconcile(b, sent.effect_id, 2, "HAPPENED", asked_at=answer.now_us)
    assert refusal(late) == ("PERSON", "GUARANTEE")


async def test_a_stored_failure_closes_repeat(client: Client) -> None:
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a)  # X38
    await client.settle(a, sent.effect_id, 1, "UNKNOWN", why="STORED_FAILURE")
    answer = await prepared(client, a, repeat=True)
    assert (answer.outcome, answer.open) == ("RECONCILE", ("ASK",))


async def test_a_late_copy_of_a_settle_fits_nowhere(client: Client) -> None:
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a)
    await client.settle(a, sent.effect_id, 1, "ABSENT", why="REFUSED", request_id="s1")
    await executing(client, a)
    late = await client.settle(a, sent.effect_id, 1, "ABSENT", why="REFUSED")  # X08
    assert refusal(late)[0] == "STALE_EXECUTION"
    said = await client.settle(a, sent.effect_id, 1, "ABSENT", why="REFUSED", request_id="s1")
    assert settled(said) == "ABSENT" and not said.changed
    assert (await effect(client, sent)).state == "PREPARED"


async def test_late_evidence_turns_absent_back_whatever_the_task_is(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client, ttl=2)
    sent = await executing(client, a)
    b = await taken_over(world, client, a)
    await past_the_window(world)
    asked = await prepared(client, b)
    await client.reconcile(b, sent.effect_id, 1, "ABSENT", ground="NOT_FOUND", asked_at=asked.now_us)
    await committed(client, b)
    late = await client.settle(a, sent.effect_id, 1, "HAPPENED", receipt={"id": 7})  # X09
    assert refusal(late) == ("FENCED", "GENERATION")
    view = await effect(client, sent)
    assert (view.state, view.contested, [e.receipt for e in view.evidence]) == ("UNKNOWN", True, [{"id": 7}])
    assert await state_of(client) == "COMMITTED"
    await client.settle(a, sent.effect_id, 1, "HAPPENED", receipt={"id": 7})
    assert (await effect(client, sent)).version == view.version  # the same report again is no news
    await past_the_window(world)
    view = await effect(client, sent)
    refused = await client.resolve(view, "ABSENT", who="eve", evidence="looked")
    assert refusal(refused)[0] == "EVIDENCE"
    loop = await client.resolve(view, "ABSENT", who="loop", evidence="asked", reconciler=True, ground="NOT_FOUND")
    assert refusal(loop)[0] == "EVIDENCE"
    done = await client.resolve(view, "HAPPENED", who="eve", evidence="there it is", receipt={"id": 7})
    assert settled(done) == "COMMITTED"


async def test_a_second_receipt_raises_an_alarm(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a)
    b = await taken_over(world, client, a)
    asked = await prepared(client, b)
    await client.reconcile(b, sent.effect_id, 1, "HAPPENED", asked_at=asked.now_us, receipt={"id": 1})
    await client.settle(a, sent.effect_id, 1, "HAPPENED", receipt={"id": 2})
    page = await client.events(task_id="t", limit=1000)
    alarms = [line for line in page.items if line.name == "alarm"]
    assert len(alarms) == 1 and alarms[0].door == "evidence"
    assert (await effect(client, sent)).receipt == {"id": 1}


async def test_every_end_of_an_attempt_leaves_what_it_was_sending_unknown(client: Client, world: World) -> None:  # X17
    ends = {
        "release": lambda c, claim: c.release(claim),
        "fail": lambda c, claim: c.fail(claim, "no"),
        "cancel": lambda c, claim: c.cancel(claim.task_id),
        "take_over": lambda c, claim: c.take_over(claim.task_id),
    }
    for name, end in ends.items():
        await given(client, name)
        claim = await claimed(client)
        sent = await executing(client, claim)
        assert not isinstance(await end(client, claim), Refused)
        assert (await effect(client, sent, name)).state == "UNKNOWN", name
        if name != "cancel":
            assert refusal(await client.revise(name, {"n": 2})) == ("CONFLICT", "EFFECTS")
            await client.cancel(name)
    await given(client, "expire")
    claim = await claimed(client)
    sent = await executing(client, claim)
    await world.advance(claim.ttl + 1)
    assert not isinstance(await client.expire("expire"), Refused)
    assert (await effect(client, sent, "expire")).state == "UNKNOWN"


async def test_commit_waits_for_its_effects_and_names_them(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    sent = await executing(client, claim)
    await executing(client, claim, kind=LOOK, slot="look")
    with pytest.raises(Unsettled) as caught:
        await client.commit(claim, 1)
    assert caught.value.effects == (sent.effect_id,)
    await client.settle(claim, sent.effect_id, 1, "HAPPENED")
    await committed(client, claim)


async def test_what_cannot_be_replayed_goes_alone_and_needs_a_person(client: Client, world: World) -> None:
    await given(client)
    claim = await claimed(client)
    letter = await executing(client, claim, kind=LETTER)
    answer = await prepared(client, claim, kind=MAIL, slot="other")  # X12
    assert (answer.outcome, answer.busy) == ("BUSY", (letter.effect_id,))
    await client.settle(claim, letter.effect_id, 1, "UNKNOWN", why="cut")
    asked = await prepared(client, claim, kind=LETTER)
    assert (asked.outcome, asked.open) == ("RECONCILE", ("PERSON",))
    looked = await client.reconcile(claim, letter.effect_id, 1, "ABSENT", ground="NOT_FOUND", asked_at=asked.now_us)
    assert refusal(looked)[0] == "PERSON"  # X11
    await past_the_window(world)
    view = await effect(client, letter)
    assert settled(await client.resolve(view, "ABSENT", who="eve", evidence="the tray is empty")) == "ABSENT"
    again = await prepared(client, claim, kind=LETTER)  # X10
    assert again.outcome == "APPROVAL_REQUIRED"
    await client.approve(await effect(client, letter), who="eve")
    assert (await executing(client, claim, kind=LETTER)).execution == 2


async def test_the_guarantee_that_was_bound_counts(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    sent = await executing(client, claim, kind=LETTER)  # X37
    await client.settle(claim, sent.effect_id, 1, "UNKNOWN", why="cut")
    answer = await prepared(client, claim, kind=terms("IDEMPOTENT"), repeat=True)
    assert (answer.outcome, answer.guarantee, answer.open) == ("RECONCILE", "NON_REPLAYABLE", ("PERSON",))


async def test_a_conditional_write_is_repeated_under_its_precondition_and_gone_once_it_moved_on(
    client: Client, world: World
) -> None:
    await given(client)
    claim = await claimed(client)
    with pytest.raises(InvalidRequest, match="precondition"):
        await client.prepare(claim, "push", "X", REF)
    sent = await executing(client, claim, kind=REF)
    await client.settle(claim, sent.effect_id, 1, "UNKNOWN", why="cut")
    again = await executing(client, claim, kind=REF, repeat=True)
    assert (again.precondition, again.execution) == ("e0", 2)
    assert settled(await client.settle(claim, sent.effect_id, 2, "ABSENT", why="PRECONDITION")) == "UNKNOWN"
    asked = await prepared(client, claim, kind=REF)

    async def absent(ground: str) -> Any:
        return await client.reconcile(claim, sent.effect_id, 2, "ABSENT", ground=ground, asked_at=asked.now_us)

    assert refusal(await absent("NOT_FOUND"))[0] == "PERSON"  # X05
    assert settled(await absent("MOVED_ON")) == "ABSENT"
    fresh = await executing(client, claim, kind=REF, precondition="e2")
    assert (fresh.precondition, fresh.execution) == ("e2", 3)


async def test_only_a_stored_reservation_may_be_confirmed(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    seat = await executing(client, a, kind=SEAT)  # X07
    b = await taken_over(world, client, a)
    assert refusal(await client.reserve(a, seat.effect_id, 1, "r0"))[0] == "FENCED"
    asked = await prepared(client, b, kind=SEAT)
    nothing = await client.reconcile(b, seat.effect_id, 1, "ABSENT", ground="NO_RESERVATION", asked_at=asked.now_us)
    assert settled(nothing) == "ABSENT"
    await executing(client, b, kind=SEAT)
    assert settled(await client.reserve(b, seat.effect_id, 2, "r1")) == "PREPARED"
    assert refusal(await client.reserve(b, seat.effect_id, 2, "r2")) == ("CONFLICT", "RESERVATION")
    await client.release(b)
    await past_the_window(world)
    view = await effect(client, seat)
    refused = await client.resolve(view, "ABSENT", who="eve", evidence="surely not")
    assert refusal(refused) == ("CONFLICT", "RESERVATION")
    done = await client.resolve(view, "ABSENT", who="eve", evidence="cancelled it", ground="RESERVATION_CANCELLED")
    assert settled(done) == "ABSENT"


async def test_a_new_revision_is_refused_while_the_old_ones_effects_count(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a)
    await client.release(a)
    view = await effect(client, sent)
    await client.resolve(view, "ABANDONED", who="eve", evidence="nobody minds")  # X13
    assert refusal(await client.revise("t", {"n": 2})) == ("CONFLICT", "EFFECTS")
    assert not isinstance(await client.revise("t", {"n": 2}, accept_effects=True), Refused)


async def test_a_raise_fences_the_sender_and_lets_the_reconciler_decide(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    sent = await executing(client, a)
    old = await world.client(epoch=1)
    await client.close_intake()
    await raised(client)
    assert refusal(await old.settle(a, sent.effect_id, 1, "HAPPENED", receipt=1)) == ("FENCED", "EPOCH")
    assert refusal(await old.resolve(await effect(old, sent), "HAPPENED", who="eve", evidence="x")) == (
        "FENCED",
        "EPOCH",
    )  # X35
    assert not isinstance(await client.expire("t"), Refused)
    view = await effect(client, sent)
    assert (view.state, view.contested) == ("UNKNOWN", True)
    done = await client.resolve(view, "HAPPENED", who="loop", evidence="asked", reconciler=True, receipt=1)
    assert settled(done) == "COMMITTED"


async def test_a_slot_is_given_to_one_of_twenty_who_ask_at_once(client: Client, world: World) -> None:
    clients = [client, await world.client()]
    await given(client)
    claim = await claimed(client)
    answers = await asyncio.gather(*(prepared(clients[n % 2], claim) for n in range(20)))
    assert sorted(answer.outcome for answer in answers) == ["EXECUTE", *["IN_FLIGHT"] * 19]
    assert len((await effect(client, answers[0])).executions) == 1


async def test_settle_races_a_take_over_and_nothing_is_lost(client: Client, world: World) -> None:
    other = await world.client()
    for n in range(20):
        await given(client, f"t{n}")
        claim = await claimed(client)
        sent = await executing(client, claim)
        answer, _ = await asyncio.gather(
            client.settle(claim, sent.effect_id, 1, "HAPPENED", receipt=n), other.take_over(f"t{n}")
        )
        view = await effect(client, sent, f"t{n}")
        if isinstance(answer, Refused):
            assert (view.state, [e.receipt for e in view.evidence]) == ("UNKNOWN", [n])
        else:
            assert (view.state, view.receipt) == ("COMMITTED", n)
        await client.cancel(f"t{n}")


async def test_statements_are_effects_of_the_commit_or_refused_where_the_store_has_none(
    client: Client, world: World
) -> None:
    from fencepost.kernel.commands import NewStatement
    from fencepost.kernel.digests import encode

    await given(client)
    claim = await claimed(client)
    statement = NewStatement("row", encode({"sql": "SELECT 1", "parameters": []}), "sql")
    if not client.backend.store.capabilities.statements:  # type: ignore[attr-defined]
        with pytest.raises(InvalidRequest, match="statements"):
            await client.commit(claim, 1, statements=[statement])
        assert await state_of(client) == "CLAIMED"
        return
    answer = await client.commit(claim, 1, statements=[statement])
    assert not isinstance(answer, Refused)
    page = await client.effects(task_id="t")
    (view,) = page.items
    assert (view.state, view.guarantee, view.slot, view.payload) == (
        "COMMITTED",
        "TRANSACTIONAL",
        "row",
        {"sql": "SELECT 1", "parameters": []},
    )
    again = await client.commit(claim, 1, statements=[statement])
    assert not isinstance(again, Refused) and again.replayed
    assert refusal(await client.commit(claim, 1))[0] == "ENDED"  # another commit: without the statement


async def test_who_waits_for_a_person_is_parked_and_who_does_not_is_ready(client: Client, world: World) -> None:  # X22
    await given(client)
    claim = await claimed(client)
    letter = terms("NON_REPLAYABLE", approval=True)
    waiting = await prepared(client, claim, kind=letter)
    assert waiting.outcome == "APPROVAL_REQUIRED"
    with pytest.raises(Unsettled):  # X23
        await client.commit(claim, 1)
    await client.release(claim, wait=True)
    view = await client.task("t")
    assert isinstance(view, TaskView) and (view.state, view.park_reason, view.charged_attempts) == (
        "PARKED",
        "WAITING",
        0,
    )
    assert await client.claim_next(owner="B") == []
    await client.approve(await effect(client, waiting), who="eve")
    claim = await claimed(client)
    await client.release(claim, wait=True)  # approved already: nothing to wait for
    assert await state_of(client) == "READY"
    await client.cancel("t")
    await client.reopen("t")  # the approval is void
    claim = await claimed(client)
    assert (await prepared(client, claim, kind=letter)).outcome == "APPROVAL_REQUIRED"
    await client.release(claim, wait=True)
    await client.cancel("t")
    assert refusal(await client.approve(await effect(client, waiting), who="eve"))[0] == "CANCELLED"
    await client.deny(await effect(client, waiting), who="eve")
    assert await state_of(client) == "CANCELLED"


async def test_what_an_older_input_waited_for_keeps_nobody_waiting(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    old = await prepared(client, claim, kind=terms("READ_ONLY", approval=True))
    await client.release(claim)
    assert not isinstance(await client.revise("t", {"n": 2}), Refused)
    claim = await claimed(client)
    await client.release(claim, wait=True)
    assert await state_of(client) == "READY"
    claim = await claimed(client)
    new = await prepared(client, claim, kind=terms("NON_REPLAYABLE", approval=True))
    await client.release(claim, wait=True)
    assert await state_of(client) == "PARKED"
    await client.approve(await effect(client, new), who="eve")
    assert await state_of(client) == "READY"
    assert (await effect(client, old)).state == "AWAITING_APPROVAL"


async def test_an_approval_is_for_one_execution_of_one_payload(client: Client, world: World) -> None:
    await given(client)
    claim = await claimed(client)
    letter = terms("NON_REPLAYABLE", approval=True)
    waiting = await prepared(client, claim, kind=letter)
    view = await effect(client, waiting)
    first = await client.approve(view, who="eve", request_id="click")
    again = await client.approve(view, who="eve", request_id="click")  # the answer was lost
    assert not isinstance(first, Refused) and not isinstance(again, Refused) and not again.changed
    assert refusal(await client.approve(view, who="eve"))[0] == "CONFLICT"  # a second click
    b = await taken_over(world, client, claim)  # whoever comes next may use it
    sent = await executing(client, b, kind=letter)
    assert (await effect(client, sent)).executions[0].approved_by == "eve"
    await client.settle(b, sent.effect_id, 1, "ABSENT", why="REFUSED")
    assert (await prepared(client, b, kind=letter)).outcome == "APPROVAL_REQUIRED"
    late = await prepared(client, b, kind=letter, request_id="r-of-none")
    assert late.outcome == "APPROVAL_REQUIRED"
    await client.approve(await effect(client, sent), who="eve")
    await client.close_intake()
    await raised(client)
    pool = await client.pool()
    assert not isinstance(pool, Refused)
    await client.open_intake(expected_state_version=pool.state_version)
    c = await taken_over(world, client, b, "C")
    assert (await prepared(client, c, kind=letter)).outcome == "APPROVAL_REQUIRED"
    assert not isinstance(await client.withdraw(c, sent.effect_id), Refused)
    assert (await prepared(client, c, kind=letter)).outcome == "DENIED"
    await committed(client, c)


async def test_effects_are_listed_by_state_pool_and_downstream_in_pages(client: Client) -> None:
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(3)])
    claims: list[Claim] = [await claimed(client) for _ in range(3)]
    for claim in claims:
        sent = await executing(client, claim, kind=terms("IDEMPOTENT", "here" if claim.task_id == "t1" else "there"))
        if claim.task_id != "t2":
            await client.settle(claim, sent.effect_id, 1, "UNKNOWN", why="cut")
    page = await client.effects(state=["UNKNOWN", "AWAITING_APPROVAL"], limit=1)
    assert [view.task_id for view in page.items] == ["t0"] and page.next_cursor
    rest = await client.effects(state=["UNKNOWN", "AWAITING_APPROVAL"], limit=1, cursor=page.next_cursor)
    assert [view.task_id for view in rest.items] == ["t1"]
    assert [view.task_id for view in (await client.effects(state="PREPARED")).items] == ["t2"]
    assert [view.task_id for view in (await client.effects(downstream="here")).items] == ["t1"]
    assert (await client.effects(pool="nowhere")).items == []
    assert [view.payload for view in (await client.effects(task_id="t0")).items] == ["X"]
    status = await client.report("status")
    assert [(row["guarantee"], row["state"], row["count"]) for row in status["effects"]] == [
        ("IDEMPOTENT", "UNKNOWN", 2)
    ]


async def test_effects_that_went_every_way_leave_a_clean_audit(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    await executing(client, a)
    b = await taken_over(world, client, a)
    await executing(client, b, repeat=True)
    await client.settle(b, (await prepared(client, b)).effect_id, 2, "HAPPENED", receipt=1)
    await committed(client, b)
    report = await client.report("audit")
    assert report.clean, report.violations


async def test_a_commit_leaves_nothing_open_of_what_was_only_read(client: Client, world: World) -> None:
    await given(client)
    a = await claimed(client)
    await executing(client, a, kind=LOOK)
    b = await taken_over(world, client, a)
    await executing(client, b, kind=LOOK, slot="again")
    await committed(client, b)
    assert [view.state for view in (await client.effects(task_id="t")).items] == ["ABSENT", "ABSENT"]
    assert (await client.report("status"))["effects"] == []
    assert (await client.report("audit")).clean
