"""Locks, full disks, damage and sudden death: Unavailable in plain words, nothing half written, no raw error."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from fencepost.errors import Unavailable
from fencepost.stores import sqlite_file
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, insert, loading, task
from tests.stores.conftest import Open


class Outsider:
    """A connection of somebody else that holds the write lock."""

    def __init__(self, path: Path) -> None:
        self.con = apsw.Connection(str(path))
        self.con.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self.con.execute("ROLLBACK")
        self.con.close()


async def test_a_lock_held_for_seconds_is_waited_out(store: SQLiteStore, path: Path) -> None:
    outsider = Outsider(path)
    calls = [asyncio.create_task(store.run(applying(insert(task(f"t{i}"))))) for i in range(5)]
    started = time.monotonic()
    timer = threading.Timer(1.5, outsider.release)
    timer.start()
    assert await asyncio.wait_for(asyncio.gather(*calls), 20) == [[True]] * 5
    assert time.monotonic() - started >= 1.4
    timer.join()


async def test_reading_does_not_wait_for_a_writers_lock(store: SQLiteStore, path: Path) -> None:
    await store.run(applying(insert(task("a"))))
    outsider = Outsider(path)
    try:
        assert (await asyncio.wait_for(store.history("a"), 5)) is not None
        assert (await asyncio.wait_for(store.pools(), 5)) and await asyncio.wait_for(store.version(), 5)
    finally:
        outsider.release()


async def test_past_the_wait_it_is_unavailable_and_those_behind_do_not_wait_in_turn(opened: Open, path: Path) -> None:
    store = await opened(busy_wait=1.0)
    outsider = Outsider(path)
    try:
        started = time.monotonic()
        calls = [asyncio.create_task(store.run(applying(insert(task(f"t{i}"))))) for i in range(4)]
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        took = time.monotonic() - started
    finally:
        outsider.release()
    assert all(type(a) is Unavailable and "locked by another process" in str(a) for a in answers), answers
    assert 0.9 <= took < 3.5, "one full wait, then the least wait for each that queued behind it"
    assert await store.run(applying(insert(task("t0")))) == [True]


async def test_a_full_disk_is_unavailable_and_over_when_space_is_back(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("a"))))
    await store._writer.do(lambda con: con.pragma("max_page_count", con.pragma("page_count") + 2))
    big = insert(*(task(f"t{i}") for i in range(500)), body="x" * 500)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"the disk .*is full"):
            await store.run(applying(big))
    assert await store.run(loading(tasks=["a"])) is not None
    assert [t.task_id for t in (await store.run(loading(tasks=["a", "t0", "t499"]))).tasks.values()] == ["a"]
    await store._writer.do(lambda con: con.pragma("max_page_count", 1 << 30))
    assert await store.run(applying(big)) == [True]
    assert (await store.diagnose())["quick_check"] == "ok"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    # Not below pytest's own folder: a mount that a killed run leaves there would break the clean-up of later runs.
    where = Path(tempfile.mkdtemp(prefix="fencepost-small-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode != 0:
        where.rmdir()
        pytest.skip(
            "no small file system can be mounted here (it takes root, as CI has); max_page_count stands in above"
        )
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True, timeout=20)
        where.rmdir()


async def test_a_really_full_disk_loses_nothing_that_was_answered(small_disk: Path) -> None:
    store = await SQLiteStore.open(small_disk / "tasks.db")
    ballast = small_disk / "ballast"
    answered: list[str] = []
    try:
        ballast.write_bytes(b"x" * 1_000_000)
        with pytest.raises(Unavailable, match="full"):
            for i in range(200):
                await store.run(applying(insert(task(f"t{i}"), body="y" * 10_000)))
                answered.append(f"t{i}")
        assert answered
        ballast.unlink()
        assert await store.run(applying(insert(task("after")))) == [True]
        found = await store.run(loading(tasks=[*answered, "after", f"t{len(answered)}"]))
        assert set(found.tasks) == {*answered, "after"}
        assert (await store.diagnose())["quick_check"] == "ok"
    finally:
        await store.close()


async def test_a_damaged_file_stays_unavailable_and_is_not_made_again(opened: Open, path: Path) -> None:
    store = await opened()
    await store.run(applying(insert(*(task(f"t{i}") for i in range(300)))))
    await store._writer.do(lambda con: con.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE))
    await store.close()
    inode = path.stat().st_ino
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(Unavailable, match="damaged"):
        store = await opened()
        await store.run(loading(tasks=[f"t{i}" for i in range(300)]))
    assert path.stat().st_ino == inode and path.stat().st_size == size


async def test_damage_met_at_work_is_remembered_by_every_call(store: SQLiteStore) -> None:
    def spoil(con: apsw.Connection) -> None:
        raise apsw.CorruptError("database disk image is malformed")

    with pytest.raises(Unavailable, match="damaged"):
        await store._on(store._writer, spoil)
    for call in (store.run(loading(tasks=["a"])), store.pools(), store.version(), store.prune(0, 1)):
        with pytest.raises(Unavailable, match="damaged"):
            await call


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (apsw.IOError("disk I/O error"), "failed: disk I/O error"),
        (apsw.ReadOnlyError("readonly"), "cannot be written"),
        (apsw.NotADBError("x"), "no database any more"),
        (apsw.CantOpenError("x"), "cannot be opened"),
        (apsw.LockedError("x"), "locked"),
        (apsw.SQLError("no such table: task"), "no such table"),
        (apsw.NoMemError("x"), "NoMemError"),
    ],
)
async def test_no_raw_error_reaches_a_caller(store: SQLiteStore, error: apsw.Error, text: str) -> None:
    def fail(con: apsw.Connection) -> None:
        raise error

    with pytest.raises(Unavailable, match=text):
        await store._on(store._writer, fail)


async def test_a_commit_that_fails_is_unavailable_and_rolled_back(store: SQLiteStore) -> None:
    def refuse(con: apsw.Connection) -> None:
        con.set_commit_hook(lambda: True)

    await store._writer.do(refuse)
    with pytest.raises(Unavailable, match="commit"):
        await store.run(applying(insert(task("a"))))
    await store._writer.do(lambda con: con.set_commit_hook(None))
    assert (await store.run(loading(tasks=["a"]))).tasks == {}
    assert await store.run(applying(insert(task("a")))) == [True]


async def test_a_transaction_that_could_not_be_rolled_back_is_before_the_next(store: SQLiteStore) -> None:
    await store._writer.do(lambda con: con.execute("BEGIN IMMEDIATE; DELETE FROM pool").fetchall())
    assert await store.run(applying(insert(task("a")))) == [True]
    assert len(await store.pools()) == 1


async def test_a_new_file_that_somebody_locks_is_waited_for(opened: Open, path: Path) -> None:
    """SQLite asks no busy handler about the lock that a switch to WAL takes."""
    apsw.Connection(str(path)).execute("PRAGMA user_version = 0")
    outsider = Outsider(path)
    timer = threading.Timer(0.5, outsider.release)
    timer.start()
    assert (await asyncio.wait_for(opened(), 20)).store_id
    timer.join()


async def test_a_caller_that_gave_up_does_not_stop_its_plan_or_the_next(store: SQLiteStore, path: Path) -> None:
    outsider = Outsider(path)
    waiting = asyncio.create_task(store.run(applying(insert(task("a")))))
    await asyncio.sleep(0)
    waiting.cancel()
    outsider.release()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await store.run(applying(insert(task("b")))) == [True]
    assert set((await store.run(loading(tasks=["a", "b"]))).tasks) == {"a", "b"}


WRITER = """
import asyncio, sys
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, insert, task

