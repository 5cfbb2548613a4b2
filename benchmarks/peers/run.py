"""The same no-op workload on fencepost and on systems that a user would pick instead, in turns, in one run.

procrastinate, pgqueuer and fencepost share one PostgreSQL server (fsync and synchronous_commit on, a database for each
repetition); huey has a SQLite file. Each is set as its documentation says for speed: the first line of each
`play_….py` says how. Each runs in an environment of its own, made with pip from the pinned list beside this file.

What is measured: enqueue/s and drain/s of jobs with 90 bytes of payload whose handler does nothing, by one worker
process; CPU a job of the draining process and the server together; from submit to the handler's first line with an
idle worker. What is run besides: a worker is stopped (SIGSTOP) in a handler, beyond its lease; another worker gets the
job; the first one wakes up and completes it, after the other has finished or while it still runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import on_postgres
from measuring import at_least_one, machine, parser, progress, scratch, show
from playing import LEASE

from tools.postgres_server import Server

HERE = Path(__file__).resolve().parent
SYSTEMS = ("fencepost", "pgqueuer", "procrastinate", "huey")
FIGURES = ("enqueue_per_s", "drain_per_s", "cpu_us_per_job", "idle_p50_ms", "idle_p95_ms")
BOUND = 180.0  # seconds for any one part
IDLE = 40  # jobs, one by one
PAUSE = 0.05  # seconds between them
FIRST = 1.0  # seconds that the first worker's handler takes; most of them it is stopped
SECOND = {"after": 0.0, "during": 12.0}
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
NEXT = 6 * LEASE  # seconds in which another worker gets the job, or nobody does


def environment(system: str, folder: Path) -> str:
    """The Python that plays `system`: this one, or that of an environment with what is pinned."""
    if system == "fencepost":
        return sys.executable
    wanted = (HERE / f"{system}.txt").read_text()
    place = folder / f"fencepost-peers-{os.getuid()}" / system
    kept = place / "pinned.txt"
    python = str(place / "bin" / "python")
    if not kept.exists() or kept.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", str(HERE / f"{system}.txt")], check=True)
        kept.write_text(wanted)
    return python


class Player:
    """One system at one place: a database, or a file."""

    def __init__(self, system: str, python: str, place: str) -> None:
        self.system = system
        self.database = place.rpartition("/")[2]
        self._line = [python, str(HERE / f"play_{system}.py")]
        self._place = place
        self.errors: Any = None  # where its stderr goes

    async def _start(self, part: str, *numbers: float) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._line, part, self._place, *map(str, numbers),
            stdout=asyncio.subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    async def do(self, part: str, *numbers: float) -> dict[str, Any]:
        """The last line that it said."""
        process = await self._start(part, *numbers)
        try:
            said, _ = await asyncio.wait_for(process.communicate(), BOUND)
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"{self.system}: {part} ended with {process.returncode}")
        lines = said.splitlines()
        return json.loads(lines[-1]) if lines else {}

    async def working(self, hold: float) -> Working:
        with tempfile.TemporaryFile() as errors:
            self.errors = os.dup(errors.fileno())
            process = await self._start("work", hold)
        working = Working(process, self.errors)
        self.errors = None
        return working


class Working:
    """A worker that runs, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, errors: int) -> None:
        self.process = process
        self.told: list[str] = []
        self._errors = errors

    def said(self) -> list[str]:
        """What its log or, past its log, its stderr told whoever runs it: warnings, and the last line of each error."""
        os.lseek(self._errors, 0, os.SEEK_SET)
        written = os.read(self._errors, 1 << 20).decode(errors="replace").splitlines()
        return [*self.told, *(line.strip()[:300] for line in written if _ERROR.match(line))][:5]

    async def until(self, event: str, bound: float = BOUND) -> dict[str, Any] | None:
        """The next such event; None where it takes too long, or the worker ends."""
        assert self.process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(bound):
                async for line in self.process.stdout:
                    found = json.loads(line)
                    if found["event"] == "told":
                        self.told.append(found["text"])
                    if found["event"] == event:
                        return found
        return None

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        await self.process.wait()
        os.close(self._errors)


async def throughput(player: Player, made: Server, jobs: int, alone: bool) -> dict[str, float]:
    put = await player.do("enqueue", jobs)
    if player.system != "huey":  # as a table that has been there for a while
        await made.administer("VACUUM (ANALYZE)", database=player.database)
    meter = on_postgres.Meter(made, alone=alone)
    await meter.begin()
    drained = await player.do("drain")
    spent = await meter.end()
    server = 0.0 if player.system == "huey" else spent.server_cpu_s
    return {
        "enqueue_per_s": round(jobs / put["seconds"]),
        "drain_per_s": round(jobs / drained["seconds"]),
        "cpu_us_per_job": round((drained["cpu"] + server) / jobs * 1e6, 1),
    }


async def idle(player: Player) -> dict[str, float]:
    worker = await player.working(0)
    try:
        await worker.until("ready")
        await asyncio.sleep(1)  # it has looked, and waits
        submitting = asyncio.create_task(player.do("each", IDLE, PAUSE))
        found = [await worker.until("started", 30) for _ in range(IDLE)]
        await submitting
    finally:
        await worker.end()
    times = [job["latency"] * 1e3 for job in found if job is not None]
    if len(times) < IDLE:
        raise RuntimeError(f"{player.system}: {IDLE - len(times)} of {IDLE} jobs were not begun within 30 s")
    at = statistics.quantiles(times, n=20)
    return {"idle_p50_ms": round(statistics.median(times), 2), "idle_p95_ms": round(at[18], 2)}


