"""The read side of the SQLite store: functions of a connection, each one short read transaction."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from fencepost.kernel.records import Content, Effect, Pool, ResultCommit, Task
from fencepost.stores import codec
from fencepost.stores.base import EffectFilter, Numbered, TaskFilter, TaskHistory
from fencepost.stores.sqlite_file import BUSY_WAIT, file_system_of
from fencepost.stores.sqlite_migrations import describe
from fencepost.stores.sqlite_transaction import (
    LOAD_CHILDREN,
    LOAD_PARENTS,
    LOAD_PAYLOAD,
    LOAD_STAGED,
    LOAD_TASKS,
    listed,
)

_replace = msgspec.structs.replace

_TASK = listed(codec.TASK_COLUMNS, "t.")
_EVENT = listed(codec.EVENT_COLUMNS, "e.")
_LOG = listed(codec.LOG_COLUMNS, "l.")
_RESULT = listed(codec.RESULT_COLUMNS, "r.")
_CHECKPOINT = listed(codec.CHECKPOINT_COLUMNS, "p.")
_STAGED = listed(codec.STAGED_COLUMNS, "s.")
_EFFECT = listed(codec.EFFECT_COLUMNS, "f.")


class _Where:
    """Conditions and their values, in step."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.values: list[Any] = []

    def add(self, part: str, *values: Any) -> None:
        self.parts.append(part)
        self.values.extend(values)

    def one_of(self, column: str, values: Sequence[Any]) -> None:
        if values:
            self.add(f"{column} IN ({', '.join('?' * len(values))})", *values)

    def __str__(self) -> str:
        return " AND ".join(self.parts) if self.parts else "TRUE"


def stored_clock(con: apsw.Connection) -> int:
    return con.execute("SELECT at FROM clock WHERE id = 1").get  # type: ignore[no-any-return]


def pools(con: apsw.Connection) -> list[Pool]:
    return [codec.pool(row) for row in con.execute(f"SELECT {listed(codec.POOL_COLUMNS)} FROM pool ORDER BY name")]


def tasks(con: apsw.Connection, where: TaskFilter, after: str | None, limit: int) -> list[Task]:
    source, found = "task t", _Where()
    if where.parent is not None:
        source = "dependency d CROSS JOIN task t ON t.task_id = d.task_id"
        found.add("d.parent_id = ?", where.parent)
    if after is not None:
        found.add("t.task_id > ?", after)
    for column in ("pool", "queue", "kind"):
        value = getattr(where, column)
        if value is not None:
            found.add(f"t.{column} = ?", value)
    if where.states:
        found.one_of("t.state", where.states)
        if max(where.states) < 3:
            found.add("t.state < 3")  # lets the planner see that the index of what is alive covers it
    sql = f"SELECT {_TASK} FROM {source} WHERE {found} ORDER BY t.task_id LIMIT ?"
    return [codec.task(row) for row in con.execute(sql, (*found.values, limit))]


def records(con: apsw.Connection, task_ids: Sequence[str]) -> list[Task]:
    return [codec.task(row) for row in con.execute(LOAD_TASKS, (apsw.carray(tuple(task_ids)),))] if task_ids else []


def history(con: apsw.Connection, task_id: str) -> TaskHistory | None:
    found = _histories(con, "t.task_id = ?", (task_id,), 1)
    return found[0] if found else None


def histories(con: apsw.Connection, after: str | None, limit: int) -> list[TaskHistory]:
    return (
        _histories(con, "t.task_id > ?", (after,), limit) if after is not None else _histories(con, "TRUE", (), limit)
    )


