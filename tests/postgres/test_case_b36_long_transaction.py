"""B36: claims behind a long transaction, which keeps the index entries of all that was done since."""

from __future__ import annotations

import pytest

from fencepost import NewTask
from tests.faults.crowd import committed_once
from tests.faults.stage import stage
from tests.postgres.stage import PostgresStage, on_postgres

__all__ = ["stage"]


async def behind_a_snapshot(stage: PostgresStage, *, cycles: int, callers: int, least: float) -> None:
    """`least`: the slowest tenth beside the median tenth, as a rate."""
    client = await stage.client()
    for first in range(0, cycles, 5_000):
        await client.submit_many([NewTask(n, task_id=f"t{n:06}") for n in range(first, min(first + 5_000, cycles))])
    async with stage.snapshot():
        worker = await stage.program("cycler", stage.url, "w", str(callers), str(cycles))
        await worker.reaches("connected")
        worker.tell("go")
        end = await worker.reaches("done", within=250.0)
        assert end["wrong"] == [] and end["committed"] == cycles
        await stage.server.administer("VACUUM fencepost.task", database=stage.database)  # which may take none away
        [(dead, live)] = stage.rows(
            "SELECT n_dead_tup, n_live_tup FROM pg_stat_user_tables WHERE relname = 'task' AND schemaname = 'fencepost'"
        )
    times = sorted(at for (at,) in stage.rows("SELECT committed_at FROM result"))
    step = len(times) // 10
    tenths = [times[n * step + step - 1] - times[n * step] for n in range(10)]
    rates = [round(step / (each / 1e6)) for each in tenths]
    print(f"commits per second, by tenths: {rates}; {dead} dead row versions kept for {live} tasks")
    # The last tenth is what a long transaction would have slowed down.
    assert rates[-1] > least * sorted(rates)[5], rates
    assert dead >= cycles
    await committed_once(stage, client, cycles)


@on_postgres
@pytest.mark.slow
async def test_b36_four_thousand_cycles_behind_an_open_snapshot_and_claims_go_on(stage: PostgresStage) -> None:
    await behind_a_snapshot(stage, cycles=4_000, callers=32, least=0.3)


@on_postgres
@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_b36_sixty_thousand_cycles_behind_an_open_snapshot_and_the_last_are_as_fast(stage: PostgresStage) -> None:
    await behind_a_snapshot(stage, cycles=60_000, callers=64, least=0.5)
