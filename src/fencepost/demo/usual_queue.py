"""The usual queue: claim by owner and expiry, heartbeat, completion by id. In one table, as many queues do it.

It is not a careless one. A claim is a single atomic statement, a heartbeat says whether the lease still stands,
and the demo's workers stop when it says no. What is missing stands in the last method: a finish names the job,
but not the attempt that finished it.
"""

from __future__ import annotations

import json
import time
from typing import Any

import apsw

TABLE = """
CREATE TABLE IF NOT EXISTS job (
    id TEXT PRIMARY KEY, priority INTEGER, payload TEXT, result TEXT,
    state TEXT DEFAULT 'queued', owner_id TEXT, expires_at REAL DEFAULT 0, attempts INTEGER DEFAULT 0)
"""
CLAIM = """
UPDATE job SET state = 'running', owner_id = :owner, expires_at = :until, attempts = attempts + 1
WHERE id = (SELECT id FROM job WHERE state = 'queued' OR (state = 'running' AND expires_at < :now)
            ORDER BY priority, id LIMIT 1)
RETURNING id, payload, attempts
"""
HEARTBEAT = "UPDATE job SET expires_at = ? WHERE id = ? AND owner_id = ? AND state = 'running' RETURNING id"
COMPLETE = "UPDATE job SET state = 'done', result = ? WHERE id = ?"


class UsualQueue:
    def __init__(self, path: str) -> None:
        self.db = apsw.Connection(path)
        self.db.set_busy_timeout(5_000)
        self.db.execute("PRAGMA journal_mode = wal")
        self.db.execute(TABLE)

    def put(self, job_id: str, payload: Any, priority: int = 0) -> None:
        self.db.execute(
            "INSERT INTO job (id, priority, payload) VALUES (?, ?, ?)", (job_id, priority, json.dumps(payload))
        )

    def claim(self, owner_id: str, ttl: float) -> tuple[str, Any, int] | None:
        """The next job that is queued or whose owner's lease ran out: its id, its payload, which attempt this is."""
        now = time.time()
        row = self.db.execute(CLAIM, {"owner": owner_id, "until": now + ttl, "now": now}).fetchone()
        return (row[0], json.loads(row[1]), row[2]) if row else None

    def heartbeat(self, job_id: str, owner_id: str, ttl: float) -> bool:
        """Whether the lease was extended; False once another owner holds the job."""
        return self.db.execute(HEARTBEAT, (time.time() + ttl, job_id, owner_id)).fetchone() is not None

    def complete(self, job_id: str, result: Any) -> None:
        self.db.execute(COMPLETE, (json.dumps(result), job_id))

    def result(self, job_id: str) -> tuple[Any, int]:
        """What the queue holds as the result, and how often the job was claimed."""
        query = "SELECT result, attempts FROM job WHERE id = ?"
        [(result, attempts)] = self.db.execute(query, (job_id,))
        return json.loads(result), attempts
