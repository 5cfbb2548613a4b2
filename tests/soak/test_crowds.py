"""Many processes on one file, the long forms."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults.crowd import a_killer_among_workers, everybody_writes
from tests.faults.stage import Stage, on_every_store


@pytest.mark.soak
@pytest.mark.timeout(300)
@on_every_store
async def test_eight_workers_2000_tasks_and_a_killer_for_a_minute(stage: Stage) -> None:
    seed = int(os.environ.get("FENCEPOST_TEST_SEED") or random.randrange(1 << 32))
    done = await a_killer_among_workers(
        stage, workers=8, tasks=2_000, seconds=60.0, seed=seed, ttl=2.0, chunk=0.25, within=150.0
    )
    print(done)
    assert min(done["SIGSTOP"], done["SIGCONT"], done["SIGKILL"]) > 10


@pytest.mark.soak
@pytest.mark.timeout(420)
@on_every_store
async def test_b26_32_processes_of_2000_tasks_a_reader_and_an_outside_lock_of_4_seconds(stage: Stage) -> None:
    done = await everybody_writes(stage, processes=32, share=2_000, callers=8, lock=4.0, within=300.0)
    print(done)
