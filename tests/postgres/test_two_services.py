"""Two services that scan the same queue at once: each task once, neither starves, few swaps are lost."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from fencepost import NewTask
from tests.faults.crowd import committed_once
from tests.faults.stage import stage
from tests.postgres.stage import PostgresStage, on_postgres

__all__ = ["stage"]

MOST_LOST = 0.02


async def side_by_side(stage: PostgresStage, *, each: int, callers: int) -> None:
    client = await stage.client()
    total = 2 * each
    for first in range(0, total, 5_000):
        await client.submit_many([NewTask(n, task_id=f"t{n:06}") for n in range(first, min(first + 5_000, total))])
    services = [await stage.program("cycler", stage.url, f"s{n}", str(callers), str(each)) for n in range(2)]
    for service in services:
        await service.reaches("connected")
    for service in services:
        service.tell("go")
    ends = [await service.reaches("done", within=200.0) for service in services]
    for service, end in zip(services, ends, strict=True):
        assert end["wrong"] == [] and end["committed"] == each
        assert await service.ended() == 0
    commits = [
        (msgspec.json.decode(data)["by"], at) for data, at in stage.rows("SELECT data, committed_at FROM result")
    ]
    times = {name: [at for by, at in commits if by == name] for name in ("s0", "s1")}
    begin, end_ = max(min(at) for at in times.values()), min(max(at) for at in times.values())
    # They connect again in the middle, each when it has done half: that pause is no hunger.
    longest = {name: gap([at for at in found if begin <= at <= end_]) for name, found in times.items()}
    shares = [sum(begin <= at <= end_ for at in found) for found in times.values()]
    won, lost = (sum(end["swaps"][place] for end in ends) for place in (0, 1))
    print(
        f"{won} swaps won, {lost} lost ({lost / (won + lost):.2%}); while both were at work {shares} commits, "
        f"longest time without one { ({name: round(at / 1e6, 3) for name, at in longest.items()}) } s"
    )
    assert min(shares) > 0.2 * sum(shares), "one of the two got hardly anything"
    assert max(longest.values()) < 2_000_000
    # Services learn of each other by what they lose. Each begins twice here, and loses what is under way a few times:
    # that is much of a short run and little of a long one.
    assert lost <= max(4 * 4 * callers, MOST_LOST * (won + lost))
    await committed_once(stage, client, total)


def gap(times: list[int]) -> int:
    times.sort()
    return max((later - at for at, later in itertools.pairwise(times)), default=0)


@on_postgres
@pytest.mark.slow
async def test_two_services_on_one_queue_share_four_thousand_tasks(stage: PostgresStage) -> None:
    await side_by_side(stage, each=2_000, callers=32)


@on_postgres
@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_two_services_on_one_queue_share_sixty_thousand_tasks(stage: PostgresStage) -> None:
    await side_by_side(stage, each=30_000, callers=64)
