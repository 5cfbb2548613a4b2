"""The read side: records and journal as values that any reader may see. Nothing here writes.

Reading compares no epoch and needs no claim. Attempt ids are keys to the door, so none leaves this
module: readers get `short_hash` of them. Times are aware datetimes, durations float seconds. Every
read of the store is consistent in itself; two of them are not one snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import msgspec

from fencepost.clock import to_datetime
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_id, check_integer
from fencepost.kernel.digests import decode, short_hash
from fencepost.kernel.outcomes import Outcome, Reason
from fencepost.kernel.records import Content, End, LogEntry, ResultCommit, StagedState, State
from fencepost.service.answers import effect_view, task_view
from fencepost.service.journal import (
    MAX_PAGE,
    events,
    hide_keys,
    log_of,
    merged,
    open_cursor,
    positions_of,
    seal_cursor,
    watch,
)
from fencepost.stores.base import Store, TaskFilter, TaskHistory
from fencepost.wire import AttemptView, EffectView, EventView, Page, Refused, Result, TaskView

__all__ = [
    "HistoryView",
    "Lineage",
    "StagedView",
    "attempts",
    "events",
    "history",
    "result",
    "result_view",
    "task",
    "task_view",
    "tasks",
    "watch",
]

TIMELINE_LIMIT = 5000  # lines of `history`; a task that was refused more often shows the first ones and says so


class StagedView(msgspec.Struct, frozen=True):
    """A staged result, accepted or not. `value` is None where retention removed the body."""

    generation: int
    attempt: str
    digest: str
    state: str  # STAGED, COMMITTED, DISCARDED
    staged_at: datetime
    value: Any = None


class Lineage(msgspec.Struct, frozen=True):
    """A task that this one depends on, with the result commit it used (None while it is open)."""

    task_id: str
    result_commit_id: str | None
    result_digest: str | None


class HistoryView(msgspec.Struct, frozen=True):
    """Everything that is known about one task.

    `conflict` is True where more than one distinct digest was staged or committed; canonical is the
    committed one, whatever came last. `truncated` is True where the timeline was longer than is shown.
    """

    task: TaskView
    attempts: list[AttemptView]
    timeline: list[EventView]
    staged: list[StagedView]
    result: Result | None
    canonical: str | None  # digest of the committed result
    conflict: bool
    lineage: list[Lineage]
    successors: list[str]
    truncated: bool = False
    effects: list[EffectView] = []  # without their payloads


# records -----------------------------------------------------------------------------------------


def result_view(result: ResultCommit) -> Result:
    return Result(
        result.task_id,
        None if result.content is None else decode(result.content),
        result.result_digest,
        result.result_commit_id,
        result.revision,
        result.generation,
        short_hash(result.attempt_id) or "",
        to_datetime(result.committed_at),
        result.parents,
        pruned=result.content is None,
    )


async def _unreachable(store: Store, history: TaskHistory) -> list[str]:
    """Parents that have to be reopened before this task can ever run: CANCELLED or PARKED ones."""
    if history.task.deps_remaining == 0 or history.task.state == State.COMMITTED:
        return []
    lost = {
        parent.task_id
        for parent in await store.records(history.parents)
        if parent.state in (State.CANCELLED, State.PARKED)
    }
    return [parent_id for parent_id in history.parents if parent_id in lost]


def _input_of(history: TaskHistory) -> Any:
    return None if history.input is None else decode(history.input[1])


async def record(store: Store, task_id: str) -> TaskView | None:
    """One task's record and nothing else: what a caller looks at before it names what it expects."""
    found = await store.records([check_id(task_id, "task_id")])
    return task_view(found[0]) if found else None


async def task(store: Store, task_id: str) -> TaskView | None:
    """One task with its input, what it depends on, and the parents that make it unreachable. None: no such task.

    `input` is None where retention has removed it (then `pruned_to_version` is above 0).
    """
    history = await store.history(check_id(task_id, "task_id"))
    if history is None:
        return None
    unreachable = await _unreachable(store, history)
    return task_view(
        history.task, input=_input_of(history), depends_on=tuple(history.parents), unreachable=tuple(unreachable)
    )


