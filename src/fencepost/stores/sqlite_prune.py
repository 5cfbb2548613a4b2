"""Retention: small transactions, so that whoever works on the file is never held up for long.

Removed are bodies, events and log entries of tasks that ended long ago, and request ids past their
retention. Kept for good are task records, digests, generations, result commits: a late caller still hits them.
A cancelled task keeps its input and checkpoint, because it can be reopened, and what its effects sent and got. An
effect's row always stays, and of an open one everything: somebody has still to decide about it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import apsw

from fencepost.kernel.records import EffectState, State
from fencepost.stores import codec
from fencepost.stores.base import REQUEST_BUCKET_US, REQUEST_RETENTION_US

# What `prune` counts.
REMOVED = ("tasks", "events", "inputs", "checkpoints", "staged", "payloads", "receipts", "log", "requests")
# Rows looked at or deleted in one transaction.
STEP = 2000

_ENDED = f"""
SELECT t.task_id, t.state, t.effects FROM carray(?1) c CROSS JOIN task t ON t.task_id = c.value
WHERE t.state IN ({int(State.COMMITTED)}, {int(State.CANCELLED)}) AND t.pruned_to_version < t.state_version
AND (SELECT e.at FROM event e WHERE e.task_id = t.task_id ORDER BY e.state_version DESC LIMIT 1) < ?2"""


def prune_tasks(con: apsw.Connection, before: int, limit: int, after: int, removed: Counter[str]) -> int | None:
    """Look at the oldest journal entries beyond number `after`, and prune the tasks that ended before `before`.

    Returns the number to go on from; None at the end of what is old enough, or with `limit` tasks pruned.
    """
    rows: Any = con.execute(
        "SELECT number, task_id, at FROM event WHERE number > ? ORDER BY number LIMIT ?", (after, STEP)
    )
    old = [(number, task_id) for number, task_id, at in rows if at < before]
    if not old:
        return None
    ids = list(dict.fromkeys(task_id for _, task_id in old))
    ended: Any = con.execute(_ENDED, (apsw.carray(tuple(ids)), before)).fetchall()
    left = limit - removed["tasks"]
    for task_id, state, effects in ended[:left]:
        _prune_task(con, task_id, state, removed)
        if effects and state == State.COMMITTED:
            _prune_effects(con, task_id, removed)
    if len(ended) >= left:
        return None
    return int(old[-1][0])


def _prune_task(con: apsw.Connection, task_id: str, state: int, removed: Counter[str]) -> None:
    tables = ["event", "staged"]
    if state == State.COMMITTED:
        tables += ["input", "checkpoint"]
        con.execute("UPDATE result SET data = NULL WHERE task_id = ?", (task_id,))
    for table in tables:
        con.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))
        removed[table if table == "staged" else table + "s"] += con.changes()
    con.execute("UPDATE task SET pruned_to_version = state_version WHERE task_id = ?", (task_id,))
    removed["tasks"] += 1


_OVER = f"task_id = ? AND state NOT IN ({int(EffectState.AWAITING_APPROVAL)}, {int(EffectState.UNKNOWN)})"


def _prune_effects(con: apsw.Connection, task_id: str, removed: Counter[str]) -> None:
    con.execute(
        "UPDATE effect_payload SET data = NULL WHERE task_id = ?1 AND data IS NOT NULL "
        f"AND number IN (SELECT number FROM effect WHERE {_OVER.replace('?', '?1')})",
        (task_id,),
    )
    removed["payloads"] += con.changes()
    con.execute(f"UPDATE effect SET receipt = NULL WHERE {_OVER} AND receipt IS NOT NULL", (task_id,))
    removed["receipts"] += con.changes()
    reports = con.execute(
        f"SELECT number, evidence FROM effect WHERE {_OVER} AND evidence <> '[]'", (task_id,)
    ).fetchall()
    for number, evidence in reports:
        left = codec.evidence_without_receipts(str(evidence))
        con.execute("UPDATE effect SET evidence = ? WHERE task_id = ? AND number = ?", (left, task_id, number))


def prune_log(con: apsw.Connection, before: int, removed: Counter[str]) -> bool:
    """Delete some of the oldest log entries; False when none that old is left."""
    rows: Any = con.execute("SELECT number, at FROM log ORDER BY number LIMIT ?", (STEP,))
    old = [number for number, at in rows if at < before]
    if old:
        con.execute("DELETE FROM log WHERE number <= ?", (old[-1],))
        removed["log"] += con.changes()
    return len(old) == STEP


def prune_requests(con: apsw.Connection, now: int, removed: Counter[str]) -> bool:
    """Delete request ids of buckets that are wholly past their retention; False when none is left."""
    oldest = (now - REQUEST_RETENTION_US) // REQUEST_BUCKET_US
    con.execute(
        "DELETE FROM request WHERE (bucket, request_id) IN "
        "(SELECT bucket, request_id FROM request WHERE bucket < ? ORDER BY bucket, request_id LIMIT ?)",
        (oldest, STEP),
    )
    removed["requests"] += con.changes()
    return con.changes() == STEP
