"""B09: the connection is cut before or after the server made a write final. See tests/cases for processes that die."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import fencepost
from fencepost import Claim, Committed, NewTask, Refused, Result, Unavailable
from fencepost.client.client import Client
from tests.cases.test_b09_commit_may_have_happened import CALLS, REQUEST, Call, whole_or_nothing
from tests.faults.stage import stage
from tests.postgres.proxy import Proxy, proxy_before
from tests.postgres.stage import PostgresStage, on_postgres

__all__ = ["stage"]


@pytest_asyncio.fixture
async def proxy(stage: PostgresStage) -> AsyncIterator[Proxy]:
    async with proxy_before(stage.server.port) as made:
        yield made


@pytest_asyncio.fixture
async def behind(stage: PostgresStage, proxy: Proxy) -> AsyncIterator[Client]:
    """A client whose connections are cut."""
    url = f"postgresql://tester@127.0.0.1:{proxy.port}/{stage.database}?sslmode=disable"
    async with await fencepost.connect(url) as client:
        yield client


@on_postgres
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("door", CALLS)
async def test_b09_a_call_whose_connection_was_cut_is_unknown_and_asked_again_it_has_happened_once(
    stage: PostgresStage, proxy: Proxy, behind: Client, door: str, point: str
) -> None:
    async def call(method: str, *args: Any, **named: Any) -> Any:
        return await getattr(behind, method)(*args, **named)

    async def lose(method: str, *args: Any, **named: Any) -> None:
        proxy.cut = point
        with pytest.raises(Unavailable):
            await call(method, *args, **named)
        assert proxy.cuts == 1

    async def same() -> Call:
        return call

    await whole_or_nothing(stage, door, point == "after", call, lose, same)


@on_postgres
async def test_b09_after_a_cut_another_result_of_that_attempt_is_refused_and_the_same_one_is_the_repeat(
    stage: PostgresStage, proxy: Proxy, behind: Client
) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="t"))
    [claim] = await behind.claim_next(owner="A")  # type: ignore[misc]
    assert isinstance(claim, Claim)
    proxy.cut = "after"
    with pytest.raises(Unavailable):
        await behind.commit(claim, "first", request_id=REQUEST)
    other = await behind.commit(claim, "second", request_id=REQUEST)
    assert isinstance(other, Refused) and (other.outcome, other.reason) == ("ENDED", "COMMITTED")
    answers = [await behind.commit(claim, "first", request_id=again) for again in (REQUEST, None, "another")]
    result = await client.result("t")
    assert isinstance(result, Result) and result.value == "first"
    for answer in answers:
        assert isinstance(answer, Committed) and answer.replayed
        assert answer.result_commit_id == result.result_commit_id
    await stage.audit()
