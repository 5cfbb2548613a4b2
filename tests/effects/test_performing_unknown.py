"""What becomes of an UNKNOWN effect, and of one that waits for a person: the flow of `test_performing` from there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.effects.base import (
    Absent,
    Call,
    Gone,
    Guarantee,
    Happened,
    NotFound,
    Standing,
    StillUnknown,
)
from fencepost.effects.failures import (
    ApprovalRequired,
    EffectAbsent,
    EffectUnknown,
    PersonRequired,
)
from fencepost.effects.performing import perform
from fencepost.errors import Fenced, InvalidRequest, Unavailable
from tests.effects.conftest import Pauses
from tests.effects.port import (
    NOW,
    Answer,
    Asked,
    GivenBack,
    Reserving,
    Said,
    Scripted,
    ScriptedPort,
    Versioned,
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


# RECONCILE ---------------------------------------------------------------------------------------


async def test_unknown_is_asked_about_first_and_what_happened_is_reconciled_with_the_stores_time() -> None:
    port = ScriptedPort(("prepare", REPEATABLE), ("reconcile", Said("RECONCILED")))
    mail = Asked(execute=[], query=[Happened({"id": 5}, "v5")])
    assert await go(port, mail) == {"id": 5}
    [reconcile] = port.of("reconcile")
    assert (reconcile["finding"], reconcile["asked_at"], reconcile["etag"]) == ("HAPPENED", NOW, "v5")
    assert mail.methods == ["query"]


async def test_not_found_after_the_settle_time_is_absent_and_prepared_anew() -> None:
    port = ScriptedPort(
        ("prepare", ASKABLE), ("reconcile", Said("RECONCILED")), ("prepare", Answer("EXECUTE", execution=2)), DONE
    )
    mail = Asked(execute=[Happened(2)], query=[NotFound()])
    assert await go(port, mail) == 2
    assert port.of("reconcile")[0]["ground"] == "NOT_FOUND"
    assert port.of("prepare")[1]["repeat"] is False


async def test_not_found_too_early_is_repeated_where_that_is_open() -> None:
    early = Said("TOO_EARLY", current={"not_before_us": NOW + 20_000_000})
    port = ScriptedPort(
        ("prepare", REPEATABLE), ("reconcile", early), ("prepare", Answer("EXECUTE", execution=2)), DONE
    )
    assert await go(port, Asked(execute=[Happened(2)], query=[NotFound()])) == 2
    assert port.of("prepare")[1]["repeat"] is True


async def test_not_found_too_early_waits_until_its_time_and_asks_again(pauses: Pauses) -> None:  # X02, X03
    early = Said("TOO_EARLY", current={"not_before_us": NOW + 20_000_000})
    later = Answer("RECONCILE", open=("ASK",), now_us=NOW + 20_001_000)
    port = ScriptedPort(
        ("prepare", ASKABLE),
        ("reconcile", early),
        ("prepare", later),
        ("reconcile", Said("RECONCILED")),
        ("prepare", Answer("EXECUTE", execution=2)),
        DONE,
    )
    mail = Asked(execute=[Happened(2)], query=[NotFound(), NotFound()])
    assert await go(port, mail) == 2
    assert 20.0 <= sum(pauses) < 20.1
    assert mail.methods == ["query", "query", "execute"], "a look from before the time counts for nothing after it"
    assert [each["asked_at"] for each in port.of("reconcile")] == [NOW, NOW + 20_001_000]


async def test_a_time_beyond_the_patience_is_not_waited_for(pauses: Pauses) -> None:
    early = Said("TOO_EARLY", current={"not_before_us": NOW + 20_000_000})
    with pytest.raises(EffectUnknown):
        await go(ScriptedPort(("prepare", ASKABLE), ("reconcile", early)), Asked(query=[NotFound()]), patience=5.0)
    assert pauses == []


async def test_a_key_still_in_progress_is_waited_for_not_repeated(pauses: Pauses) -> None:
    port = ScriptedPort(("prepare", REPEATABLE), ("prepare", REPEATABLE), ("reconcile", Said("RECONCILED")))
    mail = Asked(execute=[], query=[StillUnknown("409", in_progress=True, retry_after=2.0), Happened(1)])
    assert await go(port, mail) == 1
    assert pauses == [2.0]


async def test_a_failed_look_is_no_finding_and_repeats_under_the_key(pauses: Pauses) -> None:
    port = ScriptedPort(("prepare", REPEATABLE), ("prepare", EXECUTE), DONE)
    mail = Asked(execute=[Happened(1)], query=[ConnectionError("refused")])
    assert await go(port, mail) == 1
    assert mail.methods == ["query", "execute"]


async def test_read_only_is_simply_sent_again() -> None:
    again = Answer("RECONCILE", open=("REPEAT",), guarantee="READ_ONLY")
    port = ScriptedPort(("prepare", again), ("prepare", EXECUTE), DONE)
    assert await go(port, Scripted(Guarantee.READ_ONLY, execute=[Happened([1, 2])])) == [1, 2]


async def test_an_effect_bound_non_replayable_stays_so_whatever_the_downstream_declares_today() -> None:  # X11, X37
    unknown = Answer("RECONCILE", open=("PERSON",), guarantee="NON_REPLAYABLE")
    mail = Asked(execute=[], query=[])
    with pytest.raises(PersonRequired):
        await go(ScriptedPort(("prepare", unknown)), mail, on_approval="raise")
    assert mail.calls == [], "a plain look lifts nothing out of NON_REPLAYABLE"


async def test_against_late_evidence_only_happened_counts() -> None:
    unknown = Answer("RECONCILE", open=("ASK", "PERSON"))
    port = ScriptedPort(("prepare", unknown), ("reconcile", Said("RECONCILED")))
    assert await go(port, Asked(query=[Happened(1)])) == 1
    with pytest.raises(GivenBack):
        await go(ScriptedPort(("prepare", unknown)), Asked(query=[NotFound()]))


@pytest.mark.parametrize("outcome", ["FENCED", "CANCELLED", "ENDED"])
async def test_a_refused_reconcile_stops_the_handler(outcome: str) -> None:
    with pytest.raises(Fenced, match=outcome):
        await go(ScriptedPort(("prepare", ASKABLE), ("reconcile", Said(outcome))), Asked(query=[Happened(1)]))


# CONDITIONAL -------------------------------------------------------------------------------------

STANDING = Answer("RECONCILE", open=("ASK", "REPEAT"), guarantee="CONDITIONAL", precondition="e0")


async def test_the_precondition_is_asked_for_before_the_prepare_and_the_bound_one_is_sent() -> None:
    port = ScriptedPort(("prepare", Answer("EXECUTE", guarantee="CONDITIONAL", precondition="e0")), DONE)
    store = Versioned(precondition=["e0"], execute=[Happened(1, "e1")])
    assert await go(port, store) == 1
    assert port.of("prepare")[0]["precondition"] == "e0"
    assert store.methods == ["precondition", "execute"]
    assert store.of("execute")[0].precondition == "e0"


async def test_what_still_stands_at_its_precondition_is_repeated_under_it() -> None:
    again = Answer("EXECUTE", execution=2, guarantee="CONDITIONAL", precondition="e0")
    port = ScriptedPort(("prepare", STANDING), ("prepare", again), DONE)
    store = Versioned(precondition=["e7"], query=[Standing()], execute=[Happened(1)])
    assert await go(port, store) == 1
    assert port.of("prepare")[1]["precondition"] is None, "a repeat goes under the bound one"
    assert store.of("execute")[0].precondition == "e0"


async def test_what_moved_on_without_a_trace_in_its_complete_history_is_absent() -> None:
    port = ScriptedPort(
        ("prepare", STANDING),
        ("reconcile", Said("RECONCILED")),
        ("prepare", Answer("EXECUTE", precondition="e7")),
        DONE,
    )
    store = Versioned(precondition=["e7", "e7"], query=[Gone("MOVED_ON")], execute=[Happened(1)])
    assert await go(port, store) == 1
    assert port.of("reconcile")[0]["ground"] == "MOVED_ON"


async def test_what_moved_on_and_has_no_complete_history_becomes_a_persons(pauses: Pauses) -> None:  # X05
    port = ScriptedPort(
        ("prepare", STANDING), ("reconcile", Said("RECONCILED")), ("prepare", Answer("RECONCILE", open=("PERSON",)))
    )
    store = Versioned(precondition=["e2", "e2"], query=[StillUnknown("no history", moved_on=True)], execute=[])
    with pytest.raises(PersonRequired):
        await go(port, store, on_approval="raise")
    [reconcile] = port.of("reconcile")
    assert (reconcile["finding"], reconcile["ground"]) == ("STILL_UNKNOWN", "MOVED_ON")
    assert store.of("execute") == []


async def test_a_kept_receipt_comes_back_although_the_downstream_cannot_be_reached() -> None:
    port = ScriptedPort(("prepare", Answer("REPLAY", receipt=1)))
    assert await go(port, Versioned(precondition=[ConnectionError("down")])) == 1


async def test_nothing_is_prepared_where_the_precondition_could_not_be_read() -> None:
    port = ScriptedPort(("prepare", InvalidRequest("precondition", "CONDITIONAL needs it")))
    store = Versioned(precondition=[ConnectionError("down")], execute=[])
    with pytest.raises(ConnectionError, match="down"):
        await go(port, store)
    assert store.of("execute") == []


async def test_an_effect_bound_otherwise_is_prepared_without_the_precondition() -> None:
    refused = InvalidRequest("precondition", "is for CONDITIONAL; this effect is NON_REPLAYABLE")
    port = ScriptedPort(
        ("prepare", refused), ("prepare", Answer("RECONCILE", open=("PERSON",), guarantee="NON_REPLAYABLE"))
    )
    with pytest.raises(PersonRequired):
        await go(port, Versioned(precondition=["e0"], execute=[]), on_approval="raise")
    assert [each["precondition"] for each in port.of("prepare")] == ["e0", None]


# RESERVATION -------------------------------------------------------------------------------------

RESERVE = Answer("EXECUTE", guarantee="RESERVATION")
STORED = Answer("RECONCILE", open=("ASK",), guarantee="RESERVATION", reservation_id="r0")


async def test_only_a_stored_reservation_is_confirmed() -> None:
    order: list[str] = []

    class Watching(ScriptedPort):
        async def reserve(self, *arguments: Any, **more: Any) -> Any:
            order.append("stored")
            return await super().reserve(*arguments, **more)

    async def confirms(call: Call) -> Happened:
        order.append(f"confirmed {call.reservation_id}")
        return Happened("booked")

    port = Watching(("prepare", RESERVE), ("reserve", Said("RESERVED")), DONE)
    hotel = Reserving(reserve=["r0"], confirm=[confirms])
    assert await go(port, hotel) == "booked"
    assert order == ["stored", "confirmed r0"]
    assert port.of("reserve")[0]["reservation_id"] == "r0"


@pytest.mark.parametrize("found", [Absent("REFUSED", "full"), ConnectionError("reset"), TimeoutError(), None, ""])
async def test_what_could_not_be_reserved_is_absent(found: Any) -> None:
    port = ScriptedPort(("prepare", RESERVE), ("settle", settled("ABSENT")))
    hotel = Reserving(reserve=[found], confirm=[])
    with pytest.raises(EffectAbsent):
        await go(port, hotel)
    assert hotel.of("confirm") == []


async def test_a_reservation_that_was_refused_a_place_in_the_record_is_not_confirmed(pauses: Pauses) -> None:  # X07
    hotel = Reserving(reserve=["r0"], confirm=[])
    with pytest.raises(Fenced):
        await go(ScriptedPort(("prepare", RESERVE), ("reserve", Said("FENCED", reason="GENERATION"))), hotel)
    hotel = Reserving(reserve=["r0"], confirm=[])
    port = ScriptedPort(("prepare", RESERVE), ("reserve", Unavailable("cut")))
    leases = iter([60.0, 0.0])
    port.lease = lambda: next(leases)
    with pytest.raises(Unavailable):
        await go(port, hotel)
    assert hotel.of("confirm") == []


async def test_a_stored_reservation_is_confirmed_by_the_successor_without_a_new_execution() -> None:
    port = ScriptedPort(("prepare", STORED), ("reconcile", Said("RECONCILED")))
    hotel = Reserving(query=[StillUnknown("held")], confirm=[Happened("booked")], reserve=[])
    assert await go(port, hotel) == "booked"
    assert hotel.of("confirm")[0].reservation_id == "r0"
    assert hotel.of("reserve") == []


async def test_none_stored_is_absent_at_once_and_reserved_anew() -> None:
    none = Answer("RECONCILE", open=("ASK",), guarantee="RESERVATION")
    port = ScriptedPort(
        ("prepare", none), ("reconcile", Said("RECONCILED")), ("prepare", RESERVE), ("reserve", Said("RESERVED")), DONE
    )
    hotel = Reserving(query=[], reserve=["r1"], confirm=[Happened("booked")])
    assert await go(port, hotel) == "booked"
    assert port.of("reconcile")[0]["ground"] == "NO_RESERVATION"


async def test_a_lapsed_reservation_is_absent_and_reserved_anew() -> None:
    port = ScriptedPort(
        ("prepare", STORED),
        ("reconcile", Said("RECONCILED")),
        ("prepare", RESERVE),
        ("reserve", Said("RESERVED")),
        DONE,
    )
    hotel = Reserving(query=[Gone("RESERVATION_LAPSED")], reserve=["r1"], confirm=[Happened("booked")])
    assert await go(port, hotel) == "booked"
    assert port.of("reconcile")[0]["ground"] == "RESERVATION_LAPSED"


async def test_a_confirmation_that_was_refused_for_now_is_unknown_while_the_reservation_stands(pauses: Pauses) -> None:
    port = ScriptedPort(
        ("prepare", RESERVE),
        ("reserve", Said("RESERVED")),
        UNSURE,
        ("prepare", STORED),
        ("reconcile", Said("RECONCILED")),
    )
    hotel = Reserving(reserve=["r0"], confirm=[Absent("REFUSED", "refused"), Happened("booked")], query=[NotFound()])
    assert await go(port, hotel) == "booked"
    assert port.of("settle")[0]["finding"] == "UNKNOWN"


# approvals ---------------------------------------------------------------------------------------

WAITING = Answer("APPROVAL_REQUIRED", state="AWAITING_APPROVAL")


@pytest.mark.parametrize("answer", [WAITING, Answer("RECONCILE", open=("PERSON",))], ids=["approval", "person"])
async def test_what_only_a_person_can_decide_gives_the_task_back(answer: Answer) -> None:  # X22
    port = ScriptedPort(("prepare", answer))
    with pytest.raises(GivenBack):
        await go(port, Scripted(execute=[]))
    assert port.doors == ["prepare", "give_back"]


async def test_approval_is_waited_for_where_asked() -> None:
    port = ScriptedPort(("prepare", WAITING), ("prepare", WAITING), ("prepare", EXECUTE), DONE)
    assert await go(port, Scripted(execute=[Happened(1)]), on_approval="wait") == 1


async def test_waiting_for_approval_ends(pauses: Pauses) -> None:
    script = [("prepare", WAITING)] * 100
    port = ScriptedPort(*script)
    with pytest.raises(ApprovalRequired):
        await perform(port, Scripted(execute=[]), "slot", PAYLOAD, on_approval="wait", approval_wait=20.0)
    assert sum(pauses) <= 20.0
    assert len(pauses) < 20, "no hot loop"


async def test_approval_raises_where_asked() -> None:
    with pytest.raises(ApprovalRequired):
        await go(ScriptedPort(("prepare", WAITING)), Scripted(execute=[]), on_approval="raise")
