"""A real pgbouncer in transaction mode before the run's server: three server connections for however many clients."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.postgres.server import Missing, Server, _free_port, running, someone

POOL = 3


def pgbouncer() -> str | None:
    """The program, where this machine has it."""
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class Bouncer:
    def __init__(self, server: Server) -> None:
        binary = pgbouncer()
        if binary is None:
            raise Missing("no pgbouncer found: install Debian's package `pgbouncer`")
        self.port = _free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="fencepost-pgbouncer-"))
        who = someone()
        (self.folder / "users").write_text('"tester" ""\n')
        (self.folder / "ini").write_text(f"""[databases]
* = host=127.0.0.1 port={server.port} user=tester
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
auth_file = {self.folder}/users
pool_mode = transaction
default_pool_size = {POOL}
max_client_conn = 500
server_idle_timeout = 2
logfile = {self.folder}/log
""")
        if who:
            for path in (self.folder, self.folder / "users", self.folder / "ini"):
                os.chown(path, who["user"], who["group"])
        self._process = subprocess.Popen(
            [binary, "-q", self.folder / "ini"], **who, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError):
                import socket

                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            if self._process.poll() is not None or time.monotonic() > until:
                log = self.folder / "log"
                raise RuntimeError(f"pgbouncer did not start: {log.read_text() if log.exists() else 'no log'}")
            time.sleep(0.02)

    def url(self, database: str, **settings: Any) -> str:
        query = "&".join(f"{name}={value}" for name, value in {"pgbouncer": "true", **settings}.items())
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}?{query}"

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def bouncing() -> Bouncer:
    """The run's pooler, started when it is first asked for."""
    bouncer = Bouncer(running())
    atexit.register(bouncer.close)
    return bouncer
