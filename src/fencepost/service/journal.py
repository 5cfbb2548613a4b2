"""Journal and log for readers: one list in order of time, pages behind a cursor, and `watch`.

Attempt ids are keys to the door, so none leaves this module: readers get `short_hash` of them, inside
details too. Times are aware datetimes, durations float seconds.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from fencepost.clock import MICROSECOND, to_datetime
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_id, check_integer
from fencepost.kernel.digests import short_hash
from fencepost.kernel.fence import Compare
from fencepost.kernel.records import EVENTS, LOG_KINDS, Event, LogEntry, State
from fencepost.stores.base import Numbered, Store
from fencepost.wire import EventView, Page

MAX_PAGE = 1000

# Inside details: microseconds on the store's clock, by name.
_INSTANTS = ("lease_expires_at", "available_at", "claimed_at", "ready_at", "created_at")


def public_detail(detail: Mapping[str, Any] | None, secrets: Collection[str] = ()) -> dict[str, Any]:
    """A detail for readers: microseconds become datetimes and seconds, attempt ids their short hash.

    `secrets` are attempt ids that may stand in it under any name.
    """
    return {} if not detail else dict(_public_items(detail, secrets))


def _public_items(detail: Mapping[str, Any], secrets: Collection[str]) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in detail.items():
        if name == "attempt_id":
            items.append(("attempt", short_hash(value) if isinstance(value, str) else None))
        elif name == "usage":
            items.append((name, value))  # the keys are the reporter's own
        elif name == "lease_us" and isinstance(value, int):
            items.append(("lease_expires_at", to_datetime(value)))
        elif name == "ready_us" and isinstance(value, int):
            items.append(("ready_to_commit", value / MICROSECOND))
        elif name in ("send_by_us", "not_before_us") and type(value) is int:
            items.append((name.removesuffix("_us"), to_datetime(value)))
        elif name in _INSTANTS and type(value) is int:
            items.append((name, to_datetime(value)))
        elif name.endswith("_us") and type(value) is int:
            items.append((name.removesuffix("_us"), value / MICROSECOND))
        else:
            items.append((hide_keys(name, secrets), _public(value, secrets)))
    return items


def hide_keys(text: str, secrets: Collection[str]) -> str:
    """`text` with attempt ids replaced, wherever they stand in it: an error text may quote one."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, short_hash(secret) or "")
    return text


def _public(value: Any, secrets: Collection[str]) -> Any:
    if isinstance(value, str):
        return hide_keys(value, secrets)
    if isinstance(value, Mapping):
        return public_detail(value, secrets)
    if isinstance(value, (list, tuple)):
        return [_public(item, secrets) for item in value]
    return value


def event_view(event: Event, cursor: str, pool: str | None = None, secrets: Collection[str] = ()) -> EventView:
    """An accepted change of a task record."""
    hidden = secrets or ((event.attempt_id,) if event.attempt_id else ())
    return EventView(
        cursor,
        to_datetime(event.at),
        True,
        event.name,
        event.door,
        pool,
        event.task_id,
        event.state_version,
        event.epoch,
        event.generation,
        event.cancel_generation,
        short_hash(event.attempt_id),
        compared_names(event.compared),
        State(event.state).name,
        detail=public_detail(event.detail, hidden),
    )


def compared_names(mask: int) -> tuple[str, ...]:
    return tuple(bit.name or "" for bit in Compare if mask & bit)


def log_view(entry: LogEntry, cursor: str, secrets: Collection[str] = ()) -> EventView:
    """A log entry: what changed no task record."""
    detail = public_detail(entry.detail, secrets)
    epoch = detail.get("epoch")
    return EventView(
        cursor,
        to_datetime(entry.at),
        False,
        entry.kind,
        entry.door,
        entry.pool,
        entry.task_id,
        epoch=epoch if isinstance(epoch, int) else None,
        generation=entry.generation,
        attempt=entry.attempt,
        outcome=entry.outcome,
        reason=entry.reason,
        detail=detail,
        count=entry.count,
    )


async def events(
    store: Store,
    *,
    task_id: str | None = None,
    pool: str | None = None,
    cursor: str | None = None,
    limit: int = 100,
    names: Sequence[str] = (),
) -> Page:
    """Journal and log as one list, in order of time; each of the two keeps its own order of commit (refusals are
    committed up to a second after they were answered).

    `names`: event names and log kinds of the closed lists. Every item carries the cursor that goes on
    behind it; `next_cursor` is None where there is nothing more *now*. Raises InvalidRequest naming
    the field. What was written between two pages shows on the later one, even if it is older than
    the last line of the earlier one: order over pages is that of commit.
    """
    if task_id is not None:
        check_id(task_id, "task_id")
    if pool is not None:
        check_id(pool, "pool")
    check_integer(limit, "limit", 1, MAX_PAGE)
    event_names, kinds = _names(names)
    items, more = await merged(store, task_id, pool, positions_of(cursor), limit, event_names, kinds)
    return Page(items, items[-1].cursor if more else None)


