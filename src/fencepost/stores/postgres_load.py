"""Load on PostgreSQL: plain reads, few statements, each answer with the store's clock.

What one statement reads is one snapshot, and the clock is read after that snapshot was taken: nothing that is seen
was written later than the time it is judged at. Records that are read in further statements are younger than the
tasks; an acceptance compares the tasks' versions and so notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fencepost.kernel.records import Content, Task
from fencepost.kernel.writes import Keys, Snapshot
from fencepost.stores import codec
from fencepost.stores.base import REQUEST_RETENTION_US
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
LOAD_PAYLOADS = (
    f"SELECT {listed(codec.PAYLOAD_COLUMNS, 'p.')} FROM fencepost.effect_payload p "
    "JOIN unnest($1::text[], $2::bigint[]) AS k(task_id, number) USING (task_id, number) WHERE p.data IS NOT NULL"
)


class Reading:
    """Loads, by one clock."""

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

        # At least one row: what is asked for alone needs no second look at the clock.
        self.effects = f"""
SELECT {clock}, {listed(codec.EFFECT_COLUMNS, "e.")} FROM (VALUES (1)) one
LEFT JOIN fencepost.effect e ON e.task_id = ANY($1::text[]) ORDER BY e.task_id, e.number"""

    async def now(self, con: Connection) -> int:
        return await con.fetchval(self.clock)  # type: ignore[no-any-return]

    async def load(self, con: Connection, keys: Keys, into: Snapshot) -> None:
        if keys.tasks or keys.pools or keys.requests:
            rows = await con.fetch(self.records, list(keys.tasks), list(keys.pools), list(keys.requests))
            now, pools, requests = rows[0][:3]
            into.now = now
            for row in () if pools is None else _decode(pools):
                into.pools[row[0]] = codec.pool(row)
            for row in () if requests is None else _decode(requests):
                into.requests[row[0]] = codec.request(row)
            tasks = into.tasks
            for row in rows[1:]:
                task = Task(*row[3:])
                tasks[task.task_id] = task
        elif not keys.effects:
            into.now = await self.now(con)
        if keys.effects:
            await self._load_effects(con, keys, into)
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
        if keys.payloads:
            into.payloads.update(await payloads(con, list(keys.payloads)))

    async def _load_effects(self, con: Connection, keys: Keys, into: Snapshot) -> None:
        into.effects.update({task_id: [] for task_id in keys.effects})
        rows = await con.fetch(self.effects, list(keys.effects))
        into.now = rows[0][0]
        for row in rows:
            if row[1] is not None:
                into.effects[row[1]].append(codec.effect(row[1:]))


async def payloads(con: Connection, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Content]:
    rows = await con.fetch(LOAD_PAYLOADS, [task_id for task_id, _ in keys], [number for _, number in keys])
    return {(row[0], row[1]): codec.content(*row[2:]) for row in rows}
