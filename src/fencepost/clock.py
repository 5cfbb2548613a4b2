"""The two clocks: the machine's wall clock, for stores, and one that counts suspended time, for leases.

No wall clock of a worker enters a decision. A worker measures how long it may still trust a lease
with `elapsed()`, which goes on while the machine sleeps: CLOCK_BOOTTIME on Linux; macOS's
CLOCK_MONOTONIC counts sleep already.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

MICROSECOND = 1_000_000

_ELAPSED_ID: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed() -> float:
    """Seconds since some fixed point, suspended time included. Never goes back."""
    return time.clock_gettime(_ELAPSED_ID)


def wall_us() -> int:
    """The machine's wall clock in microseconds since 1970. May jump, in either direction."""
    return time.time_ns() // 1000


def to_us(seconds: float) -> int:
    """Seconds as whole microseconds, the unit that records are kept in."""
    return round(seconds * MICROSECOND)


def to_datetime(us: int) -> datetime:
    """A record's microseconds as an aware UTC datetime."""
    return datetime.fromtimestamp(us / MICROSECOND, UTC)