def _histories(con: apsw.Connection, where: str, values: tuple[Any, ...], limit: int) -> list[TaskHistory]:
    # One read transaction, so that a page is consistent; the caller's with-block ends it.
    rows = con.execute(f"SELECT {_TASK} FROM task t WHERE {where} ORDER BY t.task_id LIMIT ?", (*values, limit))
    found = [codec.task(row) for row in rows]
    if not found:
        return []
    span = (found[0].task_id, found[-1].task_id)
    between = "BETWEEN ? AND ?"
    events = defaultdict(list)
    for row in con.execute(
        f"SELECT {_EVENT} FROM event e WHERE e.task_id {between} ORDER BY e.task_id, e.state_version", span
    ):
        events[row[0]].append(codec.event(row))
    inputs = {
        row[0]: (row[1], codec.content(*row[2:]))
        for row in con.execute(f"SELECT {listed(codec.INPUT_COLUMNS)} FROM input WHERE task_id {between}", span)
    }
    results = {
        row[0]: codec.result(row)
        for row in con.execute(f"SELECT {_RESULT} FROM result r WHERE r.task_id {between}", span)
    }
    checkpoints = {
        row[0]: codec.checkpoint(row)
        for row in con.execute(f"SELECT {_CHECKPOINT} FROM checkpoint p WHERE p.task_id {between}", span)
    }
    staged = defaultdict(list)
    for row in con.execute(
        f"SELECT {_STAGED} FROM staged s WHERE s.task_id {between} "
        "ORDER BY s.task_id, s.generation, s.staged_at, s.digest",
        span,
    ):
        staged[row[0]].append(codec.staged(row))
    effects = defaultdict(list)
    for row in con.execute(
        f"SELECT {_EFFECT} FROM effect f WHERE f.task_id {between} ORDER BY f.task_id, f.number", span
    ):
        effects[row[0]].append(codec.effect(row))
    payload_digests: dict[str, dict[int, str]] = defaultdict(dict)
    for task_id, number, digest in con.execute(
        f"SELECT task_id, number, digest FROM effect_payload WHERE task_id {between}", span
    ):
        payload_digests[task_id][number] = digest
    return [
        TaskHistory(
            task,
            events.get(task.task_id, []),
            inputs.get(task.task_id),
            [row[0] for row in con.execute(LOAD_PARENTS, (task.task_id,))],
            [row[0] for row in con.execute(LOAD_CHILDREN, (task.task_id,))],
            results.get(task.task_id),
            staged.get(task.task_id, []),
            checkpoints.get(task.task_id),
            effects.get(task.task_id, []),
            payload_digests.get(task.task_id, {}),
        )
        for task in found
    ]


def effects(con: apsw.Connection, where: EffectFilter, after: tuple[str, int] | None, limit: int) -> list[Effect]:
    source, found = "effect f", _Where()
    if where.task_id is not None:
        found.add("f.task_id = ?", where.task_id)
    elif where.states and max(where.states) < 3:
        source += " INDEXED BY effect_open"
    if after is not None:
        found.add("(f.task_id, f.number) > (?, ?)", *after)
    if where.pool is not None:
        found.add("f.pool = ?", where.pool)
    if where.states:
        found.one_of("f.state", where.states)
        if max(where.states) < 3:
            found.add("f.state < 3")  # what the index of the open ones covers
    for name in ("guarantee", "downstream"):
        value = getattr(where, name)
        if value is not None:
            found.add(f"f.terms ->> '{name}' = ?", value)
    sql = f"SELECT {_EFFECT} FROM {source} WHERE {found} ORDER BY f.task_id, f.number LIMIT ?"
    return [codec.effect(row) for row in con.execute(sql, (*found.values, limit))]


def payloads(con: apsw.Connection, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Content]:
    found = {}
    for key in keys:
        for row in con.execute(LOAD_PAYLOAD, key):
            payload = codec.payload(row)
            if payload is not None:
                found[key] = payload
    return found


