"""The read side of the PostgreSQL store: functions of a connection, each consistent within itself."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec

from fencepost.kernel.records import Effect, EffectState, Pool, ResultCommit, Task
from fencepost.stores import codec
from fencepost.stores.base import EffectFilter, TaskFilter, TaskHistory
from fencepost.stores.postgres_connections import Connection, Settings
from fencepost.stores.postgres_feed import Where
from fencepost.stores.postgres_load import LOAD_CHILDREN, LOAD_PARENTS, LOAD_STAGED
from fencepost.stores.postgres_migrations import describe
from fencepost.stores.postgres_roles import describe_user
from fencepost.stores.postgres_rows import listed

_replace = msgspec.structs.replace

_TASK = listed(codec.TASK_COLUMNS, "t.")
_RESULT = listed(codec.RESULT_COLUMNS, "r.")
_EFFECT = listed(codec.EFFECT_COLUMNS, "e.")
_OPEN = frozenset((EffectState.AWAITING_APPROVAL, EffectState.UNKNOWN))


def _in(column: str, states: Iterable[int]) -> str:
    """As plain numbers, so that the planner sees which partial index covers them, whatever it knows of the table."""
    return f"({' OR '.join(f'{column} = {int(state)}' for state in states)})"


async def pools(con: Connection) -> list[Pool]:
    rows = await con.fetch(f"SELECT {listed(codec.POOL_COLUMNS)} FROM fencepost.pool ORDER BY name")
    return [codec.pool(row) for row in rows]


async def version(con: Connection) -> int:
    return await con.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")  # type: ignore[no-any-return]


async def tasks(con: Connection, where: TaskFilter, after: str | None, limit: int) -> list[Task]:
    source, found = "fencepost.task t", Where()
    if where.parent is not None:
        source = "fencepost.dependency d JOIN fencepost.task t ON t.task_id = d.task_id"
        found.add("d.parent_id = {}", where.parent)
    if after is not None:
        found.add("t.task_id > {}", after)
    for column in ("pool", "queue", "kind"):
        value = getattr(where, column)
        if value is not None:
            found.add(f"t.{column} = {{}}", value)
    if where.states:
        found.add(_in("t.state", where.states))
    found.values.append(limit)
    sql = f"SELECT {_TASK} FROM {source} WHERE {found} ORDER BY t.task_id LIMIT ${len(found.values)}"
    return [Task(*row) for row in await con.fetch(sql, *found.values)]


async def records(con: Connection, task_ids: Sequence[str]) -> list[Task]:
    sql = f"SELECT {_TASK} FROM fencepost.task t WHERE t.task_id = ANY($1::text[])"
    return [Task(*row) for row in await con.fetch(sql, list(task_ids))] if task_ids else []


async def history(con: Connection, task_id: str) -> TaskHistory | None:
    found = await _histories(con, "t.task_id = $2", (1, task_id))
    return found[0] if found else None


async def histories(con: Connection, after: str | None, limit: int) -> list[TaskHistory]:
    if after is None:
        return await _histories(con, "TRUE", (limit,))
    return await _histories(con, "t.task_id > $2", (limit, after))


@asynccontextmanager
async def _one_snapshot(con: Connection) -> AsyncIterator[None]:
    """Every statement of the block sees the same. In a transaction that has just begun, or one of its own."""
    if con.is_in_transaction():
        await con.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield
    else:
        async with con.transaction(isolation="repeatable_read", readonly=True):
            yield


async def _histories(con: Connection, where: str, values: tuple[Any, ...]) -> list[TaskHistory]:
    async with _one_snapshot(con):
        rows = await con.fetch(
            f"SELECT {_TASK} FROM fencepost.task t WHERE {where} ORDER BY t.task_id LIMIT $1", *values
        )
        found = [Task(*row) for row in rows]
        if not found:
            return []
        ids = [task.task_id for task in found]

        async def of(table: str, columns: Sequence[str], order: str = "") -> list[Any]:
            sql = f"SELECT {listed(columns)} FROM fencepost.{table} WHERE task_id = ANY($1::text[]) {order}"
            return await con.fetch(sql, ids)  # type: ignore[no-any-return]

        events, staged = defaultdict(list), defaultdict(list)
        parents, children = defaultdict(list), defaultdict(list)
        for row in await of("event", codec.EVENT_COLUMNS, "ORDER BY task_id, state_version"):
            events[row[0]].append(codec.event(row))
        inputs = {row[0]: (row[1], codec.content(*row[2:])) for row in await of("input", codec.INPUT_COLUMNS)}
        results = {row[0]: codec.result(row) for row in await of("result", codec.RESULT_COLUMNS)}
        checkpoints = {row[0]: codec.checkpoint(row) for row in await of("checkpoint", codec.CHECKPOINT_COLUMNS)}
        effects: dict[str, list[Effect]] = defaultdict(list)
        payload_digests: dict[str, dict[int, str]] = defaultdict(dict)
        for row in await of("effect", codec.EFFECT_COLUMNS, "ORDER BY task_id, number"):
            effects[row[0]].append(codec.effect(row))
        for task_id, number, digest in await of("effect_payload", ("task_id", "number", "digest")):
            payload_digests[task_id][number] = digest
        for row in await con.fetch(LOAD_STAGED, ids):
            staged[row[0]].append(codec.staged(row))
        for child, parent in await con.fetch(LOAD_PARENTS, ids):
            parents[child].append(parent)
        for parent, child in await con.fetch(LOAD_CHILDREN, ids):
            children[parent].append(child)
    return [
        TaskHistory(
            task,
            events.get(task.task_id, []),
            inputs.get(task.task_id),
            parents.get(task.task_id, []),
            children.get(task.task_id, []),
            results.get(task.task_id),
            staged.get(task.task_id, []),
            checkpoints.get(task.task_id),
            effects.get(task.task_id, []),
            payload_digests.get(task.task_id, {}),
        )
        for task in found
    ]


async def result(con: Connection, task_id: str) -> ResultCommit | None:
    row = await con.fetchrow(f"SELECT {_RESULT} FROM fencepost.result r WHERE r.task_id = $1", task_id)
    if row is None:
        return None
    found = codec.result(row)
    if found.content is None:
        for staged in map(codec.staged, await con.fetch(LOAD_STAGED, [task_id])):
            if (staged.generation, staged.content.digest) == (found.generation, found.result_digest):
                return _replace(found, content=staged.content)
    return found


async def effects(con: Connection, where: EffectFilter, after: tuple[str, int] | None, limit: int) -> list[Effect]:
    found = Where()
    if after is not None:
        found.add("(e.task_id, e.number) > ({}, {})", *after)
    for column in ("pool", "task_id"):
        value = getattr(where, column)
        if value is not None:
            found.add(f"e.{column} = {{}}", value)
    for name in ("guarantee", "downstream"):
        value = getattr(where, name)
        if value is not None:
            found.add(f"e.terms::jsonb ->> '{name}' = {{}}", value)
    only_open = bool(where.states) and set(where.states) <= _OPEN
    if where.states:
        found.add(_in("e.open_state" if only_open else "e.state", where.states))
    found.values.append(limit)
    sql = f"SELECT {_EFFECT} FROM fencepost.effect e WHERE {found}"
    if only_open:  # first found and then put in order: in the other order it would walk over all that are settled
        sql = f"WITH e AS MATERIALIZED ({sql}) SELECT * FROM e"
    rows = await con.fetch(f"{sql} ORDER BY e.task_id, e.number LIMIT ${len(found.values)}", *found.values)
    return [codec.effect(row) for row in rows]


async def unknown_backlog(con: Connection) -> list[tuple[str, str, int, int, int]]:
    rows = await con.fetch(
        "SELECT e.pool, (e.terms::jsonb ->> 'guarantee') COLLATE \"C\", e.open_state, count(*), "
        f"min(e.first_prepared_at) FROM fencepost.effect e WHERE {_in('e.open_state', _OPEN)} "
        "GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    )
    return [tuple(row) for row in rows]


async def counts(con: Connection) -> list[tuple[str, str, str, int, int]]:
    rows = await con.fetch(
        "SELECT pool, queue, kind, state, count(*) FROM fencepost.task "
        "GROUP BY pool, queue, kind, state ORDER BY pool, queue, kind, state"
    )
    return [tuple(row) for row in rows]


async def orphans(con: Connection) -> dict[str, int]:
    return {
        table: await con.fetchval(
            f"SELECT count(*) FROM fencepost.{table} o "
            "WHERE NOT EXISTS (SELECT 1 FROM fencepost.task t WHERE t.task_id = o.task_id)"
        )
        for table in ("input", "checkpoint", "result", "staged", "dependency", "event", "effect", "effect_payload")
    }


async def diagnose(con: Connection, settings: Settings) -> dict[str, Any]:
    """Versions, settings that durability rests on, sizes, dead rows, who holds the oldest snapshot."""
    found = {
        "store": "postgres",
        "durable": True,
        "python": platform.python_version(),
        "asyncpg": asyncpg.__version__,
        "pool_size": settings.pool_size,
        "pgbouncer": settings.pgbouncer,
    }
    durability = ("fsync", "synchronous_commit", "full_page_writes")
    for name in ("server_version", *durability, "server_encoding", "track_counts"):
        found[name] = await con.fetchval("SELECT current_setting($1)", name)
    found["durable"] = found["fsync"] == "on" and found["synchronous_commit"] != "off"
    found["user"] = await con.fetchval("SELECT current_user::text")
    found["database_bytes"] = await con.fetchval("SELECT pg_database_size(current_database())")
    found["tables"] = {
        name: {"rows": live, "dead_rows": dead, "bytes": size, "index_bytes": indexes}
        for name, live, dead, size, indexes in await con.fetch(
            "SELECT relname::text, n_live_tup, n_dead_tup, pg_table_size(relid), pg_indexes_size(relid) "
            "FROM pg_stat_user_tables WHERE schemaname = 'fencepost' ORDER BY 1"
        )
    }
    found["oldest_transaction_seconds"] = await con.fetchval(
        "SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8 FROM pg_stat_activity "
        "WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()"
    )
    return {**found, **await describe(con), **await describe_user(con)}


Sessions = tuple[tuple[int, str], ...]  # (pid, when its transaction began): that transaction, and no later one

_BEGAN = "extract(epoch FROM a.xact_start)::text"


async def in_the_way(con: Connection, pid: int) -> tuple[str, Sessions]:
    """Who holds what backend `pid` waits for, and who those wait for: for a person to read, and for `end`."""
    rows = await con.fetch(
        f"""
