"""Asking a downstream what became of an effect. It changes nothing, and what goes wrong in it is StillUnknown.

A handler's successor asks this way, and the reconciler too; only the successor may `confirm`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fencepost.effects.base import (
    Absent,
    Call,
    Found,
    Gone,
    Happened,
    NotFound,
    Standing,
    StillUnknown,
    Unknown,
    offers,
)

__all__ = ["ask", "cancel", "confirm_stored", "says"]


def says(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def ask(downstream: Any, call: Call, timeout: float) -> Found:
    """What `query` finds, within `timeout` seconds."""
    if not offers(downstream, "query"):
        return StillUnknown("the downstream cannot be asked")
    try:
        async with asyncio.timeout(timeout):
            found = await downstream.query(call)
    except Exception as error:  # noqa: BLE001 - a failed look finds nothing
        return StillUnknown(f"not answered: {says(error)}")
    return _found(found)


async def confirm_stored(downstream: Any, call: Call, timeout: float) -> Found:
    """RESERVATION: none stored, nobody can have confirmed one. Else look, then confirm the stored one.

    It succeeds once at most, so that it starts no new execution.
    """
    if call.reservation_id is None:
        return Gone("NO_RESERVATION")
    if offers(downstream, "query"):
        found = await ask(downstream, call, timeout)
        if isinstance(found, Happened | Gone) or (isinstance(found, StillUnknown) and found.in_progress):
            return found
    if not offers(downstream, "confirm"):
        return StillUnknown("the downstream no longer confirms reservations")
    try:
        async with asyncio.timeout(timeout):
            confirmed: Any = await downstream.confirm(call)
    except Exception as error:  # noqa: BLE001 - the reservation stays stored, and is asked about again
        return StillUnknown(f"not confirmed: {says(error)}")
    match confirmed:
        case Happened():
            return confirmed
        case Absent(why="RESERVATION_CANCELLED"):
            return Gone("RESERVATION_CANCELLED", confirmed.detail)
        case Absent():
            return StillUnknown(confirmed.detail or "not confirmed, and still reserved")
        case Unknown():
            return StillUnknown(confirmed.why, retry_after=confirmed.retry_after)
        case _:
            return StillUnknown(f"answered with {type(confirmed).__name__}, which is no finding")


async def cancel(downstream: Any, call: Call, timeout: float) -> Found:
    """RESERVATION: cancel the stored one for good, which the reconciler may do where nobody will confirm it."""
    if call.reservation_id is None:
        return Gone("NO_RESERVATION")
    if not offers(downstream, "cancel"):
        return StillUnknown("the downstream no longer cancels reservations")
    try:
        async with asyncio.timeout(timeout):
            found: Any = await downstream.cancel(call)
    except Exception as error:  # noqa: BLE001 - it stays stored
        return StillUnknown(f"not cancelled: {says(error)}")
    return _found(found)


def _found(found: Any) -> Found:
    if isinstance(found, Happened | NotFound | Gone | StillUnknown | Standing):
        return found
    return StillUnknown(f"answered with {type(found).__name__}, which is no finding")
