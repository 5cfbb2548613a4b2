"""Effects that pass every one of their doors; part of what `lives.live` makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fencepost.client.client import Client
from fencepost.kernel.records import Terms
from fencepost.wire import Claim, EffectView, NewTask, Prepared

Take = Callable[..., Awaitable[Claim]]

MINUTE = 60_000_000
MAIL = Terms("mail", "IDEMPOTENT", send_window_us=MINUTE, settle_time_us=0, retention_us=60 * MINUTE)
FILE = Terms("file", "CONDITIONAL", send_window_us=MINUTE, settle_time_us=0)
SEAT = Terms("seat", "RESERVATION", send_window_us=MINUTE, settle_time_us=0)
LETTER = Terms("letter", "NON_REPLAYABLE", send_window_us=1, settle_time_us=0, approval=True)
LOOK = Terms("look", "READ_ONLY", send_window_us=MINUTE, settle_time_us=0)


async def prepared(
    client: Client, claim: Claim, slot: str, terms: Terms, *, precondition: str | None = None, repeat: bool = False
) -> Prepared:
    answer = await client.prepare(claim, slot, {"slot": slot}, terms, precondition=precondition, repeat=repeat)
    assert isinstance(answer, Prepared), answer
    return answer


async def effect(client: Client, effect_id: str) -> EffectView:
    view = await client.effect(effect_id)
    assert isinstance(view, EffectView), view
    return view


async def live_with_effects(client: Client, take: Take) -> None:
    """Every door of an effect, and every way in which one ends."""
    await client.submit_many([NewTask("sends", task_id=name) for name in ("sender", "waiter", "quitter", "reader")])
    first = await take("sender")
    sent = await prepared(client, first, "mail", MAIL)
    await client.settle(first, sent.effect_id, 1, "HAPPENED", receipt={"id": 1})
    file = await prepared(client, first, "file", FILE, precondition="e1")
    await client.settle(first, file.effect_id, 1, "ABSENT", why="PRECONDITION")
    await prepared(client, first, "file", FILE, precondition="e2")
    seat = await prepared(client, first, "seat", SEAT)
    await client.reserve(first, seat.effect_id, 1, "r1")
    lost = await prepared(client, first, "lost", MAIL)
    await prepared(client, first, "look", LOOK)
    await client.take_over("sender", who="eve")
    second = await take("sender", owner="bob")
    await client.settle(first, lost.effect_id, 1, "HAPPENED", receipt={"id": 2})  # late: kept as evidence
    asked = await prepared(client, second, "lost", MAIL)
    await client.reconcile(second, lost.effect_id, 1, "HAPPENED", asked_at=asked.now_us, receipt={"id": 2})
    asked = await prepared(client, second, "file", FILE)
    await client.reconcile(second, file.effect_id, 2, "ABSENT", asked_at=asked.now_us, ground="MOVED_ON")
    asked = await prepared(client, second, "seat", SEAT)
    await client.reconcile(second, seat.effect_id, 1, "ABSENT", asked_at=asked.now_us, ground="RESERVATION_CANCELLED")
    again = await prepared(client, second, "look", LOOK, repeat=True)
    await client.settle(second, again.effect_id, 2, "HAPPENED", receipt="seen")
    await client.commit(second, "sent")
    # One that a person has to approve, and to resolve.
    waiter = await take("waiter")
    letter = await prepared(client, waiter, "letter", LETTER)
    await client.release(waiter, wait=True)
    await client.approve(await effect(client, letter.effect_id), who="eve")
    waiter = await take("waiter")
    await prepared(client, waiter, "letter", LETTER)
    await client.settle(waiter, letter.effect_id, 1, "UNKNOWN", why="cut")
    await client.release(waiter, wait=True)
    await client.resolve(await effect(client, letter.effect_id), "ABSENT", who="eve", evidence="the tray is empty")
    waiter = await take("waiter")
    await prepared(client, waiter, "letter", LETTER)
    await client.withdraw(waiter, letter.effect_id)
    await client.commit(waiter, "not sent")
    quitter = await take("quitter")
    denied = await prepared(client, quitter, "letter", LETTER)
    await client.deny(await effect(client, denied.effect_id), who="eve")
    given_up = await prepared(client, quitter, "mail", MAIL)
    await client.settle(quitter, given_up.effect_id, 1, "UNKNOWN", why="cut")
    await client.fail(quitter, "no idea")
    await client.resolve(
        await effect(client, given_up.effect_id), "ABANDONED", who="eve", evidence="nobody minds", late_evidence=0
    )
    reader = await take("reader")
    await prepared(client, reader, "look", LOOK)
    await client.commit(reader, "without it")
