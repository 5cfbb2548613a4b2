"""Retention on PostgreSQL: small transactions, so that whoever works there is never held up for long. What goes and
what stays: see sqlite_prune."""

from __future__ import annotations

from collections import Counter

from fencepost.kernel.records import State
from fencepost.stores import codec
from fencepost.stores.base import REQUEST_RETENTION_US
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_feed import Feed

REMOVED = ("tasks", "events", "inputs", "checkpoints", "staged", "payloads", "receipts", "log", "requests")
# Rows looked at or deleted in one transaction.
STEP = 2000

# SKIP LOCKED: whoever is at work on a task, a reopening say, goes first; the next prune finds it again.
_ENDED = f"""
SELECT t.task_id, t.state, t.effects FROM fencepost.task t WHERE t.task_id = ANY($1::text[])
AND t.state IN ({int(State.COMMITTED)}, {int(State.CANCELLED)}) AND t.pruned_to_version < t.state_version
AND (SELECT e.at FROM fencepost.event e WHERE e.task_id = t.task_id ORDER BY e.state_version DESC LIMIT 1) < $2
ORDER BY t.task_id LIMIT $3 FOR UPDATE OF t SKIP LOCKED"""


async def prune_tasks(
    con: Connection, feed: Feed, before: int, limit: int, after: int, removed: Counter[str]
) -> int | None:
    """Look at the oldest journal entries beyond number `after`, and prune the tasks that ended before `before`.

    Returns the number to go on from; None at the end of what is old enough, or with `limit` tasks pruned.
    """
    old = [(row[0], row[1]) for row in await feed.oldest(con, after, STEP) if row[2] < before]
    if not old:
        return None
    ids = sorted({task_id for _, task_id in old})
    async with con.transaction():
        left = limit - removed["tasks"]
        ended = [(row[0], row[1], row[2]) for row in await con.fetch(_ENDED, ids, before, left)]
        if ended:
            chosen = [task_id for task_id, _, _ in ended]
            committed = [task_id for task_id, state, _ in ended if state == State.COMMITTED]
            with_effects = [task_id for task_id, state, effects in ended if effects and state == State.COMMITTED]
            if with_effects:
                await _prune_effects(con, with_effects, removed)
            await con.execute("UPDATE fencepost.result SET data = NULL WHERE task_id = ANY($1::text[])", committed)
            for table, name, ids in (
                ("event", "events", chosen),
                ("staged", "staged", chosen),
                ("input", "inputs", committed),
                ("checkpoint", "checkpoints", committed),
            ):
                done = await con.execute(f"DELETE FROM fencepost.{table} WHERE task_id = ANY($1::text[])", ids)
                removed[name] += int(done.rpartition(" ")[2])
            await con.execute(
                "UPDATE fencepost.task SET pruned_to_version = state_version WHERE task_id = ANY($1::text[])", chosen
            )
            removed["tasks"] += len(ended)
        return None if len(ended) >= left else old[-1][0]


# Of an effect that waits for a person or for the downstream, everything stays.
_OVER = "e.task_id = ANY($1::text[]) AND e.open_state IS NULL"


async def _prune_effects(con: Connection, task_ids: list[str], removed: Counter[str]) -> None:
    done = await con.execute(
        "UPDATE fencepost.effect_payload p SET data = NULL FROM fencepost.effect e "
        f"WHERE {_OVER} AND p.task_id = e.task_id AND p.number = e.number AND p.data IS NOT NULL",
        task_ids,
    )
    removed["payloads"] += int(done.rpartition(" ")[2])
    done = await con.execute(
        f"UPDATE fencepost.effect e SET receipt = NULL WHERE {_OVER} AND e.receipt IS NOT NULL", task_ids
    )
    removed["receipts"] += int(done.rpartition(" ")[2])
    reports = await con.fetch(
        f"SELECT e.task_id, e.number, e.evidence FROM fencepost.effect e WHERE {_OVER} AND e.evidence <> '[]'", task_ids
    )
    for task_id, number, evidence in reports:
        await con.execute(
            "UPDATE fencepost.effect SET evidence = $3 WHERE task_id = $1 AND number = $2",
            task_id,
            number,
            codec.evidence_without_receipts(evidence),
        )


async def prune_log(con: Connection, before: int, removed: Counter[str]) -> bool:
    """Delete some of the oldest log entries; False when none that old is left."""
    rows = await con.fetch("SELECT number, at FROM fencepost.log ORDER BY number LIMIT $1", STEP)
    old = [number for number, at in rows if at < before]
    if old:
        done = await con.execute("DELETE FROM fencepost.log WHERE number <= $1", old[-1])
        removed["log"] += int(done.rpartition(" ")[2])
    return len(old) == STEP


async def prune_requests(con: Connection, now: int, removed: Counter[str]) -> bool:
    """Delete request ids that are past their retention; False when none is left."""
    done = await con.execute(
        "DELETE FROM fencepost.request WHERE at < $1 AND ctid = ANY(ARRAY("
        "SELECT ctid FROM fencepost.request WHERE at < $1 LIMIT $2))",
        now - REQUEST_RETENTION_US,
        STEP,
    )
    count = int(done.rpartition(" ")[2])
    removed["requests"] += count
    return count == STEP
