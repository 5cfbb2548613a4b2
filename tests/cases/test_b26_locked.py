"""B26: "database is locked" at once, whatever the busy timeout."""

from __future__ import annotations

import pytest

from tests.faults.crowd import everybody_writes
from tests.faults.stage import Stage, on_every_store


@pytest.mark.slow
@on_every_store
async def test_b26_eight_processes_a_reader_and_an_outside_lock_and_nobody_hears_of_a_lock(stage: Stage) -> None:
    done = await everybody_writes(stage, processes=8, share=100, callers=2, lock=1.5, within=60.0)
    print(done)
