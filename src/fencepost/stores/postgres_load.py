"""Load and Scan on PostgreSQL: plain reads, few statements, each answer with the store's clock.

What one statement reads is one snapshot, and the clock is read after that snapshot was taken: nothing that is seen
was written later than the time it is judged at. Records that are read in further statements are younger than the
tasks; an acceptance compares the tasks' versions and so notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fencepost.kernel.records import Content, Pool, Task
from fencepost.kernel.writes import Keys, Snapshot
from fencepost.stores import codec
from fencepost.stores.base import REQUEST_RETENTION_US, Scan
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import listed

# The store's clock. Tests put another expression in its place, to move it on.
CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"

_TASK = listed(codec.TASK_COLUMNS, "t.")
_EVENT = listed(codec.EVENT_COLUMNS, "e.")
_POOL = ", ".join(codec.POOL_COLUMNS)
_REQUEST = ", ".join(f"r.{name}" for name in codec.REQUEST_COLUMNS)
_decode = msgspec.json.Decoder(list[list[Any]]).decode

LOAD_RESULTS = f"SELECT {listed(codec.RESULT_COLUMNS)} FROM fencepost.result WHERE task_id = ANY($1::text[])"
LOAD_INPUTS = "SELECT task_id, data, digest, is_binary FROM fencepost.input WHERE task_id = ANY($1::text[])"
LOAD_CHECKPOINTS = (
    f"SELECT {listed(codec.CHECKPOINT_COLUMNS)} FROM fencepost.checkpoint WHERE task_id = ANY($1::text[])"
)
LOAD_STAGED = (
    f"SELECT {listed(codec.STAGED_COLUMNS)} FROM fencepost.staged WHERE task_id = ANY($1::text[]) "
    "ORDER BY task_id, generation, staged_at, digest"
)
LOAD_CHILDREN = "SELECT parent_id, task_id FROM fencepost.dependency WHERE parent_id = ANY($1::text[]) ORDER BY task_id"
LOAD_PARENTS = "SELECT task_id, parent_id FROM fencepost.dependency WHERE task_id = ANY($1::text[]) ORDER BY position"
LOAD_STARTS = (
    f"SELECT DISTINCT ON (e.task_id, e.generation) {_EVENT} FROM fencepost.event e "
    "JOIN unnest($1::text[], $2::bigint[]) AS k(task_id, generation) USING (task_id, generation) "
    "WHERE e.name = 'attempt_started' ORDER BY e.task_id, e.generation, e.state_version"
)

# The ready scan, as in SQLite's (see sqlite_ready): of each lane, which is a queue and a kind, the lowest priority
# above $5; of all lanes, the lowest of these; of the lanes that have it, what is due, in order.
_READY = "FROM fencepost.task t WHERE t.pool = $1 AND t.state = 1"
_FLOOR = -(1 << 15)


class Reading:
    """The statements, for one clock."""

    def __init__(self, clock: str = CLOCK) -> None:
        self.clock = f"SELECT {clock}"
        # One row of the clock, pools and requests (few, as JSON), then a row for each task.
        self.records = f"""
WITH c AS MATERIALIZED (SELECT {clock} AS now)
SELECT (SELECT now FROM c), (
    SELECT json_agg(json_build_array({_POOL}))::text FROM fencepost.pool WHERE name = ANY($2::text[])
), (
    SELECT json_agg(json_build_array({_REQUEST}))::text
    FROM unnest($3::text[]) k(id), LATERAL (
        SELECT r.* FROM fencepost.request r WHERE r.request_id = k.id LIMIT 1
    ) r WHERE r.at >= (SELECT now FROM c) - {REQUEST_RETENTION_US}
), {", ".join(["NULL"] * len(codec.TASK_COLUMNS))}
UNION ALL
SELECT NULL, NULL, NULL, {_TASK} FROM fencepost.task t WHERE t.task_id = ANY($1::text[])"""
        first = ", ".join(["NULL"] * (len(codec.TASK_COLUMNS) + 3))
        tail = f"SELECT NULL::bigint, NULL::int2, NULL::bool, {_TASK}, i.data, i.digest, i.is_binary"
        self.one_lane = f"""
