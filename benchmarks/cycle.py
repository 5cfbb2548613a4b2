"""Cycles per second: claim + commit through `Client`, durable, beside a bare loop that writes the same rows.

A cycle is `claim_next` and `commit` of one task with a 100-byte input and a 100-byte result, on the shipped
schema with every record. Tasks are submitted beforehand. For each number of callers fencepost and the bare loop
take turns, each on a fresh copy of one file; the bare loop's transactions hold as many cycles as there are callers.

`ratio_to_bare` is against the loop whose values were all made beforehand, `ratio_to_bare_making_values` against the
one that makes ids, times and JSON as it goes. On PostgreSQL the yardstick is pgbench: see `cycle_postgres.py`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import bare
from measuring import INPUT, RESULT, at_least_one, machine, median, parser, progress, scratch, show

import fencepost
from fencepost.client.client import Client
from fencepost.wire import NewTask

CYCLES = {1: 2000, 16: 12_000, 128: 24_000}  # a repetition each; about two seconds on two cores
SUBMIT = 1000
FULL = 2  # PRAGMA synchronous
GOALS = {"1": (900, 0.5), "16": (6000, 0.5), "128": (12_000, 0.4)}


def cycles_for(callers: int) -> int:
    return max(count for least, count in CYCLES.items() if callers >= least)


def warm_up_for(callers: int) -> int:
    """Enough for every statement to be prepared and every caller to have come round, in whole transactions."""
    return callers * max(2, 200 // callers)


async def template(path: Path, tasks: int) -> bare.Settings:
    """A database at `path` with that many ready tasks, closed again; and how its writer's connection was set."""
    async with await fencepost.connect(f"sqlite:///{path}") as client:
        await fill(client, tasks)
        return await durable(client)


async def fill(client: Client, tasks: int) -> None:
    for start in range(0, tasks, SUBMIT):
        await client.submit_many([NewTask(INPUT) for _ in range(min(SUBMIT, tasks - start))])


async def durable(client: Client) -> bare.Settings:
    """The settings of the connection that writes: WAL and synchronous=FULL, so that what was answered is on disk."""
    store: Any = client.backend.store  # type: ignore[attr-defined]
    settings: bare.Settings = await store._on(store._writer, bare.settings_of)
    if settings["journal_mode"] != "wal" or settings["synchronous"] != FULL:
        raise AssertionError(f"not durable: {settings}")
    return settings


async def drive(
    client: Client,
    callers: int,
    cycles: int,
    kinds: tuple[str, ...] | None = None,
    took: list[float] | None = None,
) -> None:
    """`cycles` by so many callers at once; each goes on until all are begun. `took`: the seconds of each operation."""
    left = cycles

    async def caller(number: int) -> None:
        nonlocal left
        owner = f"caller-{number}"
        while left:
            left -= 1
            began = time.perf_counter()
            [claim] = await client.claim_next(owner=owner, kinds=kinds)  # type: ignore[misc]
            between = time.perf_counter()
            answer = await client.commit(claim, RESULT)
            if took is not None:
                took.extend((between - began, time.perf_counter() - between))
            if answer.outcome != "COMMITTED":
                raise AssertionError(f"a commit in a database of our own was refused: {answer}")

    await asyncio.gather(*(caller(number) for number in range(callers)))


async def measure(client: Client, callers: int, cycles: int) -> tuple[float, float]:
    """Seconds and CPU seconds of the whole process, after the warm-up."""
    await drive(client, callers, warm_up_for(callers))
    wall, cpu = time.perf_counter(), time.process_time()
    await drive(client, callers, cycles)
    return time.perf_counter() - wall, time.process_time() - cpu


async def on_sqlite(path: Path, callers: int, cycles: int) -> tuple[float, float]:
    async with await fencepost.connect(f"sqlite:///{path}") as client:
        await durable(client)
        return await measure(client, callers, cycles)


async def on_memory(callers: int, cycles: int) -> tuple[float, float]:
    async with await fencepost.connect("memory://") as client:
        await fill(client, warm_up_for(callers) + cycles)
        return await measure(client, callers, cycles)


def fresh(source: Path, name: str) -> Path:
    """A copy that is on the disk already, so that nobody pays for it while the clock runs."""
    copy = source.with_name(name)
    shutil.copyfile(source, copy)
    with open(copy, "rb+") as file:
        os.fsync(file.fileno())
    return copy


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


KINDS = ("fencepost", "bare", "making")