async def main():
    store = await SQLiteStore.open(sys.argv[1])
    for i in range(100_000):
        pair = insert(task(f"{sys.argv[2]}-{i}-a"), task(f"{sys.argv[2]}-{i}-b"))
        assert await store.run(applying(pair)) == [True]
        print(i, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("round_", range(4))
async def test_a_process_killed_around_commit_keeps_what_it_was_told_and_nothing_half(
    opened: Open, path: Path, round_: int
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(path), f"r{round_}", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    told = -1
    for _ in range(20 + 13 * round_):
        told = int(await asyncio.wait_for(process.stdout.readline(), 30))
    await asyncio.sleep(0.0007 * round_)  # lands at another point of a transaction each round
    process.kill()
    rest = await asyncio.wait_for(process.stdout.read(), 30)
    await process.wait()
    told = max([told, *(int(line) for line in rest.split(b"\n")[:-1] if line)])
    store = await opened()
    names = [f"r{round_}-{i}-{half}" for i in range(told + 3) for half in "ab"]
    found = (await store.run(loading(tasks=names))).tasks
    for i in range(told + 3):
        both = [f"r{round_}-{i}-{half}" in found for half in "ab"]
        assert both in ([True, True], [False, False])
        assert both[0] or i > told
    assert (await store.diagnose())["quick_check"] == "ok"
    assert await store.orphans() == dict.fromkeys(await store.orphans(), 0)
    assert await store.run(applying(insert(task("after")))) == [True]


async def test_several_processes_share_a_file_and_none_is_told_that_it_is_locked(opened: Open, path: Path) -> None:
    code = WRITER.replace("100_000", "60")
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(path), f"p{n}", stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for n in range(6)
    ]
    answers = await asyncio.wait_for(asyncio.gather(*(p.communicate() for p in running)), 90)
    assert [p.returncode for p in running] == [0] * 6, answers
    store = await opened()
    assert sum(row[-1] for row in await store.counts()) == 6 * 60 * 2
    numbers = [n.number for n in await store.events(0, 10_000)]
    assert len(numbers) == 6 * 60 * 2 and numbers == sorted(set(numbers))


async def test_readers_pin_no_snapshot_so_that_the_wal_stays_bounded(store: SQLiteStore, path: Path) -> None:
    await store._writer.do(lambda con: con.wal_autocheckpoint(100))
    for i in range(60):
        await store.run(applying(insert(*(task(f"t{i}-{j}") for j in range(20)))))
        await store.counts()
        await store.version()
    assert os.stat(f"{path}-wal").st_size < 400 * 4096


def test_the_busy_handler_naps_at_random_and_gives_up_in_time() -> None:
    patience = sqlite_file.Patience(0.1)
    started = time.monotonic()
    calls = 0
    while patience(calls):
        calls += 1
    assert 0.08 <= time.monotonic() - started < 1.0 and calls > 5


class FailingFile(apsw.VFSFile):
    """Passes everything on, but for what `FailingDisk.fails` names, on the write-ahead log."""

    def __init__(self, disk: FailingDisk, inherit: str, name: apsw.URIFilename | str | None, flags: list[int]) -> None:
        super().__init__(inherit, name, flags)
        self.disk = disk
        self.is_wal = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self.is_wal and self.disk.fails == "sync":
            raise apsw.IOError("disk I/O error")
        super().xSync(flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self.is_wal and self.disk.fails == "write":
            raise apsw.FullError("database or disk is full")
        super().xWrite(data, offset)


class FailingDisk(apsw.VFS):
    def __init__(self) -> None:
        self.fails = ""
        self.inherit = apsw.vfs_names()[0]
        super().__init__("failing", self.inherit, makedefault=True)

    def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> FailingFile:  # noqa: N802
        return FailingFile(self, self.inherit, name, flags)


@pytest.mark.parametrize(("fails", "text"), [("sync", "reading or writing"), ("write", "full")])
async def test_a_disk_that_fails_at_commit_is_unavailable_and_then_works_again(
    path: Path, fails: str, text: str
) -> None:
    disk = FailingDisk()
    try:
        store = await SQLiteStore.open(path)
        try:
            assert await store.run(applying(insert(task("a")))) == [True]
            disk.fails = fails
            for _ in range(2):
                with pytest.raises(Unavailable, match=text):
                    await store.run(applying(insert(task("b"))))
            disk.fails = ""
            assert set((await store.run(loading(tasks=["a", "b"]))).tasks) == {"a"}
            assert await store.run(applying(insert(task("b")))) == [True]
            assert (await store.diagnose())["quick_check"] == "ok"
        finally:
            await store.close()
    finally:
        apsw.set_default_vfs(disk.inherit)
        disk.unregister()
