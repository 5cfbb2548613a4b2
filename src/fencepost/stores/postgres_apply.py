"""Apply on PostgreSQL: many write sets as few statements, each of them a batch of arrays.

A set that moves one existing task, which is nearly every one, goes into a single autocommit statement with all its
like: an UPDATE guarded by the version of each task, and by the pool's record under a shared lock (which a raise waits
for); everything else is inserted from what that UPDATE returns. All other sets go through one transaction that locks
the records, compares them here, and writes what stands.

Journal numbers: see the migration that makes the table `event`. The places within one transaction are dealt out in
ranges, so that no statement's text depends on how much another one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from fencepost.kernel.records import LogEntry, StagedState, Task
from fencepost.kernel.writes import FAMILIES, WriteSet
from fencepost.stores import codec
from fencepost.stores.base import REQUEST_BUCKET_US
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import Arrays, listed, type_of

NUMBER_BITS = 20
_RANGE = 1 << (NUMBER_BITS - 2)
_EARLIER, _EVENTS, _LOG, _FREE_LOG = 0, _RANGE, 2 * _RANGE, 3 * _RANGE

# The columns that the fast path changes: what claim, renew and commit change, or all that ever changes.
LEAN: tuple[str, ...] = tuple(dict.fromkeys(column for family in FAMILIES.values() for column in family))
# No door moves `pruned_to_version`; a prune does, and what was decided before it must not set it back.
FULL: tuple[str, ...] = tuple(c for c in codec.TASK_COLUMNS[1:] if c != "pruned_to_version")
_lean_row: Callable[[Task], tuple[Any, ...]] = attrgetter(*LEAN)
_full_row: Callable[[Task], tuple[Any, ...]] = attrgetter(*FULL)

_GUARD = ("task_id", "expected", "pool_of", "epoch", "pool_version")
_REQUEST = ("bucket", *codec.REQUEST_COLUMNS)
_DEPENDENCY = ("task_id", "parent_id", "position")
_NO_REQUEST = (None,) * len(_REQUEST)
_NO_RESULT = (None,) * len(codec.RESULT_COLUMNS)
_NOTHING_STAGED = (None, None, None)  # discarded generation; committed generation and digest, of which all others fall


def _number(base: str) -> str:
    return f"n AS MATERIALIZED (SELECT {base} + (pg_current_xact_id()::text::bigint << {NUMBER_BITS}) AS base)"


def is_fast(writes: WriteSet) -> bool:
    """The set moves exactly one task that exists, and no pool."""
    if len(writes.tasks) != 1 or writes.pool_write is not None or writes.dependencies or not writes.events:
        return False
    if len(writes.requests) > 1 or len(writes.results) > 1:
        return False
    write = writes.tasks[0]
    if write.expected_version == 0 or write.family == "compare":
        return False
    staged = (*writes.discard_attempts, *writes.discard_rivals)
    return len(staged) <= 1 or (len(writes.discard_attempts) == 1 == len(writes.discard_rivals))


class Rows:
    """What write sets write beside tasks and pools, table by table. Each row begins with the task that it is about,
    but for requests and log entries, which have it in front."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.results: list[tuple[Any, ...]] = []
        self.requests: list[tuple[Any, ...]] = []
        self.log: list[tuple[Any, ...]] = []
        self.checkpoints: list[tuple[Any, ...]] = []
        self.dropped: list[tuple[str]] = []
        self.staged: list[tuple[Any, ...]] = []
        self.inputs: list[tuple[Any, ...]] = []
        self.dependencies: list[tuple[Any, ...]] = []
        self.discarded: list[tuple[Any, ...]] = []  # (task, generation)
        self.rivals: list[tuple[Any, ...]] = []  # (task, generation, digest)

    def add(self, writes: WriteSet) -> None:
        self.events.extend(codec.event_row(0, event)[1:] for event in writes.events)
        self.results.extend(map(codec.result_row, writes.results))
        self.requests.extend((r.at // REQUEST_BUCKET_US, *codec.request_row(r)) for r in writes.requests)
        for position, dependency in enumerate(writes.dependencies):
            self.dependencies.append((dependency.task_id, dependency.parent_id, position))
        self.discarded.extend(writes.discard_attempts)
        self.rivals.extend(writes.discard_rivals)
        self.add_bodies(writes, "")

    def add_bodies(self, writes: WriteSet, key: str) -> None:
        """What few sets have. `key`: the task whose version decides on the log entries, too."""
        if writes.log:
            self.log.extend((key, *codec.log_row(0, entry)[1:]) for entry in writes.log)
        if writes.checkpoints:
            self.checkpoints.extend(map(codec.checkpoint_row, writes.checkpoints))
        if writes.drop_checkpoints:
            self.dropped.extend((task_id,) for task_id in writes.drop_checkpoints)
        if writes.staged:
            self.staged.extend(map(codec.staged_row, writes.staged))
        if writes.inputs:
            self.inputs.extend(codec.input_row(*entry) for entry in writes.inputs)

    def statements(self, arrays: Arrays, only: str, only_key: str, events_from: int) -> list[str]:
        """Data-modifying parts. `only` and `only_key`: conditions on `x.task_id` and `x.key`."""
        parts: list[str] = []
        if self.events:
            columns = codec.EVENT_COLUMNS
            source = f"{arrays.unnest(columns, self.events)} WITH ORDINALITY x({listed(columns)}, place)"
            parts.append(
                f"INSERT INTO fencepost.event (number, {listed(columns)}) "
                f"SELECT n.base + {events_from} + x.place, {listed(columns, 'x.')} FROM n, {source} WHERE {only}"
            )
        if self.results:
            parts.append(_insert("result", codec.RESULT_COLUMNS, arrays, self.results, only))
        if self.log:
            parts.append(log_statement(arrays, self.log, only_key, _LOG))
        if self.checkpoints:
            parts.append(_upsert("checkpoint", codec.CHECKPOINT_COLUMNS, arrays, self.checkpoints, only))
        if self.dropped:
            source = f"{arrays.unnest(('task_id',), self.dropped)} x(task_id)"
            parts.append(f"DELETE FROM fencepost.checkpoint c USING {source} WHERE c.task_id = x.task_id AND {only}")
        if self.inputs:
            parts.append(_upsert("input", codec.INPUT_COLUMNS, arrays, self.inputs, only))
        if self.dependencies:
            parts.append(_insert("dependency", _DEPENDENCY, arrays, self.dependencies, only))
        if self.staged:
            parts.append(_insert("staged", codec.STAGED_COLUMNS, arrays, self.staged, f"{only} ON CONFLICT DO NOTHING"))
        if self.discarded:
            columns = ("task_id", "generation")
            parts.append(_discard(f"{arrays.unnest(columns, self.discarded)} x({listed(columns)})", only))
        if self.rivals:
            columns = ("task_id", "generation", "digest")
            parts.append(_settle(f"{arrays.unnest(columns, self.rivals)} x({listed(columns)})", only))
        return parts


def _insert(table: str, columns: Sequence[str], arrays: Arrays, rows: Sequence[Sequence[Any]], where: str) -> str:
    source = f"{arrays.unnest(columns, rows)} x({listed(columns)})"
    return (
        f"INSERT INTO fencepost.{table} ({listed(columns)}) SELECT {listed(columns, 'x.')} FROM {source} WHERE {where}"
    )


def _upsert(table: str, columns: Sequence[str], arrays: Arrays, rows: Sequence[Sequence[Any]], where: str) -> str:
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in columns[1:])
    return f"{_insert(table, columns, arrays, rows, where)} ON CONFLICT (task_id) DO UPDATE SET {changes}"


def _discard(source: str, where: str) -> str:
    return (
        f"UPDATE fencepost.staged s SET state = {int(StagedState.DISCARDED)} FROM {source} WHERE "
        f"s.task_id = x.task_id AND s.generation = x.generation AND s.state = {int(StagedState.STAGED)} AND {where}"
    )


def _settle(source: str, where: str) -> str:
    return (
        "UPDATE fencepost.staged s SET state = CASE WHEN s.generation = x.generation AND s.digest = x.digest "
        f"THEN {int(StagedState.COMMITTED)} ELSE {int(StagedState.DISCARDED)} END FROM {source} "
        f"WHERE s.task_id = x.task_id AND s.state = {int(StagedState.STAGED)} AND {where}"
    )


def log_statement(arrays: Arrays, rows: Sequence[tuple[Any, ...]], where: str, place: int) -> str:
    columns = ("key", *codec.LOG_COLUMNS)
    source = f"{arrays.unnest(columns, rows)} WITH ORDINALITY x({listed(columns)}, place)"
    return (
        f"INSERT INTO fencepost.log (number, {listed(codec.LOG_COLUMNS)}) "
        f"SELECT n.base + {place} + x.place, {listed(codec.LOG_COLUMNS, 'x.')} FROM n, {source} WHERE {where}"
    )


# the fast path ----------------------------------------------------------------------------------


def fast_statement(sets: Sequence[WriteSet], log: Sequence[LogEntry], base: int) -> tuple[str, list[Any]]:
    """The one statement; it answers the ids of the tasks that were won."""
    lean = all(writes.tasks[0].family != "any" for writes in sets)
    columns, row = (LEAN, _lean_row) if lean else (FULL, _full_row)
    with_requests = any(writes.requests for writes in sets)
    with_results = any(writes.results for writes in sets)
    with_staged = any(writes.discard_attempts or writes.discard_rivals for writes in sets)
    others = Rows()
    rows: list[tuple[Any, ...]] = []
    pools: dict[str, None] = {}
    # Every batch takes its locks in the same order.
    for writes in sorted(sets, key=_key):
        write = writes.tasks[0]
        task = write.task
        if writes.epoch is not None:
            pools[writes.pool] = None
        events = writes.events
        one = (task.task_id, write.expected_version, writes.pool, writes.epoch, writes.pool_version, *row(task))
        one += codec.event_row(0, events[-1])[1:]
        if with_requests:
            found = writes.requests
            one += (found[0].at // REQUEST_BUCKET_US, *codec.request_row(found[0])) if found else _NO_REQUEST
        if with_results:
            one += codec.result_row(writes.results[0]) if writes.results else _NO_RESULT
        if with_staged:
            one += _staged_changes(writes)
        rows.append(one)
        if len(events) > 1:
            others.events.extend(codec.event_row(0, event)[1:] for event in events[:-1])
        others.add_bodies(writes, task.task_id)
    names: list[str] = [*_GUARD, *(f"t_{name}" for name in columns)]
    told = len(names)
    names += (f"e_{name}" for name in codec.EVENT_COLUMNS)
    kinds = [type_of(name) for name in (*_GUARD, *columns, *codec.EVENT_COLUMNS)]
    if with_requests:
        names += (f"q_{name}" for name in _REQUEST)
        kinds += (type_of(name) for name in _REQUEST)
    if with_results:
        names += (f"r_{name}" for name in codec.RESULT_COLUMNS)
        kinds += (type_of(name) for name in codec.RESULT_COLUMNS)
    if with_staged:
        names += ("s_ended", "s_generation", "s_digest")
        kinds += ("int8", "int8", "text")
    arrays = Arrays()
    chosen = arrays.one(sorted(pools), "text[]")
    number = _number(arrays.one(base, "int8"))
    source = f"{arrays.unnest(names, rows, kinds)} WITH ORDINALITY v({listed(names)}, place)"
    changes = ", ".join(f'"{name}" = v."t_{name}"' for name in columns)
    lock = (
        f"p AS MATERIALIZED (SELECT name, epoch, state_version FROM fencepost.pool WHERE name = ANY({chosen}) "
        "ORDER BY name FOR SHARE)"
    )
    update = (
        f"u AS (UPDATE fencepost.task t SET {changes} FROM {source} "
        "WHERE t.task_id = v.task_id AND t.state_version = v.expected AND (v.epoch IS NULL OR EXISTS "
        "(SELECT 1 FROM p WHERE p.name = v.pool_of AND p.epoch = v.epoch "
        "AND (v.pool_version IS NULL OR p.state_version = v.pool_version))) "
        f"RETURNING v.task_id, v.place, {listed(names[told:], 'v.')})"
    )
    event = (
        f"ev AS (INSERT INTO fencepost.event (number, {listed(codec.EVENT_COLUMNS)}) "
        f"SELECT n.base + {_EVENTS} + u.place, {_from('e', codec.EVENT_COLUMNS)} FROM n, u)"
    )
    parts = [lock, number, update, event]
    if with_requests:
        # No ON CONFLICT: an id that was used in the meantime fails the batch, and the other path sorts it out.
        parts.append(
            f"rq AS (INSERT INTO fencepost.request ({listed(_REQUEST)}) "
            f"SELECT {_from('q', _REQUEST)} FROM u WHERE u.q_request_id IS NOT NULL)"
        )
    if with_results:
        parts.append(
            f"rs AS (INSERT INTO fencepost.result ({listed(codec.RESULT_COLUMNS)}) "
            f"SELECT {_from('r', codec.RESULT_COLUMNS)} FROM u WHERE u.r_task_id IS NOT NULL)"
        )
    if with_staged:
        source = "(SELECT task_id, s_ended AS generation FROM u WHERE s_ended IS NOT NULL) x"
        parts.append(f"sd AS ({_discard(source, 'TRUE')})")
        source = "(SELECT task_id, s_generation AS generation, s_digest AS digest FROM u WHERE s_digest IS NOT NULL) x"
        parts.append(f"sr AS ({_settle(source, 'TRUE')})")
    # IS TRUE keeps the planner from turning the look-up in a hash table into a loop in a loop.
    won = "(x.{} IN (SELECT u.task_id FROM u)) IS TRUE"
    side = others.statements(arrays, won.format("task_id"), won.format("key"), _EARLIER)
    parts += (f"w{number} AS ({part})" for number, part in enumerate(side))
    if log:
        rows = [("", *codec.log_row(0, entry)[1:]) for entry in log]
        parts.append(f"fl AS ({log_statement(arrays, rows, 'TRUE', _FREE_LOG)})")
    return f"WITH {', '.join(parts)} SELECT task_id FROM u", arrays.values


def _key(writes: WriteSet) -> str:
    return writes.tasks[0].task.task_id


def _from(prefix: str, columns: Sequence[str]) -> str:
    return ", ".join(f'u."{prefix}_{name}"' for name in columns)


def _staged_changes(writes: WriteSet) -> tuple[Any, ...]:
    ended, rivals = writes.discard_attempts, writes.discard_rivals
    if not ended and not rivals:
        return _NOTHING_STAGED
    return (ended[0][1] if ended else None, rivals[0][1] if rivals else None, rivals[0][2] if rivals else None)


async def apply_fast(con: Connection, sets: Sequence[WriteSet], log: Sequence[LogEntry], base: int) -> set[str]:
    """The ids of the tasks that were won. Raises UniqueViolationError, with nothing written, where a request id was
    used in the meantime."""
    statement, values = fast_statement(sets, log, base)
    return {row[0] for row in await con.fetch(statement, *values)}


async def apply_log(con: Connection, log: Sequence[LogEntry], base: int) -> None:
    """Entries that hang on no record."""
    arrays = Arrays()
    number = _number(arrays.one(base, "int8"))
    rows = [("", *codec.log_row(0, entry)[1:]) for entry in log]
    await con.execute(f"WITH {number} {log_statement(arrays, rows, 'TRUE', _FREE_LOG)}", *arrays.values)


# the general path -------------------------------------------------------------------------------


class _Lost(Exception):
    """Another transaction inserted these first; the sets that wanted to are lost, and it is begun again without."""

    def __init__(self, keys: set[Any]) -> None:
        self.keys = keys


async def apply_general(
    con: Connection, sets: Sequence[WriteSet], log: Sequence[LogEntry], base: int, lock_pools: Any = None
) -> list[bool]:
    """Any sets, in one transaction: lock, compare, write what stands. Nothing is written where it raises."""
    lost: set[Any] = set()
    while True:
        try:
            async with con.transaction():
                return await _locked(con, sets, log, lost, base)
        except _Lost as error:
            lost |= error.keys


async def _locked(
    con: Connection, sets: Sequence[WriteSet], log: Sequence[LogEntry], lost: set[Any], base: int
) -> list[bool]:
    exclusive = sorted({writes.pool_write[1].name for writes in sets if writes.pool_write is not None})
    shared = sorted({writes.pool for writes in sets if writes.epoch is not None} - set(exclusive))
    pools: dict[str, tuple[int, int]] = {}
    for names, lock in ((exclusive, "UPDATE"), (shared, "SHARE")):
        if names:
            for row in await con.fetch(
                "SELECT name, epoch, state_version FROM fencepost.pool WHERE name = ANY($1::text[]) "
                f"ORDER BY name FOR {lock}",
                names,
            ):
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
    requests: set[tuple[int, str]] = set()
    for writes in sets:
        used = {_request_key(request) for request in writes.requests}
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


def _request_key(request: Any) -> tuple[int, str]:
    return (request.at // REQUEST_BUCKET_US, request.request_id)


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
    rows = Rows()
    for writes in won:
        rows.add(writes)
    if rows.requests:
        await _insert_requests(con, rows.requests)
    arrays = Arrays()
    number = _number(arrays.one(base, "int8"))
    parts = [f"w{place} AS ({part})" for place, part in enumerate(rows.statements(arrays, "TRUE", "TRUE", _EVENTS))]
    if log:
        free = [("", *codec.log_row(0, entry)[1:]) for entry in log]
        parts.append(f"fl AS ({log_statement(arrays, free, 'TRUE', _FREE_LOG)})")
    if parts:
        await con.execute(f"WITH {', '.join((number, *parts))} SELECT 1", *arrays.values)


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
    else:
        changes = ", ".join(f'"{name}" = ${i + 2}' for i, name in enumerate(columns[1:]))
        await con.execute(f"UPDATE fencepost.pool SET {changes} WHERE name = $1", *row)


async def _insert_tasks(con: Connection, tasks: Sequence[Task]) -> None:
    arrays = Arrays()
    sql = _insert("task", codec.TASK_COLUMNS, arrays, list(map(codec.task_row, tasks)), "TRUE")
    there = {row[0] for row in await con.fetch(f"{sql} ON CONFLICT DO NOTHING RETURNING task_id", *arrays.values)}
    missing = {task.task_id for task in tasks} - there
    if missing:
        raise _Lost(set(missing))


async def _update_tasks(con: Connection, tasks: Sequence[Task]) -> None:
    arrays = Arrays()
    columns = codec.TASK_COLUMNS
    source = f"{arrays.unnest(columns, list(map(codec.task_row, tasks)))} v({listed(columns)})"
    changes = ", ".join(f'"{name}" = v."{name}"' for name in FULL)
    await con.execute(
        f"UPDATE fencepost.task t SET {changes} FROM {source} WHERE t.task_id = v.task_id", *arrays.values
    )


async def _insert_requests(con: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    arrays = Arrays()
    sql = _insert("request", _REQUEST, arrays, sorted(rows, key=lambda row: (row[0], row[1])), "TRUE")
    found = await con.fetch(f"{sql} ON CONFLICT DO NOTHING RETURNING bucket, request_id", *arrays.values)
    missing = {row[:2] for row in rows} - {(row[0], row[1]) for row in found}
    if missing:
        raise _Lost(set(missing))
