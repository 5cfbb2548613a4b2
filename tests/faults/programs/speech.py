"""How a test's process talks: JSON lines on standard output, orders as JSON lines on standard input.

It dies with whoever started it, even while it is stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
ORPHANED = 93  # exit code of a process whose test is gone


def say(did: str, **more: Any) -> None:
    """One line: a point that was reached."""
    line = json.dumps({"did": did, **more}).encode() + b"\n"
    with _lock:
        os.write(1, line)


def listen(obey: Callable[[dict[str, Any]], None]) -> None:
    """Hand every order to `obey`, in a thread; the end of the pipe ends the process."""

    def run() -> None:
        rest = b""
        while data := os.read(0, 65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                obey(json.loads(line))
        os._exit(ORPHANED)

    threading.Thread(target=run, name="orders", daemon=True).start()


def die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:  # it ended before the call above
            os._exit(ORPHANED)


def die() -> None:
    """As `kill -9` does it: no handler, no clean-up, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
