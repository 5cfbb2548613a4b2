"""The PostgreSQL server of a test run: one for all, started when the first test asks for it."""

from __future__ import annotations

import atexit
import functools

from tools.postgres_server import Missing, Server, someone
from tools.postgres_server import free_port as _free_port


@functools.cache
def running() -> Server:
    """The run's server. Raises Missing, each time, where there is none."""
    server = Server()
    atexit.register(server.close)
    return server


__all__ = ["Missing", "Server", "_free_port", "running", "someone"]
