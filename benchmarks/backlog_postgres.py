"""`backlog.py --store postgres`: on a server of its own, with whole tasks copied by SQL, as on SQLite.

`both` is a million finished tasks and a million ready ones behind those that are claimed. `snapshot` is no backlog: a
REPEATABLE READ transaction stays open while hundreds of thousands of cycles leave dead rows and dead index entries
behind, none of which may be removed, in turns with the same run in a database where nobody looks on.
CPU is of the asking process and of all the server's processes together, vacuum's too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import on_postgres
from cycle import drive, fill
from measuring import INPUT, RESULT, machine, progress, scratch, show
from on_postgres import Meter

import fencepost
from fencepost.kernel.records import Event, Task
from fencepost.wire import NewTask
from tools.postgres_server import Server

GOAL = 1.10
CALLERS = 16
WARM_UP = 640
ROWS = {"both": 1_000_000, "finished": 1_000_000, "ready": 1_000_000, "other_kind": 100_000}
DEFAULT = "both,other_kind,snapshot"
HOLDS = {"both": ("finished", "ready"), "finished": ("finished",), "ready": ("ready",), "other_kind": ("other_kind",)}
KINDS = {"other_kind": ("default",)}
# How the copies differ from the one task that is copied, in SQL: as on SQLite.
CHANGES = {
    "finished": {},
    "ready": {"available_at": "(SELECT max(available_at) FROM fencepost.task) + 1"},
    "other_kind": {"priority": "-1"},
}
SNAPSHOT_CYCLES = 300_000
PARTS = 10  # of a run beside a snapshot; two of one that is too short to tell
# Ids as long as those that are made, spread as random ones are. What is left of the first backlog sets its last part
# apart from the second's.
ID = "lpad(to_hex((i * 2654435761) & 4294967295), 8, '0') || lpad(i::text, 27, '-') || '{mark}'"
CHUNK = 100_000  # of which three for the three events of a task have place in one transaction's numbers
NUMBER = "(SELECT number_base FROM fencepost.meta) + (pg_current_xact_id()::text::bigint << 20) + {place} + i - {start}"


def copies(table: str, columns: Sequence[str], given: dict[str, str], source: str) -> str:
    """Each number from $1 to $2 becomes a copy of the source row, with some columns given."""
    names = ", ".join(f'"{name}"' for name in columns)
    values = ", ".join(given.get(name, f's."{name}"') for name in columns)
    series = "generate_series($1::bigint, $2::bigint) i"
    return f"INSERT INTO fencepost.{table} ({names}) SELECT {values} FROM {series}, ({source}) s"


async def multiply(url: str, like: str, count: int, given: dict[str, str]) -> None:
    """`count` more tasks like the task `like`, with everything that belongs to it."""
    con = await asyncpg.connect(url)
    try:
        await con.execute("SET synchronous_commit = off")
        made = ID.format(mark=like[-1])
        tables: dict[str, Sequence[str]] = {"task": Task.__struct_fields__}
        for table in ("input", "result"):
            found = await con.fetch(f"SELECT * FROM fencepost.{table} WHERE task_id = $1", like)
            if found:
                tables[table] = list(found[0].keys())
        events = await con.fetch("SELECT state_version FROM fencepost.event WHERE task_id = $1 ORDER BY 1", like)
        for start in range(0, count, CHUNK):
            end = min(start + CHUNK, count)
            async with con.transaction():
                for table, columns in tables.items():
                    changes = {"task_id": made, **(given if table == "task" else {})}
                    source = f"SELECT * FROM fencepost.{table} WHERE task_id = '{like}'"
                    await con.execute(copies(table, columns, changes, source), start + 1, end)
                for place, (version,) in enumerate(events):
                    number = NUMBER.format(place=place * CHUNK, start=start + 1)
                    changes = {"number": number, "task_id": made}
                    source = f"SELECT * FROM fencepost.event WHERE task_id = '{like}' AND state_version = {version}"
                    columns = ("number", *Event.__struct_fields__)
                    await con.execute(copies("event", columns, changes, source), start + 1, end)
    finally:
        await con.close()


async def prepare(made: Server, backlog: str | None, count: int, cycles: int) -> str:
    """The name of a database with `cycles` tasks to be claimed, and the backlog beside them; vacuumed, on disk."""
    database = await made.new_database()
    url = made.url(database)
    holds = HOLDS.get(backlog or "", ())
    async with await fencepost.connect(url) as client:
        for name in holds:
            kind = "nobody" if name == "other_kind" else "default"
            await client.submit(NewTask(INPUT, task_id=f"model-{name}", kind=kind))
            if name == "finished":
                [claim] = await client.claim_next(owner="model")  # type: ignore[misc]
                await client.commit(claim, RESULT)
        await fill(client, cycles)
    for name in holds:
        await multiply(url, f"model-{name}", count, CHANGES[name])
    await made.administer("VACUUM (FREEZE, ANALYZE)", "CHECKPOINT", database=database)
    return database


def warm_up(cycles: int) -> int:
    return min(WARM_UP, cycles)


async def measure(made: Server, database: str, cycles: int, kinds: tuple[str, ...] | None) -> float:
    """CPU microseconds a cycle, the server's included."""
    async with await fencepost.connect(made.url(database)) as client:
        await drive(client, CALLERS, warm_up(cycles), kinds)
        meter = Meter(made)
        await meter.begin()
        await drive(client, CALLERS, cycles, kinds)
        return (await meter.end()).cpu_s / cycles * 1e6


