"""The PostgreSQL server of a test run: one for all, started when the first test asks for it."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path

from tools.postgres_server import Missing, Server, someone
from tools.postgres_server import free_port as _free_port


@functools.cache
def running() -> Server:
    """The run's server. Raises Missing, each time, where there is none."""
    _only_here()
    server = Server()
    atexit.register(server.close)
    return server


@functools.cache
def _only_here() -> None:
    """Of the processes that share a run, one has all tests that need the server: see tests/conftest.py."""
    run, worker = (os.environ.get(f"PYTEST_XDIST_{name}") for name in ("TESTRUNUID", "WORKER"))
    if run is None or worker is None:
        return
    mark = Path(tempfile.gettempdir()) / f"fencepost-server-of-{run}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        raise AssertionError(
            "another process of this run has the server: this test's name has to say that it needs postgres"
        ) from None
    atexit.register(mark.unlink, missing_ok=True)


__all__ = ["Missing", "Server", "_free_port", "running", "someone"]
