"""A real PostgreSQL server for tests and benchmarks: made in a temporary folder, on a free loopback port.

initdb refuses root, so that a run as root starts the server as another user, in a folder which that user may read.
fsync stays on. Names are ordered by a language on purpose: what depends on that must say COLLATE itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import asyncpg

SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "120",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "deadlock_timeout": "100ms",
    "log_min_messages": "warning",
    "autovacuum_naptime": "10s",
}
START = 30.0


class Missing(Exception):
    """There is no PostgreSQL here, and why that is said."""


def binaries() -> Path:
    """The folder that holds initdb and postgres: of the newest version found, or from PATH."""
    found = sorted(
        (Path(path).parent for path in glob.glob("/usr/lib/postgresql/*/bin/initdb")),
        key=lambda folder: int(folder.parent.name) if folder.parent.name.isdigit() else 0,
    )
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.insert(0, Path(os.path.realpath(on_path)).parent)
    for folder in reversed(found):
        if (folder / "postgres").exists():
            return folder
    raise Missing("no PostgreSQL server found: install Debian's package `postgresql`, or put initdb on PATH")


def someone() -> dict[str, Any]:
    """The user to run as, in Popen's words: this one, unless this is root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise Missing("this is root, and there is no user `postgres` or `nobody` to run PostgreSQL as")


# PostgreSQL beside a shell that waits for the end of its input: it shuts down should the tests' process be killed.
_BESIDE = '"$@" & server=$!; read -r _; kill -INT $server 2>/dev/null; wait $server'


class Server:
    """Runs from when it is made until `close`. `stop` and `start` keep the data and the port.

    `inside` is the folder that its own folder is made in; `settings` stand in postgresql.conf.
    """

    def __init__(self, settings: Mapping[str, str] = SETTINGS, inside: Path | None = None) -> None:
        self._settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="fencepost-postgres-", dir=inside))
        self.bin = binaries()
        self._as = someone()
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count()
        try:
            self._init()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def url(self, database: str = "postgres", **settings: Any) -> str:
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}{'?' + query if query else ''}"

    def _init(self) -> None:
        line = [self.bin / "initdb", "-D", self.data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--locale=C"]
        icu = ["--locale-provider=icu", "--icu-locale=en"]
        for more in (icu, []):  # a server that was built without ICU
            done = subprocess.run(
                [*line, *more], **self._as, cwd="/", capture_output=True, text=True, timeout=60, check=False
            )
            if done.returncode == 0:
                break
            shutil.rmtree(self.data, ignore_errors=True)
        else:
            raise Missing(f"initdb failed: {done.stderr.strip()}")
        lines = [f"port = {self.port}", *(f"{name} = '{value}'" for name, value in self._settings.items())]
        with open(self.data / "postgresql.conf", "a", encoding="utf-8") as file:
            file.write("\n".join(["", *lines, ""]))

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _BESIDE, "sh", self.bin / "postgres", "-D", self.data],
                **self._as,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START
        while True:
            done = subprocess.run(
                [self.bin / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "tester"], check=False
            )
            if done.returncode == 0:
                return
            if time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start within {START:g} s:\n{self.log}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        """Of the server's first process, which made all others."""
        return int((self.data / "postmaster.pid").read_text().partition("\n")[0])

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: a fast shutdown. SIGQUIT: at once, without a checkpoint, as `pg_ctl -m immediate`."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(self.pid, how)
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(self.pid, signal.SIGQUIT)
            self._process.wait(10)
        self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def administer(self, *statements: str, database: str = "postgres") -> None:
        con = await asyncpg.connect(self.url(database))
        try:
            for statement in statements:
                await con.execute(statement)
        finally:
            await con.close()

    async def new_database(self, template: str | None = None) -> str:
        name = f"test_{next(self._names)}"
        await self.administer(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        return name

    async def drop_database(self, name: str) -> None:
        await self.administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    async def template(self, name: str, fill: Callable[[str], Awaitable[None]]) -> str:
        """The database `name`, made once: `fill(url)` makes what stands in it."""
        if name not in self._templates:
            await self.administer(f"CREATE DATABASE {name}")
            await fill(self.url(name))
            self._templates.add(name)
        return name

    @functools.cached_property
    def _templates(self) -> set[str]:
        return set()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":  # a server to play with
    made = Server()
    try:
        print(made.url(), flush=True)
        asyncio.run(asyncio.Event().wait())
    except KeyboardInterrupt:
        pass
    finally:
        made.close()
