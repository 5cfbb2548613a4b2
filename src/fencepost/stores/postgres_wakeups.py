"""Hints between processes: that something became ready. Only latency depends on them; whoever waits also polls.

A NOTIFY inside the transaction that claims or submits would make all commits queue for one lock. So it goes out
afterwards, on another connection, one for many, and is not missed where it gets lost. One connection a process listens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fencepost.clock import elapsed
from fencepost.errors import Unavailable
from fencepost.stores.postgres_connections import BROKEN, Connection, Connections, Settings

CHANNEL = "fencepost_ready"
# The shortest time between two hints of one process, in seconds.
BETWEEN = 0.010
# Without a connection that listens (a pooler, say), waiters look by themselves: so often is the number a new one.
UNHEARD = 0.5


class Notifier:
    """`poke()` sends a hint soon. It never raises and never waits."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._task: asyncio.Task[None] | None = None
        self._wanted = False

    def poke(self) -> None:
        self._wanted = True
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="fencepost-notify")

    async def _send(self) -> None:
        try:
            while self._wanted:
                self._wanted = False
                try:
                    async with self._connections.use(patience=0.0) as con:
                        await con.execute(f"NOTIFY {CHANNEL}")
                except (Unavailable, *BROKEN):
                    return  # whoever waits polls as well
                await asyncio.sleep(BETWEEN)
        finally:
            self._task = None

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])


class Listener:
    """Counts the hints that arrive. Listens from the first question on."""

    def __init__(self, connections: Connections, settings: Settings) -> None:
        self._connections = connections
        self._allowed = not settings.pgbouncer
        self._con: Connection | None = None
        self._heard = 0
        self._tried = -1e9
        self._connecting: asyncio.Task[None] | None = None

    async def version(self) -> int:
        if self._con is not None and not self._con.is_closed():
            return self._heard
        now = elapsed()
        if now - self._tried >= UNHEARD:
            self._tried = now
            self._heard += 1  # what was said while nobody listened
            if self._allowed and self._connecting is None:
                self._connecting = asyncio.create_task(self._listen(), name="fencepost-listen")
        return self._heard

    async def _listen(self) -> None:
        con: Connection | None = None
        try:
            con = await self._connections.connect(0.0)
            await con.add_listener(CHANNEL, self._hear)
            self._con = con
            self._heard += 1
        except (Unavailable, *BROKEN):
            if con is not None:
                con.terminate()
        finally:
            self._connecting = None

    def _hear(self, *_: Any) -> None:
        self._heard += 1

    async def close(self) -> None:
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        if self._con is not None:
            con, self._con = self._con, None
            try:
                await con.close(timeout=2)
            except BROKEN:
                con.terminate()
