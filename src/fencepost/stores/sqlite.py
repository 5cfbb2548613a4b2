"""The embedded store: one SQLite file, shared by any number of processes on one machine.

Writes go through one thread and one connection per handle; a plan is one BEGIN IMMEDIATE transaction in WAL
mode with synchronous=FULL, so that what was answered survives a power cut as far as the disk keeps its word.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import apsw

from fencepost import clock
from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel.records import Content, Effect, Pool, ResultCommit, Task
from fencepost.stores import sqlite_file as file
from fencepost.stores import sqlite_migrations as migrations
from fencepost.stores import sqlite_prune as pruning
from fencepost.stores import sqlite_views as views
from fencepost.stores.base import (
    EffectFilter,
    Load,
    Numbered,
    Plan,
    Scan,
    StoreCapabilities,
    TaskFilter,
    TaskHistory,
)
from fencepost.stores.schema import Migration, MigrationState
from fencepost.stores.sqlite_threads import Lane
from fencepost.stores.sqlite_transaction import Standing, Transaction

T = TypeVar("T")


class StoreClock:
    """The store's clock: the machine's wall clock, made non-decreasing.

    A reading is the highest of the wall clock, the highest time that the store holds, and this process's
    last reading moved on by a clock that only runs forward.
    """

    def __init__(
        self, wall_us: Callable[[], int] = clock.wall_us, elapsed: Callable[[], float] = clock.elapsed
    ) -> None:
        self._wall_us = wall_us
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._last = 0
        self._last_elapsed = elapsed()

    def now(self, stored: int) -> int:
        with self._lock:
            elapsed = self._elapsed()
            moved_on = self._last + clock.to_us(elapsed - self._last_elapsed)
            self._last = now = max(self._wall_us(), stored, moved_on)
            self._last_elapsed = elapsed
            return now


class SQLiteStore:
    """`await SQLiteStore.open(path)`. Event loops and threads of one process may share a handle; a forked child
    may not, it opens its own."""

    capabilities = StoreCapabilities(durable=True, shared=True, loses_swaps=False, statements=True)

    def __init__(self, path: str, url: str, wait: float, store_clock: StoreClock) -> None:
        self.path = path
        self.url = url
        self.store_id = ""
        self.namespace = ""
        self._clock = store_clock
        self._pid = os.getpid()
        self._damage: str | None = None
        self._standing = Standing()  # belongs to the writer's thread
        self._watch: file.FileWatch | None = None
        self._patience = file.Patience(wait)
        self._writer = Lane("fencepost-sqlite-writer", partial(file.connect, path), self._patience)
        self._reader = Lane("fencepost-sqlite-reader", self._connect_reader, file.Patience(wait))

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        url: str | None = None,
        create: bool = True,
        namespace: str | None = None,
        busy_wait: float = file.BUSY_WAIT,
        store_clock: StoreClock | None = None,
        file_system_of: file.FileSystemOf | None = None,
        shipped: Sequence[Migration] | None = None,
    ) -> SQLiteStore:
        """The store in the file `path`; a missing or empty file becomes a new one, with the pool `default`.

        Raises StoreRefused, each with its own message: missing folder, not a file, network file system, not
        writable, no fencepost database, newer schema, older schema, a pool that wants a newer protocol.
        Raises Unavailable when the file is locked for longer than `busy_wait` seconds, or damaged.
        """
        found = file.locate(path)
        known = tuple(shipped) if shipped is not None else migrations.shipped()
        self = cls(found, url or f"sqlite:///{found}", busy_wait, store_clock or StoreClock())

        def prepare(con: apsw.Connection) -> None:
            if file.is_blank(con):
                if not create:
                    raise StoreRefused(f"{found} holds no fencepost database")
                migrations.create(con, known, namespace)
                # Into the file itself: were the WAL lost, it would look blank, and be made anew with its numbers at 1.
                file.write_into_file(con, busy_wait)
            migrations.check_schema(con, found, known)
            migrations.check_protocol(con, found)
            self.store_id, self.namespace = con.execute("SELECT store_id, namespace FROM meta").fetchall()[0]  # type: ignore[assignment]
            self._watch = file.FileWatch(found, con)

        file.check_path(found, create, file_system_of)
        try:
            await self._on(self._writer, prepare)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Finish what is queued and close. Afterwards every call is Unavailable. May be called twice."""
        if self._pid != os.getpid():
            return  # the threads live in the parent; closing its connections from here could spoil its file
        await self._reader.close()
        await self._writer.close()

    # plans --------------------------------------------------------------------------------------

    async def run(self, plan: Plan) -> Any:
        return await self._on(self._writer, lambda con: self._drive(con, plan))

    def _drive(self, con: apsw.Connection, plan: Plan) -> Any:
        """The whole plan inside one immediate transaction; returns only once COMMIT has."""
        try:
            step = next(plan)
        except StopIteration as stop:
            return stop.value
        transaction = Transaction(con, self._clock.now, self._standing)
        try:
            self._look_at_file(con)
            self._patience.waited = False
            transaction.begin()
            if self._patience.waited:
                self._check_file()
            while True:
                kind = type(step)
                answer: Any = None
                if kind is Load:
                    transaction.load(step.keys, step.into)  # type: ignore[union-attr]
                elif kind is Scan:
                    answer = transaction.scan(step)  # type: ignore[arg-type]
                else:
                    answer = transaction.apply(step.sets, step.log)  # type: ignore[union-attr]
                try:
                    step = plan.send(answer)
                except StopIteration as stop:
                    transaction.commit()
                    return stop.value
        except BaseException:
            transaction.rollback()
            plan.close()
            raise

    def _look_at_file(self, con: apsw.Connection) -> None:
        if self._watch is not None:
            self._watch.before(con)

    def _check_file(self) -> None:
        if self._watch is not None:
            self._watch.check()

    async def _on(self, lane: Lane, work: Callable[[apsw.Connection], T]) -> T:
        """Do `work` on the lane's thread; no apsw error leaves this method."""
        if self._pid != os.getpid():
            raise StoreRefused(f"{self.path} was opened before this process was forked; connect after the fork")
        if self._damage is not None:
            raise Unavailable(self._damage)
        try:
            return await lane.do(work)  # type: ignore[no-any-return]
        except apsw.Error as error:
            failure = file.translate(error, self.path)
            if file.is_damage(error):
                self._damage = str(failure)
            raise failure from error

    # read side ----------------------------------------------------------------------------------

    def _connect_reader(self, patience: file.Patience) -> apsw.Connection:
        self._check_file()
        return file.connect(self.path, patience, reader=True)

    async def _read(self, view: Callable[..., T], *arguments: Any) -> T:
        def work(con: apsw.Connection) -> T:
            self._look_at_file(con)
            con.execute("BEGIN")
            try:
                return view(con, *arguments)
            finally:
                if con.in_transaction:
                    con.execute("ROLLBACK")

        return await self._on(self._reader, work)

    async def version(self) -> int:
        return await self._on(self._reader, lambda con: con.pragma("data_version"))

    async def clock(self) -> int:
        return self._clock.now(await self._read(views.stored_clock))

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
        return await self._read(views.payloads, keys)

    async def unknown_backlog(self) -> list[tuple[str, str, int, int, int]]:
        return await self._read(views.unknown_backlog)

    async def events(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, names: Sequence[str] = ()
    ) -> list[Numbered]:
        return await self._read(views.events, after, limit, task_id, pool, names)

    async def log(
        self, after: int, limit: int, *, task_id: str | None = None, pool: str | None = None, kinds: Sequence[str] = ()
    ) -> list[Numbered]:
        return await self._read(views.log, after, limit, task_id, pool, kinds)

    async def counts(self) -> list[tuple[str, str, str, int, int]]:
        return await self._read(views.counts)

    async def last_numbers(self) -> tuple[int, int]:
        return await self._read(views.last_numbers)

    async def orphans(self) -> dict[str, int]:
        return await self._read(views.orphans)

    async def diagnose(self) -> dict[str, Any]:
        return await self._read(views.diagnose, self.path)

    # retention ----------------------------------------------------------------------------------

    async def prune(self, before_us: int, limit: int) -> dict[str, int]:
        removed: Counter[str] = Counter(dict.fromkeys(pruning.REMOVED, 0))

        async def step(work: Callable[[apsw.Connection], T]) -> T:
            return await self._on(self._writer, lambda con: self._small_transaction(con, work))

        after: int | None = 0
        while after is not None and removed["tasks"] < limit:
            after = await step(
                partial(pruning.prune_tasks, before=before_us, limit=limit, after=after, removed=removed)
            )
        while await step(lambda con: pruning.prune_log(con, before_us, removed)):
            pass
        now = await self.clock()
        while await step(lambda con: pruning.prune_requests(con, now, removed)):
            pass
        return dict(removed)

    def _small_transaction(self, con: apsw.Connection, work: Callable[[apsw.Connection], T]) -> T:
        self._look_at_file(con)
        con.execute("BEGIN IMMEDIATE")
        try:
            self._check_file()
            value = work(con)
            con.execute("COMMIT")
            return value
        except BaseException:
            if con.in_transaction:
                con.execute("ROLLBACK")
            raise


