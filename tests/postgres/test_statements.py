"""What a commit brings along, on PostgreSQL: one statement on its author's own tables, in the commit's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from fencepost.errors import InvalidRequest, StatementFailed
from fencepost.kernel.records import Content, EffectState, State, Statement, Task, Terms
from fencepost.kernel.writes import WriteSet
from fencepost.stores import postgres_statements
from fencepost.stores.postgres import PostgresStore
from tests.postgres.bouncer import bouncing
from tests.postgres.callers import Join
from tests.postgres.conftest import Open
from tests.postgres.databases import MOVABLE_CLOCK
from tests.postgres.server import Missing, Server
from tests.postgres.test_applying import claimed, committed
from tests.stores.building import applying, effect, encode, insert, loading, statement, task

# Each is refused, and says why.
NO_STATEMENTS = {
    "COMMIT": "syntax error",
    "ROLLBACK": "syntax error",
    "SAVEPOINT mine": "syntax error",
    "SET search_path = nowhere": "syntax error",
    "DROP TABLE public.business": "syntax error",
    "CREATE TABLE mine (n int)": "syntax error",
    "DO $$ BEGIN COMMIT; END $$": "syntax error",
    "CALL public.ends_it()": "syntax error",
    "LOCK TABLE public.business": "syntax error",
    "COPY public.business TO STDOUT": "syntax error",
    "": "syntax error",
    "-- nothing": "syntax error",
    "INSERT INTO public.business VALUES ('one'); COMMIT": "multiple commands",
    "SELECT 1; SELECT 2": "multiple commands",
    "SELECT public.ends_it_too()": "invalid transaction termination",
    "INSERT INTO public.business VALUES ($1)": "wrong number of parameters",
    "INSERT INTO public.nowhere VALUES (1)": "nowhere",
    "SELECT 1 / 0": "division by zero",
}
# Each touches what is fencepost's, and is refused whoever the user is.
TOUCHING = [
    "UPDATE fencepost.task SET priority = 7",
    "DELETE FROM fencepost.event",
    "UPDATE fencepost.result SET data = NULL",
    "INSERT INTO fencepost.log VALUES (1, 'x', 1, NULL, NULL, 'x', NULL, NULL, NULL, NULL, NULL, 1)",
    "SELECT count(*) FROM fencepost.pool",
    "SELECT * FROM fencepost.task WHERE task_id = 'none'",
    "SELECT * FROM fencepost.task FOR UPDATE",
    "SELECT task_id FROM fencepost.task WHERE ctid = '(0,1)'",
    "INSERT INTO public.business SELECT task_id FROM fencepost.task",
    "WITH gone AS (DELETE FROM fencepost.request) SELECT 1",
    "SELECT * FROM public.looks_through",
    "SELECT public.reaches_in()",
    "INSERT INTO public.triggered VALUES (1)",
    "SELECT public.empties()",
    "INSERT INTO public.refers VALUES ('a')",
]
OBJECTS = """
CREATE TABLE public.business (row text UNIQUE);
CREATE TABLE public.typed (at timestamptz, data jsonb, price numeric, id uuid, yes boolean, name text, tags int[]);
CREATE TABLE public.later (n int, CONSTRAINT once UNIQUE (n) DEFERRABLE INITIALLY DEFERRED);
CREATE PROCEDURE public.ends_it() LANGUAGE plpgsql AS 'BEGIN COMMIT; END';
CREATE FUNCTION public.ends_it_too() RETURNS int LANGUAGE plpgsql AS 'BEGIN CALL public.ends_it(); RETURN 1; END';
CREATE VIEW public.looks_through AS SELECT task_id FROM fencepost.task;
CREATE FUNCTION public.reaches_in() RETURNS int LANGUAGE sql AS
    'UPDATE fencepost.task SET priority = 7 RETURNING 1';
CREATE FUNCTION public.empties() RETURNS int LANGUAGE plpgsql AS
    'BEGIN TRUNCATE fencepost.request; RETURN 1; END';
