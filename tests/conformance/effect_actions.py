"""Short forms of what every scenario about effects does first."""

from __future__ import annotations

from typing import Any

from fencepost.client.client import Client
from fencepost.kernel.records import Terms
from fencepost.wire import Claim, Done, EffectView, Prepared
from tests.conformance.worlds import World

SECOND = 1_000_000
WINDOW, SETTLE, RETENTION = 10.0, 5.0, 3600.0


def terms(guarantee: str, downstream: str = "there", *, approval: bool = False) -> Terms:
    retention = round(RETENTION * SECOND) if guarantee == "IDEMPOTENT" else 0
    return Terms(
        downstream,
        guarantee,
        send_window_us=round(WINDOW * SECOND),
        settle_time_us=round(SETTLE * SECOND),
        retention_us=retention,
        approval=approval,
    )


MAIL = terms("IDEMPOTENT")
LETTER = terms("NON_REPLAYABLE")
REF = terms("CONDITIONAL")
SEAT = terms("RESERVATION")
LOOK = terms("READ_ONLY")


async def prepared(
    client: Client, claim: Claim, payload: Any = "X", kind: Terms = MAIL, slot: str = "send", **how: Any
) -> Prepared:
    if kind.guarantee == "CONDITIONAL" and "precondition" not in how and not how.get("repeat"):
        how["precondition"] = "e0"
    answer = await client.prepare(claim, slot, payload, kind, **how)
    assert isinstance(answer, Prepared), answer
    return answer


async def executing(
    client: Client, claim: Claim, payload: Any = "X", kind: Terms = MAIL, slot: str = "send", **how: Any
) -> Prepared:
    answer = await prepared(client, claim, payload, kind, slot, **how)
    assert answer.outcome == "EXECUTE", answer
    return answer


async def effect(client: Client, prepared: Prepared, task_id: str = "t") -> EffectView:
    view = await client.effect(prepared.effect_id, task_id=task_id)
    assert isinstance(view, EffectView), view
    return view


def settled(answer: Any) -> str:
    """The state that an accepted finding led to."""
    assert isinstance(answer, Done), answer
    return str(answer.info["state"])


async def past_the_window(world: World) -> None:
    """Nothing that was prepared until now may be sent any more, and all that was sent shows."""
    await world.advance(WINDOW + SETTLE + 0.001)