async def migration_status(
    path: str | os.PathLike[str], *, shipped: Sequence[Migration] | None = None
) -> list[MigrationState]:
    """Every migration step that this release knows or the file has, in order, and when it was applied."""
    return await _on_file(path, migrations.status, shipped)


async def migrate(
    path: str | os.PathLike[str], dry_run: bool = False, *, shipped: Sequence[Migration] | None = None
) -> list[Migration]:
    """Bring the file's schema to this release's; what was applied, or with `dry_run` what would be, with its SQL.

    Each step is a transaction of its own: a failed one changes nothing, and the next call goes on from there.
    Raises StoreRefused and Unavailable as opening does, but for an older schema.
    """
    return await _on_file(path, lambda con, known: migrations.migrate(con, known, dry_run), shipped)


async def _on_file(
    path: str | os.PathLike[str],
    work: Callable[[apsw.Connection, Sequence[Migration]], T],
    shipped: Sequence[Migration] | None,
) -> T:
    found = file.locate(path)
    known = tuple(shipped) if shipped is not None else migrations.shipped()
    file.check_path(found, create=False)
    lane = Lane("fencepost-sqlite-migrate", partial(file.connect, found), file.Patience(file.BUSY_WAIT))
    try:
        return await lane.do(lambda con: work(con, known))  # type: ignore[no-any-return]
    except apsw.Error as error:
        raise file.translate(error, found) from error
    finally:
        await lane.close()
