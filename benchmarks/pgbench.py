"""The yardstick on PostgreSQL: pgbench writing the rows that fencepost writes for claim + commit.

`single`: one statement claims the next ready task, one commits it; each is a transaction. `batched`: the same for 128
tasks a statement, written by hand. Ids, times and JSON are made by the server. What is written is compared
with nothing but the task's state; nothing is digested, looked up before, or decided.

The tables, their indexes and their settings are fencepost's. A test compares the rows table by table.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from fencepost.kernel.digests import digest_bytes, encode
from fencepost.kernel.fence import FULL_FENCE, Compare
from fencepost.kernel.records import End, State
from tools.postgres_server import Server

BATCH = 128
CLIENTS = (4, 8, 16, 32)
BATCHED_CLIENTS = (1, 2, 4)
LEASE_US = 30_000_000
CLAIM_MASK = int(Compare.PROTOCOL | Compare.EPOCH | Compare.INTAKE | Compare.VERSION | Compare.STATE)
_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_NUMBER = "(pg_current_xact_id()::text::bigint << 20)"
# Ids of requests grow with time, as fencepost's do, so that their index is written at its end.
_MS = "lpad(to_hex(claimed_at / 1000), 12, '0')"
_ORDERED_ID = f"overlay(gen_random_uuid()::text PLACING left({_MS}, 8) || '-' || right({_MS}, 4) FROM 1)"

# The next ready tasks become claimed; event and request are written from what the update returns.
_CLAIM = f"""
WITH p AS MATERIALIZED (SELECT epoch, {_NOW} AS now FROM fencepost.pool WHERE name = 'default' FOR SHARE),
next AS MATERIALIZED (
    SELECT task_id FROM fencepost.task WHERE pool = 'default' AND queue = 'default' AND kind = 'default' AND state = 1
    ORDER BY priority, available_at, task_id LIMIT $size FOR UPDATE SKIP LOCKED
), u AS (
    UPDATE fencepost.task t SET state = {int(State.CLAIMED)}, state_version = t.state_version + 1,
        scheduler_epoch = p.epoch, claim_generation = t.claim_generation + 1, attempt_id = gen_random_uuid()::text,
        owner_id = 'caller-' || :client_id, claimed_at = p.now, lease_expires_at = p.now + {LEASE_US}
    FROM next, p WHERE t.task_id = next.task_id RETURNING t.*
), e AS (
    INSERT INTO fencepost.event
    SELECT {_NUMBER} + row_number() OVER (), task_id, state_version, claimed_at, 'claim', 'attempt_started',
        scheduler_epoch, claim_generation, cancel_generation, revision, attempt_id, {CLAIM_MASK}, state,
        '{{"owner":"' || owner_id || '","lease_us":' || lease_expires_at || '}}' FROM u
), q AS (
    INSERT INTO fencepost.request
    SELECT {_ORDERED_ID}, owner_id, 'claim', claimed_at,
        '{{"claims":[["' || task_id || '",' || claim_generation || ',"' || attempt_id || '"]]}}' FROM u
)
SELECT $answer FROM u \\gset
"""
_COMMIT = f"""
WITH p AS MATERIALIZED (SELECT epoch, {_NOW} AS now FROM fencepost.pool WHERE name = 'default' FOR SHARE),
u AS (
    UPDATE fencepost.task t SET state = {int(State.COMMITTED)}, state_version = t.state_version + 1,
        lease_expires_at = NULL, result_commit_id = gen_random_uuid()::text, "end" = {int(End.COMMITTED)}
    FROM p WHERE t.task_id $which RETURNING t.*, p.now
), e AS (
    INSERT INTO fencepost.event
    SELECT {_NUMBER} + row_number() OVER (), task_id, state_version, now, 'commit', 'result_committed',
        scheduler_epoch, claim_generation, cancel_generation, revision, attempt_id, {int(FULL_FENCE)}, state,
        '{{"result":"$digest","ready_us":' || now - ready_at || '}}' FROM u
), r AS (
    INSERT INTO fencepost.result
    SELECT task_id, result_commit_id, revision, attempt_id, claim_generation, ('$digest'), ('$commit'), '[]', now,
        '\\x$data'::bytea, NULL, 0 FROM u
)
SELECT count(*) AS done FROM u \\gset
"""


def script(size: int, result: Any) -> str:
    """One pass claims and commits `size` tasks, in two statements."""
    content = encode(result, "result")
    return Template(_CLAIM + _COMMIT).substitute(
        size=size,
        answer="task_id AS task" if size == 1 else "array_agg(task_id)::text AS tasks",
        which="= :task" if size == 1 else "= ANY(:tasks::text[])",
        digest=_quiet(content.digest),
        commit=_quiet(digest_bytes(b'["%b",[],[]]' % content.digest.encode())),
        data=content.data.hex(),
    )


def _quiet(text: str) -> str:
    """Inside an SQL string; pgbench takes a name behind a colon for a variable even there."""
    return text.replace(":", "'||chr(58)||'")


@dataclass
class Ran:
    cycles: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.cycles / self.seconds


def run(made: Server, database: str, folder: Path, size: int, clients: int, cycles: int, result: Any) -> Ran:
    """`cycles` in passes of `size`, by so many clients; connecting is not counted. Raises RuntimeError."""
    path = folder / f"pgbench-{size}.sql"
    path.write_text(script(size, result))
    passes = max(1, cycles // (size * clients))
    command = [
        str(made.bin / "pgbench"), "--no-vacuum", "--protocol=prepared", f"--client={clients}",
        f"--jobs={min(clients, 2)}", f"--transactions={passes}", f"--file={path}", made.url(database),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    tps = re.search(r"^tps = ([0-9.]+) \(without", done.stdout, re.MULTILINE)
    processed = re.search(r"actually processed: (\d+)/", done.stdout)
    if done.returncode != 0 or tps is None or processed is None:
        raise RuntimeError(f"pgbench failed: {done.stderr.strip()[-2000:]}")
    if int(processed[1]) != passes * clients:
        raise RuntimeError(f"pgbench made {processed[1]} of {passes * clients} passes")
    return Ran(int(processed[1]) * size, int(processed[1]) / float(tps[1]))
