"""Many processes on one file, the short forms: writers that all want the lock, and workers with a killer among them."""

from __future__ import annotations

import os

import pytest

from tests.faults.crowd import a_killer_among_workers
from tests.faults.stage import Stage, on_every_store


@pytest.mark.slow
@on_every_store
async def test_workers_with_a_killer_among_them_commit_every_task_once_and_none_ends_by_being_fenced(
    stage: Stage,
) -> None:
    seed = int(os.environ.get("FENCEPOST_TEST_SEED", "20240"))
    done = await a_killer_among_workers(
        stage, workers=3, tasks=60, seconds=8.0, seed=seed, ttl=0.6, chunk=0.25, within=60.0
    )
    assert done["SIGSTOP"] and done["SIGKILL"]
