"""Tasks submitted per second, durable: batches of 1 000 through `Client.submit_many`, 100-byte inputs."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from cycle import durable, remove
from measuring import INPUT, at_least_one, machine, parser, progress, scratch, show

import fencepost
from fencepost.kernel.digests import encode
from fencepost.wire import NewTask, Refused

GOAL = 15_000


async def measure(url: str, tasks: int, size: int) -> tuple[float, float]:
    """Seconds and CPU seconds for `tasks` in batches of `size`, each batch acknowledged before the next."""
    async with await fencepost.connect(url) as client:
        if url.startswith("sqlite:"):
            await durable(client)
        await client.submit_many([NewTask(INPUT) for _ in range(size)])
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(tasks // size):
            answer = await client.submit_many([NewTask(INPUT) for _ in range(size)])
            if isinstance(answer, Refused) or not all(submitted.created for submitted in answer):
                raise AssertionError("a submission to a database of our own was refused")
        return time.perf_counter() - wall, time.process_time() - cpu


def hashing(tasks: int) -> float:
    """CPU seconds that the digests of so many inputs take by themselves."""
    began = time.process_time()
    for _ in range(tasks):
        encode(INPUT, "input")
    return time.process_time() - began


def on_sqlite(folder: Path, repeat: int, tasks: int, size: int) -> list[tuple[float, float]]:
    times = []
    for turn in range(repeat):
        path = folder / f"submit-{turn}.db"
        times.append(asyncio.run(measure(f"sqlite:///{path}", tasks, size)))
        remove(path)
    return times


def on_postgresql(folder: Path, repeat: int, tasks: int, size: int, alone: bool) -> list[tuple[float, float]]:
    """The CPU seconds are of the server too."""
    import on_postgres  # which asks for a server, and for asyncpg

    async def once(made: Any) -> tuple[float, float]:
        await on_postgres.durable(made)
        meter = on_postgres.Meter(made, alone=alone)
        url = made.url(await made.new_database())
        await meter.begin()
        wall, cpu = await measure(url, tasks, size)
        return wall, cpu + (await meter.end()).server_cpu_s

    with on_postgres.server(folder) as made:
        return [asyncio.run(once(made)) for _ in range(repeat)]


DURABLE = {"sqlite": "WAL, synchronous=FULL", "postgres": "fsync=on, synchronous_commit=on"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--store", choices=tuple(DURABLE), default="sqlite")
    options.add_argument("--tasks", type=at_least_one, default=30_000, help="tasks of a repetition (default 30000)")
    options.add_argument("--batch", type=at_least_one, default=1000, help="tasks of a batch (default 1000)")
    options.add_argument("--alone", action="store_true", help="before whatever else runs here (PostgreSQL; root)")
    chosen = options.parse_args()
    tasks = max(chosen.tasks // chosen.batch, 1) * chosen.batch
    with scratch(chosen.folder) as folder:
        about = machine(folder)
        progress(chosen.json, f"{chosen.repeat} times {tasks:,} tasks")
        if chosen.store == "sqlite":
            times = on_sqlite(folder, chosen.repeat, tasks, chosen.batch)
        else:
            times = on_postgresql(folder, chosen.repeat, tasks, chosen.batch, chosen.alone)
    cpu = statistics.median(cpu for _, cpu in times)
    found: dict[str, Any] = {
        "benchmark": "submit",
        "store": chosen.store,
        "durable": DURABLE[chosen.store],
        "batch": chosen.batch,
        "tasks_per_s": round(tasks / statistics.median(wall for wall, _ in times)),
        "cpu_us_per_task": round(cpu / tasks * 1e6, 1),
        "share_of_hashing": round(hashing(tasks) / cpu, 3),
        "goal_tasks_per_s": GOAL,
        "each": [round(tasks / wall) for wall, _ in times],
        "machine": about,
    }
    rows = [
        (str(chosen.batch), found["tasks_per_s"], found["cpu_us_per_task"], f"{found['share_of_hashing']:.0%}", GOAL)
    ]
    columns = ["batch", "tasks/s", "CPU µs a task", "of it hashing", "goal tasks/s"]
    show(found, chosen.json, f"submit_many, {chosen.store}, durable", columns, rows)


if __name__ == "__main__":
    main()
