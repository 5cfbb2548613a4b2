"""Statements in real commits on SQLite: once with the commit that is accepted, and never with another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest
import pytest_asyncio

import fencepost
from fencepost.client.client import Client
from fencepost.kernel.commands import NewStatement
from fencepost.kernel.digests import encode


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'tasks.db'}"


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with await fencepost.connect(url) as client:
        await client.submit_many([fencepost.NewTask(1, task_id=name) for name in "ab"])
        _author(client, "CREATE TABLE account (cents INTEGER CHECK (cents >= 0)); INSERT INTO account VALUES (100)")
        yield client


def _author(client: Client, sql: str) -> list[tuple[int]]:
    con = apsw.Connection(client.backend.store.path)  # type: ignore[attr-defined]
    con.set_busy_timeout(5000)
    try:
        return con.execute(sql).fetchall()  # type: ignore[return-value]
    finally:
        con.close()


def _pay(cents: int) -> NewStatement:
    sql = "UPDATE account SET cents = cents - ?"
    return NewStatement("pay", encode({"sql": sql, "parameters": [cents]}), "the-books")


async def _two_claims(client: Client) -> tuple[fencepost.Claim, fencepost.Claim]:
    claims = await client.claim_next(owner="w", limit=2)
    assert isinstance(claims, list)
    first, second = sorted(claims, key=lambda claim: claim.task_id)
    return first, second


async def test_of_two_commits_at_once_the_one_whose_statement_fails_fails_alone(client: Client) -> None:
    first, second = await _two_claims(client)
    failed, done = await asyncio.gather(
        client.commit(first, 1, statements=[_pay(1000)]),
        client.commit(second, 2, statements=[_pay(30)]),
        return_exceptions=True,
    )
    assert isinstance(failed, fencepost.StatementFailed) and failed.slot == "pay"
    assert isinstance(done, fencepost.Committed)
    assert _author(client, "SELECT cents FROM account") == [(70,)]
    # The attempt still holds its task, and may commit with another.
    again = await client.commit(first, 1, statements=[_pay(70)])
    assert isinstance(again, fencepost.Committed) and not again.replayed
    assert _author(client, "SELECT cents FROM account") == [(0,)]


async def test_a_commit_that_is_said_again_does_not_execute_again(client: Client) -> None:
    claim, _ = await _two_claims(client)
    for replayed in (False, True):
        done = await client.commit(claim, 1, statements=[_pay(10)])
        assert isinstance(done, fencepost.Committed) and done.replayed is replayed
    assert _author(client, "SELECT cents FROM account") == [(90,)]


async def test_a_fenced_commit_takes_its_statement_along(client: Client) -> None:
    claim, _ = await _two_claims(client)
    await client.cancel(claim.task_id)
    refused = await client.commit(claim, 1, statements=[_pay(10)])
    assert isinstance(refused, fencepost.Refused) and refused.outcome == "CANCELLED"
    assert _author(client, "SELECT cents FROM account") == [(100,)]


async def test_a_store_without_a_database_says_what_it_cannot_do() -> None:
    async with await fencepost.connect("memory://") as client:
        await client.submit(fencepost.NewTask(1, task_id="a"))
        claims = await client.claim_next(owner="w")
        assert isinstance(claims, list)
        with pytest.raises(fencepost.InvalidRequest, match="statements: "):
            await client.commit(claims[0], 1, statements=[_pay(10)])
        assert isinstance(await client.commit(claims[0], 1), fencepost.Committed)