WITH c AS MATERIALIZED (SELECT {clock} AS now),
b AS MATERIALIZED (SELECT t.priority {_READY} AND t.queue = $2 AND t.kind = $3 AND t.priority > $5
                   ORDER BY t.priority LIMIT 1)
SELECT (SELECT now FROM c), (SELECT priority FROM b),
EXISTS (SELECT 1 {_READY} AND t.queue = $2 AND t.kind = $3 AND t.priority > (SELECT priority FROM b)), {first}
UNION ALL (
{tail} FROM fencepost.task t LEFT JOIN fencepost.input i ON i.task_id = t.task_id
WHERE t.pool = $1 AND t.state = 1 AND t.queue = $2 AND t.kind = $3
AND t.priority = (SELECT priority FROM b) AND t.available_at <= (SELECT now FROM c)
ORDER BY t.available_at, t.task_id LIMIT $4)"""
        self.lanes = self._lanes(
            clock, first, tail, "SELECT w.queue, w.kind FROM unnest($2::text[], $3::text[]) w(queue, kind)"
        )
        walk = f"""
SELECT w.queue, (SELECT t.kind {_READY} AND t.queue = w.queue ORDER BY t.kind LIMIT 1)
FROM unnest($2::text[]) w(queue) WHERE $3::text[] IS NULL
UNION ALL
SELECT k.queue, (SELECT t.kind {_READY} AND t.queue = k.queue AND t.kind > k.kind ORDER BY t.kind LIMIT 1)
FROM k WHERE k.kind IS NOT NULL"""
        self.any_kind = self._lanes(clock, first, tail, walk)
        self.queues = f"""
WITH RECURSIVE q(queue) AS (
    (SELECT t.queue {_READY} ORDER BY t.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT t.queue {_READY} AND t.queue > q.queue ORDER BY t.queue LIMIT 1) FROM q WHERE q.queue IS NOT NULL
)
SELECT queue FROM q WHERE queue IS NOT NULL"""
        self.lapsed = f"""
WITH c AS MATERIALIZED (SELECT {clock} AS now)
SELECT (SELECT now FROM c), NULL::int2, NULL::bool, {first}
UNION ALL (
{tail} FROM fencepost.task t LEFT JOIN fencepost.input i ON i.task_id = t.task_id
WHERE t.pool = $1 AND t.state = 2 AND (t.lease_expires_at <= (SELECT now FROM c) - $2::bigint OR t.scheduler_epoch < $3)
AND ($4::text[] IS NULL OR t.queue = ANY($4)) AND ($5::text[] IS NULL OR t.kind = ANY($5))
ORDER BY t.priority, t.available_at, t.task_id LIMIT $6)"""

    @staticmethod
    def _lanes(clock: str, first: str, tail: str, lanes: str) -> str:
        lane = f"{_READY} AND t.queue = k.queue AND t.kind = k.kind"
        return f"""
WITH RECURSIVE c AS MATERIALIZED (SELECT {clock} AS now), k(queue, kind) AS ({lanes}),
h AS MATERIALIZED (
    SELECT k.queue, k.kind, (SELECT t.priority {lane} AND t.priority > $5 ORDER BY t.priority LIMIT 1) AS priority
    FROM k WHERE k.kind IS NOT NULL),
b AS MATERIALIZED (SELECT min(h.priority) AS priority FROM h),
x AS MATERIALIZED (
    SELECT l.available_at, l.task_id FROM h AS k CROSS JOIN LATERAL (
        SELECT t.available_at, t.task_id {lane} AND t.priority = k.priority
        AND t.available_at <= (SELECT now FROM c) ORDER BY t.available_at, t.task_id LIMIT $4
    ) l WHERE k.priority = (SELECT priority FROM b) ORDER BY 1, 2 LIMIT $4)
