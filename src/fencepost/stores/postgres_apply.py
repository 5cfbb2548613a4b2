"""Apply on PostgreSQL, for any write sets: one transaction that locks the records, compares them here, and writes what
stands, each table with one statement. What nearly every set is (a claim, a renewal, a commit of one task) has a faster
way: see postgres_swift.

Journal numbers: see the migration that makes the table `event`. The places within one transaction are dealt out in
ranges, so that no statement's text depends on how much another one writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fencepost.kernel.records import LogEntry, StagedState, Task
from fencepost.kernel.writes import WriteSet
from fencepost.stores import codec
from fencepost.stores.base import REQUEST_RETENTION_US
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import Arrays, listed
from fencepost.stores.postgres_statements import execute
from fencepost.stores.postgres_texts import Texts

NUMBER_BITS = 20
_RANGE = 1 << (NUMBER_BITS - 1)
EVENTS, LOG, FREE_LOG = 0, _RANGE, _RANGE + _RANGE // 2

# No door moves `pruned_to_version`; a prune does, and what was decided before it must not set it back.
CHANGED: tuple[str, ...] = tuple(c for c in codec.TASK_COLUMNS[1:] if c != "pruned_to_version")
DEPENDENCY = ("task_id", "parent_id", "position")
# What an effect is bound to, for good; all else of its row may change.
EFFECT_BOUND = frozenset(
    ("task_id", "number", "effect_id", "pool", "revision", "node_id", "slot", "payload_digest", "terms")
)
EFFECT_CHANGED: tuple[str, ...] = tuple(c for c in codec.EFFECT_COLUMNS if c not in EFFECT_BOUND)


_GATE = int.from_bytes(b"pool", "big")


def numbering(base: str) -> str:
    return f"n AS MATERIALIZED (SELECT {base} + (pg_current_xact_id()::text::bigint << {NUMBER_BITS}) AS base)"


class Rows:
    """What write sets write beside tasks and pools, table by table."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.results: list[tuple[Any, ...]] = []
        self.requests: list[tuple[Any, ...]] = []
        self.log: list[tuple[Any, ...]] = []
        self.checkpoints: list[tuple[Any, ...]] = []
        self.dropped: list[tuple[str]] = []
        self.staged: list[tuple[Any, ...]] = []
        self.inputs: list[tuple[Any, ...]] = []
        self.effects: list[tuple[Any, ...]] = []
        self.payloads: list[tuple[Any, ...]] = []
        self.dependencies: list[tuple[Any, ...]] = []
        self.discarded: list[tuple[Any, ...]] = []  # (task, generation)
        self.rivals: list[tuple[Any, ...]] = []  # (task, generation, digest)

    def add(self, writes: WriteSet) -> None:
        self.events.extend(codec.event_row(0, event)[1:] for event in writes.events)
        for name in writes.made:
            found = getattr(writes, name)
            match name:
                case "results":
                    self.results.extend(map(codec.result_row, found))
                case "requests":
                    self.requests.extend(map(codec.request_row, found))
                case "log":
                    self.log.extend(codec.log_row(0, entry)[1:] for entry in found)
                case "dependencies":
                    self.dependencies.extend((d.task_id, d.parent_id, place) for place, d in enumerate(found))
                case "discard_attempts":
                    self.discarded.extend(found)
                case "discard_rivals":
                    self.rivals.extend(found)
                case "checkpoints":
                    self.checkpoints.extend(map(codec.checkpoint_row, found))
                case "drop_checkpoints":
                    self.dropped.extend((task_id,) for task_id in found)
                case "staged":
                    self.staged.extend(map(codec.staged_row, found))
                case "inputs":
                    self.inputs.extend(codec.input_row(*entry) for entry in found)
                case "effects":
                    self.effects.extend(map(codec.effect_row, found))
                case "payloads":
                    self.payloads.extend(codec.payload_row(*entry) for entry in found)
                case "statements":
                    pass  # not a row: see `_write`
                case _:
                    raise AssertionError(f"this store does not know how to write {name}")

    def statements(self, arrays: Arrays) -> list[str]:
        """Data-modifying parts of one statement; they refer to `n`, which `numbering` makes."""
        parts: list[str] = []
        if self.events:
            columns = codec.EVENT_COLUMNS
            source = f"{arrays.unnest(columns, self.events)} WITH ORDINALITY x({listed(columns)}, place)"
            parts.append(
                f"INSERT INTO fencepost.event (number, {listed(columns)}) "
                f"SELECT n.base + {EVENTS} + x.place, {listed(columns, 'x.')} FROM n, {source}"
            )
        if self.results:
            parts.append(_insert("result", codec.RESULT_COLUMNS, arrays, self.results))
        if self.log:
            parts.append(log_statement(arrays, self.log, LOG))
        if self.checkpoints:
            parts.append(_upsert("checkpoint", codec.CHECKPOINT_COLUMNS, arrays, self.checkpoints))
        if self.dropped:
            source = f"{arrays.unnest(('task_id',), self.dropped)} x(task_id)"
            parts.append(f"DELETE FROM fencepost.checkpoint c USING {source} WHERE c.task_id = x.task_id")
        if self.inputs:
            parts.append(_upsert("input", codec.INPUT_COLUMNS, arrays, self.inputs))
        if self.dependencies:
            parts.append(_insert("dependency", DEPENDENCY, arrays, self.dependencies))
        if self.effects:
            effects = _insert("effect", codec.EFFECT_COLUMNS, arrays, self.effects)
            parts.append(f"{effects} ON CONFLICT (task_id, number) DO UPDATE SET {_excluded(EFFECT_CHANGED)}")
        if self.payloads:
            parts.append(_insert("effect_payload", codec.PAYLOAD_COLUMNS, arrays, self.payloads))
        if self.staged:
            parts.append(f"{_insert('staged', codec.STAGED_COLUMNS, arrays, self.staged)} ON CONFLICT DO NOTHING")
        if self.discarded:
            columns = ("task_id", "generation")
            parts.append(_discard(f"{arrays.unnest(columns, self.discarded)} x({listed(columns)})"))
        if self.rivals:
            columns = ("task_id", "generation", "digest")
            parts.append(settle(f"{arrays.unnest(columns, self.rivals)} x({listed(columns)})"))
        return parts


