"""Workers and the server are killed and paused at random: every task is committed once, and no worker gives up."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults.crowd import a_killer_among_workers
from tests.faults.stage import stage
from tests.postgres.stage import PostgresStage, on_postgres

__all__ = ["stage"]


def seed() -> int:
    return int(os.environ.get("FENCEPOST_TEST_SEED") or random.randrange(1 << 32))


@on_postgres
@pytest.mark.slow
async def test_ten_seconds_of_killing_and_pausing_workers_and_the_server(stage: PostgresStage) -> None:
    done = await a_killer_among_workers(
        stage,
        workers=3,
        tasks=60,
        seconds=10.0,
        seed=seed(),
        ttl=0.6,
        chunk=0.25,
        within=60.0,
        server=2.0,
        blows=4,
        outages=2,
    )
    assert done.get("server killed", 0) + done.get("server paused", 0) >= 2, done
    assert done.get("SIGSTOP", 0) + done.get("SIGKILL", 0) >= 4, done


@on_postgres
@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_minute_of_killing_and_pausing_workers_and_the_server(stage: PostgresStage) -> None:
    done = await a_killer_among_workers(
        stage, workers=6, tasks=1_000, seconds=60.0, seed=seed(), ttl=2.0, chunk=0.25, within=150.0, server=4.0
    )
    print(done)
    assert min(done.get(event, 0) for event in ("SIGSTOP", "SIGKILL", "server killed", "server paused")) >= 3, done