async def late(player: Player, moment: str) -> dict[str, Any]:
    """The first worker completes late: `after` the second has, or `during` its run."""
    first = await player.working(FIRST)
    second: Working | None = None
    try:
        await first.until("ready")
        await player.do("each", 1, 0)
        if await first.until("started") is None:
            raise RuntimeError(f"{player.system}: the job was not begun")
        first.send(signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE)
        if player.system == "procrastinate":
            await player.do("rescue")
        second = await player.working(SECOND[moment])
        got = await second.until("started", NEXT) is not None
        if got and moment == "after":
            await asyncio.sleep(1)  # what it completes is written
        before = (await player.do("completions"))["count"]
        first.send(signal.SIGCONT)
        returned = await first.until("returned", 5) is not None
        await first.until("nothing more", 2)
        between = (await player.do("completions"))["count"]
        if got and moment == "during":
            await second.until("returned", SECOND["during"] + 2)
            await second.until("nothing more", 2)
        return {
            "second_got_the_job": got,
            "first_handler_ran_to_its_end": returned,
            "completions_before": before,
            "completions_once_the_first_was_done": between,
            "completions_at_the_end": (await player.do("completions"))["count"],
            "first_was_told": first.said(),
            "second_was_told": second.said(),
        }
    finally:
        await first.end()
        if second is not None:
            await second.end()


def verdict(found: dict[str, Any]) -> str:
    """In words, from what was counted."""
    if not found["second_got_the_job"]:
        took = found["completions_once_the_first_was_done"] > found["completions_before"]
        return "nobody else got the job; " + ("accepted" if took else "not accepted")
    if found["completions_once_the_first_was_done"] > found["completions_before"]:
        return "accepted"
    if not found["first_handler_ran_to_its_end"]:
        return "refused, handler stopped"
    return "refused, and said so" if found["first_was_told"] else "without effect, and nobody is told"


class Field:
    """All contestants: their environments, and places that are theirs alone."""

    def __init__(self, made: Server, folder: Path, pythons: dict[str, str]) -> None:
        self._made = made
        self._folder = folder
        self._pythons = pythons
        self._places = 0

    async def player(self, system: str) -> Player:
        self._places += 1
        if system == "huey":
            place = str(self._folder / f"huey-{self._places}.db")
        else:
            place = self._made.url(await self._made.new_database())
        player = Player(system, self._pythons[system], place)
        await player.do("prepare")
        return player


async def measure(chosen: Any, made: Server, folder: Path, found: dict[str, Any]) -> None:
    found["server"] = await on_postgres.durable(made)
    systems = chosen.systems.split(",")
    field = Field(made, folder, {name: environment(name, chosen.environments) for name in systems})
    found["each"] = {name: [] for name in systems}
    for turn in range(chosen.repeat):
        for name in systems if turn % 2 == 0 else systems[::-1]:
            progress(chosen.json, f"{turn + 1} of {chosen.repeat}: {name}")
            figures = await throughput(await field.player(name), made, chosen.jobs, chosen.alone)
            figures |= await idle(await field.player(name))
            found["each"][name].append(figures)
    for figure in FIGURES:
        found[figure] = {name: statistics.median(run[figure] for run in found["each"][name]) for name in systems}
    found["late"] = {}
    progress(chosen.json, "late completions")

    async def come_late(name: str) -> None:
        runs = {moment: await late(await field.player(name), moment) for moment in ("after", "during")}
        found["late"][name] = {moment: {"verdict": verdict(run), **run} for moment, run in runs.items()}

    await asyncio.gather(*map(come_late, systems))  # nothing is timed here


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--systems", default=",".join(SYSTEMS), help="which, separated by commas")
    options.add_argument("--jobs", type=at_least_one, default=5000, help="jobs of a repetition (default 5000)")
    options.add_argument("--alone", action="store_true", help="drain before whatever else runs here (root)")
    temporary = Path(tempfile.gettempdir())
    options.add_argument("--environments", type=Path, default=temporary, help="where environments are made and kept")
    chosen = options.parse_args()
    found: dict[str, Any] = {"benchmark": "peers", "jobs": chosen.jobs, "repetitions": chosen.repeat}
    with scratch(chosen.folder) as folder:
        found["machine"] = machine(folder)
        with on_postgres.server(folder) as made:
            asyncio.run(measure(chosen, made, folder, found))
    rows = [
        (
            name,
            *(found[figure][name] for figure in FIGURES),
            *(found["late"][name][moment]["verdict"] for moment in ("after", "during")),
        )
        for name in found["each"]
    ]
    columns = [
        "system", "enqueue/s", "drain/s", "CPU µs a job", "idle p50 ms", "p95 ms",
        "late, after another finished", "late, while another runs",
    ]  # fmt: skip
    show(found, chosen.json, f"{chosen.jobs:,} jobs that do nothing, one worker process", columns, rows)


if __name__ == "__main__":
    main()
