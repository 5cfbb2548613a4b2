"""B39: claimers of batches, bulk cancels, pruning, sweepers: nobody hears of a deadlock, nobody gets too much."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import Done, NewTask, Refused, Unavailable
from fencepost.client.client import Client
from tests.faults.stage import stage
from tests.postgres.stage import PostgresStage, on_postgres

__all__ = ["stage"]

# Settings of the whole database, such as its owner might choose.
DATABASES = {
    "as it comes": {},
    "nested loops": {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_bitmapscan": "off"},
    "hash joins": {"enable_nestloop": "off", "enable_indexscan": "off"},
    "serializable": {"default_transaction_isolation": "serializable"},
}


async def mix(stage: PostgresStage, database: str, *, processes: int, callers: int, cancels: int, more: int) -> None:
    for name, value in DATABASES[database].items():
        await stage.server.administer(f"ALTER DATABASE {stage.database} SET {name} = '{value}'")
    dice = random.Random(39)
    client = await stage.client()
    await client.set_policy(max_attempts=1000)
    ids = [f"t{n:05}" for n in range(cancels)]
    await submit(client, [*(f"m{n:05}" for n in range(more)), *ids])
    crowd = [await stage.program("claimers", stage.url, f"p{n}", str(callers), "10") for n in range(processes)]
    for program in crowd:
        await program.reaches("connected")
    over = asyncio.Event()
    counts: dict[str, int] = {"expired": 0, "pruned": 0}

    async def again_and_again(work: Callable[[], Any]) -> None:
        while not over.is_set():
            await work()
            await asyncio.sleep(0.01)

    async def prune() -> None:
        counts["pruned"] += (await client.report("prune", older_than=0.0))["tasks"]

    async def sweep() -> None:
        counts["expired"] += (await client.report("maintain"))["expired"]

    beside = [asyncio.create_task(again_and_again(work)) for work in (prune, sweep)]
    answers: list[Any] = []
    try:
        dice.shuffle(ids)
        canceller = await stage.client()
        for program in crowd:
            program.tell("go")
        for first in range(0, len(ids), 500):
            answers += await asyncio.gather(*(canceller.cancel(each) for each in ids[first : first + 500]))
        await asyncio.wait_for(drained(client), 90.0)
    finally:
        over.set()
        ended = await asyncio.gather(*beside, return_exceptions=True)
    assert not [each for each in ended if isinstance(each, BaseException)], ended
    for program in crowd:
        program.tell("end")
    ends = [await program.reaches("done") for program in crowd]
    assert [text for end in ends for text in end["wrong"]] == []
    committed = [task_id for end in ends for task_id in end["committed"]]
    assert len(set(committed)) == len(committed)
    cancelled = [each for each in answers if isinstance(each, Done)]
    others = {str(each.outcome) for each in answers if isinstance(each, Refused)}
    assert others <= {"ALREADY_COMMITTED"}, others
    assert len(cancelled) + len(committed) == cancels + more
    assert len(cancelled) > cancels / 20
    longest = max(end["longest"] for end in ends)
    print(f"{database}: {len(committed)} committed, {len(cancelled)} cancelled, {counts}, no commit for {longest} s")
    await stage.audit()


async def submit(client: Client, ids: list[str]) -> None:
    for first in range(0, len(ids), 1000):
        await client.submit_many([NewTask(task_id, task_id=task_id) for task_id in ids[first : first + 1000]])


async def drained(client: Client) -> None:
    while True:
        try:
            page = await client.tasks(state=["READY", "CLAIMED"], limit=1)
        except Unavailable as error:
            raise AssertionError("reading must not fail either") from error
        if not page.items:
            return
        await asyncio.sleep(0.05)


@on_postgres
@pytest.mark.slow
@pytest.mark.parametrize("database", DATABASES)
async def test_b39_claimers_a_bulk_cancel_pruning_and_a_sweeper(stage: PostgresStage, database: str) -> None:
    await mix(stage, database, processes=2, callers=25, cancels=1_000, more=1_000)


@on_postgres
@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("database", DATABASES)
async def test_b39_fifty_claimers_and_a_cancel_of_five_thousand(stage: PostgresStage, database: str) -> None:
    await mix(stage, database, processes=5, callers=10, cancels=5_000, more=15_000)