def unknown_backlog(con: apsw.Connection) -> list[tuple[str, str, int, int, int]]:
    rows: Any = con.execute(
        "SELECT f.pool, f.terms ->> 'guarantee', f.state, count(*), min(f.first_prepared_at) "
        "FROM effect f WHERE f.state < 3 GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    )
    return list(rows)


def result(con: apsw.Connection, task_id: str) -> ResultCommit | None:
    row = con.execute(f"SELECT {_RESULT} FROM result r WHERE r.task_id = ?", (task_id,)).fetchone()
    if row is None:
        return None
    found = codec.result(row)
    if found.content is None:
        for staged in map(codec.staged, con.execute(LOAD_STAGED, (task_id,))):
            if (staged.generation, staged.content.digest) == (found.generation, found.result_digest):
                return _replace(found, content=staged.content)
    return found


def events(
    con: apsw.Connection, after: int, limit: int, task_id: str | None, pool: str | None, names: Sequence[str]
) -> list[Numbered]:
    where = _Where()
    if task_id is not None:
        where.add("e.task_id = ?", task_id)
        where.add("+e.number > ?", after)  # by the task's key: its events are few, the journal is long
    else:
        where.add("e.number > ?", after)
    if pool is not None:
        where.add("(SELECT t.pool FROM task t WHERE t.task_id = e.task_id) = ?", pool)
    where.one_of("e.name", names)
    sql = f"SELECT e.number, {_EVENT} FROM event e WHERE {where} ORDER BY e.number LIMIT ?"
    return [Numbered(row[0], codec.event(row[1:])) for row in con.execute(sql, (*where.values, limit))]


def log(
    con: apsw.Connection, after: int, limit: int, task_id: str | None, pool: str | None, kinds: Sequence[str]
) -> list[Numbered]:
    where = _Where()
    if task_id is not None:
        where.add("l.task_id = ?", task_id)
        where.add("+l.number > ?", after)
    else:
        where.add("l.number > ?", after)
    if pool is not None:
        where.add("l.pool = ?", pool)
    where.one_of("l.kind", kinds)
    sql = f"SELECT l.number, {_LOG} FROM log l WHERE {where} ORDER BY l.number LIMIT ?"
    return [Numbered(row[0], codec.log_entry(row[1:])) for row in con.execute(sql, (*where.values, limit))]


def counts(con: apsw.Connection) -> list[tuple[str, str, str, int, int]]:
    rows: Any = con.execute(
        "SELECT pool, queue, kind, state, count(*) FROM task GROUP BY pool, queue, kind, state ORDER BY 1, 2, 3, 4"
    )
    return list(rows)


def last_numbers(con: apsw.Connection) -> tuple[int, int]:
    found = con.execute(
        "SELECT coalesce((SELECT max(number) FROM event), 0), coalesce((SELECT max(number) FROM log), 0)"
    )
    return found.fetchall()[0]  # type: ignore[return-value]


def orphans(con: apsw.Connection) -> dict[str, int]:
    return {
        table: con.execute(
            f"SELECT count(*) FROM {table} o WHERE NOT EXISTS (SELECT 1 FROM task t WHERE t.task_id = o.task_id)"
        ).get
        for table in ("input", "checkpoint", "result", "staged", "dependency", "event", "effect", "effect_payload")
    }


_OPTIONS = ("ENABLE_CARRAY", "THREADSAFE=1", "DEFAULT_SYNCHRONOUS=2")


def diagnose(con: apsw.Connection, path: str) -> dict[str, Any]:
    """Versions, file, journal, sizes, integrity. `quick_check` reads the whole file."""
    problems = [row[0] for row in con.execute("PRAGMA quick_check(20)")]
    pages, page_bytes = con.pragma("page_count"), con.pragma("page_size")
    return {
        "store": "sqlite",
        "durable": True,
        "python": platform.python_version(),
        "apsw": apsw.apsw_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "path": path,
        "file_system": file_system_of(path) or "unknown",
        "journal_mode": con.pragma("journal_mode"),
        "synchronous": con.pragma("synchronous"),
        "pages": pages,
        "page_bytes": page_bytes,
        "file_bytes": os.stat(path).st_size,
        "free_pages": con.pragma("freelist_count"),
        "wal_bytes": _size(path + "-wal"),
        "quick_check": "ok" if problems == ["ok"] else problems,
        "busy_wait": BUSY_WAIT,
        "compile_options": [option for option in _OPTIONS if option in apsw.compile_options],
        **describe(con),
    }


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
