"""The ready scan: READY tasks of some queues and kinds in claim order, without walking over anything else.

The index is (pool, state, queue, kind, priority, available_at, task_id). One *lane* is a queue and a kind; in
a lane and a priority what is due stands in order, and what is delayed behind it. So the scan asks each lane for
its lowest priority, merges the lanes that have the lowest of all, and goes on to the next priority while it has
too few. Tasks of other kinds, delayed ones and finished ones cost nothing, however many.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import apsw

from fencepost.stores import codec

Execute = Callable[..., apsw.Cursor]

_TASK = ", ".join(f't."{name}"' for name in codec.TASK_COLUMNS)
# `state < 3` is what the partial index covers; the planner wants to read it.
_READY = "task t INDEXED BY task_live WHERE t.pool = ?1 AND t.state = 1 AND t.state < 3"

ROWS = f"""
SELECT {_TASK}, i.data, i.digest, i.is_binary
FROM task t INDEXED BY task_live LEFT JOIN input i ON i.task_id = t.task_id
WHERE t.pool = ?1 AND t.state = 1 AND t.state < 3 AND t.queue = ?2 AND t.kind = ?3 AND t.priority = ?4
AND t.available_at <= ?5 ORDER BY t.available_at, t.task_id LIMIT ?6"""

ROWS_CHOSEN = f"""
SELECT {_TASK}, i.data, i.digest, i.is_binary
FROM carray(?1) c CROSS JOIN task t ON t.task_id = c.value LEFT JOIN input i ON i.task_id = t.task_id"""

# One lane's part of a compound: SQLite merges the parts lazily, so that a LIMIT stops them all.
_LANE_KEYS = f"""SELECT t.available_at, t.task_id FROM {_READY}
AND t.queue = ?{{queue}} AND t.kind = ?{{kind}} AND t.priority = ?2 AND t.available_at <= ?3"""
LANES_AT_ONCE = 50

QUEUES = f"""
WITH RECURSIVE q(queue) AS (
    SELECT (SELECT t.queue FROM {_READY} ORDER BY t.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT t.queue FROM {_READY} AND t.queue > q.queue ORDER BY t.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
)
SELECT queue FROM q WHERE queue IS NOT NULL"""

# The kinds of a queue one after the other, each with its lowest priority.
NEXT_KIND = (
    f"SELECT t.kind, t.priority FROM {_READY} AND t.queue = ?2 AND t.kind > ?3 ORDER BY t.kind, t.priority LIMIT 1"
)
PRIORITY = f"SELECT t.priority FROM {_READY} AND t.queue = ?2 AND t.kind = ?3 ORDER BY t.priority LIMIT 1"
NEXT_PRIORITY = (
    f"SELECT t.priority FROM {_READY} AND t.queue = ?2 AND t.kind = ?3 AND t.priority > ?4 ORDER BY t.priority LIMIT 1"
)


def ready_rows(
    execute: Execute, pool: str, queues: Sequence[str] | None, kinds: Sequence[str] | None, limit: int, now: int
) -> Iterable[tuple[Any, ...]]:
    """Rows of TASK_COLUMNS and the input's data, digest and is_binary, best first, at most `limit`."""
    if queues is None:
        queues = [row[0] for row in execute(QUEUES, (pool,))]
    heads: list[tuple[int, str, str]] = []
    for queue in dict.fromkeys(queues):
        if kinds is None:
            row: Any = execute(NEXT_KIND, (pool, queue, "")).fetchone()
            while row is not None:
                kind, priority = row
                heads.append((priority, queue, kind))
                row = execute(NEXT_KIND, (pool, queue, kind)).fetchone()
        else:
            for kind in dict.fromkeys(kinds):
                for (priority,) in execute(PRIORITY, (pool, queue, kind)):
                    heads.append((priority, queue, kind))
    found: list[tuple[Any, ...]] = []
    while heads:
        lowest = min(heads)[0]
        level = [head for head in heads if head[0] == lowest]
        wanted = limit - len(found)
        if len(level) == 1:
            _, queue, kind = level[0]
            found.extend(execute(ROWS, (pool, queue, kind, lowest, now, wanted)))
        else:
            found.extend(_merged(execute, pool, level, now, wanted))
        if len(found) >= limit:
            break
        heads = [head for head in heads if head[0] != lowest]
        for _, queue, kind in level:
            for (priority,) in execute(NEXT_PRIORITY, (pool, queue, kind, lowest)):
                heads.append((priority, queue, kind))
    return found


def _merged(
    execute: Execute, pool: str, level: Sequence[tuple[int, str, str]], now: int, limit: int
) -> Iterable[tuple[Any, ...]]:
    """The first `limit` rows of several lanes that stand at one priority."""
    parts: list[list[tuple[int, str]]] = []
    for start in range(0, len(level), LANES_AT_ONCE):
        lanes = level[start : start + LANES_AT_ONCE]
        values: list[Any] = [pool, lanes[0][0], now, limit]
        for _, queue, kind in lanes:
            values += (queue, kind)
        parts.append(list(execute(keys_statement(len(lanes)), values)))
    keys = [task_id for _, task_id in heapq.merge(*parts)][:limit]
    return execute(ROWS_CHOSEN, (apsw.carray(tuple(keys)),)) if keys else ()


def keys_statement(lanes: int) -> str:
    """Keys of several lanes in order; parameters: pool, priority, now, limit, then queue and kind of each lane."""
    parts = [_LANE_KEYS.format(queue=5 + 2 * i, kind=6 + 2 * i) for i in range(lanes)]
    return " UNION ALL ".join(parts) + " ORDER BY 1, 2 LIMIT ?4"
