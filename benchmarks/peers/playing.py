"""What the players share: a player does, with one system, what `run.py` asks for, and says so in lines of JSON.

Only the standard library is used: each player runs in an environment of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

INPUT = "x" * 89
LEASE = 2.0  # seconds after which a worker that says nothing is given up, where that can be set


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def now() -> float:
    """Seconds on a clock that all processes of this machine share."""
    return time.monotonic()


class Watch:
    """Seconds, and CPU seconds of this process, from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def say(self) -> None:
        say(seconds=time.perf_counter() - self._wall, cpu=time.process_time() - self._cpu)


class _Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]}"
        say(event="told", level=record.levelname, text=" ".join(text.split())[:300])


def listen(*loggers: str) -> None:
    """Pass on what the system's loggers say from WARNING on."""
    for name in loggers:
        found = logging.getLogger(name)
        found.addHandler(_Heard(logging.WARNING))
        found.propagate = False


def batches(count: int, size: int) -> Iterable[int]:
    for start in range(0, count, size):
        yield min(size, count - start)


def play(parts: dict[str, Callable[..., Any]]) -> None:
    """`player.py PART URL [NUMBER …]`."""
    part, url, *numbers = sys.argv[1:]
    parts[part](url, *map(float, numbers))