WITH RECURSIVE b(pid) AS (
    SELECT unnest(pg_blocking_pids($1)) UNION SELECT unnest(pg_blocking_pids(b.pid)) FROM b
)
SELECT a.pid, coalesce(a.usename::text, '?'), a.application_name, coalesce(host(a.client_addr), 'local'), a.state,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8,
       left(regexp_replace(a.query, '[[:space:]]+', ' ', 'g'), 80), {_BEGAN}
FROM b JOIN pg_stat_activity a ON a.pid = b.pid WHERE b.pid <> $1 ORDER BY a.xact_start""",
        pid,
    )
    says = (
        "; ".join(
            f"pid {row[0]} ({row[1]} from {row[3]}, {row[2] or 'no application name'}, {row[4]}, "
            f"in its transaction for {row[5] or 0:.1f} s: {row[6]})"
            for row in rows
        )
        or "nobody that can be seen"
    )
    return says, tuple((row[0], row[7]) for row in rows if row[7] is not None)


async def end(con: Connection, sessions: Sessions) -> int:
    """End the sessions that are still in that very transaction, which is rolled back. How many."""
    sql = (
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(a.pid)) FROM pg_stat_activity a "
        f"JOIN unnest($1::int4[], $2::text[]) s(pid, began) ON a.pid = s.pid AND {_BEGAN} = s.began"
    )
    return await con.fetchval(sql, [pid for pid, _ in sessions], [began for _, began in sessions])  # type: ignore[no-any-return]