SELECT (SELECT now FROM c), (SELECT priority FROM b),
EXISTS (SELECT 1 FROM h WHERE h.priority > (SELECT priority FROM b))
OR EXISTS (SELECT 1 FROM h AS k WHERE EXISTS (SELECT 1 {lane} AND t.priority > k.priority)), {first}
UNION ALL (
{tail} FROM x JOIN fencepost.task t ON t.task_id = x.task_id LEFT JOIN fencepost.input i ON i.task_id = t.task_id
ORDER BY x.available_at, x.task_id)"""

    async def now(self, con: Connection) -> int:
        return await con.fetchval(self.clock)  # type: ignore[no-any-return]

    async def load(self, con: Connection, keys: Keys, into: Snapshot) -> None:
        if keys.tasks or keys.pools or keys.requests:
            rows = await con.fetch(self.records, list(keys.tasks), list(keys.pools), list(keys.requests))
            now, pools, requests = rows[0][:3]
            into.now = now
            for row in () if pools is None else _decode(pools):
                into.pools[row[0]] = _pool(row)
            for row in () if requests is None else _decode(requests):
                into.requests[row[0]] = codec.request(row)
            tasks = into.tasks
            for row in rows[1:]:
                task = Task(*row[3:])
                tasks[task.task_id] = task
        else:
            into.now = await self.now(con)
        if keys.results:
            for row in await con.fetch(LOAD_RESULTS, list(keys.results)):
                into.results[row[0]] = codec.result(row)
        if keys.inputs:
            for row in await con.fetch(LOAD_INPUTS, list(keys.inputs)):
                into.inputs[row[0]] = codec.content(row[1], row[2], row[3])
        if keys.checkpoints:
            for row in await con.fetch(LOAD_CHECKPOINTS, list(keys.checkpoints)):
                into.checkpoints[row[0]] = codec.checkpoint(row)
        if keys.staged:
            into.staged.update({task_id: [] for task_id in keys.staged})
            for row in await con.fetch(LOAD_STAGED, list(keys.staged)):
                into.staged[row[0]].append(codec.staged(row))
        if keys.children:
            into.children.update({parent: [] for parent in keys.children})
            for parent, child in await con.fetch(LOAD_CHILDREN, list(keys.children)):
                into.children[parent].append(child)
        if keys.parents:
            into.parents.update({child: [] for child in keys.parents})
            for child, parent in await con.fetch(LOAD_PARENTS, list(keys.parents)):
                into.parents[child].append(parent)
        if keys.starts:
            wanted = list(keys.starts)
            for row in await con.fetch(LOAD_STARTS, [task for task, _ in wanted], [number for _, number in wanted]):
                event = codec.event(row)
                into.starts[(event.task_id, event.generation)] = event

    async def scan(self, con: Connection, step: Scan) -> list[Task]:
        queues = None if step.queues is None else list(dict.fromkeys(step.queues))
        kinds = None if step.kinds is None else list(dict.fromkeys(step.kinds))
        found: list[Task] = []
        if step.limit <= 0 or queues == [] or kinds == []:
            step.into.now = await self.now(con)
        elif step.lapsed:
            rows = await con.fetch(self.lapsed, step.pool, step.grace_us, step.epoch, queues, kinds, step.limit)
            _take(rows, step.into, found)
        else:
            if queues is None:
                queues = [row[0] for row in await con.fetch(self.queues, step.pool)]
            await self._ready(con, step, queues, kinds, found)
        return found

    async def _ready(
        self, con: Connection, step: Scan, queues: list[str], kinds: list[str] | None, found: list[Task]
    ) -> None:
        chosen: Any
        if kinds is None:
            sql, chosen = self.any_kind, (queues, None)
        elif len(queues) == 1 and len(kinds) == 1:
            sql, chosen = self.one_lane, (queues[0], kinds[0])
        else:
            lanes = [(queue, kind) for queue in queues for kind in kinds]
            sql, chosen = self.lanes, ([queue for queue, _ in lanes], [kind for _, kind in lanes])
        floor = _FLOOR
        while True:
            rows = await con.fetch(sql, step.pool, *chosen, step.limit - len(found), floor)
            _take(rows, step.into, found)
            _, floor, more = rows[0][:3]
            if not more or len(found) >= step.limit:
                return


def _take(rows: Sequence[Any], into: Snapshot, found: list[Task]) -> None:
    """The first row is the clock's, the others are tasks and their inputs."""
    into.now = rows[0][0]
    inputs = into.inputs
    for row in rows[1:]:
        task = Task(*row[3:-3])
        data = row[-3]
        if data is not None:
            inputs[task.task_id] = Content(data, row[-2], row[-1] != 0)
        found.append(task)


def _pool(row: Sequence[Any]) -> Pool:
    return codec.pool(row)
