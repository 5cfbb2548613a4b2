"""A PostgreSQL server of a benchmark's own, and what it spends: processor time, WAL, checkpoints.

fsync and synchronous_commit are on and read back. The files lie on a disk, in a temporary folder.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from measuring import INPUT

import fencepost
from fencepost.wire import NewTask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.postgres_server import SETTINGS as FOR_TESTS
from tools.postgres_server import Missing, Server

SETTINGS = {
    **FOR_TESTS,
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "max_connections": "200",
    "autovacuum_naptime": "60s",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
}
_SAID = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_compression", "shared_buffers")
_REAPED = 0.3  # seconds until a backend that left is counted with its parent
_TICK = os.sysconf("SC_CLK_TCK")


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """A server whose files lie in `folder`; stopped and removed at the end."""
    folder.chmod(0o711)  # a server that root starts runs as somebody else
    try:
        made = Server(SETTINGS, folder)
    except Missing as error:
        sys.exit(str(error))
    try:
        yield made
    finally:
        made.close()


async def durable(made: Server) -> dict[str, str]:
    """What decides how durable the server is, as it says itself. Raises AssertionError where it is not."""
    con = await asyncpg.connect(made.url())
    try:
        found: dict[str, str] = {name: await con.fetchval(f"SHOW {name}") for name in _SAID}
    finally:
        await con.close()
    if found["fsync"] != "on" or found["synchronous_commit"] != "on":
        raise AssertionError(f"not durable: {found}")
    return found


async def filled(made: Server, name: str, tasks: int) -> str:
    """A database to copy, with that many ready tasks in it, vacuumed."""

    async def fill(url: str) -> None:
        async with await fencepost.connect(url) as client:
            for start in range(0, tasks, 1000):
                await client.submit_many([NewTask(INPUT) for _ in range(min(1000, tasks - start))])
        await made.administer("VACUUM (ANALYZE)", database=name)

    return await made.template(name, fill)


@dataclass
class Spent:
    """Of one run. `cpu_s` is of the server and of whoever asked, together."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    wal_bytes: int = 0
    checkpoints: int = 0


class Meter:
    """`begin`, work, `end`. The processor time of this process and of children that it waited for counts as asking.

    With `alone`, this process, those that it starts, and the server come before whatever else runs on the machine
    meanwhile (SCHED_RR, which asks for root): the rest of it has what they leave, and the disk.
    """

    def __init__(self, made: Server, *, alone: bool = False) -> None:
        self._made = made
        self._alone = alone

    async def begin(self) -> None:
        await asyncio.sleep(_REAPED)
        self._wal, self._checkpoints = await self._read()
        if self._alone:
            _schedule(self._made.pid, os.SCHED_RR, 1)
        self._server = _server_cpu(self._made.pid)
        self._own = _own_cpu()
        self._wall = time.perf_counter()

    async def end(self) -> Spent:
        wall = time.perf_counter() - self._wall
        own = _own_cpu() - self._own
        if self._alone:
            _schedule(self._made.pid, os.SCHED_OTHER, 0)
        await asyncio.sleep(_REAPED)
        server_cpu = _server_cpu(self._made.pid) - self._server
        wal, checkpoints = await self._read()
        return Spent(wall, own + server_cpu, server_cpu, wal - self._wal, checkpoints - self._checkpoints)

    async def _read(self) -> tuple[int, int]:
        con = await asyncpg.connect(self._made.url())
        try:
            wal = await con.fetchval("SELECT pg_current_wal_lsn() - '0/0'")
            view, timed, wanted = "pg_stat_bgwriter", "checkpoints_timed", "checkpoints_req"
            if con.get_server_version().major >= 17:
                view, timed, wanted = "pg_stat_checkpointer", "num_timed", "num_requested"
            return int(wal), int(await con.fetchval(f"SELECT {timed} + {wanted} FROM {view}"))
        finally:
            await con.close()


def _schedule(first: int, policy: int, priority: int) -> None:
    """This process, and the server whose first process it is."""
    for pid in (os.getpid(), first, *_children(first)):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(pid, policy, os.sched_param(priority))


def _children(first: int) -> list[int]:
    return [
        int(pid) for task in Path(f"/proc/{first}/task").iterdir() for pid in (task / "children").read_text().split()
    ]


def _own_cpu() -> float:
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def _server_cpu(first: int) -> float:
    """Of the server's first process, of its children, and of those that have left."""
    ticks = sum(_stat(first)[11:15])  # its own and its children's that it waited for
    for child in _children(first):
        with suppress(FileNotFoundError, ProcessLookupError):  # it left meanwhile
            ticks += sum(_stat(child)[11:13])
    return ticks / _TICK


def _stat(pid: int) -> list[int]:
    """The fields of /proc/pid/stat from the state on, of which the numbers are numbers."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, fields[1:15])]


def shown(settings: dict[str, str], **more: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in (settings | more).items())
