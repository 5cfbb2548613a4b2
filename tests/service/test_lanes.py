"""Which commands go into one batch, and which batches are under way at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.kernel import commands as k
from fencepost.service.batch import Operation
from fencepost.service.lanes import LEAST_TO_SPLIT, MAX_BATCH, Lanes

BOUND = 5.0


class Store:
    """Batches wait in it until they are let go."""

    def __init__(self) -> None:
        self.batches: list[list[Operation]] = []
        self.under_way: list[tuple[list[Operation], asyncio.Event]] = []

    async def run(self, batch: list[Operation]) -> None:
        free = asyncio.Event()
        self.batches.append(batch)
        self.under_way.append((batch, free))
        await free.wait()
        self.under_way.remove((batch, free))
        for operation in batch:
            operation.future.set_result(None)

    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    async def finish(self, place: int = 0) -> list[Operation]:
        """Let one batch go, and its callers and lane come round."""
        batch, free = self.under_way[place]
        free.set()
        await settle()
        return batch


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def claim(many: int = 1) -> Operation:
    command: Any = k.ClaimNext(
        request_id="r", pool="p", queues=("q",), kinds=None, epoch=1, owner_id="o", ttl_us=1,
        attempt_ids=("a",) * many,
    )  # fmt: skip
    return Operation(command, asyncio.get_running_loop().create_future(), False)


def other(alone: bool = False) -> Operation:
    command: Any = k.Usage(request_id="r", claim=k.Presented("s", "p", "t", "a", 1, 0, "d"), usage={})
    made = Operation(command, asyncio.get_running_loop().create_future(), False)
    made.alone = alone
    return made


@pytest.fixture
def store() -> Store:
    return Store()


async def add(lanes: Lanes, *operations: Operation) -> None:
    for operation in operations:
        lanes.add(operation)
    await settle()


async def test_one_lane_takes_all_that_was_asked_while_the_last_batch_was_under_way(store: Store) -> None:
    lanes = Lanes(store.run, several=False)
    await add(lanes, *(claim() for _ in range(100)))
    await add(lanes, *(other() for _ in range(5)), *(claim() for _ in range(MAX_BATCH)))
    assert store.sizes() == [100]
    await store.finish()
    assert store.sizes() == [100, MAX_BATCH] and len(lanes.running()) == 1
    await store.finish()
    await store.finish()
    assert store.sizes() == [100, MAX_BATCH, 5] and lanes.running() == []


async def test_two_lanes_have_claims_and_all_else_under_way_at_once_but_never_claims_twice(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, claim(), claim(), other(), other(), other())
    assert store.sizes() == [2, 3]
    await add(lanes, claim(), other())
    assert store.sizes() == [2, 3] and len(lanes.running()) == 2
    await store.finish(1)
    assert store.sizes() == [2, 3, 1] and [type(o.command) for o in store.batches[2]] == [k.Usage]
    await store.finish(0)
    assert [type(o.command) for o in store.batches[3]] == [k.ClaimNext]


async def test_a_crowd_that_does_the_same_at_once_is_split_once_and_then_stays_out_of_step(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, *(claim() for _ in range(LEAST_TO_SPLIT)))
    half = LEAST_TO_SPLIT // 2
    for _ in range(20):  # whoever was answered asks for the other thing
        for batch, _ in list(store.under_way):
            done = await store.finish()
            assert done is batch
            await add(lanes, *(other() if type(o.command) is k.ClaimNext else claim() for o in done))
    assert set(store.sizes()) == {half} and len(store.under_way) == 2


async def test_what_a_split_left_is_not_split_again(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, *(other() for _ in range(4 * LEAST_TO_SPLIT)))
    for _ in range(2):
        await store.finish()
    assert store.sizes() == [2 * LEAST_TO_SPLIT] * 2 and lanes.running() == []


@pytest.mark.parametrize("count", [1, 2, LEAST_TO_SPLIT - 1])
async def test_a_few_are_not_split(store: Store, count: int) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, *(other() for _ in range(count)))
    assert store.sizes() == [count]


async def test_a_part_of_those_who_were_at_work_lately_is_not_split(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, claim(4 * LEAST_TO_SPLIT))
    await store.finish()
    await add(lanes, *(other() for _ in range(2 * LEAST_TO_SPLIT)))
    assert store.sizes() == [1, 2 * LEAST_TO_SPLIT]
    await store.finish()
    await add(lanes, *(other() for _ in range(4 * LEAST_TO_SPLIT)))
    assert store.sizes()[-1] == 2 * LEAST_TO_SPLIT and len(store.batches) == 3


async def test_a_crowd_is_not_split_while_the_other_lane_has_something_to_do(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, other())
    await add(lanes, *(claim() for _ in range(4 * LEAST_TO_SPLIT)))
    assert store.sizes() == [1, 4 * LEAST_TO_SPLIT]


async def test_what_must_go_alone_goes_alone_and_in_order(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, other(), other(alone=True), other(), other())
    while store.under_way:
        await store.finish()
    assert store.sizes() == [1, 1, 2]
    assert [o.alone for batch in store.batches for o in batch] == [False, True, False, False]


async def test_a_lane_that_was_cancelled_can_begin_again(store: Store) -> None:
    lanes = Lanes(store.run, several=True)
    await add(lanes, other())
    [lane] = lanes.running()
    lane.cancel()
    await asyncio.wait([lane], timeout=BOUND)
    assert lanes.running() == []
    await add(lanes, other())
    assert len(lanes.running()) == 1 and store.sizes() == [1, 1]
