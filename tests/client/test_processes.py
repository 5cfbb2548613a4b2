"""Workers as processes on one SQLite file: paused, killed, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fencepost
from fencepost.wire import Claim, Committed, NewTask, Refused
from tests.client.faults import BOUND, ends_of, until

WORKER = """
import asyncio, pathlib, sys, logging
import fencepost

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
app = fencepost.App()
folder = pathlib.Path(sys.argv[2])

@app.task("slow", ttl=1.0)
async def slow(attempt, input):
    (folder / f"started-{attempt.claim.task_id}").touch()
    while not (folder / f"go-{attempt.claim.task_id}").exists():
        await asyncio.sleep(0.01)
    return "A's"

async def main():
    async with await fencepost.connect(sys.argv[1]) as client:
        return await fencepost.Worker(client, app, owner="A", concurrency=2, drain_timeout=0.0).run()

sys.exit(asyncio.run(main()))
"""


@asynccontextmanager
async def working(url: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    log = (folder / "log").open("wb")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, url, str(folder), stderr=log)
    try:
        yield process
    finally:
        log.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def appears(path: Path) -> None:
    async def there() -> bool:
        return path.exists()

    await until(there, f"{path.name} did not appear")


async def test_b13_a_worker_paused_beyond_its_lease_is_refused_and_goes_on(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with await fencepost.connect(url) as client:
        await client.submit(NewTask({}, task_id="t", kind="slow"))
        async with working(url, tmp_path) as process:
            await appears(tmp_path / "started-t")
            os.kill(process.pid, signal.SIGSTOP)
            found: list[Claim] = []
            async with asyncio.timeout(BOUND):
                while not found:
                    answer = await client.claim_next(owner="B", kinds=["slow"], wait=1.0)
                    assert not isinstance(answer, Refused)
                    found = answer
            (tmp_path / "go-t").touch()  # the result is ready the moment that A wakes up
            assert isinstance(await client.commit(found[0], "B's"), Committed)
            os.kill(process.pid, signal.SIGCONT)
            await client.submit(NewTask({}, task_id="next", kind="slow"))
            (tmp_path / "go-next").touch()
            assert (await client.result("next", wait=BOUND)).value == "A's"
            process.terminate()
            assert await asyncio.wait_for(process.wait(), BOUND) == 0
        assert (await client.result("t")).value == "B's"
        assert await ends_of(client, "t") == ["EXPIRED", "COMMITTED"]
        assert "task t is dropped" in (tmp_path / "log").read_text()
        assert not (await client.report("audit")).violations


async def test_b12_a_worker_that_is_killed_with_its_task_uses_up_an_attempt_each_time(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with await fencepost.connect(url) as client:
        await client.submit(NewTask({}, task_id="t", kind="slow", max_attempts=2))
        for _ in range(2):
            (tmp_path / "started-t").unlink(missing_ok=True)
            async with working(url, tmp_path) as process:
                await appears(tmp_path / "started-t")
                process.kill()
                await process.wait()
        client.start_maintenance(0.1)

        async def parked() -> bool:
            return (await client.task("t")).state == "PARKED"

        await until(parked, "the task was not parked")
        assert await ends_of(client, "t") == ["EXPIRED", "EXPIRED"]
        assert (await client.task("t")).charged_attempts == 2
