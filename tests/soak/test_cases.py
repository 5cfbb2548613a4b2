"""The long forms of single cases."""

from __future__ import annotations

import os
import random

import pytest

from tests.cases.test_b09_commit_may_have_happened import kill_in_a_storm
from tests.cases.test_b21_starved_renewer import kept_through
from tests.cases.test_b41_full_disk_and_wal import wal_under_load
from tests.cases.test_b45_job_outlives_its_hold import fence_each_other
from tests.faults.stage import Stage


def seed() -> int:
    return int(os.environ.get("FENCEPOST_TEST_SEED") or random.randrange(1 << 32))


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_b09_forty_kills_in_storms_of_commits(stage: Stage) -> None:
    await kill_in_a_storm(stage, kills=40, seed=seed())


@pytest.mark.soak
async def test_b21_a_handler_that_blocks_the_event_loop_for_three_leases(stage: Stage) -> None:
    await kept_through(stage, "block", tasks=1, seconds=10.0, ttl=3.0)


@pytest.mark.soak
async def test_b21_eight_threads_that_burn_the_interpreter_for_three_leases(stage: Stage) -> None:
    await kept_through(stage, "burn", tasks=8, seconds=10.0, ttl=3.0)


@pytest.mark.soak
@pytest.mark.timeout(240)
async def test_b41_readers_that_stay_while_a_quarter_of_a_gigabyte_goes_through_the_wal(stage: Stage) -> None:
    largest, written = await wal_under_load(stage, 60_000)
    print(f"WAL at most {largest >> 20} MiB, {written >> 20} MiB of results")
    assert largest < 32 << 20


@pytest.mark.soak
async def test_b45_two_workers_that_fence_each_other_for_a_minute(stage: Stage) -> None:
    await fence_each_other(stage, 60.0)