def _insert(table: str, columns: Sequence[str], arrays: Arrays, rows: Sequence[Sequence[Any]]) -> str:
    source = f"{arrays.unnest(columns, rows)} x({listed(columns)})"
    return f"INSERT INTO fencepost.{table} ({listed(columns)}) SELECT {listed(columns, 'x.')} FROM {source}"


def _upsert(table: str, columns: Sequence[str], arrays: Arrays, rows: Sequence[Sequence[Any]]) -> str:
    return f"{_insert(table, columns, arrays, rows)} ON CONFLICT (task_id) DO UPDATE SET {_excluded(columns[1:])}"


def _excluded(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}" = excluded."{name}"' for name in columns)


# Few tasks have staged anything. The look-up of each stands in a sub-select that the planner may not turn round: with
# a plan made while the table was empty it would walk over all of it for each batch.
_STAGED_OF = f"""CROSS JOIN LATERAL (
    SELECT s.ctid AS row, s.generation, s.digest FROM fencepost.staged s
    WHERE s.task_id = x.task_id AND s.state = {int(StagedState.STAGED)} OFFSET 0) o"""


def _discard(source: str) -> str:
    return (
        f"UPDATE fencepost.staged s SET state = {int(StagedState.DISCARDED)} WHERE s.ctid = ANY(ARRAY("
        f"SELECT o.row FROM {source} {_STAGED_OF} WHERE o.generation = x.generation))"
    )


def settle(source: str) -> str:
    """`source` x: task, generation and digest of what was committed; all else that the task has staged falls."""
    return (
        f"WITH o AS MATERIALIZED (SELECT o.row, o.generation = x.generation AND o.digest = x.digest AS wins "
        f"FROM {source} {_STAGED_OF}) UPDATE fencepost.staged s SET state = "
        f"CASE WHEN EXISTS (SELECT 1 FROM o WHERE o.row = s.ctid AND o.wins) THEN {int(StagedState.COMMITTED)} "
        f"ELSE {int(StagedState.DISCARDED)} END WHERE s.ctid = ANY(ARRAY(SELECT o.row FROM o))"
    )


def log_statement(arrays: Arrays, rows: Sequence[tuple[Any, ...]], place: int) -> str:
    columns = codec.LOG_COLUMNS
    source = f"{arrays.unnest(columns, rows)} WITH ORDINALITY x({listed(columns)}, place)"
    return (
        f"INSERT INTO fencepost.log (number, {listed(columns)}) "
        f"SELECT n.base + {place} + x.place, {listed(columns, 'x.')} FROM n, {source}"
    )


async def apply_log(con: Connection, log: Sequence[LogEntry], base: int) -> None:
    """Entries that hang on no record."""
    arrays = Texts()
    number = numbering(arrays.one(base, "int8"))
    rows = [codec.log_row(0, entry)[1:] for entry in log]
    await con.execute(f"WITH {number} {log_statement(arrays, rows, FREE_LOG)}", *arrays.values)


