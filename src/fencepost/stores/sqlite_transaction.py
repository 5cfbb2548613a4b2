"""One write transaction of the SQLite store: a plan's Load, Scan and Apply, answered on the writer thread.

BEGIN IMMEDIATE holds the only write lock of the file, so nothing that was read inside can move before
COMMIT: versions and epochs are compared in Python against what this transaction has read, and the
statements compare the version once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import apsw
import msgspec

from fencepost.errors import Inconsistent, Unavailable
from fencepost.kernel.records import Content, Event, LogEntry, Pool, StagedState, Statement, Task
from fencepost.kernel.writes import FAMILIES, Keys, Snapshot, WriteSet
from fencepost.stores import codec, sqlite_statements
from fencepost.stores.base import REQUEST_BUCKET_US, REQUEST_BUCKETS, REQUEST_RETENTION_US, Scan
from fencepost.stores.sqlite_ready import ready_rows


def listed(columns: Iterable[str], of: str = "") -> str:
    return ", ".join(f'{of}"{name}"' for name in columns)


def _insert(table: str, columns: Sequence[str], tail: str = "") -> str:
    return f"INSERT INTO {table} ({listed(columns)}) VALUES ({', '.join('?' * len(columns))}) {tail}"


def _upsert(table: str, columns: Sequence[str], *key: str) -> str:
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name not in key)
    return _insert(table, columns, f"ON CONFLICT ({listed(key)}) DO UPDATE SET {changes}")


def _update_task(columns: Sequence[str]) -> str:
    changes = ", ".join(f'"{name}" = ?' for name in columns)
    return f"UPDATE task SET {changes} WHERE task_id = ? AND state_version = ?"


astuple = msgspec.structs.astuple


class _Family:
    """The statement of one TaskWrite.family, and the row that it takes."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.sql = _update_task(columns)
        self.row: Callable[[Task], tuple[Any, ...]] = attrgetter(*columns, "task_id")


_FAMILIES = {name: _Family(columns) for name, columns in FAMILIES.items()}
_FAMILIES["any"] = _Family(codec.TASK_COLUMNS[1:])

_TASK = listed(codec.TASK_COLUMNS, "t.")
_EVENT = listed(codec.EVENT_COLUMNS)
_STAGED = listed(codec.STAGED_COLUMNS)
_EFFECT = listed(codec.EFFECT_COLUMNS, "f.")

INSERT_TASK = _insert("task", codec.TASK_COLUMNS)
INSERT_EVENT = _insert("event", ("number", *codec.EVENT_COLUMNS))
INSERT_LOG = _insert("log", ("number", *codec.LOG_COLUMNS))
INSERT_RESULT = _insert("result", codec.RESULT_COLUMNS)
# The first answer under a request id stays the answer.
INSERT_REQUEST = _insert("request", ("bucket", *codec.REQUEST_COLUMNS), "ON CONFLICT DO NOTHING")
INSERT_STAGED = _insert("staged", codec.STAGED_COLUMNS, "ON CONFLICT DO NOTHING")
INSERT_DEPENDENCY = _insert("dependency", ("task_id", "parent_id", "position"))
PUT_INPUT = _upsert("input", codec.INPUT_COLUMNS, "task_id")
PUT_CHECKPOINT = _upsert("checkpoint", codec.CHECKPOINT_COLUMNS, "task_id")
PUT_EFFECT = _upsert("effect", codec.EFFECT_COLUMNS, "task_id", "number")
INSERT_PAYLOAD = _insert("effect_payload", codec.PAYLOAD_COLUMNS)
INSERT_POOL = _insert("pool", codec.POOL_COLUMNS)
_POOL_CHANGES = ", ".join(f"{name} = ?" for name in codec.POOL_COLUMNS[1:])
UPDATE_POOL = f"UPDATE pool SET {_POOL_CHANGES} WHERE name = ? AND state_version = ?"
DISCARD_ATTEMPT = (
    f"UPDATE staged SET state = {int(StagedState.DISCARDED)} "
    f"WHERE task_id = ? AND generation = ? AND state = {int(StagedState.STAGED)}"
)
DISCARD_RIVALS = (
    f"UPDATE staged SET state = CASE WHEN generation = ? AND digest = ? THEN {int(StagedState.COMMITTED)} "
    f"ELSE {int(StagedState.DISCARDED)} END WHERE task_id = ? AND state = {int(StagedState.STAGED)}"
)