async def beside(made: Server, backlog: str, count: int, cycles: int, repeat: int, note: Any) -> list[list[float]]:
    """CPU a cycle with the backlog and without, in turns."""
    note(f"{backlog}: filling {count:,} rows of each")
    tasks = (warm_up(cycles) + cycles) * repeat
    full, empty = await prepare(made, backlog, count, tasks), await prepare(made, None, 0, tasks)
    pairs: list[list[float]] = []
    for turn in range(repeat):
        note(f"{backlog}: {turn + 1} of {repeat}")
        costs: dict[str, float] = {}
        for database in (full, empty) if turn % 2 == 0 else (empty, full):
            costs[database] = await measure(made, database, cycles, KINDS.get(backlog))
        pairs.append([round(costs[full], 1), round(costs[empty], 1)])
    await made.drop_database(full)
    await made.drop_database(empty)
    return pairs


@asynccontextmanager
async def looking_on(url: str) -> AsyncIterator[None]:
    """A transaction that sees the store as it is now, and stays open."""
    con = await asyncpg.connect(url)
    try:
        async with con.transaction(isolation="repeatable_read", readonly=True):
            await con.fetchval("SELECT count(*) FROM fencepost.pool")
            yield
    finally:
        await con.close()


DEAD = """
SELECT (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'fencepost.task'::regclass) AS dead_rows_estimated,
pg_relation_size('fencepost.task') AS table_bytes, pg_relation_size('fencepost.task_ready') AS ready_index_bytes,
pg_relation_size('fencepost.task_pkey') AS key_bytes,
(SELECT count(*) FROM fencepost.task WHERE state = 1) AS ready
"""
EXACT = """
SELECT (SELECT dead_tuple_count FROM bench.pgstattuple('fencepost.task')) AS dead_rows,
(SELECT tuple_count + dead_tuple_count FROM bench.pgstattuple('fencepost.task_ready')) AS ready_index_entries,
(SELECT tuple_count + dead_tuple_count FROM bench.pgstattuple('fencepost.task_pkey')) AS key_entries,
(SELECT leaf_pages FROM bench.pgstatindex('fencepost.task_ready')) AS ready_index_leaf_pages
"""


async def dead(url: str) -> dict[str, int]:
    """What lies about. An entry of the index of what is ready is dead where its row is ready no more.

    A row whose removal an open snapshot forbids is "recently dead": pgstattuple counts it as dead."""
    con = await asyncpg.connect(url)
    try:
        found = dict(await con.fetchrow(DEAD))
        try:
            await con.execute("CREATE SCHEMA bench; CREATE EXTENSION pgstattuple SCHEMA bench")
        except asyncpg.PostgresError:  # a server without its extensions
            return found
        found |= dict(await con.fetchrow(EXACT))
        found["dead_ready_index_entries"] = found["ready_index_entries"] - found["ready"]
        return found
    finally:
        await con.close()


