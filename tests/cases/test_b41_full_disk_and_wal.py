"""B41: an idle reader pins the WAL; the disk fills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import fencepost
from fencepost import Claim, Committed, NewTask, Renewed, Result, TaskView
from tests.faults.stage import Stage, Told, until

DISK = 16 << 20


@pytest_asyncio.fixture
async def small_disk() -> AsyncIterator[Stage]:
    """A stage on a file system of its own, of 16 MiB."""
    # Not below pytest's folder: that is tidied up by whichever run comes next.
    folder = Path(tempfile.mkdtemp(prefix="fencepost-small-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        done = subprocess.CompletedProcess(mount, 127, "", "there is no mount command")
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"a file system of 16 MiB cannot be mounted here ({done.stderr.strip()}); it takes root, as CI has")
    logs = Path(tempfile.mkdtemp(prefix="fencepost-logs-"))
    stage = Stage(logs, folder / "small.db")
    try:
        yield stage
    finally:
        await stage.close()
        subprocess.run(["umount", str(folder)], check=True, timeout=20)
        folder.rmdir()
        for log in logs.iterdir():
            log.unlink()
        logs.rmdir()


def fill(stage: Stage) -> Path:
    """Nothing is left on the disk, and nothing in the WAL that could be written over."""
    with stage.sql() as con:
        con.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    filler = stage.path.with_name("filler")
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        size = 1 << 20
        while size >= 512:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2
    return filler


async def unavailable(call: Any) -> None:
    with pytest.raises(Told) as told:
        await call
    assert told.value.name == "Unavailable" and "full" in str(told.value), told.value


async def test_b41_a_full_disk_is_unavailable_at_claim_renew_and_commit_and_all_goes_on_when_it_is_free(
    small_disk: Stage,
) -> None:
    stage = small_disk
    client = await stage.client()
    await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(5)])
    await client.submit(NewTask(None, task_id="child", depends_on=["t0"], queue="later"))
    hand = await stage.hand()
    first, second = await hand.call("claim_next", owner="A", limit=2, ttl=600.0)
    before = {name: await client.task(name) for name in ("t0", "t1", "t2", "child")}
    calls: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "claim": ("claim_next", (), {"owner": "A", "request_id": "claim it"}),
        "renew": ("renew", (second, 900.0), {"request_id": "renew it"}),
        "commit": ("commit", (first, "x" * 5_000), {"request_id": "commit it"}),
    }
    filler = fill(stage)
    try:
        for method, args, named in calls.values():
            await unavailable(hand.call(method, *args, **named))
        # Reading goes on, and shows that nothing was half-written.
        assert {name: await client.task(name) for name in before} == before
    finally:
        filler.unlink()
    answers = {name: await hand.call(method, *args, **named) for name, (method, args, named) in calls.items()}
    assert isinstance(answers["claim"][0], Claim) and answers["claim"][0].generation == 1
    assert isinstance(answers["renew"], Renewed) and isinstance(answers["commit"], Committed)
    child = await client.task("child")
    assert isinstance(child, TaskView) and child.state == "READY"
    assert stage.integrity() == "ok"
    await stage.audit()


async def test_b41_a_result_that_does_not_fit_any_more_leaves_its_task_to_be_committed_later(
    small_disk: Stage,
) -> None:
    stage = small_disk
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    [claim] = await client.claim_next(owner="A", ttl=600.0)  # type: ignore[misc]
    large = os.urandom(1 << 20)
    filler = fill(stage)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - (256 << 10))  # room for a little, not for this
    with pytest.raises(fencepost.Unavailable, match="full"):
        await client.commit(claim, large)
    assert isinstance(await client.renew(claim, 900.0), Renewed)
    filler.unlink()
    assert isinstance(await client.commit(claim, large), Committed)
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == large
    assert stage.integrity() == "ok"
    await stage.audit()


async def test_b41_workers_outlive_a_disk_that_is_full_for_longer_than_their_leases(small_disk: Stage) -> None:
    stage = small_disk
    client = await stage.client()
    await client.submit_many([NewTask(0.2, task_id=f"t{n:02}", kind="nap", max_attempts=50) for n in range(30)])
    workers = [await stage.worker(f"w{n}", ttl=0.8, concurrency=2) for n in range(2)]
    for worker in workers:
        await worker.reaches("finished")
    filler = fill(stage)
    try:
        for worker in workers:
            await until(lambda worker=worker: "full" in worker.stderr(), within=20.0)  # type: ignore[misc]
        await asyncio.sleep(1.2)
    finally:
        filler.unlink()
    for n in range(30):
        assert isinstance(await client.result(f"t{n:02}", wait=30.0), Result)
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
    assert stage.integrity() == "ok"
    await stage.audit()


async def wal_under_load(stage: Stage, cycles: int) -> tuple[int, int]:
    """The largest WAL, and how much went through it, while clients read and watch for their whole lives."""
    client, idle = await stage.client(), await stage.client()
    seen = 0
    wal = Path(f"{stage.path}-wal")

    async def watch() -> None:
        nonlocal seen
        async for _ in idle.watch():
            seen += 1

    async def look() -> None:
        cursor = None
        while True:
            cursor = (await idle.tasks(cursor=cursor, limit=50)).next_cursor
            await idle.events(limit=50)
            await asyncio.sleep(0.02)

    dashboard = [asyncio.create_task(each) for each in (watch(), look())]
    largest = written = 0
    text = "x" * 4_000
    try:
        for n in range(0, cycles, 50):
            await client.submit_many([NewTask({"n": m}, task_id=f"t{m}") for m in range(n, n + 50)])
            claims = await client.claim_next(owner="A", limit=50)
            assert isinstance(claims, list)
            await asyncio.gather(*(client.commit(claim, text) for claim in claims))
            size = wal.stat().st_size
            largest = max(largest, size)
            written += 50 * len(text)
        assert not [task for task in dashboard if task.done()]
    finally:
        for task in dashboard:
            task.cancel()
        await asyncio.gather(*dashboard, return_exceptions=True)
    assert seen > cycles
    await stage.audit()
    return largest, written


async def test_b41_readers_that_stay_for_ever_do_not_pin_the_wal(stage: Stage) -> None:
    # A checkpoint is due every 4000 pages (16 MiB); what comes in while it runs is on top.
    largest, written = await wal_under_load(stage, 6_000)
    assert written > 20 << 20
    assert largest < 32 << 20, f"the WAL grew to {largest >> 20} MiB"


async def test_b41_a_snapshot_of_somebody_elses_is_caught_up_with_once_it_ends(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(60)])
    claims = await client.claim_next(owner="A", limit=60)
    assert isinstance(claims, list)
    wal = Path(f"{stage.path}-wal")
    blob = os.urandom(1 << 20)
    with stage.sql() as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM task").fetchall()
        for claim in claims[:50]:
            await client.commit(claim, blob)
        pinned = wal.stat().st_size
        assert pinned > 40 << 20  # while it lasts, nothing can be done about it
        reader.execute("ROLLBACK")
    for claim in claims[50:]:
        await client.commit(claim, blob)
    assert wal.stat().st_size <= max(pinned, 64 << 20), "the WAL went on growing after the snapshot had ended"
    await stage.audit()
