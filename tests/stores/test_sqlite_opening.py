"""What opening a SQLite store refuses, each with its own words, and leaves as it was."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import apsw
import pytest

from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel.records import PROTOCOL, Policy
from fencepost.stores import sqlite_file
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, insert, loading, task
from tests.stores.conftest import Open


async def test_a_new_file_becomes_a_store_with_the_pool_default(opened: Open, path: Path) -> None:
    store = await opened()
    pools = await store.pools()
    assert [pool.name for pool in pools] == ["default"]
    assert pools[0].policy == Policy() and pools[0].epoch == 1 and pools[0].intake_open is True
    assert store.store_id and store.namespace
    again = await opened(url="sqlite:///elsewhere.db")
    assert (again.store_id, again.namespace) == (store.store_id, store.namespace)
    assert again.url == "sqlite:///elsewhere.db"


async def test_a_new_store_stands_in_the_file_itself(opened: Open, path: Path) -> None:
    """Without its WAL it must not look blank: it would be made anew, and its numbers begin again."""
    store = await opened()
    copy = path.with_name("copy.db")
    # By another process: closing a descriptor of this one's own would drop SQLite's locks.
    subprocess.run(["cp", str(path), str(copy)], check=True, timeout=20)
    assert (await opened(copy)).store_id == store.store_id


async def test_an_empty_file_becomes_a_store(opened: Open, path: Path) -> None:
    path.touch()
    assert (await opened()).store_id


async def test_a_file_that_died_before_its_first_table_becomes_a_store(opened: Open, path: Path) -> None:
    con = apsw.Connection(str(path))
    con.execute("PRAGMA journal_mode = WAL")
    con.execute("PRAGMA user_version = 0")
    con.close()
    assert (await opened()).store_id


async def test_the_namespace_can_be_given_at_creation(opened: Open) -> None:
    assert (await opened(namespace="mine")).namespace == "mine"


async def test_without_create_a_missing_or_empty_file_is_refused(opened: Open, path: Path) -> None:
    with pytest.raises(StoreRefused, match="there is no database at"):
        await opened(create=False)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreRefused, match="is empty"):
        await opened(create=False)


async def test_a_missing_folder_is_refused(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=r"folder .*nowhere does not exist"):
        await opened(tmp_path / "nowhere" / "tasks.db")


async def test_a_folder_is_refused(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="is a folder"):
        await opened(tmp_path)


async def test_a_file_that_is_not_sqlite_is_refused_and_left_alone(opened: Open, path: Path) -> None:
    path.write_text("just some text, longer than a header of sixteen bytes")
    with pytest.raises(StoreRefused, match="no fencepost database"):
        await opened()
    assert path.read_text().startswith("just some text")


async def test_another_programs_database_is_refused_and_left_alone(opened: Open, path: Path) -> None:
    con = apsw.Connection(str(path))
    con.execute("CREATE TABLE recipe (name TEXT)")
    con.close()
    before = path.read_bytes()
    with pytest.raises(StoreRefused, match="another program's"):
        await opened()
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == [path.name]


@pytest.mark.parametrize("name", ["nfs4", "cifs", "fuse.sshfs", "virtiofs", "9p", "ceph", "fuse.glusterfs", "lustre"])
async def test_a_network_or_shared_file_system_is_refused_by_name(opened: Open, path: Path, name: str) -> None:
    with pytest.raises(StoreRefused, match=f"lies on {name}, a network or shared file system"):
        await opened(file_system_of=lambda _: name)
    assert not path.exists()


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs", "fuseblk", None])
async def test_a_local_file_system_is_taken(opened: Open, name: str | None) -> None:
    assert (await opened(file_system_of=lambda _: name)).store_id


def test_the_file_system_of_a_path_is_that_of_the_mount_below_it() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads Linux's mount table")
    assert sqlite_file.file_system_of("/proc/self/status") == "proc"
    assert sqlite_file.file_system_of("/") != "proc"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_written_is_refused(what: str) -> None:
    """In a process that is not root, for whom everything may be written."""
    code = """
import asyncio, os, sys
from fencepost.errors import StoreRefused
from fencepost.stores.sqlite import SQLiteStore
from fencepost.stores.sqlite_migrations import shipped

shipped()  # read while whoever runs the tests may still read it

async def make():
    await (await SQLiteStore.open(sys.argv[1])).close()

asyncio.run(make())
if os.geteuid() == 0:
    os.chmod(sys.argv[1], 0o444 if sys.argv[2] == "file" else 0o666)
    os.chmod(os.path.dirname(sys.argv[1]), 0o777 if sys.argv[2] == "file" else 0o555)
    os.setuid(65534)
else:
    os.chmod(sys.argv[1], 0o444 if sys.argv[2] == "file" else 0o644)
    os.chmod(os.path.dirname(sys.argv[1]), 0o755 if sys.argv[2] == "file" else 0o555)
try:
    asyncio.run(SQLiteStore.open(sys.argv[1]))
