"""Hints between processes: that something became ready, or soon will. Only latency depends on them; whoever waits also
looks by itself, if rarely.

A NOTIFY inside the transaction that claims or submits would make all commits queue for one lock. So it goes out
afterwards, on another connection, one for many, and nobody misses it where it gets lost. One connection a process
listens. Delays travel as a time from now, in milliseconds, and end in the listener.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from fencepost.errors import Unavailable
from fencepost.stores.postgres_connections import BROKEN, Connection, Connections, Settings

CHANNEL = "fencepost_ready"
# The shortest time between two hints of one process, in seconds.
BETWEEN = 0.010
# Delays are hinted at to this many milliseconds; longer ones than LONGEST seconds are left to those who look.
STEP_MS = 50
LONGEST = 60.0
MOST_DELAYS = 200
# How long a listener that lost its connection waits before it tries again, in seconds.
RETRY = 1.0


class Notifier:
    """`hint` sends a hint soon. It never raises and never waits."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._task: asyncio.Task[None] | None = None
        self._delays: set[int] = set()

    def hint(self, delay: float) -> None:
        """Something is ready `delay` seconds from now."""
        if delay > LONGEST or len(self._delays) >= MOST_DELAYS:
            return
        self._delays.add(0 if delay <= 0 else (int(delay * 1000) // STEP_MS + 1) * STEP_MS)
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="fencepost-notify")

    async def _send(self) -> None:
        try:
            while self._delays:
                payload = ",".join(map(str, sorted(self._delays)))
                self._delays.clear()
                try:
                    async with self._connections.use(patience=0.0) as con:
                        await con.execute(f"NOTIFY {CHANNEL}, '{payload}'")
                except (Unavailable, *BROKEN):
                    return  # whoever waits looks by itself
                await asyncio.sleep(BETWEEN)
        finally:
            self._task = None

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])


class Listener:
    """Hears hints and passes them on. Listens from the first subscription on, again after each loss."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self._connections = connections
        self._allowed = not settings.pgbouncer  # which gives each transaction another connection
        self._task: asyncio.Task[None] | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}  # by the time they end, in steps
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call `changed` when something became ready, and when something may have been while nobody listened."""
        self._subscribers.append(changed)

    def start(self) -> None:
        """Listen from now on. Costs a connection; so only whoever waits asks for it."""
        if self._allowed and self._task is None:
            self._task = asyncio.create_task(self._listen(), name="fencepost-listen")

    async def _listen(self) -> None:
        while True:
            con: Connection | None = None
            lost = asyncio.Event()
            try:
                con = await self._connections.connect(0.0)
                con.add_termination_listener(lambda _, lost=lost: lost.set())
                await con.add_listener(CHANNEL, self._hear)
                self._changed()
                await lost.wait()
            except (Unavailable, *BROKEN):
                pass
            finally:
                if con is not None:
                    con.terminate()
            await asyncio.sleep(RETRY * (0.5 + random.random()))

    def _hear(self, con: Any, pid: int, channel: str, payload: str) -> None:
        loop = asyncio.get_running_loop()
        for part in payload.split(","):
            delay = int(part) if part.isdecimal() else 0
            if delay == 0:
                self._changed()
            elif len(self._timers) < MOST_DELAYS:
                end = int(loop.time() * 1000 + delay) // STEP_MS
                if end not in self._timers:
                    self._timers[end] = loop.call_later(delay / 1000, self._due, end)

    def _due(self, end: int) -> None:
        del self._timers[end]
        self._changed()

    def _changed(self) -> None:
        for changed in self._subscribers:
            changed()

    async def close(self) -> None:
        self._subscribers.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