def compare(folder: Path, callers: int, cycles: int, repeat: int, note: Any) -> dict[str, list[tuple[float, float]]]:
    """(seconds, CPU seconds) a cycle: fencepost and the two bare loops in turn, `repeat` times each."""
    source = folder / f"template-{callers}.db"
    warm_up = warm_up_for(callers)
    note(f"{callers} callers: submitting {warm_up + cycles:,} tasks")
    settings = asyncio.run(template(source, warm_up + cycles))
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(repeat):
        note(f"{callers} callers: {turn + 1} of {repeat}")
        for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
            copy = fresh(source, f"{kind}-{callers}-{turn}.db")
            if kind == "fencepost":
                wall, cpu = asyncio.run(on_sqlite(copy, callers, cycles))
            else:
                wall, cpu = bare.run(str(copy), settings, cycles, callers, RESULT, warm_up, ahead=kind == "bare")
            found[kind].append((wall / cycles, cpu / cycles))
            remove(copy)
    remove(source)
    return found


def ratio(theirs: list[tuple[float, float]], ours: list[tuple[float, float]]) -> float:
    """How near we come, from each pair of neighbours: the machine may be busier in one than in the next."""
    return median([their_wall / our_wall for (their_wall, _), (our_wall, _) in zip(theirs, ours, strict=True)], 3)


def per_second(times: list[tuple[float, float]]) -> int:
    return round(1 / statistics.median(wall for wall, _ in times))


def cpu_us(times: list[tuple[float, float]]) -> float:
    return median([cpu * 1e6 for _, cpu in times], 1)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--store", choices=("sqlite", "memory", "postgres"), default="sqlite")
    options.add_argument("--callers", help="numbers of callers, separated by commas (1,16,128; on PostgreSQL 2,16,128)")
    options.add_argument("--with-pgbench", action="store_true", help="take turns with pgbench (on PostgreSQL)")
    options.add_argument("--alone", action="store_true", help="before whatever else runs here (PostgreSQL; root)")
    options.add_argument(
        "--cycles", type=at_least_one, help="cycles of a repetition (default: by the number of callers)"
    )
    chosen = options.parse_args()
    chosen.callers = chosen.callers or ("2,16,128" if chosen.store == "postgres" else "1,16,128")
    if chosen.store == "postgres":
        import cycle_postgres  # which asks for a server, and for asyncpg

        cycle_postgres.main(chosen)
        return
    on_disk = chosen.store == "sqlite"
    found: dict[str, Any] = {
        "benchmark": "cycle",
        "store": chosen.store,
        "durable": "WAL, synchronous=FULL" if on_disk else "not at all",
        "repetitions": chosen.repeat,
        "cycles_per_s": {},
        "cpu_us_per_cycle": {},
    }
    if on_disk:
        found |= {"ratio_to_bare": {}, "bare_cycles_per_s": {}, "bare_cpu_us_per_cycle": {}}
        found |= {"ratio_to_bare_making_values": {}, "bare_making_values_cycles_per_s": {}}
        found["goals"] = {name: {"cycles_per_s": goal, "ratio_to_bare": least} for name, (goal, least) in GOALS.items()}
    found["each"] = {}
    with scratch(chosen.folder) as folder:
        found["machine"] = machine(folder)
        for callers in (at_least_one(text) for text in chosen.callers.split(",")):
            cycles = chosen.cycles or cycles_for(callers)
            name = str(callers)
            if on_disk:
                times = compare(folder, callers, cycles, chosen.repeat, lambda text: progress(chosen.json, text))
                found["ratio_to_bare"][name] = ratio(times["bare"], times["fencepost"])
                found["bare_cycles_per_s"][name] = per_second(times["bare"])
                found["bare_cpu_us_per_cycle"][name] = cpu_us(times["bare"])
                found["ratio_to_bare_making_values"][name] = ratio(times["making"], times["fencepost"])
                found["bare_making_values_cycles_per_s"][name] = per_second(times["making"])
            else:
                rounds = [asyncio.run(on_memory(callers, cycles)) for _ in range(chosen.repeat)]
                times = {"fencepost": [(wall / cycles, cpu / cycles) for wall, cpu in rounds]}
            found["cycles_per_s"][name] = per_second(times["fencepost"])
            found["cpu_us_per_cycle"][name] = cpu_us(times["fencepost"])
            found["each"][name] = {"cycles": cycles} | {
                kind: [{"wall_us": round(wall * 1e6, 1), "cpu_us": round(cpu * 1e6, 1)} for wall, cpu in values]
                for kind, values in times.items()
            }
    shown = ["cycles_per_s", "cpu_us_per_cycle"]
    columns = ["callers", "cycles/s", "CPU µs"]
    if on_disk:
        shown += ["bare_cycles_per_s", "bare_cpu_us_per_cycle", "ratio_to_bare", "ratio_to_bare_making_values"]
        columns += ["bare cycles/s", "CPU µs", "ratio", "ratio, making values"]
    rows = [(name, *(found[kind][name] for kind in shown)) for name in found["cycles_per_s"]]
    title = f"claim + commit through Client, {chosen.store}, durable: {found['durable']}"
    show(found, chosen.json, title, columns, rows)


if __name__ == "__main__":
    main()
