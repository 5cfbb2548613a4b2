"""Hints between processes: that something became ready. Only latency depends on them; whoever waits also looks by
itself, if rarely.

A NOTIFY inside the transaction that claims or submits would make all commits queue for one lock. So it goes out
afterwards, on another connection, one for many, and nobody misses it where it gets lost. A task that became ready is
for one: for whoever waits for it in this very process, else for one other process. Whoever waits holds an advisory
lock on the connection that it listens on, and the sender picks among those at random. A process that was picked and
cannot use the hint passes it on, to one other again, after a few tries to all. And who made a task ready, and told
somebody, looks a moment later whether the task was taken; where it was not (the one who was told has died, or sleeps),
it tells a few more, and after another moment all who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import asyncpg
import msgspec

from fencepost.clock import elapsed
from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel.records import READY, Task
from fencepost.stores.postgres_connections import BROKEN, Connection, Connections, Settings

logger = logging.getLogger("fencepost.stores.postgres")

CHANNEL = "fencepost_ready"
# The shortest time between two hints of one process, in seconds.
BETWEEN = 0.010
# Tasks that become ready later are hinted at by a timer of whoever made them; so many at most, so far ahead.
MOST_TIMERS = 1000
LONGEST = 3600.0
# How often a hint that nobody can use is passed on to one other before it goes to all who wait.
MOST_HOPS = 3
# So many seconds after a hint its sender looks whether the task was taken, at so many tasks at most, and tells so many
# more; after as long again, all.
CHECK_AFTER = 0.25
MOST_CHECKED = 100
MORE = 2
# How long a listener that lost its connection waits before it tries again, and one that the server refused.
RETRY = 1.0
RETRY_REFUSED = 30.0
# How long a process stays on the list of those who wait after the last waiter left, in seconds.
LINGER = 0.5

_WAITING = int.from_bytes(b"wait", "big")
_MOST_BYTES = 7000  # a payload must stay below 8000
_ALL = 1000

Where = tuple[str, str, str]  # pool, queue, kind


class Hint(msgspec.Struct, frozen=True, array_like=True):
    places: tuple[Where, ...] = ()  # where something became ready; none: anywhere
    told: tuple[int, ...] = ()  # who heard of it and could not use it
    final: bool = False  # nobody passes it on


def _telling(clock: str) -> str:
    """$1 payload, $2 how many of the processes that wait are told, $3 who is not."""
    return f"""
