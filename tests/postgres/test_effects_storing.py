"""Effects through `Client` on PostgreSQL: what a batch of them costs the server; statements beside other commits."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from fencepost import Claim, Client, NewTask, Refused
from fencepost.errors import StatementFailed
from fencepost.kernel.commands import NewStatement
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Terms
from fencepost.stores import postgres
from fencepost.wire import Committed, Pending, TaskView
from tests.postgres.callers import Join, claimed, clean, rows, state

TERMS = Terms("mail", "IDEMPOTENT", retention_us=86_400_000_000, margin_us=60_000_000)


def inserting(row: str, slot: str = "row") -> NewStatement:
    payload = {"sql": "INSERT INTO public.business VALUES ($1)", "parameters": [row]}
    return NewStatement(slot, encode(payload), "sql")


async def many(client: Client, count: int) -> list[Claim]:
    await client.submit_many([NewTask({"n": n}, task_id=f"t{n:02}") for n in range(count)])
    found = await asyncio.gather(*(client.claim_next(owner=f"w{n}") for n in range(count)))
    return [claim for claims in found for claim in claims]  # type: ignore[union-attr]


async def test_a_batch_of_prepares_or_settles_is_one_statement_and_reads_nothing_first(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = await many(client, 24)
    store: Any = client.backend.store  # type: ignore[attr-defined]
    swift, slow, loads = [], [], []
    apply_swift, apply_any, load = postgres.apply_swift, postgres.apply_any, store._reading.load

    def counted(calls: list[int], do: Any) -> Any:
        async def call(con: Any, some: Any, *more: Any) -> Any:
            calls.append(len(more))
            return await do(con, some, *more)

        return call

    monkeypatch.setattr(postgres, "apply_swift", counted(swift, apply_swift))
    monkeypatch.setattr(postgres, "apply_any", counted(slow, apply_any))
    monkeypatch.setattr(store._reading, "load", counted(loads, load))

    prepared: list[Any] = await asyncio.gather(*(client.prepare(claim, "send", "hello", TERMS) for claim in claims))
    assert [one.outcome for one in prepared] == ["EXECUTE"] * 24
    first = len(swift)
    settled: list[Any] = await asyncio.gather(
        *(
            client.settle(claim, one.effect_id, one.execution, "HAPPENED", receipt={"id": n})
            for n, (claim, one) in enumerate(zip(claims, prepared, strict=True))
        )
    )
    assert [one.outcome for one in settled] == ["SETTLED"] * 24
    committed: list[Any] = await asyncio.gather(*(client.commit(claim, "done") for claim in claims))
    assert [one.outcome for one in committed] == ["COMMITTED"] * 24
    # Calls that come in together are decided together: one or two batches each.
    assert 1 <= first <= 2 and 1 <= len(swift) - first <= 4
    assert (slow, loads) == ([], [])
    await clean(client)


async def test_of_many_commits_with_statements_the_one_that_fails_fails_alone(client: Client, url: str) -> None:
    con = await asyncpg.connect(url)
    await con.execute("CREATE UNIQUE INDEX ON public.business (row)")
    await con.close()
    claims = await many(client, 12)
    names = ["the same" if n in (3, 7) else f"row {n}" for n in range(12)]
    answers = await asyncio.gather(
        *(
            client.commit(claim, n, statements=[inserting(names[n])] if n % 3 != 2 else [])
            for n, claim in enumerate(claims)
        ),
        return_exceptions=True,
    )
    failed = [n for n, answer in enumerate(answers) if isinstance(answer, StatementFailed)]
    assert len(failed) == 1 and failed[0] in (3, 7)
    assert all(isinstance(answer, Committed) for n, answer in enumerate(answers) if n not in failed)
    assert await rows(url) == {name for n, name in enumerate(names) if n % 3 != 2}
    late = claims[failed[0]]
    assert await state(client, late.task_id) == "CLAIMED"
    assert isinstance(await client.commit(late, "again", statements=[inserting("another")]), Committed)
    page = await client.effects(task_id=late.task_id)
    assert [(view.slot, view.state, view.guarantee) for view in page.items] == [("row", "COMMITTED", "TRANSACTIONAL")]
    await clean(client)


async def test_a_late_workers_statement_is_never_executed(client: Client, url: str) -> None:
    late = await claimed(client, "t")
    await client.take_over("t", expected_generation=late.generation)
    answer = await client.commit(late, "late", statements=[inserting("late")])
    assert isinstance(answer, Refused)
    [now] = await client.claim_next(owner="next")  # type: ignore[misc]
    assert isinstance(await client.commit(now, "in time", statements=[inserting("in time")]), Committed)
    assert isinstance(await client.commit(now, "in time", statements=[inserting("in time")]), Committed)  # a repeat
    assert await rows(url) == {"in time"}
    await clean(client)


async def test_a_statement_stands_and_falls_with_the_callers_own_transaction(
    client: Client, join: Join, url: str
) -> None:
    claim = await claimed(client, "t")
    business = await join()
    for end, left in (("ROLLBACK", set()), ("COMMIT", {"mine", "brought along"})):
        await business.begin()
        await business.write("mine")
        nothing = NewStatement("bad", encode({"sql": "COMMIT", "parameters": []}), "sql")
        with pytest.raises(StatementFailed):
            await client.commit(claim, "x", statements=[nothing], connection=business.con)
        answer = await client.commit(claim, "x", statements=[inserting("brought along")], connection=business.con)
        assert isinstance(answer, Pending)
        await business.do(end)
        assert await rows(url) == left
    found = await client.task("t")
    assert isinstance(found, TaskView) and found.state == "COMMITTED"
    await clean(client)