class _Lost(Exception):
    """Another transaction inserted these first; the sets that wanted to are lost, and it is begun again without."""

    def __init__(self, keys: set[Any]) -> None:
        self.keys = keys


LockPools = Callable[[Connection, Sequence[str]], Awaitable[list[Any]]]


async def apply_any(
    con: Connection, sets: Sequence[WriteSet], log: Sequence[LogEntry], base: int, lock_pools: LockPools
) -> list[bool]:
    """Which sets stood, and so were written; nothing is written where it raises. `con` is in no transaction.

    `lock_pools` locks the pools that are written and returns their rows (`WRITTEN_POOLS`): it may wait for long.
    Raises StatementFailed where the database refuses a statement of one of the sets.
    """
    lost: set[Any] = set()
    while True:
        try:
            async with con.transaction():
                return await _locked(con, sets, log, lost, base, lock_pools)
        except _Lost as error:
            lost |= error.keys


# Whoever compares a pool's record locks its row, so that what it compares is true until it has committed. Sharers would
# let a writer wait for ever, one after the other; so all pass an advisory lock first, whose queue is fair.
def locked_pools(names: str, exclusive: bool) -> str:
    """The pools' names, epochs and versions, as they stand once they are locked."""
    gate = "" if exclusive else "_shared"
    return (
        "SELECT p.name, p.epoch, p.state_version FROM fencepost.pool p, (SELECT count(pg_advisory_xact_lock"
        f"{gate}({_GATE}, hashtext(name))) FROM (SELECT name FROM unnest({names}) name ORDER BY name) names) gate "
        f"WHERE p.name = ANY({names}) AND gate.count IS NOT NULL ORDER BY p.name "
        f"FOR {'UPDATE' if exclusive else 'SHARE'} OF p"
    )


_TOUCH = "UPDATE fencepost.task SET state_version = state_version WHERE task_id = ANY($1::text[])"
WRITTEN_POOLS = locked_pools("$1::text[]", True)
_READ_POOLS = locked_pools("$1::text[]", False)


async def _locked(
    con: Connection,
    sets: Sequence[WriteSet],
    log: Sequence[LogEntry],
    lost: set[Any],
    base: int,
    lock_pools: LockPools,
) -> list[bool]:
    exclusive = sorted({writes.pool_write[1].name for writes in sets if writes.pool_write is not None})
    shared = sorted({writes.pool for writes in sets if writes.epoch is not None} - set(exclusive))
    pools: dict[str, tuple[int, int]] = {}
    rows = await lock_pools(con, exclusive) if exclusive else []
    rows += await con.fetch(_READ_POOLS, shared) if shared else []
    for row in rows:
        pools[row[0]] = (row[1], row[2])
    moved = sorted({write.task.task_id for writes in sets for write in writes.tasks if write.expected_version > 0})
    versions: dict[str, int] = {}
    if moved:
        for row in await con.fetch(
            "SELECT task_id, state_version FROM fencepost.task WHERE task_id = ANY($1::text[]) "
            "ORDER BY task_id FOR UPDATE",
            moved,
        ):
            versions[row[0]] = row[1]
    standing: list[bool] = []
    won: list[WriteSet] = []
    requests: set[tuple[str, str]] = set()
    for writes in sets:
        used = {("request", r.request_id) for r in writes.requests} if "requests" in writes.made else set()
        stands = _stands(writes, pools, versions, lost) and lost.isdisjoint(used) and requests.isdisjoint(used)
        standing.append(stands)
        if stands:
            won.append(writes)
            requests |= used
            if writes.pool_write is not None:
                after = writes.pool_write[1]
                pools[after.name] = (after.epoch, after.state_version)
    await _write(con, won, log, base)
    return standing


def _stands(writes: WriteSet, pools: dict[str, tuple[int, int]], versions: dict[str, int], lost: set[Any]) -> bool:
    if writes.epoch is not None:
        epoch, version = pools.get(writes.pool, (0, 0))
        if epoch != writes.epoch or writes.pool_version not in (None, version):
            return False
    if writes.pool_write is not None:
        expected, pool = writes.pool_write
        if ("pool", pool.name) in lost or pools.get(pool.name, (0, 0))[1] != expected:
            return False
    return all(
        write.task.task_id not in lost and versions.get(write.task.task_id, 0) == write.expected_version
        for write in writes.tasks
    )


