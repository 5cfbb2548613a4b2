"""Saying what became of a call although its caller was cancelled: for a few seconds, and then no more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["LEAVING", "through", "within_leaving"]

T = TypeVar("T")

LEAVING = 5.0  # seconds

_outliving: set[asyncio.Future[Any]] = set()  # an event loop alone does not keep its tasks


def _start(coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    task = asyncio.ensure_future(coroutine)
    _outliving.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: asyncio.Future[Any]) -> None:
    _outliving.discard(task)
    if not task.cancelled():
        task.exception()  # the attempt's end says UNKNOWN where this could not


async def through(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` to its end also when the caller is cancelled meanwhile (within `LEAVING`), then be cancelled."""
    task = _start(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=LEAVING)
        task.cancel()
        raise


async def within_leaving(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run `coroutine` for `LEAVING` seconds at most, whatever comes of it."""
    task = _start(coroutine)
    await asyncio.wait({task}, timeout=LEAVING)
    task.cancel()
