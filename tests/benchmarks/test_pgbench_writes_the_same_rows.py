"""The yardstick on PostgreSQL is honest: table by table, pgbench leaves the rows that fencepost leaves."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import asyncpg
import cycle
import on_postgres
import pgbench
import pytest
from measuring import RESULT

import fencepost
from tests.postgres.databases import running_or_skip
from tools.postgres_server import Server

TABLES = ("task", "event", "request", "result", "log", "staged", "checkpoint")
CYCLES = 256
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_A_TIME = re.compile(r"\b1[0-9]{15}\b")  # microseconds since 1970
_ANEW = {"number": "a number", "owner": "a caller", "owner_id": "a caller"}


def plain(column: str, value: Any, tasks: set[str]) -> Any:
    """What is new in each run under one name: ids, times, durations. Task ids are the same in all databases."""
    if value is None or column in _ANEW:
        return value and _ANEW[column]
    if isinstance(value, str) and value.startswith("{"):
        found = json.loads(value)
        for name in ("ready_us", "owner"):
            if name in found:
                found[name] = type(found[name]).__name__
        value = json.dumps(found)
    text = _A_TIME.sub("a time", str(value))
    return _ID.sub(lambda found: found[0] if found[0] in tasks else "an id", text)


async def rows_of(made: Server, database: str) -> dict[str, list[str]]:
    con = await asyncpg.connect(made.url(database))
    tasks = {row[0] for row in await con.fetch("SELECT task_id FROM fencepost.task")}
    found = {}
    for table in TABLES:
        rows = await con.fetch(f"SELECT * FROM fencepost.{table}")
        found[table] = sorted(str([(name, plain(name, value, tasks)) for name, value in row.items()]) for row in rows)
    await con.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("size", "clients"), [(1, 2), (pgbench.BATCH, 2)], ids=["one by one", "in batches"])
async def test_pgbench_leaves_the_rows_that_fencepost_leaves_on_postgresql(
    tmp_path: Path, size: int, clients: int
) -> None:
    made = running_or_skip()
    template = await on_postgres.filled(made, "bench_same_rows", CYCLES)
    ours, theirs = await made.new_database(template), await made.new_database(template)

    async with await fencepost.connect(made.url(ours)) as client:
        await cycle.drive(client, 16, CYCLES)
    ran = await asyncio.to_thread(pgbench.run, made, theirs, tmp_path, size, clients, CYCLES, RESULT)

    assert ran.cycles == CYCLES
    expected, written = await rows_of(made, ours), await rows_of(made, theirs)
    for table, rows in expected.items():
        assert written[table] == rows, table
    assert len(expected["result"]) == len(expected["request"]) == CYCLES
    assert len(expected["event"]) == 3 * CYCLES
    for database in (ours, theirs):
        await made.drop_database(database)


async def test_what_is_measured_on_postgresql_is_durable() -> None:
    made = running_or_skip()

    assert (await on_postgres.durable(made))["fsync"] == "on"

    await made.administer("ALTER ROLE tester SET synchronous_commit = off")
    try:
        with pytest.raises(AssertionError, match="not durable"):
            await on_postgres.durable(made)
    finally:
        await made.administer("ALTER ROLE tester RESET synchronous_commit")
