"""The store for many machines: PostgreSQL 15 or newer, the same contract as on one file.

A plan's reads are plain statements; what it applies is one autocommit statement, or one transaction, and is on the
server's disk when it is answered. Others may move a record between the two: the swap is lost then, and the plan
decides again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import asyncpg

from fencepost.errors import InTheWay, StoreRefused
from fencepost.kernel.records import READY, Content, Effect, LogEntry, Pool, ResultCommit, Task
from fencepost.kernel.writes import Keys, Snapshot, WriteSet
from fencepost.stores import postgres_glance as glancing
from fencepost.stores import postgres_migrations as migrations
from fencepost.stores import postgres_prune as pruning
from fencepost.stores import postgres_views as views
from fencepost.stores.base import (
    Apply,
    EffectFilter,
    Glance,
    Load,
    Numbered,
    Plan,
    Scan,
    StoreCapabilities,
    TaskFilter,
    TaskHistory,
)
from fencepost.stores.postgres_apply import WRITTEN_POOLS, apply_any, apply_log
from fencepost.stores.postgres_connections import (
    BROKEN,
    LOST_AGAINST_OTHERS,
    MAX_TRIES,
    Connection,
    Connections,
    Settings,
    parse,
    translate,
)
from fencepost.stores.postgres_feed import Feed
from fencepost.stores.postgres_guesses import Guesses
from fencepost.stores.postgres_inserts import apply_new, only_new
from fencepost.stores.postgres_joined import Home, run_joined, whereabouts
from fencepost.stores.postgres_load import CLOCK, Reading, payloads
from fencepost.stores.postgres_scan import Scanner
from fencepost.stores.postgres_statements import CLEAR
from fencepost.stores.postgres_swift import MOST_GROUPS, Group, apply_swift, sort
from fencepost.stores.postgres_wakeups import Here, Listener, Notifier, Subscriber
from fencepost.stores.schema import Migration, MigrationState

T = TypeVar("T")

# A clock that is carried on here is right if a hint that says another one is so near, in microseconds.
CONFIRMED_US = 100_000
_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


class PostgresStore:
    """`await PostgresStore.open(url)`. Belongs to the event loop that opened it; other threads and loops open their
    own, and so does a forked child."""

    capabilities = StoreCapabilities(
        durable=True, shared=True, loses_swaps=True, hints=True, look_every=2.0, joins=True, statements=True
    )
    # Through a pooler nobody can listen.
    unheard = StoreCapabilities(
        durable=True, shared=True, loses_swaps=True, hints=True, look_every=1.0, joins=True, statements=True
    )

    def __init__(self, url: str, dsn: str, settings: Settings, clock: str) -> None:
        self.url = url
        self.settings = settings
        self.store_id = ""
        self.namespace = ""
        if settings.pgbouncer:
            self.capabilities = self.unheard
        self._where = _without_password(url)
        self._home = Home(lambda: self._on(self._views, whereabouts))
        self._reading = Reading(clock)
        self._scanner = Scanner(clock)
        self._feed = Feed(0)
        self._guesses = Guesses()
        self.swaps_won = 0
        self.swaps_lost = 0
        self._plans = Connections(dsn, settings, settings.pool_size, keyed=True, name="fencepost")
        self._views = Connections(dsn, settings, 2, keyed=False, name="fencepost views")
        # What a commit brings along is planned as its author's own connection would, and leaves no setting to others.
        self._apart = Connections(dsn, settings, 2, keyed=False, name="fencepost statements")
        self._here = Here(self._task_is_there)
        self._notifier = Notifier(self._views, settings, self._here, clock)
        self._listener = Listener(self._views, settings, self._here, self._notifier, self._clock_was)
        self._glance = glancing.statement(clock)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        create: bool = True,
        namespace: str | None = None,
        clock: str = CLOCK,
        shipped: Sequence[Migration] | None = None,
    ) -> PostgresStore:
        """The store in the database at `url`; one without a fencepost schema gets it, with the pool `default`.

        `clock` is an SQL expression for the store's clock, in microseconds: only tests give another.
        Raises InvalidRequest (the URL), StoreRefused, each with its own message: wrong user, no such database, no
        fencepost schema, newer schema, older schema, a pool that wants a newer protocol. Raises Unavailable when the
        server does not answer.
        """
        dsn, settings = parse(url)
        known = tuple(shipped) if shipped is not None else migrations.shipped()
        self = cls(url, dsn, settings, clock)
        base = 0

        async def prepare(con: Connection) -> None:
            nonlocal base
            if create and not await migrations.exists(con):
                await migrations.create(con, known, namespace)
            await migrations.check(con, self._where, known)
            self.store_id, self.namespace, base = await migrations.identify(con)

        try:
            await self._on(self._views, prepare, patience=0.0)
        except BaseException:
            await self.close()
            raise
        self._feed = Feed(base)
        return self

    async def close(self) -> None:
        """Finish what is under way and close. Afterwards every call is Unavailable. May be called twice."""
        await self._notifier.close()
        await self._listener.close()
        await self._plans.close()
        await self._apart.close()
        await self._views.close()

    # plans --------------------------------------------------------------------------------------

    async def run(self, plan: Plan) -> Any:
        try:
            step = next(plan)
        except StopIteration as stop:
            return stop.value
        try:
            async with self._plans.use() as con:
                while True:
                    answer = await self._step(con, step)
                    try:
                        step = plan.send(answer)
                    except StopIteration as stop:
                        return stop.value
        except _ERRORS as error:
            raise translate(error) from error
        finally:
            plan.close()

    async def run_on(self, connection: Any, plan: Plan) -> None:
        """Drive `plan` inside the transaction of `connection`, an asyncpg or psycopg one; see postgres_joined."""
        base = self._feed.base
        apart = await run_joined(connection, plan, self.store_id, self._home, self._reading, base, self._look)
        if apart:
            await self._on(self._views, apply_log, apart, base)

    async def _look(self, keys: Keys) -> Snapshot:
        found = Snapshot()
        await self._read(self._reading.load, keys, found)
        return found

    async def _step(self, con: Connection, step: Load | Scan | Apply) -> Any:
        kind = type(step)
        guesses = self._guesses
        if kind is Load:
            keys, into = step.keys, step.into  # type: ignore[union-attr]
            if not (step.guess and guesses.fill(keys, into)):  # type: ignore[union-attr]
                await self._again(con, self._reading.load, keys, into)
                guesses.answered(into)
            return None
        if kind is Scan:
            if step.lapsed and step.into.guessed:  # type: ignore[union-attr]
                return []  # what is found besides is enough to try; whoever finds nothing by guess looks again
            found = await self._again(con, self._scanner.scan, step)
            guesses.answered(step.into)  # type: ignore[union-attr]
            if not step.lapsed:  # type: ignore[union-attr]
                guesses.plenty = len(found) == step.limit  # type: ignore[union-attr]
            return found
        return await self._apply(con, step)  # type: ignore[arg-type]

    async def _again(self, con: Connection, do: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """`do`, and once more where it lost against others: nothing was written then."""
        tries = 1
        while True:
            try:
                if not self.settings.pgbouncer:
                    return await do(con, *arguments)
                # A statement is prepared and executed in two messages: only a transaction keeps them together.
                async with con.transaction(isolation="read_committed"):
                    return await do(con, *arguments)
            except LOST_AGAINST_OTHERS:
                if tries == MAX_TRIES or con.is_closed():
                    raise
            await asyncio.sleep(random.uniform(0, 0.002 * tries))
            tries += 1

    async def _apply(self, con: Connection, step: Apply) -> list[bool]:
        sets, base = step.sets, self._feed.base
        log: Sequence[LogEntry] = step.log
        if not sets:
            if log:
                await self._again(con, apply_log, log, base)
            return []
        groups: list[Group] = []
        others: Sequence[WriteSet] = sets
        if any("statements" in writes.made for writes in sets):
            return await self._apply_with_statements(sets, log)
        if not any(writes.pool_write is not None for writes in sets):  # which the sets after it are compared with
            groups, others = sort(sets)
        won: set[int] = set()
        for start in range(0, len(groups), MOST_GROUPS):
            some = groups[start : start + MOST_GROUPS]
            try:
                found = await self._again(con, apply_swift, some, log, base)
            except asyncpg.UniqueViolationError as error:
                if error.table_name != "request":
                    raise
                others = [*(writes for group in some for writes in group.sets), *others]
            else:
                won.update(map(id, found))
                log = ()
        if others and only_new(others):
            with contextlib.suppress(asyncpg.UniqueViolationError):  # whose id is taken, apply_any finds out
                await self._again(con, apply_new, others, log, base)
                won.update(map(id, others))
                others = log = ()
        if others:
            standing = await self._again(con, apply_any, others, log, base, self._lock_pools)
            won.update(id(writes) for writes, stands in zip(others, standing, strict=True) if stands)
        elif log:
            await self._again(con, apply_log, log, base)
        return self._applied(sets, [id(writes) in won for writes in sets])

    async def _apply_with_statements(self, sets: Sequence[WriteSet], log: Sequence[LogEntry]) -> list[bool]:
        """All of `sets` in one transaction, on a connection that is for this alone."""
        async with self._apart.use() as con:
            if not self.settings.pgbouncer:  # where it would be another's server connection, and is not ours to clear
                await con.execute(CLEAR)
            return self._applied(sets, await self._again(con, apply_any, sets, log, self._feed.base, self._lock_pools))

    def _applied(self, sets: Sequence[WriteSet], answer: list[bool]) -> list[bool]:
        self._guesses.applied(sets, answer)
        self._count(sets, answer)
        for writes, stands in zip(sets, answer, strict=True):
            if stands:
                for write in writes.tasks:
                    if write.task.state == READY:
                        self._scanner.wrote(write.task)
                        self._notifier.hint(write.task, (write.task.available_at - self._guesses.now()) / 1e6)
        return answer

    def _count(self, sets: Sequence[WriteSet], won: Sequence[bool]) -> None:
        tried = lost = 0
        for writes, stands in zip(sets, won, strict=True):
            if writes.tasks and writes.tasks[0].family == "claim":
                tried += 1
                lost += not stands
        self._scanner.share.claimed(tried, lost)
        self.swaps_won += sum(won)
        self.swaps_lost += len(won) - sum(won)

    async def _lock_pools(self, con: Connection, names: Sequence[str]) -> list[Any]:
        """Lock pools to write them: waits for every batch that compares their epoch, at most `raise_timeout`."""
        pid = await con.fetchval("SELECT pg_backend_pid()")
        if not self.settings.pgbouncer:  # where no lock_timeout is set
            await con.execute("SET LOCAL lock_timeout = 0")
        locking = asyncio.ensure_future(con.fetch(WRITTEN_POOLS, names))
        try:
            done, _ = await asyncio.wait([locking], timeout=self.settings.raise_timeout)
            if done:
                return list(locking.result())
            others, sessions = await self._on(self._views, views.in_the_way, pid)
            raise InTheWay(
                f"raise_timeout: after {self.settings.raise_timeout:g} s others are still at work on pool "
                f"{', '.join(names)}, nothing was written; in the way: {others}",
                sessions,
            )
        finally:
            if not locking.done():
                locking.cancel()
                await asyncio.wait([locking])

    async def end_sessions(self, sessions: views.Sessions) -> int:
        """End those that `InTheWay` named, as far as they still are; the server rolls back what they had open."""
        return await self._on(self._views, views.end, sessions)

    def forget(self) -> None:
        """Decide nothing more on what is only remembered: the next look asks the server."""
        self._guesses.forget()
        self._scanner.forget()

    # read side ----------------------------------------------------------------------------------

    async def _on(
        self,
        connections: Connections,
        work: Callable[..., Awaitable[T]],
        *arguments: Any,
        patience: float | None = None,
    ) -> T:
        """Do `work` on a connection; no error of the driver leaves this method."""
        try:
            async with connections.use(patience=patience) as con:
                return await self._again(con, work, *arguments)
        except _ERRORS as error:
            raise translate(error) from error

    async def _read(self, view: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """A view, on another connection once more where the first one turns out to be broken."""
        try:
            async with self._views.use() as con:
                return await self._again(con, view, *arguments)
        except BROKEN:
            return await self._on(self._views, view, *arguments)
        except _ERRORS as error:
            raise translate(error) from error

    async def version(self) -> int:
        return await self._read(views.version)

    def subscribe(
        self, changed: Callable[[], None], ready: Callable[[str, str, str], bool], anybody: Callable[[], bool]
    ) -> None:
        self._here.subscribers.append(Subscriber(changed, ready, anybody))

    def listen(self) -> None:
        """Somebody waits: hear what other processes say from now on."""
        self._listener.start()

    def _task_is_there(self) -> None:
        """Somebody was told of a task and will look at once: what is remembered is enough to try to take it."""
        self._guesses.plenty = True

    def _clock_was(self, then: int) -> None:
        """A hint carries the store's clock. It may have been long on its way: it only confirms what is known here."""
        known = self._guesses.now()
        if abs(known - then) < CONFIRMED_US:
            into = Snapshot()
            into.now = max(known, then)
            self._guesses.answered(into)

    def hears_since(self) -> float | None:
        return self._listener.since

    async def glance(self, lanes: Sequence[glancing.Lane]) -> Glance:
        return await self._on(self._plans, glancing.glance, self._glance, lanes)

    async def clock(self) -> int:
        return await self._read(self._reading.now)

    async def pools(self) -> list[Pool]:
        return await self._read(views.pools)

    async def tasks(self, where: TaskFilter, after: str | None, limit: int) -> list[Task]:
        return await self._read(views.tasks, where, after, limit)

    async def records(self, task_ids: Sequence[str]) -> list[Task]:
        return await self._read(views.records, task_ids)

    async def history(self, task_id: str) -> TaskHistory | None:
        return await self._read(views.history, task_id)

    async def histories(self, after: str | None, limit: int) -> list[TaskHistory]:
        return await self._read(views.histories, after, limit)

    async def result(self, task_id: str) -> ResultCommit | None:
        return await self._read(views.result, task_id)

    async def effects(self, where: EffectFilter, after: tuple[str, int] | None, limit: int) -> list[Effect]:
        return await self._read(views.effects, where, after, limit)

    async def payloads(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Content]:
        return await self._read(payloads, keys)

    async def unknown_backlog(self) -> list[tuple[str, str, int, int, int]]:
        return await self._read(views.unknown_backlog)

    async def events(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, names: Sequence[str] = ()
    ) -> list[Numbered]:
        return await self._read(self._feed.events, after, limit, task_id, pool, names)

    async def log(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, kinds: Sequence[str] = ()
    ) -> list[Numbered]:
        return await self._read(self._feed.log, after, limit, task_id, pool, kinds)

    async def counts(self) -> list[tuple[str, str, str, int, int]]:
        return await self._read(views.counts)

    async def last_numbers(self) -> tuple[int, int]:
        return await self._read(self._feed.last_numbers)

    async def orphans(self) -> dict[str, int]:
        return await self._read(views.orphans)

    async def diagnose(self) -> dict[str, Any]:
        return await self._read(views.diagnose, self.settings)

    # retention ----------------------------------------------------------------------------------

    async def prune(self, before_us: int, limit: int) -> dict[str, int]:
        removed: Counter[str] = Counter(dict.fromkeys(pruning.REMOVED, 0))

        after: int | None = 0
        while after is not None and removed["tasks"] < limit:
            after = await self._on(self._views, pruning.prune_tasks, self._feed, before_us, limit, after, removed)
        while await self._on(self._views, pruning.prune_log, before_us, removed):
            pass
        now = await self.clock()
        while await self._on(self._views, pruning.prune_requests, now, removed):
            pass
        return dict(removed)


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{place.partition('?')[0]}"