async def beside_a_snapshot(made: Server, cycles: int, note: Any) -> dict[str, Any]:
    """CPU a cycle in each part of the run, with an open snapshot and with none, and what is left of both.

    The two take turns part by part, each in its own database, so that a busier hour is the same for both."""
    count = PARTS if cycles >= 1000 * PARTS else 2
    part = max(1, cycles // count)
    parts: dict[str, list[float]] = {"open": [], "none": []}
    databases = {name: await prepare(made, None, 0, warm_up(part) + part * count) for name in parts}
    urls = {name: made.url(database) for name, database in databases.items()}
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(fencepost.connect(url)) for name, url in urls.items()}
        for client in clients.values():
            await drive(client, CALLERS, warm_up(part))
        await stack.enter_async_context(looking_on(urls["open"]))
        for number in range(count):
            note(f"beside a snapshot: {number + 1} of {count}")
            for name in ("open", "none") if number % 2 == 0 else ("none", "open"):
                meter = Meter(made)
                await meter.begin()
                await drive(clients[name], CALLERS, part)
                parts[name].append(round((await meter.end()).cpu_s / part * 1e6, 1))
        left = {name: await dead(url) for name, url in urls.items()}
    for database in databases.values():
        await made.drop_database(database)
    ratios = [_ratio(a, b) for a, b in zip(parts["open"], parts["none"], strict=True)]
    third = max(1, count // 3)
    early, late = statistics.median(ratios[:third]), statistics.median(ratios[-third:])
    found: dict[str, Any] = {"cycles": part * count}
    for name, costs in parts.items():
        found[name] = {
            "cpu_us_per_cycle": costs,
            "early": round(statistics.median(costs[:third]), 1),
            "late": round(statistics.median(costs[-third:]), 1),
        } | left[name]
    return found | {"ratio_to_none": {"early": round(early, 3), "late": round(late, 3)}}


async def run(chosen: argparse.Namespace, made: Server, found: dict[str, Any]) -> None:
    found["server"] = await on_postgres.durable(made)

    def note(text: str) -> None:
        progress(chosen.json, text)

    for name in (chosen.backlogs or DEFAULT).split(","):
        if name == "snapshot":
            count = chosen.snapshot_cycles or SNAPSHOT_CYCLES
            found["snapshot"] = await beside_a_snapshot(made, count, note)
            continue
        count = chosen.rows or ROWS[name]
        pairs = await beside(made, name, count, chosen.cycles, chosen.repeat, note)
        found["rows"][name] = count
        found["cpu_us_per_cycle"][name] = round(statistics.median(pair[0] for pair in pairs), 1)
        found["empty_cpu_us_per_cycle"][name] = round(statistics.median(pair[1] for pair in pairs), 1)
        found["ratio_to_empty"][name] = round(statistics.median(_ratio(a, b) for a, b in pairs), 3)
        found["each"][name] = pairs


def _ratio(one: float, other: float) -> float:
    """Processor time comes in ticks: a run of a few cycles may have taken none."""
    return one / other if other else 1.0


def main(chosen: argparse.Namespace) -> None:
    found: dict[str, Any] = {"benchmark": "backlog", "store": "postgres", "callers": CALLERS, "goal_ratio": GOAL}
    found |= {"rows": {}, "cpu_us_per_cycle": {}, "empty_cpu_us_per_cycle": {}, "ratio_to_empty": {}, "each": {}}
    with scratch(chosen.folder) as folder:
        found["machine"] = machine(folder)
        with on_postgres.server(folder) as made:
            asyncio.run(run(chosen, made, found))
    figures = ("cpu_us_per_cycle", "empty_cpu_us_per_cycle", "ratio_to_empty")
    rows: list[tuple[Any, ...]] = [
        (name, count, *(found[kind][name] for kind in figures)) for name, count in found["rows"].items()
    ]
    if "snapshot" in found:
        run_of = found["snapshot"]
        for when in ("early", "late"):
            costs = (run_of[name][when] for name in ("open", "none"))
            rows.append((f"open snapshot, {when}", run_of["cycles"], *costs, run_of["ratio_to_none"][when]))
    columns = ["backlog", "rows", "CPU µs a cycle", "without", f"ratio (goal {GOAL})"]
    show(found, chosen.json, f"claim + commit beside a backlog, {CALLERS} callers, postgres, durable", columns, rows)
