"""What idle workers cost, what one new task sets off, and how soon its handler begins.

Processes of workers wait on an empty queue. Their connections go through a proxy that counts statements: while nothing
happens, and for each of some new tasks, one by one. Then the same without the proxy, and the time from submit to the
handler's first line, with all those processes and with one that has a single worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from measuring import at_least_one, machine, parser, progress, scratch, show

import fencepost
from fencepost.wire import NewTask, Refused

SETTLE = 4.0  # seconds until all have looked and wait
PAUSE = 0.05  # seconds between the tasks whose time is taken
AFTERWARDS = 0.5  # seconds after a task for whoever was woken in vain
BOUND = 30.0
GOALS = {"statements_per_s_per_process": 1.0, "p50_ms": 5.0, "p95_ms": 10.0}


def now() -> float:
    """Seconds on a clock that all processes of this machine share."""
    return time.monotonic()


async def work(url: str, workers: str, slots: str) -> None:
    """One process of the crowd. It ends with its input."""
    app = fencepost.App()

    @app.task("at")
    async def at(attempt: fencepost.Attempt, input: dict[str, float]) -> None:
        print(json.dumps(now() - input["at"]), flush=True)

    async with await fencepost.connect(url) as client:
        crowd = [
            fencepost.Worker(client, app, concurrency=int(slots), handle_signals=False) for _ in range(int(workers))
        ]
        running = [asyncio.create_task(worker.run()) for worker in crowd]
        print("null", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for worker in crowd:
            worker.stop()
        await asyncio.gather(*running)


class Crowd:
    """So many processes, and the latencies that they say."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._said: asyncio.Queue[float | None] = asyncio.Queue()

    async def start(self, url: str, processes: int, workers: int, slots: int) -> None:
        for _ in range(processes):
            line = [sys.executable, __file__, "work", url, str(workers), str(slots)]
            process = await asyncio.create_subprocess_exec(
                *line, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(process)))
        for _ in range(processes):
            await asyncio.wait_for(self._said.get(), BOUND)
        await asyncio.sleep(SETTLE)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._said.put_nowait(json.loads(line))

    async def one(self, client: fencepost.Client) -> float:
        """Milliseconds from submit to the handler's first line."""
        answer = await client.submit(NewTask({"at": now()}, kind="at"))
        if isinstance(answer, Refused):
            raise AssertionError("a submission to a database of our own was refused")
        latency = await asyncio.wait_for(self._said.get(), BOUND)
        assert latency is not None
        return latency * 1e3

    async def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), BOUND)
            except TimeoutError:
                process.kill()
                await process.wait()
        await asyncio.gather(*self._readers)


@asynccontextmanager
async def crowd(url: str, processes: int, workers: int, slots: int) -> AsyncIterator[Crowd]:
    made = Crowd()
    try:
        await made.start(url, processes, workers, slots)
        yield made
    finally:
        await made.end()


async def latency(url: str, tasks: int, processes: int, workers: int, slots: int) -> dict[str, float]:
    async with await fencepost.connect(url) as client, crowd(url, processes, workers, slots) as idle:
        for _ in range(5):  # connections and statements that are met for the first time
            await idle.one(client)
            await asyncio.sleep(PAUSE)
        found = []
        for _ in range(tasks):
            found.append(await idle.one(client))
            await asyncio.sleep(PAUSE)
    at = statistics.quantiles(found, n=20)
    return {"p50_ms": round(statistics.median(found), 2), "p95_ms": round(at[18], 2), "max_ms": round(max(found), 2)}