DROP_CHECKPOINT = "DELETE FROM checkpoint WHERE task_id = ?"
WITH_STAGED = (
    "SELECT c.value FROM carray(?1) c WHERE EXISTS "
    f"(SELECT 1 FROM staged s WHERE s.task_id = c.value AND s.state = {int(StagedState.STAGED)})"
)

# What several of these do to one task happens in this order.
_IN_ORDER = (
    PUT_INPUT,
    INSERT_DEPENDENCY,
    PUT_CHECKPOINT,
    DROP_CHECKPOINT,
    INSERT_STAGED,
    DISCARD_ATTEMPT,
    PUT_EFFECT,
    INSERT_PAYLOAD,
)

# Chosen rows: the list drives, each of its members is one look-up by key.
_CHOSEN = "FROM carray(?1) c CROSS JOIN"
LOAD_TASK = f"SELECT {_TASK} FROM task t WHERE t.task_id = ?1"
LOAD_TASKS = f"SELECT {_TASK} {_CHOSEN} task t ON t.task_id = c.value"
LOAD_VERSIONS = f"SELECT t.task_id, t.state_version {_CHOSEN} task t ON t.task_id = c.value"
LOAD_POOL = f"SELECT {listed(codec.POOL_COLUMNS)} FROM pool WHERE name = ?"
_REQUEST_BUCKETS = ", ".join(f"?{i + 2}" for i in range(REQUEST_BUCKETS))
LOAD_REQUEST = (
    f"SELECT {listed(codec.REQUEST_COLUMNS, 'r.')} FROM request r "
    f"WHERE r.bucket IN ({_REQUEST_BUCKETS}) AND r.request_id = ?1 AND r.at >= ?{REQUEST_BUCKETS + 2}"
)
LOAD_REQUESTS = (
    f"SELECT {listed(codec.REQUEST_COLUMNS, 'r.')} {_CHOSEN} request r "
    f"ON r.bucket IN ({_REQUEST_BUCKETS}) AND r.request_id = c.value WHERE r.at >= ?{REQUEST_BUCKETS + 2}"
)
LOAD_RESULTS = f"SELECT {listed(codec.RESULT_COLUMNS, 'r.')} {_CHOSEN} result r ON r.task_id = c.value"
LOAD_INPUTS = f"SELECT i.task_id, i.data, i.digest, i.is_binary {_CHOSEN} input i ON i.task_id = c.value"
LOAD_CHECKPOINTS = f"SELECT {listed(codec.CHECKPOINT_COLUMNS, 'p.')} {_CHOSEN} checkpoint p ON p.task_id = c.value"
LOAD_STAGED = f"SELECT {_STAGED} FROM staged WHERE task_id = ? ORDER BY generation, staged_at, digest"
LOAD_CHILDREN = "SELECT task_id FROM dependency WHERE parent_id = ? ORDER BY task_id"
LOAD_PARENTS = "SELECT parent_id FROM dependency WHERE task_id = ? ORDER BY position"
LOAD_START = (
    f"SELECT {_EVENT} FROM event WHERE task_id = ? AND generation = ? AND name = 'attempt_started' "
    "ORDER BY state_version LIMIT 1"
)
LOAD_EFFECTS = f"SELECT {_EFFECT} {_CHOSEN} effect f ON f.task_id = c.value ORDER BY f.task_id, f.number"
LOAD_PAYLOAD = f"SELECT {listed(codec.PAYLOAD_COLUMNS)} FROM effect_payload WHERE task_id = ? AND number = ?"

LAPSED = f"""
SELECT {_TASK}, i.data, i.digest, i.is_binary
FROM task t INDEXED BY task_live LEFT JOIN input i ON i.task_id = t.task_id
WHERE t.pool = ?1 AND t.state = 2 AND t.state < 3 AND (t.lease_expires_at <= ?2 OR t.scheduler_epoch < ?3)
{{queues}} {{kinds}}
ORDER BY t.priority, t.available_at, t.task_id LIMIT ?4"""


class Standing:
    """What one connection's last transaction left behind of the two tables that every transaction reads.

    SQLite counts the database's changes, whoever makes them: while `version` is the count inside a later
    transaction, nobody has written since, and these are the rows as they stand.
    """

    __slots__ = ("at", "con", "number", "pools", "version")

    def __init__(self) -> None:
        self.con: apsw.Connection | None = None  # whose count it is; None: nothing is known
        self.version = 0
        self.at = 0
        self.number = 0
        self.pools: dict[str, Pool] = {}


