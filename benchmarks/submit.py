"""Tasks submitted per second, durable: batches of 1 000 through `Client.submit_many`, 100-byte inputs."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from cycle import durable, remove
from measuring import INPUT, at_least_one, machine, median, parser, progress, scratch, show

import fencepost
from fencepost.wire import NewTask, Refused

GOAL = 15_000


async def measure(path: Path, tasks: int, size: int) -> tuple[float, float]:
    """Seconds and CPU seconds for `tasks` in batches of `size`, each batch acknowledged before the next."""
    async with await fencepost.connect(f"sqlite:///{path}") as client:
        await durable(client)
        await client.submit_many([NewTask(INPUT) for _ in range(size)])
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(tasks // size):
            answer = await client.submit_many([NewTask(INPUT) for _ in range(size)])
            if isinstance(answer, Refused) or not all(submitted.created for submitted in answer):
                raise AssertionError("a submission to a database of our own was refused")
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tasks", type=at_least_one, default=30_000, help="tasks of a repetition (default 30000)")
    options.add_argument("--batch", type=at_least_one, default=1000, help="tasks of a batch (default 1000)")
    chosen = options.parse_args()
    times: list[tuple[float, float]] = []
    tasks = max(chosen.tasks // chosen.batch, 1) * chosen.batch
    with scratch(chosen.folder) as folder:
        about = machine(folder)
        for turn in range(chosen.repeat):
            progress(chosen.json, f"{turn + 1} of {chosen.repeat}")
            path = folder / f"submit-{turn}.db"
            times.append(asyncio.run(measure(path, tasks, chosen.batch)))
            remove(path)
    found: dict[str, Any] = {
        "benchmark": "submit",
        "store": "sqlite",
        "durable": "WAL, synchronous=FULL",
        "batch": chosen.batch,
        "tasks_per_s": round(tasks / statistics.median(wall for wall, _ in times)),
        "cpu_us_per_task": median([cpu / tasks * 1e6 for _, cpu in times], 1),
        "goal_tasks_per_s": GOAL,
        "each": [round(tasks / wall) for wall, _ in times],
        "machine": about,
    }
    rows = [(str(chosen.batch), found["tasks_per_s"], found["cpu_us_per_task"], GOAL)]
    show(
        found, chosen.json, "submit_many, sqlite, durable", ["batch", "tasks/s", "CPU µs a task", "goal tasks/s"], rows
    )


if __name__ == "__main__":
    main()
