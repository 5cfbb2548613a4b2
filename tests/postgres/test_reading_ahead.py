"""Ready tasks that a look brought beyond what was asked for: who gets them, in what order, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import fencepost
from fencepost import Client, NewTask
from fencepost.kernel.writes import Snapshot
from fencepost.stores import postgres_ahead
from fencepost.stores.base import Scan
from fencepost.stores.postgres_ahead import FRESH, MOST, MOST_BYTES, Ahead
from fencepost.stores.postgres_scan import Scanner
from tests.stores.building import encode, task

LONG = 1000.0


@pytest_asyncio.fixture
async def clients(url: str) -> AsyncIterator[list[Client]]:
    async with await fencepost.connect(url) as first, await fencepost.connect(url) as second:
        yield [first, second]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each look at the server asked for. What was read ahead grows old only where a test says so."""
    found: list[int] = []
    look = Scanner._ready

    async def counted(self: Scanner, con: Any, step: Scan, *rest: Any) -> Any:
        found.append(step.limit)
        return await look(self, con, step, *rest)

    monkeypatch.setattr(Scanner, "_ready", counted)
    monkeypatch.setattr(postgres_ahead, "FRESH", LONG)
    return found


async def claimed(client: Client, limit: int = 1) -> list[str]:
    found = await client.claim_next(owner="o", limit=limit)
    assert isinstance(found, list)
    return [claim.task_id for claim in found]


async def test_claims_in_a_row_look_at_the_server_now_and_then_and_keep_the_order(
    clients: list[Client], looks: list[int]
) -> None:
    client = clients[0]
    await client.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(40)])
    found = [await claimed(client) for _ in range(40)]
    assert found == [[f"t{n:02}"] for n in range(40)]
    assert looks[:4] == [1, 2, 4, 8] and len(looks) < 12
    assert await claimed(client) == []


async def test_an_input_comes_with_its_task_also_where_both_were_read_ahead(
    clients: list[Client], looks: list[int]
) -> None:
    client = clients[0]
    await client.submit_many([NewTask({"n": n}, task_id=f"t{n:02}") for n in range(20)])
    for n in range(20):
        [claim] = await client.claim_next(owner="o")  # type: ignore[misc]
        assert (claim.task_id, claim.input) == (f"t{n:02}", {"n": n})
    assert len(looks) < 10


async def test_a_more_urgent_task_of_this_service_is_not_passed_over(clients: list[Client], looks: list[int]) -> None:
    client = clients[0]
    await client.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(20)])
    assert [await claimed(client) for _ in range(4)] == [["t00"], ["t01"], ["t02"], ["t03"]]
    before = len(looks)
    assert await claimed(client) == ["t04"] and len(looks) == before  # it was read ahead
    await client.submit(NewTask("now", task_id="urgent", priority=-1))
    assert await claimed(client) == ["urgent"]
    assert await claimed(client) == ["t05"]


async def test_a_more_urgent_task_of_another_service_waits_no_longer_than_what_was_read_is_fresh(
    clients: list[Client], looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = clients
    await first.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(20)])
    for n in range(4):
        assert await claimed(first) == [f"t{n:02}"]
    await second.submit(NewTask("now", task_id="urgent", priority=-1))
    assert await claimed(first) == ["t04"]
    now = postgres_ahead.elapsed()
    monkeypatch.setattr(postgres_ahead, "elapsed", lambda: now + 2 * LONG)
    assert await claimed(first) == ["urgent"]


async def test_what_others_took_meanwhile_is_lost_and_looked_for_again(clients: list[Client], looks: list[int]) -> None:
    first, second = clients
    await first.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(30)])
    mine = [await claimed(first) for _ in range(8)]
    theirs = await claimed(second, limit=12)
    assert theirs == [f"t{n:02}" for n in range(8, 20)]
    mine += [await claimed(first) for _ in range(10)]
    # Who lost takes a share of its own first, so no order is promised between the two.
    assert sorted(mine) == [[f"t{n:02}"] for n in (*range(8), *range(20, 30))]
    assert await claimed(first) == [] and await claimed(second) == []


async def test_a_lost_claim_makes_the_next_look_at_the_server(clients: list[Client], looks: list[int]) -> None:
    client = clients[0]
    await client.submit_many([NewTask(n) for n in range(20)])
    for _ in range(4):
        await claimed(client)
    assert len(looks) == 3  # of 1, 2 and 4: more is at hand
    client.backend.store._scanner.share.claimed(100, 1)  # type: ignore[attr-defined]
    await claimed(client)
    assert len(looks) == 4


async def test_a_service_that_shares_a_queue_with_others_reads_nothing_ahead(
    clients: list[Client], looks: list[int]
) -> None:
    client = clients[0]
    client.backend.store._scanner.share.of = 2  # type: ignore[attr-defined]
    await client.submit_many([NewTask(n) for n in range(20)])
    for _ in range(6):
        await claimed(client)
    assert looks == [1] * 6


def scan(limit: int, **more: Any) -> Scan:
    into = Snapshot(guessed=True)
    return msgspec.structs.replace(Scan("default", ("q",), None, limit, into), **more)


def test_what_is_read_ahead_is_bounded_and_shrinks_where_it_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(postgres_ahead, "elapsed", lambda: now)
    ahead, asked = Ahead(), []
    for _ in range(8):
        assert ahead.take("q", scan(60)) is None
        asked.append(ahead.limit("q", scan(60)))
        ahead.keep("q", scan(60), [task(f"t{i}") for i in range(60)], now)
    assert asked == [60, 120, 240, 60 + MOST, *[60 + MOST] * 4]
    now += 2 * FRESH
    for _ in range(4):
        assert ahead.take("q", scan(60)) is None
    assert ahead.limit("q", scan(60)) == 60


def test_a_plan_that_reads_afresh_gets_nothing_that_was_read_before() -> None:
    ahead = Ahead()
    ahead.keep("q", scan(1), [task("t0"), task("t1")], postgres_ahead.elapsed())
    assert ahead.take("q", scan(1, into=Snapshot())) is None
    assert ahead.take("other", scan(1)) is None
    assert [found.task_id for found in ahead.take("q", scan(1)) or ()] == ["t1"]


def test_large_inputs_are_not_kept_in_memory_ahead() -> None:
    ahead = Ahead()
    step = scan(1)
    step.into.inputs = {f"t{i}": encode("x" * MOST_BYTES) for i in range(2)}
    assert [found.task_id for found in ahead.keep("q", step, [task("t0"), task("t1")], postgres_ahead.elapsed())] == [
        "t0"
    ]
    assert ahead.take("q", scan(1)) is None
    assert ahead.limit("q", scan(1)) == 1