class Transaction:
    """Begin, answer the plan's requests, commit or roll back. Used once, by the thread that owns `con`."""

    def __init__(self, con: apsw.Connection, tick: Callable[[int], int], standing: Standing | None = None) -> None:
        self.con = con
        self._execute = con.execute
        self._tick = tick
        self._standing = Standing() if standing is None else standing
        self.now = 0
        self.wrote = False
        self._stored = 0
        self._number = 0
        self._versions: dict[str, int] = {}  # of tasks, as this transaction has read or written them; 0: none
        self._pools: dict[str, Pool] = {}

    def begin(self) -> None:
        con, standing = self.con, self._standing
        if con.in_transaction:  # a rollback that failed, with the disk
            self._execute("ROLLBACK")
        self._execute("BEGIN IMMEDIATE")
        if standing.con is con and standing.version == con.data_version():
            self._stored, self._number, self._pools = standing.at, standing.number, standing.pools
        else:
            row: Any = self._execute("SELECT at, number FROM clock WHERE id = 1").fetchone()
            if row is None:
                raise Inconsistent("the row of the store's clock is gone; restore the file from a backup")
            self._stored, self._number = row
        standing.con = None  # until this one has ended well
        self.now = self._tick(self._stored)

    def commit(self) -> None:
        standing = self._standing
        if self.wrote:
            self._execute("UPDATE clock SET at = ?, number = ? WHERE id = 1", (self.now, self._number))
            self._stored = self.now
        try:
            self._execute("COMMIT")
        except apsw.ConstraintError as error:
            raise Unavailable(f"the commit was refused, and nothing was written: {error}") from error
        standing.at, standing.number, standing.pools = self._stored, self._number, self._pools
        standing.con, standing.version = self.con, self.con.data_version()

    def rollback(self) -> None:
        if self.con.in_transaction:  # a full disk, say, has rolled back already
            self._execute("ROLLBACK")

    # load ---------------------------------------------------------------------------------------

    def load(self, keys: Keys, into: Snapshot) -> None:
        into.now = self.now
        execute = self._execute
        for name in keys.pools:
            pool = self._pool(name)
            if pool is not None:
                into.pools[name] = pool
        if keys.tasks:
            self._load_tasks(keys.tasks, into.tasks)
        if keys.requests:
            bucket = self.now // REQUEST_BUCKET_US
            bounds = (*range(bucket - REQUEST_BUCKETS + 1, bucket + 1), self.now - REQUEST_RETENTION_US)
            if len(keys.requests) == 1:
                rows = execute(LOAD_REQUEST, (*keys.requests, *bounds))
            else:
                rows = execute(LOAD_REQUESTS, (apsw.carray(tuple(keys.requests)), *bounds))
            for row in rows:
                into.requests[row[0]] = codec.request(row)
        if keys.results:
            for row in execute(LOAD_RESULTS, (apsw.carray(tuple(keys.results)),)):
                into.results[row[0]] = codec.result(row)
        if keys.inputs:
            for row in execute(LOAD_INPUTS, (apsw.carray(tuple(keys.inputs)),)):
                into.inputs[row[0]] = codec.content(row[1], row[2], row[3])
        if keys.checkpoints:
            for row in execute(LOAD_CHECKPOINTS, (apsw.carray(tuple(keys.checkpoints)),)):
                into.checkpoints[row[0]] = codec.checkpoint(row)
        for task_id in keys.staged:
            into.staged[task_id] = [codec.staged(row) for row in execute(LOAD_STAGED, (task_id,))]
        for task_id in keys.children:
            into.children[task_id] = [row[0] for row in execute(LOAD_CHILDREN, (task_id,))]
        for task_id in keys.parents:
            into.parents[task_id] = [row[0] for row in execute(LOAD_PARENTS, (task_id,))]
        for task_id, generation in keys.starts:
            for row in execute(LOAD_START, (task_id, generation)):
                into.starts[(task_id, generation)] = codec.event(row)
        if keys.effects:
            for task_id in keys.effects:
                into.effects[task_id] = []
            for row in execute(LOAD_EFFECTS, (apsw.carray(tuple(keys.effects)),)):
                into.effects[row[0]].append(codec.effect(row))
        for key in keys.payloads:
            for row in execute(LOAD_PAYLOAD, key):
                payload = codec.payload(row)
                if payload is not None:
                    into.payloads[key] = payload

    def _pool(self, name: str) -> Pool | None:
        pool = self._pools.get(name)
        if pool is None:
            row = self._execute(LOAD_POOL, (name,)).fetchone()
            if row is not None:
                pool = self._pools[name] = codec.pool(row)
        return pool

    def _load_tasks(self, wanted: set[str], into: dict[str, Task]) -> None:
        versions = self._versions
        if len(wanted) == 1:
            rows = self._execute(LOAD_TASK, tuple(wanted))
        else:
            rows = self._execute(LOAD_TASKS, (apsw.carray(tuple(wanted)),))
        found = 0
        for row in rows:
            task = Task(*row)
            into[task.task_id] = task
            versions[task.task_id] = task.state_version
            found += 1
        if found != len(wanted):
            for task_id in wanted:
                if task_id not in into:
                    versions[task_id] = 0

    # scan ---------------------------------------------------------------------------------------

    def scan(self, step: Scan) -> list[Task]:
        into, limit, queues, kinds = step.into, step.limit, step.queues, step.kinds
        into.now = self.now
        if limit <= 0 or queues == () or kinds == ():
            return []
        if step.lapsed:
            rows = self._lapsed(step.pool, queues, kinds, limit, step.epoch, self.now - step.grace_us)
        else:
            rows = ready_rows(self._execute, step.pool, queues, kinds, limit, self.now)
        found: list[Task] = []
        inputs, versions = into.inputs, self._versions
        for row in rows:
            task = Task(*row[:-3])
            task_id = task.task_id
            versions[task_id] = task.state_version
            data = row[-3]
            if data is not None:
                inputs[task_id] = Content(data, row[-2], row[-1] != 0)
            found.append(task)
        return found

    def _lapsed(
        self, pool: str, queues: Sequence[str] | None, kinds: Sequence[str] | None, limit: int, epoch: int, ended: int
    ) -> Iterable[tuple[Any, ...]]:
        values: list[Any] = [pool, ended, epoch, limit]
        parts = {"queues": "", "kinds": ""}
        for column, chosen in (("queue", queues), ("kind", kinds)):
            if chosen is not None:
                values.append(apsw.carray(tuple(chosen)))
                parts[column + "s"] = f"AND t.{column} IN (SELECT value FROM carray(?{len(values)}))"
        return self._execute(LAPSED.format(**parts), values)

    # apply --------------------------------------------------------------------------------------

    def apply(self, sets: Sequence[WriteSet], log: Sequence[LogEntry]) -> list[bool]:
        self._read_unread(sets)
        batch = _Batch()
        won: list[bool] = []
        for writes in sets:
            standing = self._compare(writes)
            won.append(standing)
            if standing:
                batch.add(writes)
        batch.log.extend(log)
        if True in won or log:
            self.wrote = True
            self._number = batch.write(self.con, self._number)
        return won

    def _read_unread(self, sets: Sequence[WriteSet]) -> None:
        versions = self._versions
        unread = {w.task.task_id for writes in sets for w in writes.tasks if w.task.task_id not in versions}
        if unread:
            versions.update(dict.fromkeys(unread, 0))
            versions.update(self._execute(LOAD_VERSIONS, (apsw.carray(tuple(unread)),)))

    def _compare(self, writes: WriteSet) -> bool:
        """Whether everything stands as `writes` was decided on; then counts it as written."""
        if writes.epoch is not None:
            pool = self._pool(writes.pool)
            if pool is None or pool.epoch != writes.epoch:
                return False
            if writes.pool_version is not None and pool.state_version != writes.pool_version:
                return False
        versions = self._versions
        for write in writes.tasks:
            if versions[write.task.task_id] != write.expected_version:
                return False
        if writes.pool_write is not None:
            expected, after = writes.pool_write
            standing = self._pool(after.name)
            if (0 if standing is None else standing.state_version) != expected:
                return False
            self._pools[after.name] = after
        for write in writes.tasks:
            versions[write.task.task_id] = write.task.state_version
        return True


