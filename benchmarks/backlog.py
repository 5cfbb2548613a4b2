"""Whether a backlog costs anything: CPU per cycle with a full table, against an empty one in the same run.

Three backlogs: 1 000 000 finished tasks, 1 000 000 ready ones behind those that are claimed, and 100 000 of a kind
that nobody serves, in front of them. "Empty" holds only the tasks that are claimed and committed. The two take turns,
each on its one file: the next repetition opens it anew and goes on with further tasks.
Rows are copied by SQL, so that filling takes seconds; the copies are what claim + commit leave, or submit leaves.
On PostgreSQL, with an open snapshot too: see `backlog_postgres.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
from cycle import drive, durable, fill, remove
from measuring import INPUT, RESULT, at_least_one, machine, parser, progress, scratch, show

import fencepost
from fencepost.client.client import Client
from fencepost.kernel.records import Event, Task
from fencepost.wire import NewTask

GOAL = 1.10
SIZES = {"finished": 1_000_000, "ready": 1_000_000, "other_kind": 100_000}
# How the copies differ from the one task that is copied, in SQL. Ready ones stand behind the tasks that are claimed
# and at their priority; those of the other kind stand in front.
CHANGES = {
    "finished": {},
    "ready": {"available_at": "(SELECT max(available_at) FROM task) + 1"},
    "other_kind": {"priority": "-1"},
}
CALLERS = 16
WARM_UP = 640
KINDS = {"finished": None, "ready": None, "other_kind": ("default",)}


def copies(table: str, columns: Sequence[str], given: dict[str, str], source: str) -> str:
    """Each number of `n` becomes a copy of the source row, with some columns given."""
    names = ", ".join(f'"{name}"' for name in columns)
    values = ", ".join(given.get(name, f's."{name}"') for name in columns)
    return (
        f"INSERT INTO {table} ({names}) WITH RECURSIVE n(i) AS "
        f"(SELECT ?1 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?1 + ?2) SELECT {values} FROM n, ({source}) s"
    )


# Ids are spread as random ones are, so that the indexes are as deep and as scattered as in life.
ID = "printf('%08x-%012d', (n.i * 2654435761) & 4294967295, n.i)"
CHUNK = 100_000


def multiply(path: Path, like: str, count: int, given: dict[str, str]) -> None:
    """`count` more tasks like the task `like`, with everything that belongs to it."""
    con = apsw.Connection(str(path))
    con.execute("PRAGMA synchronous = OFF")
    con.execute("PRAGMA cache_size = -262144")
    tables: dict[str, Sequence[str]] = {"task": Task.__struct_fields__}
    for table in ("input", "result"):
        tables[table] = [row[1] for row in con.execute(f"PRAGMA table_info({table})")]
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        with con:
            for table, columns in tables.items():
                changes = {"task_id": ID, **(given if table == "task" else {})}
                source = f"SELECT * FROM {table} WHERE task_id = '{like}'"
                con.execute(copies(table, columns, changes, source), (start, size))
            events = con.execute("SELECT state_version FROM event WHERE task_id = ?", (like,)).fetchall()
            for (version,) in events:
                last: int = con.execute("SELECT number FROM clock").get
                changes = {"number": f"n.i - {start} + {last + 1}", "task_id": ID}
                source = f"SELECT * FROM event WHERE task_id = '{like}' AND state_version = {version}"
                con.execute(copies("event", ("number", *Event.__struct_fields__), changes, source), (start, size))
                con.execute("UPDATE clock SET number = number + ?", (size,))
    con.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    con.close()


async def prepare(path: Path, backlog: str | None, count: int, cycles: int) -> None:
    """A database with `cycles` tasks to be claimed, and the backlog beside them, checkpointed."""
    async with await fencepost.connect(f"sqlite:///{path}") as client:
        await client.submit(NewTask(INPUT, task_id="model", kind="nobody" if backlog == "other_kind" else "default"))
        if backlog == "finished":
            [claim] = await client.claim_next(owner="model")  # type: ignore[misc]
            await client.commit(claim, RESULT)
        await fill(client, cycles)
    if backlog is not None:
        multiply(path, "model", count, CHANGES[backlog])


async def measure(path: Path, cycles: int, kinds: tuple[str, ...] | None) -> float:
    """CPU seconds a cycle, of the whole process."""
    async with await fencepost.connect(f"sqlite:///{path}") as client:
        await durable(client)
        await drive(client, CALLERS, WARM_UP, kinds)
        await settled(client)
        began = time.process_time()
        await drive(client, CALLERS, cycles, kinds)
        return (time.process_time() - began) / cycles


async def settled(client: Client) -> None:
    """The WAL is checkpointed, so that nobody pays for what came before."""
    store: Any = client.backend.store  # type: ignore[attr-defined]
    await store._on(store._writer, lambda con: con.wal_checkpoint())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    options.add_argument("--backlogs", help="which, separated by commas (default: all; on PostgreSQL both at once)")
    options.add_argument("--rows", type=at_least_one, help="rows of each backlog (default: as above)")
    options.add_argument("--cycles", type=at_least_one, default=6000, help="cycles of a repetition (default 6000)")
    options.add_argument("--snapshot-cycles", type=at_least_one, help="while a snapshot is open (PostgreSQL; 300 000)")
    chosen = options.parse_args()
    if chosen.store == "postgres":
        import backlog_postgres  # which asks for a server, and for asyncpg

        backlog_postgres.main(chosen)
        return
    cycles = (WARM_UP + chosen.cycles) * chosen.repeat
    found: dict[str, Any] = {"benchmark": "backlog", "store": "sqlite", "callers": CALLERS, "goal_ratio": GOAL}
    found |= {"rows": {}, "cpu_us_per_cycle": {}, "empty_cpu_us_per_cycle": {}, "ratio_to_empty": {}, "each": {}}
    with scratch(chosen.folder) as folder:
        found["machine"] = machine(folder)
        for name in (chosen.backlogs or ",".join(SIZES)).split(","):
            count = chosen.rows or SIZES[name]
            progress(chosen.json, f"{name}: filling {count:,} rows")
            full, empty = folder / "full.db", folder / "empty.db"
            asyncio.run(prepare(full, name, count, cycles))
            asyncio.run(prepare(empty, None, 0, cycles))
            pairs: list[tuple[float, float]] = []
            for turn in range(chosen.repeat):
                progress(chosen.json, f"{name}: {turn + 1} of {chosen.repeat}")
                costs: dict[str, float] = {}
                for path in (full, empty) if turn % 2 == 0 else (empty, full):
                    costs[path.stem] = asyncio.run(measure(path, chosen.cycles, KINDS[name])) * 1e6
                pairs.append((round(costs["full"], 1), round(costs["empty"], 1)))
            remove(full)
            remove(empty)
            found["rows"][name] = count
            found["cpu_us_per_cycle"][name] = round(statistics.median(pair[0] for pair in pairs), 1)
            found["empty_cpu_us_per_cycle"][name] = round(statistics.median(pair[1] for pair in pairs), 1)
            found["ratio_to_empty"][name] = round(statistics.median(a / b for a, b in pairs), 3)
            found["each"][name] = pairs
    rows = [
        (name, count, *(found[kind][name] for kind in ("cpu_us_per_cycle", "empty_cpu_us_per_cycle", "ratio_to_empty")))
        for name, count in found["rows"].items()
    ]
    columns = ["backlog", "rows", "CPU µs a cycle", "empty", f"ratio (goal {GOAL})"]
    show(found, chosen.json, f"claim + commit beside a backlog, {CALLERS} callers, sqlite, durable", columns, rows)


if __name__ == "__main__":
    main()
