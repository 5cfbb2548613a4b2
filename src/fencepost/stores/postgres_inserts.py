"""New tasks on PostgreSQL, in one statement: an idle worker waits for what is submitted, and each turn to the server
would keep it waiting.

A set that writes new tasks alone compares nothing but that their ids are free, which the primary key does. Where one is
taken the statement fails, nothing of it is written, and the sets go the way of all others (postgres_apply), which
finds out whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.kernel.records import LogEntry
from fencepost.kernel.writes import WriteSet
from fencepost.stores import codec
from fencepost.stores.postgres_apply import FREE_LOG, Rows, log_statement, numbering
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import Arrays, listed

_COLUMNS = listed(codec.TASK_COLUMNS)


def only_new(sets: Sequence[WriteSet]) -> bool:
    """Whether they write new tasks, and what goes with these, and compare nothing else."""
    return all(
        writes.epoch is None
        and writes.pool_write is None
        and writes.tasks
        and all(write.expected_version == 0 for write in writes.tasks)
        and not {"requests", "statements"}.intersection(writes.made)
        for writes in sets
    )


async def apply_new(con: Connection, sets: Sequence[WriteSet], log: Sequence[LogEntry], base: int) -> None:
    """Write all of `sets`, for which `only_new` holds, or raise UniqueViolationError and write none."""
    tasks = sorted((write.task for writes in sets for write in writes.tasks), key=lambda task: task.task_id)
    rows = Rows()
    for writes in sets:
        rows.add(writes)
    arrays = Arrays()
    parts = [numbering(arrays.one(base, "int8"))]
    source = arrays.unnest(codec.TASK_COLUMNS, list(map(codec.task_row, tasks)))
    parts.append(f"t AS (INSERT INTO fencepost.task ({_COLUMNS}) SELECT {_COLUMNS} FROM {source} x({_COLUMNS}))")
    parts += [f"w{place} AS ({part})" for place, part in enumerate(rows.statements(arrays))]
    if log:
        free = [codec.log_row(0, entry)[1:] for entry in log]
        parts.append(f"fl AS ({log_statement(arrays, free, FREE_LOG)})")
    await con.execute(f"WITH {', '.join(parts)} SELECT 1", *arrays.values)
