"""Hints between processes: that something became ready. Only latency depends on them; whoever waits also looks by
itself, if rarely.

A NOTIFY inside the transaction that claims or submits would make all commits queue for one lock. So it goes out
afterwards, on another connection, one for many, and nobody misses it where it gets lost. It goes to as many processes
as there are new tasks, not to all: whoever waits holds an advisory lock on the connection that it listens on, and the
sender picks among those. Who is picked and cannot use the hint passes it on to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg
import msgspec

from fencepost.errors import Unavailable
from fencepost.kernel.records import Task
from fencepost.stores.postgres_connections import BROKEN, Connection, Connections, Settings

CHANNEL = "fencepost_ready"
# The shortest time between two hints of one process, in seconds.
BETWEEN = 0.010
# Tasks that become ready later are hinted at by a timer of whoever made them; so many at most, so far ahead.
MOST_TIMERS = 1000
LONGEST = 3600.0
# How long a listener that lost its connection waits before it tries again, and how long it stays on the list of those
# who wait after the last one left, in seconds.
RETRY = 1.0
LINGER = 0.5

_WAITING = int.from_bytes(b"wait", "big")
_MOST_BYTES = 7000  # a payload must stay below 8000

Where = tuple[str, str, str]  # pool, queue, kind

# $1 payload, $2 how many: to that many of the processes that wait.
_TO_SOME = f"""
SELECT count(pg_notify('{CHANNEL}_' || w.objid, $1)) FROM (
    SELECT l.objid FROM (
        SELECT DISTINCT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = {_WAITING} AND objsubid = 2
        AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ) l ORDER BY random() LIMIT $2
) w"""
_TO_ALL = f"SELECT pg_notify('{CHANNEL}', $1)"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Where]).decode


class Notifier:
    """`hint` sends a hint soon. It never raises and never waits."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._task: asyncio.Task[None] | None = None
        self._wanted: Counter[Where] = Counter()
        self._for_all: set[Where] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._closed = False

    def hint(self, task: Task, delay: float) -> None:
        """`task` is ready `delay` seconds from now."""
        where = (task.pool, task.queue, task.kind)
        if delay <= 0:
            self._wanted[where] += 1
            self._soon()
        elif delay <= LONGEST and len(self._timers) < MOST_TIMERS:

            def due() -> None:
                self._timers.discard(timer)
                self._wanted[where] += 1
                self._soon()

            timer = asyncio.get_running_loop().call_later(delay, due)
            self._timers.add(timer)

    def pass_on(self, wheres: Sequence[Where]) -> None:
        """Tell everybody what this process was told for nothing."""
        self._for_all.update(wheres)
        self._soon()

    def _soon(self) -> None:
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._send(), name="fencepost-notify")

    async def _send(self) -> None:
        try:
            while self._wanted or self._for_all:
                wanted, for_all = self._wanted, self._for_all
                self._wanted, self._for_all = Counter(), set()
                try:
                    async with self._connections.use(patience=0.0) as con:
                        if wanted:
                            await con.execute(_TO_SOME, _payload(wanted), min(wanted.total(), 1000))
                        if for_all:
                            await con.execute(_TO_ALL, _payload(for_all))
                except (Unavailable, asyncpg.PostgresError, *BROKEN):  # a full queue of notifications, say
                    return  # whoever waits looks by itself
                await asyncio.sleep(BETWEEN)
        finally:
            self._task = None

    async def close(self) -> None:
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._task is not None:
            await asyncio.wait([self._task])


def _payload(wheres: Any) -> str:
    """The places, or nothing where they are too many: anything may be ready then."""
    text = _encode(list(wheres)).decode()
    return text if len(text.encode()) <= _MOST_BYTES else "[]"


class Subscriber(msgspec.Struct, frozen=True):
    changed: Callable[[], None]  # something may be ready, whatever it is
    ready: Callable[[str, str, str], bool]  # a task of this pool, queue and kind is; whether anybody here wanted it
    anybody: Callable[[], bool]  # whether anybody waits here at all


class Listener:
    """Hears hints and passes them on. Listens from the first wait on, again after each loss."""

    def __init__(self, connections: Connections, settings: Settings, notifier: Notifier) -> None:
        self._connections = connections
        self._notifier = notifier
        self._allowed = not settings.pgbouncer  # which gives each transaction another connection
        self._slot = random.randrange(1, 1 << 31)
        self._task: asyncio.Task[None] | None = None
        self._somebody = asyncio.Event()
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def start(self) -> None:
        """Somebody waits here. Costs a connection; so only whoever waits asks for it."""
        self._somebody.set()
        if self._allowed and self._task is None:
            self._task = asyncio.create_task(self._listen(), name="fencepost-listen")

    async def _listen(self) -> None:
        while True:
            con: Connection | None = None
            lost = asyncio.Event()
            try:
                con = await self._connections.connect(0.0)
                con.add_termination_listener(lambda _, lost=lost: lost.set())
                await con.add_listener(f"{CHANNEL}_{self._slot}", self._picked)
                await con.add_listener(CHANNEL, self._told)
                while not lost.is_set():
                    await self._somebody.wait()
                    await con.execute(f"SELECT pg_advisory_lock_shared({_WAITING}, {self._slot})")
                    self._changed()  # what became ready before this process stood on the list
                    while any(one.anybody() for one in self._subscribers) and not lost.is_set():
                        self._somebody.clear()
                        await self._wait(lost, LINGER)
                    self._somebody.clear()
                    await con.execute(f"SELECT pg_advisory_unlock_shared({_WAITING}, {self._slot})")
            except (Unavailable, *BROKEN):
                pass
            finally:
                if con is not None:
                    con.terminate()
            await asyncio.sleep(RETRY * (0.5 + random.random()))
            self._somebody.set()

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def _picked(self, con: Any, pid: int, channel: str, payload: str) -> None:
        """This process, among few or alone."""
        wheres = _decode(payload)
        if not wheres:
            self._changed()
        left = [where for where in wheres if not any(one.ready(*where) for one in self._subscribers)]
        if left:
            self._notifier.pass_on(left)

    def _told(self, con: Any, pid: int, channel: str, payload: str) -> None:
        """As everybody was."""
        wheres = _decode(payload)
        if not wheres:
            self._changed()
        for where in wheres:
            for one in self._subscribers:
                one.ready(*where)

    def _changed(self) -> None:
        for one in self._subscribers:
            one.changed()

    async def close(self) -> None:
        self._subscribers.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