async def tasks(store: Store, where: Mapping[str, Any], cursor: str | None = None, limit: int = 100) -> Page:
    """Tasks in order of id. `where`: pool, queue, kind, parent (ids), state (a name, or several).

    Raises InvalidRequest naming the field for an unknown filter, a bad id or state, a limit outside
    1…1000 or a foreign cursor. Pages are not one snapshot: a task that changes state meanwhile may
    show in none or under its new state, and no task shows twice.
    """
    chosen = _task_filter(where)
    check_integer(limit, "limit", 1, MAX_PAGE)
    after = None if cursor is None else check_id(open_cursor("t", cursor), "cursor")
    found = await store.tasks(chosen, after, limit + 1)
    items = [task_view(item) for item in found[:limit]]
    more = len(found) > limit
    return Page(items, seal_cursor("t", items[-1].task_id) if more else None)


def _task_filter(where: Mapping[str, Any]) -> TaskFilter:
    ids: dict[str, str] = {}
    states: tuple[int, ...] = ()
    for field, value in where.items():
        if value is None:
            continue
        if field in ("pool", "queue", "kind", "parent"):
            ids[field] = check_id(value, field)
        elif field in ("state", "states"):
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, Collection):
                raise InvalidRequest(field, f"must be a state's name or several, got {type(value).__name__}")
            states = tuple(int(_state(field, name)) for name in names)
        else:
            raise InvalidRequest(str(field)[:200], "is no filter; there are pool, queue, kind, state and parent")
    return TaskFilter(states=states, **ids)


