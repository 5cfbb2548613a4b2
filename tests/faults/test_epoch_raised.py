"""The kill switch under load: what a raise that returned promises, with sixteen busy clients in two processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.wire import NewTask, PoolView
from tests.faults.stage import Stage, on_every_store

# Accepted events of doors that compare the epoch. A claim that ends an older attempt in passing shows, for that end,
# the epoch of the attempt that it ended; a spawned task's own first event shows none.
OF_CLAIMS = """(name IN ('attempt_started', 'attempt_renewed', 'checkpoint_saved', 'result_committed')
    OR name = 'attempt_ended' AND door IN ('release', 'fail'))"""
ROUNDS = 25  # two hundred in the long form


async def raise_in_the_middle(stage: Stage, rounds: int) -> dict[str, int]:
    boss = await stage.client()
    await boss.set_policy(max_attempts=999)
    await boss.submit_many([NewTask({"n": n}, max_attempts=999) for n in range(48)])
    await boss.submit_many([NewTask({"n": n}, queue="veterans") for n in range(2)])
    crowds = [await stage.program("busy", stage.url, "8", str(seed)) for seed in (1, 2)]
    for crowd in crowds:
        await crowd.reaches("connected")
    marks = []
    accepted = held = 0
    for n in range(rounds):
        for crowd in crowds:
            await crowd.reaches("at work")
        pool = await boss.pool()
        assert isinstance(pool, PoolView) and pool.epoch == n + 1
        raised = await boss.raise_epoch(expected_epoch=pool.epoch, expected_state_version=pool.state_version)
        assert raised.outcome == "EPOCH_RAISED", raised
        # From the moment in which the raise returned.
        marks.append(stage.after_now())
        for said in await asyncio.gather(*(crowd.reaches("refused") for crowd in crowds)):
            accepted += said["accepted"]
            assert said["through"] == [], f"a client that connected before the raise got through: {said['through']}"
        assert await boss.adopt_epoch() == n + 2
        for crowd in crowds:
            crowd.tell("adopt")
        for said in await asyncio.gather(*(crowd.reaches("adopted") for crowd in crowds)):
            assert said["epochs"] == [n + 2]
            assert said["through"] == [], f"a claim of the old epoch got through under the new one: {said['through']}"
            held += said["held"]
    for crowd in crowds:
        await crowd.kill()
    late = events_of_an_older_epoch(stage, marks)
    assert late == []
    await stage.audit()
    assert held > rounds, "hardly anybody was in the middle of something"
    return {"accepted": accepted, "held": held}


def events_of_an_older_epoch(stage: Stage, marks: list[str]) -> list[Any]:
    """Accepted changes that were written after raise n returned and show an epoch of before it."""
    late = []
    for n, after in enumerate(marks):
        late += stage.rows(
            f"SELECT number, door, name, epoch FROM event WHERE {after} AND epoch < {n + 2} AND {OF_CLAIMS}"
        )
    return late


@on_every_store
@pytest.mark.slow
async def test_after_a_raise_returned_nothing_of_the_old_epoch_is_accepted_from_sixteen_busy_clients(
    stage: Stage,
) -> None:
    done = await raise_in_the_middle(stage, ROUNDS)
    assert done["accepted"] >= ROUNDS * 32