class _Batch:
    """The rows of many write sets, table by table: one pass over each table a batch."""

    def __init__(self) -> None:
        self.inserts: list[tuple[Any, ...]] = []
        self.updates: dict[str, list[tuple[Any, ...]]] = {}  # by family
        self.pools: list[tuple[int, Pool]] = []
        self.rows: dict[str, list[tuple[Any, ...]]] = {}  # by statement
        self.requests: list[tuple[Any, ...]] = []
        self.results: list[tuple[Any, ...]] = []
        self.rivals: dict[str, tuple[int, str]] = {}
        self.events: list[Event] = []
        self.log: list[LogEntry] = []
        self.statements: list[Statement] = []

    def add(self, writes: WriteSet) -> None:
        for expected, task, family in map(astuple, writes.tasks):
            if expected == 0:
                self.inserts.append(astuple(task))
            elif family in self.updates:
                self.updates[family].append((*_FAMILIES[family].row(task), expected))
            elif family != "compare":
                self.updates[family] = [(*_FAMILIES[family].row(task), expected)]
        self.events += writes.events
        if writes.pool_write is not None:
            self.pools.append(writes.pool_write)
        for name in writes.made:
            _ADD[name](self, getattr(writes, name))

    def _extend(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self.rows.setdefault(statement, []).extend(rows)

    def write(self, con: apsw.Connection, number: int) -> int:
        """Write it all; the last number given to an event or log entry. Raises Inconsistent and StatementFailed, never
        half a batch: the transaction is then rolled back."""
        many = con.executemany
        before = con.total_changes()
        expected = len(self.inserts) + len(self.pools)
        for family, rows in self.updates.items():
            many(_FAMILIES[family].sql, rows)
            expected += len(rows)
        if self.inserts:
            many(INSERT_TASK, self.inserts)
        for version, pool in self.pools:
            row = codec.pool_row(pool)
            if version == 0:
                con.execute(INSERT_POOL, row)
            else:
                con.execute(UPDATE_POOL, (*row[1:], row[0], version))
        if con.total_changes() - before != expected:
            raise Inconsistent("a record moved inside a transaction that holds the write lock; run fencepost audit")
        for statement in _IN_ORDER:
            if statement in self.rows:
                many(statement, self.rows[statement])
        if self.rivals:
            self._settle_rivals(con)
        if self.results:
            many(INSERT_RESULT, self.results)
        if self.requests:
            many(INSERT_REQUEST, self.requests)
        if self.events:
            event_row = codec.event_row
            many(INSERT_EVENT, [event_row(number + i, event) for i, event in enumerate(self.events, 1)])
            number += len(self.events)
        if self.log:
            many(INSERT_LOG, [codec.log_row(number + i, entry) for i, entry in enumerate(self.log, 1)])
            number += len(self.log)
        if self.statements:
            sqlite_statements.execute(con, self.statements)
        return number

    def _settle_rivals(self, con: apsw.Connection) -> None:
        """Few tasks have staged anything: one statement asks for them all."""
        if len(self.rivals) == 1:
            [(task_id, rival)] = self.rivals.items()
            con.execute(DISCARD_RIVALS, (*rival, task_id))
            return
        staged: Any = con.execute(WITH_STAGED, (apsw.carray(tuple(self.rivals)),))
        for task_id in [row[0] for row in staged]:
            con.execute(DISCARD_RIVALS, (*self.rivals[task_id], task_id))


# By the name of a write set's list: how its members become rows of a batch.
_ADD: dict[str, Callable[[_Batch, list[Any]], None]] = {
    "checkpoints": lambda batch, found: batch._extend(PUT_CHECKPOINT, map(codec.checkpoint_row, found)),
    "dependencies": lambda batch, found: batch._extend(
        INSERT_DEPENDENCY, ((d.task_id, d.parent_id, position) for position, d in enumerate(found))
    ),
    "discard_attempts": lambda batch, found: batch._extend(DISCARD_ATTEMPT, found),
    "discard_rivals": lambda batch, found: batch.rivals.update(
        (task_id, (generation, digest)) for task_id, generation, digest in found
    ),
    "drop_checkpoints": lambda batch, found: batch._extend(DROP_CHECKPOINT, ((task_id,) for task_id in found)),
    "effects": lambda batch, found: batch._extend(PUT_EFFECT, map(codec.effect_row, found)),
    "inputs": lambda batch, found: batch._extend(PUT_INPUT, (codec.input_row(*entry) for entry in found)),
    "log": lambda batch, found: batch.log.extend(found),
    "payloads": lambda batch, found: batch._extend(INSERT_PAYLOAD, (codec.payload_row(*entry) for entry in found)),
    "requests": lambda batch, found: batch.requests.extend(
        (request.at // REQUEST_BUCKET_US, *codec.request_row(request)) for request in found
    ),
    "results": lambda batch, found: batch.results.extend(map(codec.result_row, found)),
    "staged": lambda batch, found: batch._extend(INSERT_STAGED, map(codec.staged_row, found)),
    "statements": lambda batch, found: batch.statements.extend(found),
}
