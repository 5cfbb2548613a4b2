"""The yardstick: a plain apsw loop that writes exactly the rows which fencepost writes for claim + commit.

Nothing is read, decided, compared or digested while the clock runs. What is timed is BEGIN, executemany, COMMIT on a
connection with the settings of the shipped store, with every value made beforehand; or else, in a second figure, with
ids, times and JSON made as the loop goes, as a program would have to that did nothing else. A test compares the files
table by table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import apsw

from fencepost.clock import wall_us
from fencepost.kernel.digests import digest_bytes, encode
from fencepost.kernel.fence import FULL_FENCE, Compare
from fencepost.kernel.records import End, State
from fencepost.wire import new_attempt_id, new_id

LEASE_US = 30_000_000
BUCKET_US = 300_000_000
CLAIM_MASK = int(Compare.PROTOCOL | Compare.EPOCH | Compare.INTAKE | Compare.VERSION | Compare.STATE)

CLAIM_TASK = """UPDATE task SET state = ?, state_version = ?, scheduler_epoch = ?, claim_generation = ?, attempt_id = ?,
owner_id = ?, claimed_at = ?, lease_expires_at = ?, checkpoint_number = ?, "end" = ? WHERE task_id = ?"""
COMMIT_TASK = """UPDATE task SET state = ?, state_version = ?, lease_expires_at = ?, result_commit_id = ?, "end" = ?
WHERE task_id = ?"""
EVENT = f"INSERT INTO event VALUES ({', '.join('?' * 14)})"
REQUEST = "INSERT INTO request VALUES (?, ?, ?, ?, ?, ?)"
RESULT = f"INSERT INTO result VALUES ({', '.join('?' * 12)})"
CLOCK = "UPDATE clock SET at = ?, number = ? WHERE id = 1"

# What decides how durable, and how fast, a connection is. The bare loop's is set to what the store's stands at.
SETTINGS = (
    "journal_mode",
    "synchronous",
    "cache_size",
    "wal_autocheckpoint",
    "journal_size_limit",
    "mmap_size",
    "temp_store",
)

Rows = list[tuple[Any, ...]]
Settings = dict[str, Any]


def settings_of(con: apsw.Connection) -> Settings:
    return {name: con.pragma(name) for name in SETTINGS}


def connect(path: str, settings: Settings) -> apsw.Connection:
    """A plain connection with these settings. Raises AssertionError where it does not take one of them."""
    con = apsw.Connection(path, statementcachesize=200)
    for name, value in settings.items():
        con.pragma(name, value)
    if settings_of(con) != settings:
        raise AssertionError(f"the bare loop's connection stands at {settings_of(con)}, the store's at {settings}")
    return con


class Transaction:
    """The rows of one transaction: `tables` are (statement, its rows)."""

    __slots__ = ("clock", "tables")

    def __init__(self, clock: tuple[int, int], *tables: tuple[str, Rows]) -> None:
        self.clock = clock
        self.tables = tables


def transactions(con: apsw.Connection, cycles: int, size: int, result: Any) -> Iterator[Transaction]:
    """The first `cycles` ready tasks' rows: a transaction of claims, one of commits, for each `size` of them."""
    content = encode(result, "result")
    commit_digest = digest_bytes(b'["%b",[],[]]' % content.digest.encode())
    number: int = con.execute("SELECT number FROM clock").get
    epoch: int = con.execute("SELECT epoch FROM pool WHERE name = 'default'").get
    tasks = con.execute(
        "SELECT task_id, state_version, revision, ready_at FROM task WHERE state = 1 AND pool = 'default' "
        "ORDER BY priority, available_at, task_id LIMIT ?",
        (cycles,),
    ).fetchall()
    if len(tasks) < cycles:
        raise LookupError(f"the file holds {len(tasks)} ready tasks, {cycles} are wanted")
    now = wall_us()
    for start in range(0, cycles, size):
        chosen = tasks[start : start + size]
        attempts = [new_attempt_id() for _ in chosen]
        owners = [f"caller-{position % size}" for position in range(len(chosen))]
        now += 1000
        lease = now + LEASE_US
        claims: Rows = []
        claim_events: Rows = []
        requests: Rows = []
        for (task_id, version, revision, _), attempt, owner in zip(chosen, attempts, owners, strict=True):
            number += 1
            claims.append((int(State.CLAIMED), version + 1, epoch, 1, attempt, owner, now, lease, 0, 0, task_id))
            detail = _text({"owner": owner, "lease_us": lease})
            claim_events.append(
                (
                    number,
                    task_id,
                    version + 1,
                    now,
                    "claim",
                    "attempt_started",
                    epoch,
                    1,
                    0,
                    revision,
                    attempt,
                    CLAIM_MASK,
                    int(State.CLAIMED),
                    detail,
                )
            )
            answer = _text({"claims": [[task_id, 1, attempt]]})
            requests.append((now // BUCKET_US, new_id(), owner, "claim", now, answer))
        yield Transaction((now, number), (CLAIM_TASK, claims), (REQUEST, requests), (EVENT, claim_events))
        now += 1000
        commits: Rows = []
        commit_events: Rows = []
        results: Rows = []
        for (task_id, version, revision, ready_at), attempt in zip(chosen, attempts, strict=True):
            number += 1
            commit_id = new_id()
            commits.append((int(State.COMMITTED), version + 2, None, commit_id, int(End.COMMITTED), task_id))
            detail = _text({"result": content.digest, "ready_us": now - ready_at})
            commit_events.append(
                (
                    number,
                    task_id,
                    version + 2,
                    now,
                    "commit",
                    "result_committed",
                    epoch,
                    1,
                    0,
                    revision,
                    attempt,
                    int(FULL_FENCE),
                    int(State.COMMITTED),
                    detail,
                )
            )
            results.append(
                (
                    task_id,
                    commit_id,
                    revision,
                    attempt,
                    1,
                    content.digest,
                    commit_digest,
                    "[]",
                    now,
                    content.data,
                    None,
                    0,
                )
            )
        yield Transaction((now, number), (COMMIT_TASK, commits), (RESULT, results), (EVENT, commit_events))


def write(con: apsw.Connection, found: Iterable[Transaction]) -> None:
    execute, many = con.execute, con.executemany
    for transaction in found:
        execute("BEGIN IMMEDIATE")
        for statement, rows in transaction.tables:
            many(statement, rows)
        execute(CLOCK, transaction.clock)
        execute("COMMIT")


def run(
    path: str, settings: Settings, cycles: int, size: int, result: Any, warm_up: int = 0, *, ahead: bool = True
) -> tuple[float, float]:
    """Seconds and CPU seconds for `cycles`, after `warm_up` further ones, on the database at `path`.

    `ahead`: every value is made before the clock runs.
    """
    con = connect(path, settings)
    try:
        found = transactions(con, warm_up + cycles, size, result)
        if ahead:
            found = iter(list(found))
        write(con, islice(found, 2 * -(-warm_up // size)))
        wall, cpu = time.perf_counter(), time.process_time()
        write(con, found)
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        con.close()


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