SELECT count(pg_notify('{CHANNEL}_' || w.objid, {clock} || $1)) FROM (
    SELECT l.objid FROM (
        SELECT DISTINCT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = {_WAITING} AND objsubid = 2
        AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ) l WHERE l.objid <> ALL($3::oid[]) ORDER BY random() LIMIT $2
) w"""


_LEFT = f"SELECT task_id, pool, queue, kind FROM fencepost.task WHERE task_id = ANY($1::text[]) AND state = {READY:d}"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Hint).decode


class Subscriber(msgspec.Struct, frozen=True):
    changed: Callable[[], None]  # something may be ready, whatever it is
    ready: Callable[[str, str, str], bool]  # a task of this pool, queue and kind is; whether anybody here wanted it
    anybody: Callable[[], bool]  # whether anybody waits here at all


class Here:
    """Who waits in this process, and its number among those who do. `soon`: somebody is about to look."""

    def __init__(self, soon: Callable[[], None]) -> None:
        self.slot = random.randrange(1, 1 << 31)
        self.subscribers: list[Subscriber] = []
        self._soon = soon

    def ready(self, where: Where) -> bool:
        wanted = False
        for one in self.subscribers:  # each hears of it
            wanted = one.ready(*where) or wanted
        if wanted:
            self._soon()
        return wanted

    def changed(self) -> None:
        for one in self.subscribers:
            one.changed()

    def anybody(self) -> bool:
        return any(one.anybody() for one in self.subscribers)


class Notifier:
    """`hint` says, here or elsewhere, that a task is ready. It never raises and never waits."""

    def __init__(self, connections: Connections, settings: Settings, here: Here, clock: str) -> None:
        self._connections = connections
        self._tell_some = _telling(clock)
        self._transaction = settings.pgbouncer  # what keeps the two messages of a statement together there
        self._here = here
        self._task: asyncio.Task[None] | None = None
        self._wanted: Counter[Where] = Counter()
        self._sample: list[str] = []  # of the tasks that are counted there
        self._passed: list[Hint] = []
        self._unsure: dict[str, bool] = {}  # that somebody was told of; whether a few more have been told
        self._timers: set[asyncio.TimerHandle] = set()
        self._check: asyncio.TimerHandle | None = None
        self._checking: asyncio.Task[None] | None = None
        self._closed = False

    def hint(self, task: Task, delay: float) -> None:
        """`task` is ready `delay` seconds from now."""
        if delay <= 0:
            self._ready((task.pool, task.queue, task.kind), task.task_id)
        elif delay <= LONGEST and len(self._timers) < MOST_TIMERS:
            where, task_id = (task.pool, task.queue, task.kind), task.task_id

            def due() -> None:
                self._timers.discard(timer)
                self._ready(where, task_id)

            timer = asyncio.get_running_loop().call_later(delay, due)
            self._timers.add(timer)

    def _ready(self, where: Where, task_id: str) -> None:
        if self._here.ready(where):
            self._check_later([task_id])
            return
        self._wanted[where] += 1
        if len(self._sample) < MOST_CHECKED:
            self._sample.append(task_id)
        self._soon()

    def pass_on(self, hint: Hint) -> None:
        """Tell somebody else what this process was told for nothing."""
        self._passed.append(hint)
        self._soon()

    def _soon(self) -> None:
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._send(), name="fencepost-notify")

    async def _send(self) -> None:
        try:
            while self._wanted or self._passed:
                wanted, sample, passed = self._wanted, self._sample, self._passed
                self._wanted, self._sample, self._passed = Counter(), [], []
                try:
                    async with self._connection() as con:
                        if wanted and await self._tell(con, Hint(tuple(wanted)), min(wanted.total(), _ALL)):
                            self._check_later(sample)
                        for hint in passed:
                            await self._tell(con, hint, _ALL if hint.final else 1)
                except (Unavailable, asyncpg.PostgresError, *BROKEN):  # a full queue of notifications, say
                    return  # whoever waits looks by itself
                await asyncio.sleep(BETWEEN)
        finally:
            self._task = None

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        async with self._connections.use(patience=0.0) as con:
            if self._transaction:
                async with con.transaction():
                    yield con
            else:
                yield con

    async def _tell(self, con: Connection, hint: Hint, most: int) -> int:
        """How many were told."""
        text = _encode(hint).decode()
        if len(text.encode()) > _MOST_BYTES:
            text = _encode(Hint((), hint.told, hint.final)).decode()
        return int(await con.fetchval(self._tell_some, text, most, [self._here.slot, *hint.told]))

    # whether it was heard -----------------------------------------------------------------------

    def _check_later(self, task_ids: Collection[str]) -> None:
        if len(self._unsure) < MOST_CHECKED:
            self._unsure.update(dict.fromkeys(task_ids, False))
            self._plan_check()

    def _plan_check(self) -> None:
        if self._check is None and self._checking is None and self._unsure and not self._closed:
            self._check = asyncio.get_running_loop().call_later(CHECK_AFTER, self._start_check)

    def _start_check(self) -> None:
        self._check = None
        self._checking = asyncio.create_task(self._look_after(), name="fencepost-notify-again")

    async def _look_after(self) -> None:
        """Tell others of what nobody has taken that one was told of."""
        unsure, self._unsure = self._unsure, {}
        try:
            async with self._connection() as con:
                rows = await con.fetch(_LEFT, list(unsure))
                for again in (False, True):
                    left = {row[0]: (row[1], row[2], row[3]) for row in rows if unsure[row[0]] is again}
                    if left:
                        places = tuple(dict.fromkeys(left.values()))
                        for where in places:
                            self._here.ready(where)
                        await self._tell(con, Hint(places, final=True), _ALL if again else MORE * len(places))
                        if not again:
                            self._unsure.update(dict.fromkeys(left, True))
        except (Unavailable, asyncpg.PostgresError, *BROKEN):
            return  # whoever waits looks by itself
        finally:
            self._checking = None
            self._plan_check()

    async def close(self) -> None:
        self._closed = True
        for timer in (*self._timers, *([self._check] if self._check is not None else [])):
            timer.cancel()
        self._timers.clear()
        under_way = [task for task in (self._task, self._checking) if task is not None]
        if under_way:
            await asyncio.wait(under_way)


class Listener:
    """Hears hints and passes them on. Listens from the first wait on, again after each loss."""

    def __init__(
        self,
        connections: Connections,
        settings: Settings,
        here: Here,
        notifier: Notifier,
        clock_was: Callable[[int], None],  # told the store's clock as it was when a hint was sent
    ) -> None:
        self._connections = connections
        self._clock_was = clock_was
        self._notifier = notifier
        self._here = here
        self._allowed = not settings.pgbouncer  # which gives each transaction another connection
        self._task: asyncio.Task[None] | None = None
        self._somebody = asyncio.Event()
        self.since: float | None = None  # on the list of those who wait

    def start(self) -> None:
        """Somebody waits here. Costs a connection; so only whoever waits asks for it."""
        self._somebody.set()
        if self._allowed and self._task is None:
            self._task = asyncio.create_task(self._listen(), name="fencepost-listen")

    async def _listen(self) -> None:
        while True:
            pause = RETRY
            try:
                await self._once()
            except StoreRefused as error:
                pause = RETRY_REFUSED
                logger.warning("this process cannot listen for hints, it looks for tasks by itself: %s", error)
            except (Unavailable, asyncpg.PostgresError, *BROKEN) as error:
                logger.debug("the listening connection is lost: %s", error)
            await asyncio.sleep(pause * (0.5 + random.random()))
            self._somebody.set()

    async def _once(self) -> None:
        """Listen on one connection, until it is lost."""
        con = await self._connections.connect(0.0)
        slot, lost = self._here.slot, asyncio.Event()

        def over(con: Connection) -> None:
            self.since = None
            lost.set()

        try:
            con.add_termination_listener(over)
            await con.add_listener(f"{CHANNEL}_{slot}", self._heard)
            while not lost.is_set():
                await self._somebody.wait()
                await con.execute(f"SELECT pg_advisory_lock_shared({_WAITING}, {slot})")
                if not lost.is_set():
                    self.since = elapsed()
                self._here.changed()  # what became ready before this process stood on the list
                while self._here.anybody() and not lost.is_set():
                    self._somebody.clear()
                    await self._wait(lost, LINGER)
                self._somebody.clear()
                self.since = None
                await con.execute(f"SELECT pg_advisory_unlock_shared({_WAITING}, {slot})")
        finally:
            self.since = None
            con.terminate()

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def _heard(self, con: Connection, pid: int, channel: str, payload: str) -> None:
        sent_at, bracket, rest = payload.partition("[")
        self._clock_was(int(sent_at))
        hint = _decode(bracket + rest)
        if not hint.places:
            self._here.changed()
        left = unwanted(hint.places, self._here)
        if left and not hint.final:
            told = (*hint.told, self._here.slot)
            self._notifier.pass_on(Hint(left, told, final=len(told) > MOST_HOPS))

    async def close(self) -> None:
        self._here.subscribers.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None


def unwanted(places: Sequence[Where], here: Here) -> tuple[Where, ...]:
    return tuple([where for where in places if not here.ready(where)])