def _state(field: str, name: Any) -> State:
    try:
        return State[name.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(state.name for state in State)
        raise InvalidRequest(field, f"{str(name)[:40]!r} is no task state; there are {known}") from None


async def result(store: Store, task_id: str) -> Result | Refused:
    """The canonical result; else Refused: NOT_FOUND, or NOT_COMMITTED with the task's state as reason."""
    check_id(task_id, "task_id")
    found = await store.result(task_id)
    if found is None:
        history = await store.history(task_id)
        if history is None:
            return Refused(Outcome.NOT_FOUND, Reason.TASK, door="result", task_id=task_id)
        if history.task.state != State.COMMITTED:
            return Refused(
                Outcome.NOT_COMMITTED,
                State(history.task.state).name,
                {
                    "state": State(history.task.state).name,
                    "state_version": history.task.state_version,
                    "park_reason": history.task.park_reason,
                },
                door="result",
                task_id=task_id,
            )
        found = await store.result(task_id)  # committed between the two reads
        if found is None:
            return Refused(Outcome.NOT_COMMITTED, "MISSING", {"state": "COMMITTED"}, door="result", task_id=task_id)
    return result_view(found)


# attempts ----------------------------------------------------------------------------------------


async def attempts(store: Store, task_id: str) -> list[AttemptView]:
    """Attempts in order of generation, as the journal tells them; empty for an unknown or never claimed task.

    Reported usage is added up per key. Attempts whose start retention removed are left out, but for
    the latest, whose start stands in the record.
    """
    history = await store.history(check_id(task_id, "task_id"))
    if history is None:
        return []
    usage: dict[tuple[int | None, str | None], dict[str, float]] = {}
    async for numbered in log_of(store, task_id, ("usage",)):
        entry = numbered.entry
        add_usage(usage.setdefault((entry.generation, entry.attempt), {}), entry)
    return _attempts(history, usage)


def add_usage(total: dict[str, float], entry: LogEntry) -> None:
    """Add what one usage entry reports to `total`, key by key."""
    for key, value in ((entry.detail or {}).get("usage") or {}).items():
        total[key] = total.get(key, 0) + value * entry.count


def _attempts(history: TaskHistory, usage: Mapping[Any, dict[str, float]]) -> list[AttemptView]:
    task, secrets = history.task, _secrets(history)
    found: dict[int, dict[str, Any]] = {}
    for event in history.events:
        if event.name == "attempt_started":
            found[event.generation] = {
                "attempt_id": event.attempt_id,
                "epoch": event.epoch,
                "cancel_generation": event.cancel_generation,
                "revision": event.revision,
                "owner_id": (event.detail or {}).get("owner") or "",
                "started_at": to_datetime(event.at),
            }
            continue
        attempt = found.get(event.generation)
        if attempt is None and event.attempt_id == task.attempt_id:
            attempt = _latest(found, history)
        if attempt is None:
            continue
        if event.name == "attempt_renewed":
            attempt["renewals"] = attempt.get("renewals", 0) + 1
        elif event.name in ("attempt_ended", "result_committed"):
            detail = event.detail or {}
            attempt["ended_at"] = to_datetime(event.at)
            attempt["end"] = "COMMITTED" if event.name == "result_committed" else detail.get("end")
            error = detail.get("error")
            attempt["error"] = hide_keys(error, secrets) if isinstance(error, str) else None
    if task.claim_generation and task.claim_generation not in found:
        _latest(found, history)
    views = []
    for generation in sorted(found):
        attempt = found[generation]
        short = short_hash(attempt.pop("attempt_id")) or ""
        spent = usage.get((generation, short), {})
        views.append(AttemptView(task.task_id, generation, short, usage=spent, **attempt))
    return views


def _latest(found: dict[int, dict[str, Any]], history: TaskHistory) -> dict[str, Any] | None:
    """The latest attempt from the record, where its start is no longer in the journal."""
    task = history.task
    if task.attempt_id is None or task.claimed_at is None:
        return None
    result = history.result
    return found.setdefault(
        task.claim_generation,
        {
            "attempt_id": task.attempt_id,
            "epoch": task.scheduler_epoch,
            "cancel_generation": task.cancel_generation,
            "revision": task.revision,
            "owner_id": task.owner_id or "",
            "started_at": to_datetime(task.claimed_at),
            "end": End(task.end).name if task.end else None,
            "ended_at": to_datetime(result.committed_at) if result is not None else None,
        },
    )


# one task, whole ---------------------------------------------------------------------------------


async def history(store: Store, task_id: str, *, timeline_limit: int = TIMELINE_LIMIT) -> HistoryView | None:
    """Record, attempts, timeline of events and log entries, staged results with the discarded ones, lineage.

    None: no such task. The timeline shows the first `timeline_limit` lines and says when there are more.
    """
    found = await store.history(check_id(task_id, "task_id"))
    if found is None:
        return None
    secrets = _secrets(found)
    usage: dict[tuple[int | None, str | None], dict[str, float]] = {}
    async for numbered in log_of(store, task_id, ("usage",)):
        entry = numbered.entry
        add_usage(usage.setdefault((entry.generation, entry.attempt), {}), entry)
    timeline: list[EventView] = []
    positions, more = (0, 0), True
    while more and len(timeline) < timeline_limit:
        limit = min(MAX_PAGE, timeline_limit - len(timeline))
        items, more = await merged(store, task_id, None, positions, limit, (), (), secrets)
        timeline += items
        positions = positions_of(items[-1].cursor) if items else positions
    timeline.sort(key=lambda line: line.at)  # refusals are written up to a second after they were answered
    committed = found.result
    canonical = await store.result(task_id) if committed is not None else None
    lineage = []
    for parent_id in found.parents:
        parent = await store.result(parent_id)
        lineage.append(
            Lineage(
                parent_id,
                None if parent is None else parent.result_commit_id,
                None if parent is None else parent.result_digest,
            )
        )
    digests = {item.content.digest for item in found.staged}
    if committed is not None:
        digests.add(committed.result_digest)
    now = await store.clock() if found.effects else 0
    return HistoryView(
        effects=[effect_view(effect, now) for effect in found.effects],
        task=task_view(
            found.task,
            input=_input_of(found),
            depends_on=tuple(found.parents),
            unreachable=tuple(await _unreachable(store, found)),
        ),
        attempts=_attempts(found, usage),
        timeline=timeline,
        staged=[
            StagedView(
                item.generation,
                short_hash(item.attempt_id) or "",
                item.content.digest,
                StagedState(item.state).name,
                to_datetime(item.staged_at),
                _body(item.content),
            )
            for item in sorted(found.staged, key=lambda item: (item.staged_at, item.generation, item.content.digest))
        ],
        result=None if canonical is None else result_view(canonical),
        canonical=None if committed is None else committed.result_digest,
        conflict=len(digests) > 1,
        lineage=lineage,
        successors=list(found.children),
        truncated=more,
    )


def _body(content: Content) -> Any:
    return None if not content.data and not content.binary else decode(content)


def _secrets(found: TaskHistory) -> set[str]:
    """Every attempt id that the task ever had, as far as records and journal still know."""
    ids = {event.attempt_id for event in found.events if event.attempt_id}
    ids.update(item.attempt_id for item in found.staged)
    if found.task.attempt_id:
        ids.add(found.task.attempt_id)
    return ids
