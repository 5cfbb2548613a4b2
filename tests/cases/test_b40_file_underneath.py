"""B40: the file underneath: cut, swapped, removed while somebody works on it. (Network file systems: tests/stores.)"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fencepost
from fencepost import Claim, Committed, NewTask, Result, TaskView, Unavailable
from tests.faults.stage import Hand, Stage, Told, until


async def at_work(stage: Stage) -> tuple[Hand, list[Claim]]:
    """A process with claims in its hands, on a store whose WAL holds what it did."""
    client = await fencepost.connect(stage.url)
    await client.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(40)])
    hand = await stage.hand()
    claims = await hand.call("claim_next", owner="A", limit=20)
    for claim in claims[:10]:
        await hand.call("commit", claim, "kept")
    await client.close()
    return hand, claims[10:]


async def every_door_is_unavailable(hand: Hand, claims: list[Claim]) -> None:
    for method, args, named in (
        ("commit", (claims[0], "after"), {}),
        ("claim_next", (), {"owner": "A"}),
        ("renew", (claims[1],), {}),
        ("submit", (NewTask(1, task_id="after"),), {}),
        ("cancel", ("t39",), {"expected_cancel_generation": 0}),
        ("task", ("t00",), {}),
        ("report", ("doctor",), {}),
    ):
        with pytest.raises(Told) as told:
            await hand.call(method, *args, **named)
        assert told.value.name == "Unavailable", (method, told.value)


CUTS = {"to nothing": 0, "in the middle": 3 * 4120 + 32 + 1000}


@pytest.mark.parametrize("cut", CUTS)
async def test_b40_a_wal_cut_under_a_running_process_stops_it_and_no_empty_store_is_made_in_its_place(
    stage: Stage, cut: str
) -> None:
    hand, claims = await at_work(stage)
    store_id = claims[0].store_id
    os.truncate(f"{stage.path}-wal", CUTS[cut])
    await every_door_is_unavailable(hand, claims)
    with pytest.raises(Unavailable, match="cut"):  # nor does whoever comes now go to work on it
        await fencepost.connect(stage.url)
    await hand.program.kill()
    # What the WAL held is gone. What comes up is that very store at its last checkpoint, not a new one.
    async with await fencepost.connect(stage.url) as client:
        assert client.store_id == store_id
    assert stage.integrity() == "ok"


async def test_b40_shared_memory_cut_under_a_running_process_stops_it_and_loses_nothing(stage: Stage) -> None:
    hand, claims = await at_work(stage)
    os.truncate(f"{stage.path}-shm", 0)
    await every_door_is_unavailable(hand, claims)
    await hand.program.kill()
    async with await fencepost.connect(stage.url) as client:
        result = await client.result("t00")
        assert not isinstance(result, fencepost.Refused)
        assert isinstance(await client.commit(claims[0], "after the restart"), Committed)
    await stage.audit()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
async def test_b40_a_file_removed_under_a_running_process_is_not_made_again(stage: Stage, suffix: str) -> None:
    hand, claims = await at_work(stage)
    aside = stage.folder / "aside"
    shutil.move(f"{stage.path}{suffix}", aside)
    await every_door_is_unavailable(hand, claims)
    assert not Path(f"{stage.path}{suffix}").exists()
    shutil.move(aside, f"{stage.path}{suffix}")
    # It was the same file all along: the process goes on where it was.
    assert isinstance(await hand.call("commit", claims[0], "back again"), Committed)
    await stage.audit()


async def test_b40_a_file_swapped_for_an_older_copy_is_noticed_and_its_generations_do_not_start_again(
    stage: Stage,
) -> None:
    hand, claims = await at_work(stage)
    with stage.sql() as con:
        con.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
    shutil.copy(stage.path, stage.folder / "copy.db")
    assert isinstance(await hand.call("commit", claims[0], "after the copy"), Committed)
    os.replace(stage.folder / "copy.db", stage.path)
    await every_door_is_unavailable(hand, claims[1:])


async def test_b40_a_worker_whose_file_vanishes_for_a_while_waits_and_goes_on(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(0.3, task_id="t0", kind="nap"))
    worker = await stage.worker("A", ttl=4.0)
    await worker.reaches("finished")
    await until(lambda: committed(client, "t0"))
    os.rename(stage.path, stage.folder / "aside.db")
    try:
        await until(lambda: "not answered" in worker.stderr() or "does not answer" in worker.stderr(), within=20.0)
        assert not stage.path.exists()
    finally:
        os.rename(stage.folder / "aside.db", stage.path)
    await client.submit(NewTask(0.0, task_id="t1", kind="nap"))
    await until(lambda: committed(client, "t1"))
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    await stage.audit()


async def committed(client: fencepost.Client, task_id: str) -> bool:
    return isinstance(await client.result(task_id), Result)


# Where SQLite keeps its locks in a database file: whoever gets all of it believes that nobody else is there.
GRAB = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)
    except OSError:
        sys.exit(7)
"""


async def test_b40_a_process_that_leaves_does_not_take_the_wal_from_one_that_has_the_file_open_twice(
    stage: Stage,
) -> None:
    """Opening a file once more must not drop the locks that the process holds on it already."""
    first, second = await stage.client(), await stage.client()
    await first.submit_many([NewTask(n, task_id=f"t{n}") for n in range(5)])
    async with await fencepost.connect(stage.url) as third:
        await third.tasks()
    grabbed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", GRAB, stage.path], timeout=60, check=False)
    assert grabbed.returncode == 7, "another process was let through as if it were alone"
    # Any program that reads the file: the last one to leave tidies the WAL up, and it must not think it is the last.
    read = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT count(*) FROM task'); c.close()"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", read, stage.path], timeout=60, check=True)
    assert Path(f"{stage.path}-wal").exists()
    for client in (first, second):
        view = await client.task("t4")
        assert isinstance(view, TaskView)
        assert len(await client.claim_next(owner="A")) == 1  # type: ignore[arg-type]
    await stage.audit()