async def _write(con: Connection, won: Sequence[WriteSet], log: Sequence[LogEntry], base: int) -> None:
    for writes in won:
        if writes.pool_write is not None:
            await _write_pool(con, *writes.pool_write)
    inserts = [w.task for writes in won for w in writes.tasks if w.expected_version == 0]
    if inserts:
        await _insert_tasks(con, sorted(inserts, key=lambda task: task.task_id))
    updates = [w.task for writes in won for w in writes.tasks if w.expected_version > 0 and w.family != "compare"]
    if updates:
        await _update_tasks(con, updates)
    compared = [w.task.task_id for writes in won for w in writes.tasks if w.family == "compare"]
    if compared:
        # To the same values: a transaction that began before, and waits for this row or comes to it later, finds out
        # that it does not see what hangs on it (a result that was staged).
        await con.execute(_TOUCH, sorted(set(compared)))
    rows = Rows()
    for writes in won:
        rows.add(writes)
    if rows.requests:
        await _insert_requests(con, rows.requests)
    arrays = Texts()
    number = numbering(arrays.one(base, "int8"))
    parts = [f"w{place} AS ({part})" for place, part in enumerate(rows.statements(arrays))]
    if log:
        free = [codec.log_row(0, entry)[1:] for entry in log]
        parts.append(f"fl AS ({log_statement(arrays, free, FREE_LOG)})")
    if parts:
        await con.execute(f"WITH {', '.join((number, *parts))} SELECT 1", *arrays.values)
    for writes in won:
        if "statements" in writes.made:
            await execute(con, writes.statements)


async def _write_pool(con: Connection, expected: int, pool: Any) -> None:
    columns = codec.POOL_COLUMNS
    row = codec.pool_row(pool)
    if expected == 0:
        places = ", ".join(f"${i + 1}" for i in range(len(columns)))
        done = await con.fetch(
            f"INSERT INTO fencepost.pool ({listed(columns)}) VALUES ({places}) ON CONFLICT DO NOTHING RETURNING name",
            *row,
        )
        if not done:
            raise _Lost({("pool", pool.name)})
    elif pool.intake_open or not await _close_as_worker(con, expected, pool):
        changes = ", ".join(f'"{name}" = ${i + 2}' for i, name in enumerate(columns[1:]))
        await con.execute(f"UPDATE fencepost.pool SET {changes} WHERE name = $1", *row)


# A worker's role may change nothing in a pool but by this function: see postgres_roles. The row is locked already.
_MAY_CLOSE = """SELECT to_regprocedure('fencepost.close_intake(text, bigint)') IS NOT NULL
AND NOT has_column_privilege('fencepost.pool', 'intake_open', 'UPDATE')"""
_CLOSE = """SELECT fencepost.close_intake(name, state_version) FROM fencepost.pool
WHERE name = $1 AND state_version = $2 AND epoch = $3 AND stage = $4 AND policy = $5"""


async def _close_as_worker(con: Connection, expected: int, pool: Any) -> bool:
    if not await con.fetchval(_MAY_CLOSE):
        return False
    row = dict(zip(codec.POOL_COLUMNS, codec.pool_row(pool), strict=True))
    return bool(await con.fetchval(_CLOSE, row["name"], expected, row["epoch"], row["stage"], row["policy"]))


async def _insert_tasks(con: Connection, tasks: Sequence[Task]) -> None:
    arrays = Texts()
    sql = _insert("task", codec.TASK_COLUMNS, arrays, list(map(codec.task_row, tasks)))
    there = {row[0] for row in await con.fetch(f"{sql} ON CONFLICT DO NOTHING RETURNING task_id", *arrays.values)}
    missing = {task.task_id for task in tasks} - there
    if missing:
        raise _Lost(set(missing))


async def _update_tasks(con: Connection, tasks: Sequence[Task]) -> None:
    arrays = Texts()
    columns = codec.TASK_COLUMNS
    source = f"{arrays.unnest(columns, list(map(codec.task_row, tasks)))} v({listed(columns)})"
    changes = ", ".join(f'"{name}" = v."{name}"' for name in CHANGED)
    await con.execute(
        f"UPDATE fencepost.task t SET {changes} FROM {source} WHERE t.task_id = v.task_id", *arrays.values
    )


async def _insert_requests(con: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """An id that is past its retention, and not pruned yet, may be used again."""
    arrays = Texts()
    columns = codec.REQUEST_COLUMNS
    sql = _insert("request", columns, arrays, sorted(rows, key=lambda row: str(row[0])))
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns[1:])
    found = await con.fetch(
        f"{sql} ON CONFLICT (request_id) DO UPDATE SET {changes} "
        f"WHERE request.at < excluded.at - {REQUEST_RETENTION_US} RETURNING request_id",
        *arrays.values,
    )
    missing = {("request", row[0]) for row in rows} - {("request", row[0]) for row in found}
    if missing:
        raise _Lost(set(missing))
