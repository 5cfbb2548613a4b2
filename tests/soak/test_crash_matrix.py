"""The whole crash matrix: each downstream, each point of an effect, killed and paused, on each store."""

from __future__ import annotations

import pytest

from tests.faults.crash_matrix import SIGNALS, play
from tests.faults.crash_page import compare, keys
from tests.faults.stage import Stage, on_every_store
from tests.faults.worlds import World


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signal", SIGNALS)
@on_every_store
async def test_a_sender_that_ends_or_is_paused_at_any_point_leaves_its_effect_in_the_world_once(
    stage: Stage, every_world: dict[str, World], signal: str
) -> None:
    compare(await play(stage, every_world, [key for key in keys() if key[2] == signal]))
