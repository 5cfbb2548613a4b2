"""What an idle process asks PostgreSQL now and then, in one statement: is there anything to do, and when will there be?

Of each lane (a queue and a kind) the first task of each priority, which the index has in front; of all claims, which
are few, when the first lease ends; and every pool's version, which tells whether an answer of before still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fencepost.stores.base import Glance
from fencepost.stores.postgres_connections import Connection

Lane = tuple[str, tuple[str, ...], tuple[str, ...] | None]

_decode_pools = msgspec.json.Decoder(list[tuple[str, int, int | None]]).decode
_decode_ready = msgspec.json.Decoder(list[tuple[int, int]]).decode

_READY = "FROM fencepost.task t WHERE t.state = 1 AND t.pool = w.pool AND t.queue = w.queue"


def statement(clock: str) -> str:
    # $1 to $4: number, pool, queue, kind (NULL: any) of each lane.
    return f"""
WITH RECURSIVE n(number, pool, queue, kind) AS MATERIALIZED (
    SELECT * FROM unnest($1::int[], $2::text[], $3::text[], $4::text[])),
k(number, pool, queue, kind) AS (
    SELECT w.number, w.pool, w.queue, (SELECT t.kind {_READY} ORDER BY t.kind LIMIT 1) FROM n w WHERE w.kind IS NULL
    UNION ALL
    SELECT w.number, w.pool, w.queue, (SELECT t.kind {_READY} AND t.kind > w.kind ORDER BY t.kind LIMIT 1)
    FROM k w WHERE w.kind IS NOT NULL),
p(number, pool, queue, kind, priority, available_at) AS (
    SELECT w.number, w.pool, w.queue, w.kind, f.priority, f.available_at
    FROM (SELECT * FROM n UNION ALL SELECT * FROM k) w CROSS JOIN LATERAL (
        SELECT t.priority, t.available_at {_READY} AND t.kind = w.kind ORDER BY t.priority, t.available_at LIMIT 1
    ) f WHERE w.kind IS NOT NULL
    UNION ALL
    SELECT w.number, w.pool, w.queue, w.kind, f.priority, f.available_at FROM p w CROSS JOIN LATERAL (
        SELECT t.priority, t.available_at {_READY} AND t.kind = w.kind AND t.priority > w.priority
        ORDER BY t.priority, t.available_at LIMIT 1
    ) f)
SELECT {clock}, (
    SELECT json_agg(json_build_array(o.name, o.state_version, (
        SELECT min(CASE WHEN t.scheduler_epoch < o.epoch THEN 0 ELSE t.lease_expires_at END)
        FROM fencepost.task t WHERE t.pool = o.name AND t.state = 2
    )))::text FROM fencepost.pool o
), (
    SELECT json_agg(json_build_array(f.number, f.due))::text
    FROM (SELECT p.number, min(p.available_at) AS due FROM p GROUP BY p.number) f
)"""


async def glance(con: Connection, sql: str, lanes: Sequence[Lane]) -> Glance:
    """`sql` is `statement`'s. Nothing that is seen was written later than the time that it is judged at."""
    columns: tuple[list[Any], ...] = ([], [], [], [])
    for number, (pool, queues, kinds) in enumerate(lanes):
        for queue in dict.fromkeys(queues):
            for kind in (None,) if kinds is None else dict.fromkeys(kinds):
                for column, value in zip(columns, (number, pool, queue, kind), strict=True):
                    column.append(value)
    now, pools, ready = await con.fetchrow(sql, *columns)
    found = Glance(now, {}, {}, [None] * len(lanes))
    for name, version, lapses_at in _decode_pools(pools or "[]"):
        found.versions[name] = version
        if lapses_at is not None:
            found.lapses[name] = lapses_at
    for number, due in _decode_ready(ready or "[]"):
        found.ready[number] = due
    return found
