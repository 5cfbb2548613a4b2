"""The kill switch under load, two hundred times over."""

from __future__ import annotations

import pytest

from tests.faults.stage import Stage, on_every_store
from tests.faults.test_epoch_raised import raise_in_the_middle

ROUNDS = 200


@pytest.mark.soak
@pytest.mark.timeout(300)
@on_every_store
async def test_two_hundred_raises_under_sixteen_busy_clients_and_nothing_of_an_old_epoch_follows_one(
    stage: Stage,
) -> None:
    done = await raise_in_the_middle(stage, ROUNDS)
    print(done)
    assert done["accepted"] >= ROUNDS * 32