except StoreRefused as error:
    print(error)
"""
    folder = tempfile.mkdtemp()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, f"{folder}/tasks.db", what],
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        named = f"{folder}/tasks.db cannot" if what == "file" else f"the folder {folder} cannot"
        assert named + " be written by this user" in done.stdout, done.stderr
    finally:
        os.chmod(folder, 0o700)
        shutil.rmtree(folder)


async def test_a_newer_schema_is_refused(opened: Open, path: Path) -> None:
    await (await opened()).close()
    con = apsw.Connection(str(path))
    con.execute("INSERT INTO migration VALUES (9, 'later', 'pre', 1)")
    con.close()
    with pytest.raises(StoreRefused, match=r"schema 9, newer than this release's \d+; upgrade"):
        await opened()


async def test_a_pool_that_wants_a_newer_protocol_is_refused(opened: Open, path: Path) -> None:
    await (await opened()).close()
    con = apsw.Connection(str(path))
    con.execute("UPDATE pool SET min_protocol = ?", (PROTOCOL + 1,))
    con.close()
    with pytest.raises(StoreRefused, match=f"pool 'default' wants protocol {PROTOCOL + 1}"):
        await opened()


async def test_a_handle_carried_across_a_fork_says_so(store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (store.run(applying()), store.pools(), store.version(), store.prune(0, 1)):
        with pytest.raises(StoreRefused, match="connect after the fork"):
            await call
    await store.close()  # leaves the parent's connections alone
    monkeypatch.undo()
    assert await store.pools()


def test_a_really_forked_child_is_told_and_the_parent_goes_on(path: Path) -> None:
    """In a process of its own: pytest's threads should not be forked."""
    code = """
import asyncio, os, sys, warnings
from fencepost.errors import StoreRefused
from fencepost.stores.sqlite import SQLiteStore

async def main():
    store = await SQLiteStore.open(sys.argv[1])
    child = os.fork()
    if child == 0:
        try:
            store.pools().send(None)  # the child has no event loop of its own yet
        except StoreRefused as error:
            os._exit(7 if "after the fork" in str(error) else 8)
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert await store.pools()
    await store.close()
    print(os.waitstatus_to_exitcode(status))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "7", done.stderr


async def test_a_closed_store_is_unavailable_and_closes_twice(opened: Open) -> None:
    store = await opened()
    await store.close()
    await store.close()
    for call in (store.run(applying()), store.pools(), store.version()):
        with pytest.raises(Unavailable, match="closed"):
            await call


@pytest.mark.parametrize("round_", range(3))
async def test_many_processes_may_create_one_file_at_once(path: Path, round_: int) -> None:
    code = (
        "import asyncio, sys\n"
        "from fencepost.stores.sqlite import SQLiteStore\n"
        "async def main():\n"
        "    sys.stdin.readline()\n"
        "    store = await SQLiteStore.open(sys.argv[1])\n"
        "    print(store.store_id); await store.close()\n"
        "asyncio.run(main())\n"
    )
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(6)
    ]
    answers = await asyncio.wait_for(asyncio.gather(*(p.communicate(b"go\n") for p in running)), 60)
    ids = {out for out, _ in answers}
    assert len(ids) == 1 and ids != {b""}, answers


async def test_a_store_reached_through_a_link_is_the_same_store(opened: Open, path: Path) -> None:
    store = await opened()
    link = path.with_name("link.db")
    link.symlink_to(path)
    assert (await opened(link)).store_id == store.store_id


@pytest.mark.parametrize("reading", [False, True])
async def test_a_removed_file_is_noticed_and_never_made_again(store: SQLiteStore, path: Path, reading: bool) -> None:
    assert await store.run(applying(insert(task("a")))) == [True]
    if reading:
        assert await store.pools()  # the connection that reads is open, too
    path.unlink()
    for call in (store.run(applying(insert(task("b")))), store.run(loading(tasks=["a"])), store.pools()):
        with pytest.raises(Unavailable, match="was removed while it was open"):
            await call
    assert not path.exists()


async def test_a_swapped_file_is_noticed(store: SQLiteStore, opened: Open, path: Path, tmp_path: Path) -> None:
    assert await store.pools()
    other = tmp_path / "other.db"
    await (await opened(other)).close()
    os.replace(other, path)
    for call in (store.run(applying(insert(task("a")))), store.pools()):
        with pytest.raises(Unavailable, match="was replaced while it was open"):
            await call


async def test_a_removed_wal_is_noticed(store: SQLiteStore, path: Path) -> None:
    assert await store.run(applying(insert(task("a")))) == [True]
    kept = path.with_name("kept")
    shutil.move(f"{path}-wal", kept)
    with pytest.raises(Unavailable, match="-wal was removed"):
        await store.run(applying(insert(task("b"))))
    shutil.move(kept, f"{path}-wal")
    assert await store.run(applying(insert(task("b")))) == [True]