CREATE TABLE public.refers (task_id text REFERENCES fencepost.task);
CREATE TABLE public.triggered (n int);
CREATE FUNCTION public.trigger() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN UPDATE fencepost.task SET priority = 7; RETURN NEW; END';
CREATE TRIGGER reaches AFTER INSERT ON public.triggered FOR EACH ROW EXECUTE FUNCTION public.trigger();
"""


@pytest_asyncio.fixture
async def business(server: Server, database: str, url: str) -> AsyncIterator[asyncpg.Connection]:
    await server.administer(OBJECTS, database=database)
    con = await asyncpg.connect(url)
    yield con
    await con.close()


async def running(store: PostgresStore, name: str = "a") -> Task:
    await store.run(applying(insert(task(name))))
    made = claimed(task(name), f"cl-{name}")
    assert await store.run(applying(made)) == [True]
    return made.tasks[0].task


def with_statements(before: Task, *statements: Statement) -> WriteSet:
    """A commit that brings these along, with the effects that they are."""
    made = committed(before)
    after = made.tasks[0].task
    for number, one in enumerate(statements, 1):
        made.effects.append(
            effect(
                after.task_id,
                number,
                slot=one.slot,
                terms=Terms("sql", "TRANSACTIONAL"),
                state=int(EffectState.COMMITTED),
                payload_digest=one.payload.digest,
            )
        )
        made.payloads.append((after.task_id, number, one.payload))
        made.statements.append(one)
    return made


async def nothing_came_of_it(store: PostgresStore, before: Task, business: asyncpg.Connection) -> None:
    found = await store.run(loading(tasks=[before.task_id], effects=[before.task_id], results=[before.task_id]))
    assert found.tasks == {before.task_id: before}
    assert (found.effects, found.results) == ({before.task_id: []}, {})
    assert await business.fetchval("SELECT count(*) FROM public.business") == 0


async def test_a_statement_stands_with_its_commit(store: PostgresStore, business: asyncpg.Connection) -> None:
    one = await running(store)
    made = with_statements(
        one,
        statement("INSERT INTO public.business VALUES ($1)", "it's \\ ü", slot="first"),
        statement("INSERT INTO public.business SELECT row || $1 FROM public.business;", "!", slot="second"),
    )
    assert await store.run(applying(made)) == [True]
    rows = {row[0] for row in await business.fetch("SELECT row FROM public.business")}
    assert rows == {"it's \\ ü", "it's \\ ü!"}
    history = await store.history("a")
    assert history is not None and history.task.state == State.COMMITTED
    assert [found.slot for found in history.effects] == ["first", "second"]


async def test_values_take_the_types_of_their_parameters(store: PostgresStore, business: asyncpg.Connection) -> None:
    values = ["2026-01-02T03:04:05Z", '{"a": [1]}', 1.5, "6f7c2e0a-0000-4000-8000-000000000000", True, None, "{1,2}"]
    made = with_statements(
        await running(store), statement("INSERT INTO public.typed VALUES ($1, $2, $3, $4, $5, $6, $7)", *values)
    )
    assert await store.run(applying(made)) == [True]
    row = await business.fetchrow(
        "SELECT at = '2026-01-02 03:04:05Z', data->'a'->>0, price::text, id::text, yes, name, tags FROM public.typed"
    )
    assert tuple(row) == (True, "1", "1.5", values[3], True, None, [1, 2])


async def test_whatever_writes_rows_is_a_statement(store: PostgresStore, business: asyncpg.Connection) -> None:
    writing = [
        statement("WITH n AS (INSERT INTO public.business VALUES ('x') RETURNING row) SELECT * FROM n", slot="with"),
        statement("MERGE INTO public.business b USING (SELECT 'x' AS row) n ON b.row = n.row "
                  "WHEN MATCHED THEN UPDATE SET row = 'y'", slot="merge"),
        statement("/* why */ DELETE FROM public.business WHERE row = 'y' RETURNING row -- done", slot="delete"),
        statement("INSERT INTO public.business VALUES ('z') ON CONFLICT (row) DO NOTHING;", slot="insert"),
    ]  # fmt: skip
    assert await store.run(applying(with_statements(await running(store), *writing))) == [True]
    assert [row[0] for row in await business.fetch("SELECT row FROM public.business")] == ["z"]


async def test_what_is_no_such_statement_is_refused_and_the_commit_with_it(
    store: PostgresStore, business: asyncpg.Connection
) -> None:
    one = await running(store)
    before = statement("INSERT INTO public.business VALUES ('before')", slot="before")
    for sql, says in NO_STATEMENTS.items():
        with pytest.raises(StatementFailed, match=says) as failed:
            await store.run(applying(with_statements(one, before, statement(sql, slot="last"))))
        assert failed.value.slot == "last", sql
        await nothing_came_of_it(store, one, business)
    # The claim may still commit, and the connection is as good as before.
    assert await store.run(applying(with_statements(one, before))) == [True]


async def test_a_text_that_the_protocol_would_cut_off_is_refused(
    store: PostgresStore, business: asyncpg.Connection
) -> None:
    one = await running(store)
    for body in (rb'{"sql": "SELECT 1 \u0000, nonsense"}', rb'{"sql": "SELECT $1", "parameters": ["\u0000"]}'):
        with pytest.raises(StatementFailed, match="NUL"):
            await store.run(applying(with_statements(one, Statement("id", "slot", Content(body, "sha256:x")))))
    await nothing_came_of_it(store, one, business)


async def test_a_payload_that_says_no_statement_is_a_wrong_call(
    store: PostgresStore, business: asyncpg.Connection
) -> None:
    one = await running(store)
    made = with_statements(one, Statement("id", "slot", encode({"sql": 1})))
    with pytest.raises(InvalidRequest, match="slot"):
        await store.run(applying(made))
    await nothing_came_of_it(store, one, business)


async def test_a_statement_that_touches_fenceposts_tables_is_refused(
    store: PostgresStore, business: asyncpg.Connection
) -> None:
    one = await running(store)
    for sql in TOUCHING:
        with pytest.raises(StatementFailed, match="touches fencepost's own tables: "):
            await store.run(applying(with_statements(one, statement(sql))))
            raise AssertionError(f"let: {sql}")
        await nothing_came_of_it(store, one, business)
    assert await business.fetchval("SELECT max(priority) FROM fencepost.task") == 0


async def test_where_the_server_does_not_count_no_statement_is_executed(
    store: PostgresStore, business: asyncpg.Connection
) -> None:
    await business.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_counts = off', current_database()); END $$"
    )
    one = await running(store)
    with pytest.raises(StatementFailed, match="track_counts"):
        await store.run(applying(with_statements(one, statement("SELECT 1"))))
    await nothing_came_of_it(store, one, business)


async def test_a_check_that_waits_for_the_end_of_the_transaction_is_the_statements_own(
    store: PostgresStore, business: asyncpg.Connection
) -> None:
    one = await running(store)
    made = with_statements(one, statement("INSERT INTO public.later VALUES (1), (1)", slot="twice"))
    with pytest.raises(StatementFailed, match="once") as failed:
        await store.run(applying(made))
    assert failed.value.slot == "twice"
    await nothing_came_of_it(store, one, business)


async def test_whatever_has_ended_the_transaction_is_noticed(
    store: PostgresStore, business: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(con: Any, sql: str, parameters: Any) -> None:
        await con.execute("COMMIT; BEGIN")

    one = await running(store)
    monkeypatch.setattr(postgres_statements, "_one", ends)
    with pytest.raises(StatementFailed, match="ended the transaction"):
        await store.run(applying(with_statements(one, statement("SELECT 1"))))


async def test_a_lost_swap_executes_nothing(store: PostgresStore, business: asyncpg.Connection) -> None:
    one = await running(store)
    late = with_statements(one, statement("INSERT INTO public.business VALUES ('late')"))
    late.epoch = 9
    assert await store.run(applying(late)) == [False]
    await nothing_came_of_it(store, one, business)


async def test_a_statement_that_takes_too_long_is_given_up(opened: Open, business: asyncpg.Connection) -> None:
    store = await opened(statement_timeout=0.3)
    one = await running(store)
    async with asyncio.timeout(10):
        with pytest.raises(StatementFailed, match="statement timeout"):
            await store.run(applying(with_statements(one, statement("SELECT pg_sleep(60)"))))
    await nothing_came_of_it(store, one, business)


async def test_settings_that_a_statement_leaves_behind_reach_no_other(
    opened: Open, business: asyncpg.Connection
) -> None:
    store = await opened()
    first, second = await running(store, "a"), await running(store, "b")
    leaves = "SELECT set_config('search_path', 'nowhere', false), pg_advisory_lock(77)"
    assert await store.run(applying(with_statements(first, statement(leaves)))) == [True]
    assert await store.run(applying(with_statements(second, statement("INSERT INTO business VALUES ('x')")))) == [True]
    assert await business.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77") == 0


async def test_through_a_pooler_a_statement_is_as_safe(
    database: str, business: asyncpg.Connection, store: PostgresStore
) -> None:
    try:
        url = bouncing().url(database)
    except Missing as error:
        pytest.skip(str(error))
    pooled = await PostgresStore.open(url, clock=MOVABLE_CLOCK)
    try:
        one = await running(pooled)
        for sql in ("COMMIT", "SELECT 1; COMMIT", "SELECT 1 / 0", TOUCHING[0], TOUCHING[4]):
            for _ in range(4):  # one after the other on whichever server connection there is
                with pytest.raises(StatementFailed):
                    await pooled.run(applying(with_statements(one, statement(sql))))
        await nothing_came_of_it(store, one, business)
        made = with_statements(one, statement("INSERT INTO public.business VALUES ($1)", "paid"))
        assert await pooled.run(applying(made)) == [True]
        assert await business.fetchval("SELECT row FROM public.business") == "paid"
    finally:
        await pooled.close()


# inside a caller's own transaction ----------------------------------------------------------------


async def on(store: PostgresStore, connection: Any, made: WriteSet) -> None:
    await store.run_on(connection, applying(made))


async def test_through_a_callers_connection_it_stands_once_the_caller_commits(
    store: PostgresStore, business: asyncpg.Connection, join: Join
) -> None:
    one = await running(store)
    caller = await join()
    await caller.begin()
    await on(store, caller.con, with_statements(one, statement("INSERT INTO public.business VALUES ($1)", "paid")))
    assert await business.fetchval("SELECT count(*) FROM public.business") == 0
    await caller.do("COMMIT")
    assert await business.fetchval("SELECT row FROM public.business") == "paid"


async def test_through_a_callers_connection_a_refused_one_leaves_the_transaction_as_it_was(
    store: PostgresStore, business: asyncpg.Connection, join: Join
) -> None:
    one = await running(store)
    caller = await join()
    await caller.begin()
    await caller.write("mine")
    for sql in ("COMMIT", "SELECT 1; COMMIT", "SELECT 1 / 0", TOUCHING[0], "SELECT * FROM fencepost.pool"):
        with pytest.raises(StatementFailed):  # each also finds what the one before has left on the connection
            await on(store, caller.con, with_statements(one, statement(sql)))
            raise AssertionError(f"let: {sql}")
    await on(store, caller.con, with_statements(one, statement("INSERT INTO public.business VALUES ('paid')")))
    await caller.do("COMMIT")
    assert {row[0] for row in await business.fetch("SELECT row FROM public.business")} == {"mine", "paid"}
    assert await business.fetchval("SELECT max(priority) FROM fencepost.task") == 0


async def test_what_the_caller_did_to_the_tables_before_hides_nothing(
    store: PostgresStore, business: asyncpg.Connection, join: Join
) -> None:
    one, other = await running(store, "a"), await running(store, "b")
    caller = await join()
    await caller.begin()
    await on(store, caller.con, with_statements(other, statement("INSERT INTO public.business VALUES ('paid')")))
    for sql in ("UPDATE fencepost.task SET priority = 7 WHERE task_id = 'a'", "SELECT count(*) FROM fencepost.task"):
        with pytest.raises(StatementFailed, match="task"):
            await on(store, caller.con, with_statements(one, statement(sql)))
    await caller.do("COMMIT")
    found = await store.run(loading(tasks=["a", "b"]))
    assert (found.tasks["a"], found.tasks["b"].state) == (one, State.COMMITTED)
