"""Connections that callers pass: which ones fit, and what a wrong one, or one that is given up, leaves behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

import fencepost
from fencepost import Client, InvalidRequest, NewTask, Pending, Refused
from fencepost.errors import InTheWay
from fencepost.wire import Result
from tests.docs.pages import blocks, run
from tests.postgres.bouncer import bouncing
from tests.postgres.callers import Join, claimed, clean, raised, rows, state
from tests.postgres.databases import new_database
from tests.postgres.server import Missing, Server


async def test_a_connection_in_no_transaction_is_a_wrong_call(client: Client, join: Join) -> None:
    business = await join()
    with pytest.raises(InvalidRequest, match=r"connection: is in no transaction"):
        await client.submit(NewTask(1, task_id="t"), connection=business.con)
    assert await state(client, "t") is None


async def test_a_transaction_that_has_failed_is_a_wrong_call(client: Client, join: Join) -> None:
    business = await join()
    await business.begin()
    with pytest.raises((asyncpg.PostgresError, psycopg.Error)):
        await business.do("SELECT 1/0")
    with pytest.raises(InvalidRequest, match="has failed already"):
        await client.submit(NewTask(1), connection=business.con)
    await business.do("ROLLBACK")


async def test_a_transaction_that_is_read_only_is_a_wrong_call(client: Client, join: Join) -> None:
    business = await join()
    await business.do("BEGIN READ ONLY")
    with pytest.raises(InvalidRequest, match="read only"):
        await client.submit(NewTask(1), connection=business.con)
    await business.do("ROLLBACK")


async def test_another_database_is_a_wrong_call_that_leaves_its_transaction_in_order(
    client: Client, join: Join, server: Server
) -> None:
    kind = type(await join())
    for made, said in ((server.url(), "without a fencepost schema"), (None, "another store")):
        name = None
        if made is None:
            name = await server.new_database()
            made = server.url(name)
            async with fencepost.connect(made):
                pass
        stranger = kind()
        await stranger.open(made)
        try:
            await stranger.begin()
            with pytest.raises(InvalidRequest, match=said):
                await client.submit(NewTask(1), connection=stranger.con)
            await stranger.do("SELECT 1")
            await stranger.do("COMMIT")
        finally:
            await stranger.close()
            if name is not None:
                await server.drop_database(name)


async def test_two_calls_at_once_on_one_connection_are_a_wrong_call(client: Client, join: Join) -> None:
    business = await join()
    await business.begin()
    answers = await asyncio.gather(
        *(client.submit(NewTask(n, task_id=f"t{n}"), connection=business.con) for n in range(2)),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Pending)
    assert isinstance(answers[1], InvalidRequest)
    await business.do("COMMIT")
    assert (await state(client, "t0"), await state(client, "t1")) == ("READY", None)


async def test_a_call_that_is_cancelled_leaves_the_transaction_as_it_was(client: Client, join: Join, url: str) -> None:
    claim = await claimed(client, "t")
    one, other = await join(), await join()
    await one.begin()
    assert isinstance(await client.commit(claim, "one", connection=one.con), Pending)
    await other.begin()
    await other.write("kept")
    waiting = asyncio.create_task(client.commit(claim, "other", connection=other.con))
    await asyncio.wait([waiting], timeout=0.3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 10)
    await other.write("kept too")
    await other.do("COMMIT")
    await one.do("COMMIT")
    assert await rows(url) == {"kept", "kept too"}
    await clean(client)


async def test_a_held_claim_is_kept_no_longer_than_its_transactional_commit(client: Client, join: Join) -> None:
    claim = await claimed(client, "t")
    business = await join()
    async with client.hold(claim):
        await business.begin()
        assert isinstance(await client.commit(claim, "x", connection=business.con), Pending)
        await business.do("COMMIT")
    assert isinstance(await client.result("t"), Result)


async def test_what_is_no_connection_is_a_wrong_call(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"asyncpg or psycopg 3 connection, got builtins\.str"):
        await client.submit(NewTask(1), connection="postgresql://")


async def test_a_pooled_asyncpg_connection_may_be_passed(client: Client, url: str) -> None:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as con, con.transaction():
        assert isinstance(await client.submit(NewTask(1, task_id="t"), connection=con), Pending)
    assert await state(client, "t") == "READY"


async def test_psycopg_begins_its_transaction_by_itself_and_keeps_the_callers_row_factory(
    client: Client, url: str
) -> None:
    async with await psycopg.AsyncConnection.connect(url, row_factory=psycopg.rows.dict_row) as con:
        assert isinstance(await client.submit(NewTask(1, task_id="t"), connection=con), Pending)
        assert await state(client, "t") is None
    assert await state(client, "t") == "READY"


def test_plain_code_submits_on_its_own_connection(url: str) -> None:
    with fencepost.sync.connect(url) as client, psycopg.connect(url) as con:
        assert isinstance(client.submit(NewTask(1, task_id="t"), connection=con), Pending)
        con.commit()
        assert client.task("t").state == "READY"


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
async def test_other_stores_say_that_they_cannot(scheme: str, tmp_path: Any) -> None:
    where = "memory://" if scheme == "memory" else f"sqlite:///{tmp_path}/tasks.db"
    async with fencepost.connect(where) as client:
        with pytest.raises(InvalidRequest, match=f"connection: a {scheme} store .* no other transaction"):
            await client.submit(NewTask(1), connection=object())


async def test_a_role_for_workers_may_do_all_of_it(server: Server) -> None:
    name = await new_database(server, roles=True)
    where = server.url(name).replace("tester@", "hand@")
    async with fencepost.connect(where) as client:
        con = await asyncpg.connect(where)
        claim = await claimed(client, "t")
        async with con.transaction():
            spawn = [NewTask(2, task_id="child", depends_on=["t"])]
            assert isinstance(await client.submit(NewTask(1, depends_on=["t"]), connection=con), Pending)
            assert isinstance(await client.commit(claim, "x", spawn=spawn, connection=con), Pending)
        await con.close()
        assert await state(client, "child") == "READY"
    await server.drop_database(name)


async def test_a_pooler_may_stand_between(client: Client, database: str) -> None:
    try:
        where = bouncing().url(database)
    except Missing as error:
        pytest.skip(str(error))
    async with fencepost.connect(where) as through:
        con = await asyncpg.connect(where.partition("?")[0], statement_cache_size=0)
        claim = await claimed(through, "t")
        async with con.transaction():
            assert isinstance(await through.submit(NewTask(1, task_id="u"), connection=con), Pending)
            assert isinstance(await through.commit(claim, "x", connection=con), Pending)
        await con.close()
        assert await state(through, "u") == "READY"
        assert isinstance(await through.result("t"), Result)


# the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "printed"), [("order.py", "paid\n"), ("plain_order.py", "READY\n")])
async def test_what_the_page_shows_works(
    name: str, printed: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    [block] = [block for block in blocks("docs/transactions.md") if block.mark == f"file: {name}"]
    (tmp_path / name).write_text(block.text)
    assert await asyncio.to_thread(run, ["python3", name], tmp_path) == (0, printed)


# in the way of a raise ----------------------------------------------------------------------------


@pytest.mark.parametrize("terminate", [False, True])
async def test_the_command_line_names_a_sleeper_and_ends_it_where_it_is_told_to(
    client: Client, url: str, terminate: bool
) -> None:
    claim = await claimed(client, "t")
    sleeper = await asyncpg.connect(url, server_settings={"application_name": "sleeper"})
    await sleeper.execute("BEGIN")
    assert isinstance(await client.commit(claim, "x", connection=sleeper), Pending)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost", "pool", "raise-epoch", "--yes", "--store", f"{url}?raise_timeout=0.5"),
        *(["--terminate"] if terminate else []),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, printed = await asyncio.wait_for(process.communicate(), 60)
    assert f"pid {sleeper.get_server_pid()}" in printed.decode()
    assert ("ended 1 sessions" in printed.decode()) == terminate
    assert ("raise-epoch --terminate" in printed.decode()) == (not terminate)
    assert process.returncode == (0 if terminate else 3)
    view = await client.pool("default")
    assert not isinstance(view, Refused)
    assert view.epoch == (2 if terminate else 1)
    if terminate:
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
            await sleeper.execute("COMMIT")
    else:
        await sleeper.execute("COMMIT")
    assert isinstance(await client.result("t"), Result) == (not terminate)
    await sleeper.close()
    await clean(client)


async def test_only_that_very_transaction_is_ended_and_not_the_sessions_next_one(client: Client, url: str) -> None:
    claim = await claimed(client, "t")
    sleeper = await asyncpg.connect(url)
    await sleeper.execute("BEGIN")
    assert isinstance(await client.commit(claim, "x", connection=sleeper), Pending)
    with pytest.raises(InTheWay) as caught:
        await raised(client)
    await sleeper.execute("COMMIT")
    await sleeper.execute("BEGIN")
    assert await client.report("end_sessions", sessions=caught.value.sessions) == 0
    await sleeper.execute("COMMIT")
    await sleeper.close()
