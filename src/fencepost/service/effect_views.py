"""Effects as readers see them, in pages. Nothing here writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_id, check_integer
from fencepost.kernel.records import EffectState, Guarantee
from fencepost.service.answers import effect_view
from fencepost.service.journal import MAX_PAGE, open_cursor, seal_cursor
from fencepost.stores.base import EffectFilter, Store
from fencepost.wire import Page

__all__ = ["effects"]


async def effects(store: Store, where: Mapping[str, Any], cursor: str | None = None, limit: int = 100) -> Page:
    """EffectViews with their payloads, in order of (task id, first prepare). `where`: pool, task_id, downstream (ids),
    guarantee, state (a name, or several).

    `now_us` of each is the store's time before this read: whatever is found out about an effect after reading it
    here is found out later than that. Raises InvalidRequest naming the field for an unknown filter, a bad id, state or
    guarantee, a limit outside 1…1000 or a foreign cursor.
    """
    chosen = _filter(where)
    check_integer(limit, "limit", 1, MAX_PAGE)
    after = None if cursor is None else _after(cursor)
    now = await store.clock()
    found = await store.effects(chosen, after, limit + 1)
    shown = found[:limit]
    payloads = await store.payloads([(effect.task_id, effect.number) for effect in shown]) if shown else {}
    items = [effect_view(effect, now, payloads.get((effect.task_id, effect.number))) for effect in shown]
    if len(found) <= limit:
        return Page(items, None)
    return Page(items, seal_cursor("f", f"{shown[-1].number}.{shown[-1].task_id}"))


def _after(cursor: str) -> tuple[str, int]:
    number, dot, task_id = open_cursor("f", cursor).partition(".")
    if not dot or not number.isdecimal() or len(number) > 18:
        raise InvalidRequest("cursor", "is none that this list gave")
    return check_id(task_id, "cursor"), int(number)


def _filter(where: Mapping[str, Any]) -> EffectFilter:
    chosen: dict[str, Any] = {}
    for field, value in where.items():
        if value is None:
            continue
        if field in ("pool", "task_id", "downstream"):
            chosen[field] = check_id(value, field)
        elif field == "guarantee":
            if value not in Guarantee.__members__:
                raise InvalidRequest(field, f"{str(value)[:40]!r} is none; there are {', '.join(Guarantee)}")
            chosen[field] = value
        elif field == "state":
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, Collection):
                raise InvalidRequest(field, f"must be a state's name or several, got {type(value).__name__}")
            chosen["states"] = tuple(int(_state(name)) for name in names)
        else:
            raise InvalidRequest(
                str(field)[:200], "is no filter; there are pool, task_id, downstream, guarantee and state"
            )
    return EffectFilter(**chosen)


def _state(name: Any) -> EffectState:
    try:
        return EffectState[name.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(state.name for state in EffectState)
        raise InvalidRequest("state", f"{str(name)[:40]!r} is no state of an effect; there are {known}") from None
