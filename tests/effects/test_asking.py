"""Asking changes nothing, and whatever goes wrong in it is no finding."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.effects.asking import ask, cancel, confirm_stored
from fencepost.effects.base import (
    Absent,
    Call,
    Deadline,
    Gone,
    Guarantee,
    Happened,
    NotFound,
    StillUnknown,
    Unknown,
)
from tests.effects.port import Asked, Reserving, Scripted


def call(reservation_id: str | None = "r0") -> Call:
    return Call(
        effect_id="e",
        task_id="t",
        slot="s",
        execution=1,
        epoch=1,
        generation=1,
        payload={},
        reservation_id=reservation_id,
        send_by=Deadline.none(),
    )


async def hangs(_: Call) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("found", [hangs, ConnectionError("down"), None, {"happened": True}, Unknown("x"), Absent()])
async def test_a_look_that_fails_finds_nothing(found: Any) -> None:
    for asked in (
        await ask(Asked(query=[found]), call(), 0.05),
        await cancel(Reserving(cancel=[found]), call(), 0.05),
    ):
        assert isinstance(asked, StillUnknown)
        assert not asked.in_progress


async def test_what_cannot_be_asked_is_unknown() -> None:
    assert isinstance(await ask(Scripted(), call(), 1.0), StillUnknown)
    assert isinstance(await cancel(Scripted(), call(), 1.0), StillUnknown)
    assert isinstance(await confirm_stored(Scripted(Guarantee.READ_ONLY), call(), 1.0), StillUnknown)


async def test_without_a_stored_reservation_nobody_is_asked() -> None:
    hotel = Reserving(query=[], confirm=[], cancel=[])
    assert await confirm_stored(hotel, call(None), 1.0) == Gone("NO_RESERVATION")
    assert await cancel(hotel, call(None), 1.0) == Gone("NO_RESERVATION")
    assert hotel.calls == []


async def test_a_stored_reservation_is_looked_at_before_it_is_confirmed() -> None:
    hotel = Reserving(query=[Happened(1)], confirm=[])
    assert await confirm_stored(hotel, call(), 1.0) == Happened(1)
    hotel = Reserving(query=[StillUnknown("202", in_progress=True)], confirm=[])
    assert isinstance(await confirm_stored(hotel, call(), 1.0), StillUnknown)
    assert hotel.methods == ["query"]


@pytest.mark.parametrize(
    ("confirmed", "found"),
    [
        (Happened(1), Happened(1)),
        (Absent("RESERVATION_CANCELLED", "gone"), Gone("RESERVATION_CANCELLED", "gone")),
        (Absent("REFUSED", "full"), StillUnknown("full")),
        (Unknown("503", retry_after=2.0), StillUnknown("503", retry_after=2.0)),
        (OSError("reset"), StillUnknown("not confirmed: OSError: reset")),
        ("done", StillUnknown("answered with str, which is no finding")),
    ],
)
async def test_what_a_confirmation_says_of_the_effect(confirmed: Any, found: Any) -> None:
    assert await confirm_stored(Reserving(query=[NotFound()], confirm=[confirmed]), call(), 1.0) == found