def _names(names: Sequence[str]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Event names and log kinds among `names`; None for a table that is not asked for."""
    if isinstance(names, str) or not isinstance(names, Collection):
        raise InvalidRequest("names", "must be a list of event names and log kinds")
    if not names:
        return (), ()
    for name in names:
        if name not in EVENTS and name not in LOG_KINDS:
            raise InvalidRequest("names", f"{str(name)[:40]!r} is neither an event's name nor a kind of log entry")
    chosen = tuple(name for name in EVENTS if name in names)
    kinds = tuple(name for name in LOG_KINDS if name in names)
    return chosen or None, kinds or None


async def merged(
    store: Store,
    task_id: str | None,
    pool: str | None,
    positions: tuple[int, int],
    limit: int,
    names: Sequence[str] | None,
    kinds: Sequence[str] | None,
    secrets: Collection[str] = (),
) -> tuple[list[EventView], bool]:
    at_event, at_log = positions
    left: list[Numbered] = []
    right: list[Numbered] = []
    if names is not None:
        left = await store.events(at_event, limit + 1, task_id=task_id, pool=pool, names=names)
    if kinds is not None:
        right = await store.log(at_log, limit + 1, task_id=task_id, pool=pool, kinds=kinds)
    i = j = 0
    items: list[EventView] = []
    while len(items) < limit and (i < len(left) or j < len(right)):
        if j == len(right) or (i < len(left) and left[i].entry.at <= right[j].entry.at):
            at_event = left[i].number
            items.append(event_view(left[i].entry, _event_cursor(at_event, at_log), pool, secrets))
            i += 1
        else:
            at_log = right[j].number
            items.append(log_view(right[j].entry, _event_cursor(at_event, at_log), secrets))
            j += 1
    return items, i < len(left) or j < len(right)


async def watch(
    store: Store, pool: str | None = None, cursor: str | None = None, *, poll: float = 0.2
) -> AsyncIterator[EventView]:
    """Lines of journal and log as they come, for ever: from now on, or from behind `cursor`.

    An idle watcher asks the store for its version every `poll` seconds and reads nothing. Nothing is
    left out, and after a lost connection the last line's cursor goes on where it ended.
    """
    if pool is not None:
        check_id(pool, "pool")
    positions = await store.last_numbers() if cursor is None else positions_of(cursor)
    seen: int | None = None
    while True:
        version = await store.version()
        if version == seen:
            await asyncio.sleep(poll)
            continue
        seen = version  # read before the pages, so that what comes meanwhile moves it again
        more = True
        while more:
            items, more = await merged(store, None, pool, positions, MAX_PAGE, (), ())
            for item in items:
                positions = positions_of(item.cursor)
                yield item


async def log_of(store: Store, task_id: str | None, kinds: Sequence[str], pool: str | None = None) -> Any:
    after = 0
    while True:
        page = await store.log(after, MAX_PAGE, task_id=task_id, pool=pool, kinds=kinds)
        for numbered in page:
            yield numbered
        if len(page) < MAX_PAGE:
            return
        after = page[-1].number


# cursors -----------------------------------------------------------------------------------------


def seal_cursor(kind: str, text: str) -> str:
    return base64.urlsafe_b64encode(f"{kind}1:{text}".encode()).decode().rstrip("=")


def open_cursor(kind: str, cursor: Any) -> str:
    refused = InvalidRequest("cursor", "is none that this list gave")
    if not isinstance(cursor, str) or len(cursor) > 2000 or not cursor.isascii():
        raise refused
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise refused from None
    if not text.startswith(f"{kind}1:"):
        raise refused
    return text[3:]


def _event_cursor(event: int, log: int) -> str:
    return seal_cursor("e", f"{event}.{log}")


def positions_of(cursor: str | None) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    event, dot, log = open_cursor("e", cursor).partition(".")
    if not dot or not (event.isdecimal() and log.isdecimal()) or len(event) > 18 or len(log) > 18:
        raise InvalidRequest("cursor", "is none that this list gave")
    return int(event), int(log)
