"""`cycle.py --store postgres`: on a server of its own, in turns with pgbench where that is asked for.

Each run has a fresh copy of one database. pgbench writes the same rows, one statement for a claim and one for a commit
(at the number of clients at which it is fastest here), and by hand-made batches of 128.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import on_postgres
import pgbench
from cycle import drive, warm_up_for
from measuring import RESULT, at_least_one, machine, median, progress, scratch, show
from on_postgres import Meter, Spent

import fencepost
from tools.postgres_server import Server

CYCLES = {1: 2000, 16: 10_000, 128: 24_000}
FIND = 3000  # cycles to find the best number of clients with
GOALS = {
    "2": {"cycles_per_s": 1200, "ratio_to_pgbench_single": 0.8},
    "16": {"cycles_per_s": 5500, "ratio_to_pgbench_single": 1.5, "p99_ms": 6},
    "128": {
        "cycles_per_s": 11_000,
        "ratio_to_pgbench_single": 3,
        "ratio_to_pgbench_batched": 0.8,
        "cpu_us_per_cycle": 90,
        "wal_bytes_per_cycle": 2100,
        "p99_ms": 20,
    },
}


@dataclass
class Run:
    """One repetition of one contestant."""

    cycles: int
    seconds: float
    spent: Spent
    took: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.cycles / self.seconds

    def a_cycle(self) -> dict[str, float]:
        written = {name: value / self.cycles for name, value in asdict(self.spent).items() if name != "checkpoints"}
        found = {
            "cycles_per_s": round(self.per_second),
            "cpu_us_per_cycle": round(written["cpu_s"] * 1e6, 1),
            "server_cpu_us_per_cycle": round(written["server_cpu_s"] * 1e6, 1),
            "wal_bytes_per_cycle": round(written["wal_bytes"]),
            "checkpoints": self.spent.checkpoints,
        }
        if self.took:
            found["p99_ms"] = round(statistics.quantiles(self.took, n=100)[98] * 1e3, 2)
        return found


async def on_fencepost(made: Server, database: str, callers: int, cycles: int, alone: bool) -> Run:
    took: list[float] = []
    async with await fencepost.connect(made.url(database)) as client:
        await drive(client, callers, warm_up_for(callers))
        meter = Meter(made, alone=alone)
        await meter.begin()
        await drive(client, callers, cycles, took=took)
        spent = await meter.end()
    return Run(cycles, spent.wall_s, spent, took)


async def on_pgbench(
    made: Server, database: str, folder: Path, size: int, clients: int, cycles: int, alone: bool
) -> Run:
    meter = Meter(made, alone=alone)
    await meter.begin()
    ran = await asyncio.to_thread(pgbench.run, made, database, folder, size, clients, cycles, RESULT)
    spent = await meter.end()
    return Run(ran.cycles, ran.seconds, spent)


class Contest:
    """Contestants on copies of one database."""

    def __init__(self, made: Server, folder: Path, cycles: int, alone: bool) -> None:
        self.made = made
        self.folder = folder
        self.cycles = cycles
        self.alone = alone

    async def run(self, kind: str, callers: int, cycles: int | None = None, clients: int = 1) -> Run:
        cycles = cycles or self.cycles
        tasks = self.cycles + warm_up_for(callers)
        template = await on_postgres.filled(self.made, f"ready_{tasks}", tasks)
        database = await self.made.new_database(template)
        try:
            if kind == "fencepost":
                return await on_fencepost(self.made, database, callers, cycles, self.alone)
            size = pgbench.BATCH if kind == "batched" else 1
            return await on_pgbench(self.made, database, self.folder, size, clients, cycles, self.alone)
        finally:
            await self.made.drop_database(database)

    async def best(self, kind: str, choices: tuple[int, ...]) -> tuple[int, dict[str, int]]:
        """The number of clients at which pgbench is fastest here, and what it did at each."""
        speeds = {clients: (await self.run(kind, 1, None, clients)).per_second for clients in choices}
        return max(speeds, key=speeds.__getitem__), {str(n): round(speed) for n, speed in speeds.items()}


def ratio(ours: list[Run], theirs: list[Run]) -> float:
    """From each pair of neighbours: the machine may be busier in one than in the next."""
    return median([a.per_second / b.per_second for a, b in zip(ours, theirs, strict=True)], 3)


async def measure(chosen: argparse.Namespace, folder: Path, made: Server, found: dict[str, Any]) -> None:
    found["server"] = await on_postgres.durable(made)
    kinds = ["fencepost", "single", "batched"] if chosen.with_pgbench else ["fencepost"]
    clients = {"fencepost": 1}
    if chosen.with_pgbench:
        progress(chosen.json, "pgbench: how many clients are best")
        looking = Contest(made, folder, min(chosen.cycles or FIND, FIND), chosen.alone)
        for kind, choices in (("single", pgbench.CLIENTS), ("batched", pgbench.BATCHED_CLIENTS)):
            clients[kind], speeds = await looking.best(kind, choices)
            found[f"pgbench_{kind}"] = {"clients": clients[kind], "cycles_per_s_by_clients": speeds}
    for callers in (at_least_one(text) for text in chosen.callers.split(",")):
        cycles = chosen.cycles or max(count for least, count in CYCLES.items() if callers >= least)
        contest = Contest(made, folder, cycles, chosen.alone)
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        for turn in range(chosen.repeat):
            progress(chosen.json, f"{callers} callers: {turn + 1} of {chosen.repeat}")
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                count = cycles if kind != "single" else min(cycles, 6000)
                runs[kind].append(await contest.run(kind, callers, count, clients[kind]))
        name = str(callers)
        each = {kind: [run.a_cycle() for run in some] for kind, some in runs.items()}
        for figure in ("cycles_per_s", "cpu_us_per_cycle", "server_cpu_us_per_cycle", "wal_bytes_per_cycle", "p99_ms"):
            value = statistics.median(run[figure] for run in each["fencepost"])
            found.setdefault(figure, {})[name] = value
        for kind in kinds[1:]:
            found.setdefault(f"ratio_to_pgbench_{kind}", {})[name] = ratio(runs["fencepost"], runs[kind])
            for figure in ("cycles_per_s", "cpu_us_per_cycle", "wal_bytes_per_cycle"):
                value = statistics.median(run[figure] for run in each[kind])
                found.setdefault(f"pgbench_{kind}_{figure}", {})[name] = value
        found["each"][name] = each


def main(chosen: argparse.Namespace) -> None:
    found: dict[str, Any] = {
        "benchmark": "cycle",
        "store": "postgres",
        "durable": "fsync=on, synchronous_commit=on",
        "repetitions": chosen.repeat,
        "alone": chosen.alone,
        "ids": "text of 36 characters",
        "goals": GOALS,
        "each": {},
    }
    with scratch(chosen.folder) as folder:
        found["machine"] = machine(folder)
        with on_postgres.server(folder) as made:
            asyncio.run(measure(chosen, folder, made, found))
    shown = ["cycles_per_s", "cpu_us_per_cycle", "server_cpu_us_per_cycle", "wal_bytes_per_cycle", "p99_ms"]
    columns = ["callers", "cycles/s", "CPU µs", "of it server", "WAL bytes", "p99 ms"]
    if chosen.with_pgbench:
        shown += ["ratio_to_pgbench_single", "ratio_to_pgbench_batched"]
        columns += ["ratio to pgbench", "to batched"]
    rows = [(name, *(found[kind][name] for kind in shown)) for name in found["cycles_per_s"]]
    show(found, chosen.json, f"claim + commit through Client, postgres, durable: {found['durable']}", columns, rows)
