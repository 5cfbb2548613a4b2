"""Every row of the prepare table, as the one flow walks it. Pure: the port and the downstream answer from scripts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.effects.base import (
    Absent,
    Call,
    Declaration,
    Guarantee,
    Happened,
    Unknown,
)
from fencepost.effects.failures import (
    EffectAbandoned,
    EffectAbsent,
    EffectBusy,
    EffectDenied,
    EffectUnknown,
    PayloadConflict,
    PersonRequired,
)
from fencepost.effects.performing import perform
from fencepost.errors import Fenced, InvalidRequest, Unavailable
from tests.effects.conftest import Pauses
from tests.effects.port import (
    NOW,
    Answer,
    Asked,
    Said,
    Scripted,
    ScriptedPort,
    settled,
)

EXECUTE = Answer("EXECUTE")
REPEATABLE = Answer("RECONCILE", state="UNKNOWN", open=("ASK", "REPEAT"))
ASKABLE = Answer("RECONCILE", state="UNKNOWN", open=("ASK",))
DONE = ("settle", settled("COMMITTED"))
UNSURE = ("settle", settled("UNKNOWN"))
PAYLOAD = {"to": "a@example.org"}


async def go(port: ScriptedPort, downstream: Any, payload: Any = PAYLOAD, **options: Any) -> Any:
    receipt = await asyncio.wait_for(perform(port, downstream, "slot", payload, **options), 10)
    assert port.script == [], "not everything that was expected was asked"
    return receipt


async def hangs(call: Call) -> Any:
    await asyncio.Event().wait()


# EXECUTE -----------------------------------------------------------------------------------------


async def test_a_call_that_happened_is_settled_with_its_receipt_which_is_returned() -> None:
    port = ScriptedPort(("prepare", EXECUTE), DONE)
    mail = Scripted(execute=[Happened({"id": 1}, etag="v1")])
    assert await go(port, mail) == {"id": 1}
    [prepare], [settle] = port.of("prepare"), port.of("settle")
    assert (prepare["slot"], prepare["payload"], prepare["repeat"]) == ("slot", PAYLOAD, False)
    assert prepare["terms"].guarantee == "IDEMPOTENT"
    assert (settle["finding"], settle["receipt"], settle["etag"]) == ("HAPPENED", {"id": 1}, "v1")
    [call] = mail.of("execute")
    assert (call.key, call.epoch, call.generation, call.execution) == ("e" * 64, 7, 3, 1)
    assert call.marks["fencepost-generation"] == "3"
    assert 9 < call.send_by.remaining <= 10


async def test_past_send_by_nothing_is_sent_and_unknown_is_settled(pauses: Pauses) -> None:
    late = Answer("EXECUTE", send_by_us=NOW - 1)
    port = ScriptedPort(("prepare", late), UNSURE, ("prepare", Answer("REPLAY", receipt="another's")))
    mail = Scripted(execute=[])
    assert await go(port, mail) == "another's"
    assert mail.calls == []
    assert port.of("settle")[0]["note"] == "not sent: its send_by was over"


async def test_send_by_counts_from_when_it_was_asked_for_by_a_clock_that_counts_suspended_time(pauses: Pauses) -> None:
    class Slow(ScriptedPort):
        async def prepare(self, *arguments: Any, **more: Any) -> Any:
            answer = await super().prepare(*arguments, **more)
            if len(self.of("prepare")) == 1:
                pauses.skew += 10.0  # the machine slept while the answer was under way
            return answer

    port = Slow(("prepare", EXECUTE), UNSURE, ("prepare", Answer("REPLAY", receipt=1)))
    mail = Scripted(execute=[])
    assert await go(port, mail) == 1
    assert mail.calls == []


async def test_a_lease_that_is_no_longer_trusted_sends_nothing() -> None:
    port = ScriptedPort(("prepare", EXECUTE), UNSURE)
    port.lease = lambda: 0.0
    mail = Scripted(execute=[])
    with pytest.raises(EffectUnknown):
        await go(port, mail)
    assert mail.calls == []


@pytest.mark.parametrize(
    "found",
    [ConnectionResetError("reset"), TimeoutError(), Unknown("502"), {"no": "finding"}, None, hangs],
    ids=["raises", "times-out", "says-unknown", "no-finding", "nothing", "hangs"],
)
async def test_a_call_that_did_not_end_well_is_unknown_and_goes_again_only_as_the_store_says(
    found: Any, pauses: Pauses
) -> None:
    again = Answer("EXECUTE", execution=2)
    port = ScriptedPort(("prepare", EXECUTE), UNSURE, ("prepare", REPEATABLE), ("prepare", again), DONE)
    mail = Scripted(execute=[found, Happened("sent")])
    assert await go(port, mail, timeout=0.05) == "sent"
    assert port.of("settle")[0]["finding"] == "UNKNOWN"
    assert [each["repeat"] for each in port.of("prepare")] == [False, False, True]
    assert len({each["request_id"] for each in port.of("prepare")}) == 3
    first, second = mail.of("execute")
    assert first.key == second.key
    assert (first.execution, second.execution) == (1, 2)


async def test_repeats_end_after_a_few(pauses: Pauses) -> None:
    script: list[tuple[str, Any]] = [("prepare", EXECUTE), UNSURE]
    for number in range(2, 10):
        script += [("prepare", REPEATABLE), ("prepare", Answer("EXECUTE", execution=number)), UNSURE]
    port = ScriptedPort(*script, ("prepare", REPEATABLE))
    mail = Scripted(execute=[Unknown("503")] * 9)
    with pytest.raises(EffectUnknown, match="repeated 8 times"):
        await go(port, mail, patience=60.0)
    assert port.script == []
    assert 5.0 < sum(pauses) < 20.0, "later ones wait for longer"


async def test_repeats_end_with_the_patience(pauses: Pauses) -> None:
    script: list[tuple[str, Any]] = [("prepare", EXECUTE), UNSURE]
    for number in range(2, 10):
        script += [("prepare", REPEATABLE), ("prepare", Answer("EXECUTE", execution=number)), UNSURE]
    port = ScriptedPort(*script)
    with pytest.raises(EffectUnknown, match="503"):
        await perform(port, Scripted(execute=[Unknown("503")] * 9), "slot", PAYLOAD, patience=1.0)
    assert sum(pauses) <= 1.0


async def test_a_stored_failure_says_so_and_is_never_repeated(pauses: Pauses) -> None:  # X38
    port = ScriptedPort(("prepare", EXECUTE), UNSURE, ("prepare", ASKABLE))
    mail = Scripted(execute=[Unknown("500", stored=True)])
    with pytest.raises(EffectUnknown, match="nor may it be repeated"):
        await go(port, mail)
    assert port.of("settle")[0]["why"] == "STORED_FAILURE"
    assert mail.methods == ["execute"]


async def test_what_certainly_did_not_happen_is_absent_and_raised() -> None:
    port = ScriptedPort(("prepare", EXECUTE), ("settle", settled("ABSENT")))
    with pytest.raises(EffectAbsent, match="no such address") as raised:
        await go(port, Scripted(execute=[Absent("REFUSED", "no such address")]))
    assert raised.value.why == "REFUSED"
    [settle] = port.of("settle")
    assert (settle["finding"], settle["why"], settle["note"]) == ("ABSENT", "REFUSED", "no such address")


async def test_absent_of_a_repeat_leads_back_to_asking(pauses: Pauses) -> None:  # X14
    port = ScriptedPort(
        ("prepare", Answer("EXECUTE", execution=2)), UNSURE, ("prepare", ASKABLE), ("reconcile", Said("RECONCILED"))
    )
    mail = Asked(execute=[Absent()], query=[Happened("by the first")])
    assert await go(port, mail) == "by the first"
    assert mail.methods == ["execute", "query"]


async def test_absent_against_late_evidence_is_settled_unknown() -> None:  # X09
    port = ScriptedPort(
        ("prepare", EXECUTE),
        ("settle", Said("EVIDENCE")),
        UNSURE,
        ("prepare", Answer("RECONCILE", open=("ASK", "PERSON"))),
    )
    with pytest.raises(PersonRequired):
        await go(port, Scripted(execute=[Absent()]), on_approval="raise")
    assert [each["finding"] for each in port.of("settle")] == ["ABSENT", "UNKNOWN"]


async def test_a_receipt_that_cannot_be_stored_is_kept_as_text() -> None:
    port = ScriptedPort(("prepare", EXECUTE), DONE)
    receipt = await go(port, Scripted(execute=[Happened({"id": 2**60, "at": float("nan")})]))
    assert receipt["cut"] is True
    assert str(2**60) in receipt["text"]
    assert port.of("settle")[0]["receipt"] == receipt


# cut off -----------------------------------------------------------------------------------------


async def test_a_cancelled_call_is_settled_unknown_before_the_cancellation_goes_on() -> None:
    port = ScriptedPort(("prepare", EXECUTE), UNSURE)
    mail = Scripted(execute=[hangs])
    task = asyncio.create_task(perform(port, mail, "slot", PAYLOAD))
    while not mail.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.of("settle")[0]["finding"] == "UNKNOWN"
    assert port.script == []


async def test_a_finding_that_was_being_settled_when_the_caller_was_cancelled_is_settled_all_the_same() -> None:
    port = ScriptedPort(("prepare", EXECUTE), DONE)
    port.hold = asyncio.Event()
    mail = Scripted(execute=[Happened("worth keeping")])
    task = asyncio.create_task(perform(port, mail, "slot", PAYLOAD))
    while not mail.calls:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    port.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert port.of("settle")[0]["receipt"] == "worth keeping"


async def test_a_store_that_hangs_does_not_hold_a_cancelled_caller_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencepost.effects.enduring.LEAVING", 0.05)
    port = ScriptedPort(("prepare", EXECUTE))
    port.hold = asyncio.Event()
    mail = Scripted(execute=[hangs])
    task = asyncio.create_task(perform(port, mail, "slot", PAYLOAD))
    while not mail.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 2)


async def test_fenced_out_of_the_call_itself_goes_on_as_fenced_and_is_unknown() -> None:
    port = ScriptedPort(("prepare", EXECUTE), UNSURE)
    with pytest.raises(Fenced):
        await go(port, Scripted(execute=[Fenced("lost")]))
    assert port.of("settle")[0]["finding"] == "UNKNOWN"


# the store ---------------------------------------------------------------------------------------


async def test_a_prepare_that_could_not_be_stored_sends_nothing(pauses: Pauses) -> None:
    port = ScriptedPort(("prepare", Unavailable("full disk")))
    port.lease = lambda: 0.0
    mail = Scripted(execute=[])
    with pytest.raises(Unavailable):
        await go(port, mail)
    assert mail.calls == []


@pytest.mark.parametrize("door", ["prepare", "settle"])
async def test_a_lost_answer_is_asked_for_again_with_the_same_request_id(door: str, pauses: Pauses) -> None:  # X15
    script = [("prepare", EXECUTE), DONE]
    script.insert(0 if door == "prepare" else 1, (door, Unavailable("cut")))
    port = ScriptedPort(*script)
    mail = Scripted(execute=[Happened(1)])
    assert await go(port, mail) == 1
    one, other = port.of(door)
    assert one == other
    assert mail.methods == ["execute"]


@pytest.mark.parametrize("outcome", ["FENCED", "CANCELLED", "STALE_INPUT", "ENDED", "NOT_FOUND", "PROTOCOL"])
async def test_a_refused_claim_stops_the_handler(outcome: str) -> None:
    refused = Said(outcome, reason="GENERATION")
    mail = Scripted(execute=[Happened("late")])
    with pytest.raises(Fenced, match=outcome):
        await go(ScriptedPort(("prepare", refused)), mail)
    assert mail.calls == []
    port = ScriptedPort(("prepare", EXECUTE), ("settle", refused))
    with pytest.raises(Fenced, match=outcome):
        await go(port, mail)
    assert port.of("settle")[0]["receipt"] == "late", "the refused report is evidence"


@pytest.mark.parametrize("outcome", ["STALE_EXECUTION", "CONFLICT"])
async def test_a_settle_that_came_too_late_looks_at_the_slot_again(outcome: str, pauses: Pauses) -> None:
    port = ScriptedPort(("prepare", EXECUTE), ("settle", Said(outcome)), ("prepare", Answer("REPLAY", receipt="kept")))
    assert await go(port, Scripted(execute=[Happened("mine")])) == "kept"


# the other rows ----------------------------------------------------------------------------------


async def test_a_kept_receipt_comes_back_without_a_call() -> None:
    mail = Scripted(execute=[])
    assert await go(ScriptedPort(("prepare", Answer("REPLAY", receipt={"id": 9}))), mail) == {"id": 9}
    assert mail.calls == []


@pytest.mark.parametrize(("outcome", "failure"), [("DENIED", EffectDenied), ("ABANDONED", EffectAbandoned)])
async def test_what_a_person_refused_is_raised(outcome: str, failure: type[Exception]) -> None:
    with pytest.raises(failure):
        await go(ScriptedPort(("prepare", Answer(outcome))), Scripted(execute=[]))


async def test_in_flight_by_this_very_attempt_is_settled_unknown_and_reconciled() -> None:
    port = ScriptedPort(
        ("prepare", Answer("IN_FLIGHT", execution=4)), UNSURE, ("prepare", ASKABLE), ("reconcile", Said("RECONCILED"))
    )
    mail = Asked(execute=[], query=[Happened("it was")])
    assert await go(port, mail) == "it was"
    assert port.of("settle")[0]["execution"] == 4


async def test_in_flight_elsewhere_is_waited_for(pauses: Pauses) -> None:
    port = ScriptedPort(
        ("prepare", Answer("IN_FLIGHT")), ("settle", Said("STALE_EXECUTION")), ("prepare", Answer("REPLAY", receipt=1))
    )
    assert await go(port, Scripted(execute=[])) == 1
    assert len(pauses) == 1


async def test_two_calls_for_one_slot_go_one_after_the_other() -> None:
    port = ScriptedPort(("prepare", EXECUTE), DONE, ("prepare", Answer("REPLAY", receipt=1)))
    mail = Scripted(execute=[Happened(1)])
    both = await asyncio.gather(perform(port, mail, "slot", PAYLOAD), perform(port, mail, "slot", PAYLOAD))
    assert both == [1, 1]
    assert port.doors == ["prepare", "settle", "prepare"]


async def test_busy_waits_and_asks_again(pauses: Pauses) -> None:  # X12
    busy = Answer("BUSY", busy=("f" * 64,))
    port = ScriptedPort(("prepare", busy), ("prepare", busy), ("prepare", EXECUTE), DONE)
    assert await go(port, Scripted(execute=[Happened(1)])) == 1
    assert len(pauses) == 2
    with pytest.raises(EffectBusy) as raised:
        await go(ScriptedPort(("prepare", busy)), Scripted(execute=[]), patience=0.0)
    assert raised.value.busy == ("f" * 64,)


# payloads ----------------------------------------------------------------------------------------

BOUND = {"to": "a@example.org", "text": "first wording"}


async def test_another_payload_raises_with_the_bound_one_and_sends_nothing() -> None:
    mail = Asked(execute=[], query=[])
    with pytest.raises(PayloadConflict) as raised:
        await go(ScriptedPort(("prepare", Answer("PAYLOAD_CONFLICT", state="UNKNOWN", payload=BOUND))), mail)
    assert (raised.value.payload, raised.value.state) == (BOUND, "UNKNOWN")
    assert mail.calls == []


async def test_adopt_reconciles_the_bound_payload_and_returns_its_receipt() -> None:
    port = ScriptedPort(
        ("prepare", Answer("PAYLOAD_CONFLICT", state="UNKNOWN", payload=BOUND)),
        ("prepare", ASKABLE),
        ("reconcile", Said("RECONCILED")),
    )
    mail = Asked(execute=[], query=[Happened("the first mail's")])
    assert await go(port, mail, {"to": "a@example.org", "text": "other"}, on_conflict="adopt") == "the first mail's"
    assert mail.of("query")[0].payload == BOUND
    assert port.of("prepare")[1]["payload"] == BOUND


async def test_adopt_finishes_what_was_bound_and_did_not_happen() -> None:  # X39
    port = ScriptedPort(
        ("prepare", Answer("PAYLOAD_CONFLICT", state="ABSENT", payload=BOUND)), ("prepare", EXECUTE), DONE
    )
    mail = Scripted(execute=[Happened(1)])
    assert await go(port, mail, "Y", on_conflict="adopt") == 1
    assert mail.of("execute")[0].payload == BOUND


async def test_another_downstream_is_never_adopted() -> None:
    conflict = Answer("PAYLOAD_CONFLICT", payload=BOUND, downstream="mail/other")
    with pytest.raises(PayloadConflict, match="mail/other"):
        await go(ScriptedPort(("prepare", conflict)), Scripted(execute=[]), on_conflict="adopt")


async def test_a_payload_that_was_bound_with_something_made_up_is_known_again() -> None:
    class Dated(Asked):
        async def bind(self, payload: Any) -> Any:
            return {"text": payload, "date": "second try"}

        async def same(self, bound: Any, payload: Any) -> bool:
            return bound["text"] == payload

    mine = {"text": "hello", "date": "first try"}
    port = ScriptedPort(("prepare", Answer("PAYLOAD_CONFLICT", payload=mine)), ("prepare", EXECUTE), DONE)
    mail = Dated(execute=[Happened(1)])
    assert await go(port, mail, "hello") == 1
    assert mail.of("execute")[0].payload == mine
    with pytest.raises(PayloadConflict):
        await go(ScriptedPort(("prepare", Answer("PAYLOAD_CONFLICT", payload=mine))), mail, "another text")


# the rest ----------------------------------------------------------------------------------------


async def test_a_transactional_effect_is_bound_and_not_called() -> None:
    class Statement:
        declaration = Declaration(name="sql", guarantee=Guarantee.TRANSACTIONAL)

    port = ScriptedPort(("defer", "deferred"))
    assert await go(port, Statement(), "UPDATE …") == "deferred"
    assert port.of("defer")[0]["payload"] == "UPDATE …"


async def test_a_payload_that_cannot_be_sent_is_refused_before_anything_is_prepared() -> None:
    class Strict(Scripted):
        async def bind(self, payload: Any) -> Any:
            raise InvalidRequest("payload.to", "is missing")

        async def same(self, bound: Any, payload: Any) -> bool:
            return False

    port = ScriptedPort()
    with pytest.raises(InvalidRequest, match=r"payload\.to"):
        await go(port, Strict(execute=[]))
    assert port.asked == []


async def test_the_declaration_that_counts_is_the_one_that_was_earned() -> None:
    class Probed(Scripted):
        async def earn(self) -> Declaration:
            return Declaration(name="mail", guarantee=Guarantee.NON_REPLAYABLE)

    port = ScriptedPort(("prepare", EXECUTE), DONE)
    await go(port, Probed(execute=[Happened(1)]))
    assert port.of("prepare")[0]["terms"].guarantee == "NON_REPLAYABLE"


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": 0}, {"patience": -1}, {"on_conflict": "retry"}, {"on_approval": True}, {"timeout": float("nan")}],
)
async def test_options_that_mean_nothing_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        await go(ScriptedPort(), Scripted(execute=[]), **wrong)