async def migration_status(url: str, *, shipped: Sequence[Migration] | None = None) -> list[MigrationState]:
    """Every migration step that this release knows or the database has, in order, and when it was applied."""
    return await _on_database(url, migrations.status, shipped)


async def migrate(
    url: str, dry_run: bool = False, *, create: bool = False, shipped: Sequence[Migration] | None = None
) -> list[Migration]:
    """Bring the database's schema to this release's; what was applied, or with `dry_run` what would be, with its SQL.

    Each step is a transaction of its own: a failed one changes nothing, and the next call goes on from there.
    A database without a fencepost schema is refused unless `create`. Raises StoreRefused and Unavailable as opening
    does, but for an older schema.
    """

    async def work(con: Connection, known: Sequence[Migration]) -> list[Migration]:
        if not create and not dry_run and not await migrations.exists(con):
            raise StoreRefused(f"{_without_password(url)} holds no fencepost schema")
        return await migrations.migrate(con, known, dry_run)

    return await _on_database(url, work, shipped)


async def _on_database(
    url: str,
    work: Callable[[Connection, Sequence[Migration]], Awaitable[T]],
    shipped: Sequence[Migration] | None,
) -> T:
    dsn, settings = parse(url)
    known = tuple(shipped) if shipped is not None else migrations.shipped()
    connections = Connections(dsn, settings, 1, keyed=False, name="fencepost migrate")
    try:
        async with connections.use(patience=0.0) as con:
            return await work(con, known)
    except _ERRORS as error:
        raise translate(error) from error
    finally:
        await connections.close()