async def counted(made: Any, database: str, given: Any) -> dict[str, Any]:
    """Statements while nothing happens, and for new tasks."""
    from tests.postgres.proxy import proxy_before

    def look(sql: bytes) -> str:
        return "look" if b"fencepost.input i" in sql and b"t.state = 1" in sql else "other"

    async with await fencepost.connect(made.url(database)) as client, proxy_before(made.port) as proxy:
        proxy.name = look
        url = made.url(database).replace(f":{made.port}/", f":{proxy.port}/") + "?sslmode=disable"
        async with crowd(url, given.processes, given.workers, given.slots) as idle:
            proxy.statements.clear()
            await asyncio.sleep(given.seconds)
            rate = proxy.statements.total() / given.seconds / given.processes
            looks, statements = [], []
            for _ in range(10):
                proxy.statements.clear()
                await idle.one(client)
                await asyncio.sleep(AFTERWARDS)
                looks.append(proxy.statements["look"])
                statements.append(proxy.statements.total())
    return {
        "statements_per_s_per_process": round(rate, 3),
        "looks_per_new_task": {"median": statistics.median(looks), "max": max(looks)},
        "statements_per_new_task": {"median": statistics.median(statements), "max": max(statements)},
    }


def fdatasync(folder: Path) -> float:
    """Milliseconds that writing 16 kB durably takes here, the median: there are two such in each latency."""
    path = folder / "fdatasync"
    took = []
    with path.open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(b"x" * 16384)
            began = now()
            os.fdatasync(file.fileno())
            took.append((now() - began) * 1e3)
    path.unlink()
    return round(statistics.median(took), 3)


def on_postgresql(folder: Path, given: Any) -> dict[str, Any]:
    import on_postgres  # which asks for a server, and for asyncpg

    async def all_of_it(made: Any) -> dict[str, Any]:
        await on_postgres.durable(made)
        found = {"fdatasync_ms": fdatasync(folder), **await counted(made, await made.new_database(), given)}
        url = made.url(await made.new_database())
        found["latency"] = await latency(url, given.tasks, given.processes, given.workers, given.slots)
        found["latency_of_one_worker"] = await latency(made.url(await made.new_database()), given.tasks, 1, 1, 8)
        return found

    with on_postgres.server(folder) as made:
        return asyncio.run(all_of_it(made))


def on_sqlite(folder: Path, given: Any) -> dict[str, Any]:
    took = fdatasync(folder)
    return {
        "fdatasync_ms": took,
        "latency_of_one_worker": asyncio.run(latency(f"sqlite:///{folder / 'idle.db'}", given.tasks, 1, 1, 8)),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--store", choices=("postgres", "sqlite"), default="postgres")
    options.add_argument("--processes", type=at_least_one, default=10)
    options.add_argument("--workers", type=at_least_one, default=50, help="of each process (default 50)")
    options.add_argument("--slots", type=at_least_one, default=1, help="of each worker (default 1)")
    options.add_argument("--seconds", type=float, default=60.0, help="that statements are counted for (default 60)")
    options.add_argument("--tasks", type=at_least_one, default=100, help="whose time is taken (default 100)")
    chosen = options.parse_args()
    each: list[dict[str, Any]] = []
    with scratch(chosen.folder) as folder:
        about = machine(folder)
        for turn in range(chosen.repeat):
            progress(chosen.json, f"turn {turn + 1} of {chosen.repeat}")
            each.append((on_postgresql if chosen.store == "postgres" else on_sqlite)(folder, chosen))
            for leftover in folder.glob("idle.db*"):
                leftover.unlink()
    found: dict[str, Any] = {"benchmark": "idle", "store": chosen.store}
    found |= {name: getattr(chosen, name) for name in ("processes", "workers", "slots")}
    found |= {name: _middle([turn[name] for turn in each]) for name in each[0]}
    found |= {"goals": GOALS, "each": each, "machine": about}
    rows = [
        (name, *(value.values() if isinstance(value, dict) else (value,)))
        for name, value in found.items()
        if name in each[0]
    ]
    wide = max(len(row) for row in rows)
    shown = [(*row, *("" for _ in range(wide - len(row)))) for row in rows]
    show(found, chosen.json, f"idle, {chosen.store}", ("", "median", "p95 or max", "max")[:wide], shown)


def _middle(values: list[Any]) -> Any:
    """The median of each figure."""
    if isinstance(values[0], dict):
        return {name: _middle([value[name] for value in values]) for name in values[0]}
    return round(statistics.median(values), 3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        asyncio.run(work(*sys.argv[2:]))
    else:
        main()
