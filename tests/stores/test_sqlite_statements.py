"""A statement that comes with a commit: done in its transaction, on rows of its author's tables, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost.errors import InvalidRequest, StatementFailed
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, Statement
from fencepost.stores import sqlite_statements
from fencepost.stores.sqlite import SQLiteStore
from fencepost.stores.sqlite_transaction import DROP_CHECKPOINT
from tests.stores.building import applying, effect, insert, loading, statement, task, with_effects

TABLES = """
CREATE TABLE account (name TEXT PRIMARY KEY, cents INTEGER NOT NULL CHECK (cents >= 0));
INSERT INTO account VALUES ('x', 100);
CREATE TABLE line (id INTEGER PRIMARY KEY AUTOINCREMENT, text, number, flag, empty);
CREATE VIEW poor AS SELECT * FROM account WHERE cents < 10;
CREATE VIEW spying AS SELECT * FROM task;
CREATE TABLE innocent (x);
CREATE TRIGGER reaching AFTER INSERT ON innocent BEGIN DELETE FROM task; END;
CREATE TABLE fair (x);
CREATE TRIGGER booking AFTER INSERT ON fair BEGIN INSERT INTO line (text) VALUES (new.x); END;
"""
Ask = Callable[[str], list[Any]]


@pytest.fixture
def ask(store: SQLiteStore, path: Path) -> Any:
    """The author's own connection to the file."""
    con = apsw.Connection(str(path))
    con.set_busy_timeout(5000)
    con.execute(TABLES)
    yield lambda sql: con.execute(sql).fetchall()
    con.close()


async def _with(store: SQLiteStore, *statements: Statement) -> list[bool]:
    """A set of one task with its effect, and these."""
    if await store.history("a") is None:
        await store.run(applying(insert(task("a"))))
    made = with_effects(task("a"), effect("a"), payloads={1: encode(1)})
    made.statements.extend(statements)
    return await store.run(applying(made))  # type: ignore[no-any-return]


async def _nothing_was_written(store: SQLiteStore) -> None:
    found = await store.run(loading(tasks=["a"], effects=["a"], payloads=[("a", 1)]))
    assert found.tasks == {"a": task("a")} and found.effects == {"a": []} and found.payloads == {}
    assert len(await store.events(0, 10)) == 1


async def test_it_is_done_in_the_transaction_of_its_set(store: SQLiteStore, ask: Ask) -> None:
    done = await _with(
        store,
        statement("UPDATE account SET cents = cents - ? WHERE name = ?", 40, "x"),
        statement("INSERT INTO line (text, number, flag, empty) VALUES (?, ?, ?, ?)", "ü", 1.5, True, None),
        statement("INSERT INTO fair SELECT value FROM json_each(?) RETURNING x", '["one", "two"]'),
    )
    assert done == [True]
    assert ask("SELECT cents FROM account") == [(60,)]
    assert ask("SELECT text, number, flag, empty FROM line WHERE id = 1") == [("ü", 1.5, 1, None)]
    assert ask("SELECT text FROM line WHERE id > 1") == [("one",), ("two",)]
    assert (await store.run(loading(effects=["a"]))).effects == {"a": [effect("a")]}


async def test_a_set_that_loses_its_swap_takes_its_statement_along(store: SQLiteStore, ask: Ask) -> None:
    await store.run(applying(insert(task("a"))))
    made = with_effects(task("a", state_version=7), effect("a"))
    made.statements.append(statement("UPDATE account SET cents = 0"))
    assert await store.run(applying(made)) == [False]
    assert ask("SELECT cents FROM account") == [(100,)]


async def test_a_later_one_that_fails_takes_the_earlier_ones_along(store: SQLiteStore, ask: Ask) -> None:
    with pytest.raises(StatementFailed, match="CHECK constraint failed") as failed:
        await _with(
            store,
            statement("INSERT INTO line (text) VALUES ('first')"),
            statement("UPDATE account SET cents = -1", slot="pay"),
        )
    assert failed.value.slot == "pay" and failed.value.code == "STATEMENT_FAILED"
    assert ask("SELECT count(*) FROM line") == [(0,)]
    await _nothing_was_written(store)


@pytest.mark.parametrize("resolution", ["ROLLBACK", "FAIL", "ABORT"])
async def test_one_that_rolls_back_by_itself_takes_everything_along(
    store: SQLiteStore, ask: Ask, resolution: str
) -> None:
    with pytest.raises(StatementFailed, match="UNIQUE constraint failed"):
        await _with(store, statement(f"INSERT OR {resolution} INTO account VALUES ('y', 1), ('x', 1)"))
    assert ask("SELECT name FROM account") == [("x",)]
    await _nothing_was_written(store)


OWN = sorted(sqlite_statements.OWN_TABLES)


def test_the_tables_that_no_statement_may_touch_are_those_of_the_schema(store: SQLiteStore, path: Path) -> None:
    con = apsw.Connection(str(path))
    there = [str(row[0]) for row in con.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()]
    con.close()
    assert sorted(there) == OWN


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM {}",
        "DELETE FROM main.{}",
        "INSERT INTO {} DEFAULT VALUES",
        "INSERT INTO line (number) SELECT count(*) FROM {}",
        'WITH mine AS (SELECT 1 FROM "{}") SELECT * FROM mine',
    ],
)
async def test_fencepost_s_own_tables_are_out_of_its_reach(store: SQLiteStore, ask: Ask, sql: str) -> None:
    for table in OWN:
        before = ask(f"SELECT count(*) FROM {table}")
        for spelling in (table, table.upper()):
            with pytest.raises(StatementFailed, match=r"prohibited|not authorized"):
                await _with(store, statement(sql.format(spelling)))
        assert ask(f"SELECT count(*) FROM {table}") >= before
    await _nothing_was_written(store)


REFUSED = {
    "reaches rows that are not its author's": [
        "UPDATE task SET owner_id = 'me'",
        "UPDATE account SET cents = (SELECT count(*) FROM task)",
        "DELETE FROM account WHERE name IN (SELECT task_id FROM task)",
        "INSERT INTO account VALUES ('y', 1) ON CONFLICT DO UPDATE SET cents = (SELECT max(number) FROM event)",
        "SELECT * FROM spying",
        "INSERT INTO innocent VALUES (1)",
        "DELETE FROM sqlite_schema",
        "SELECT sql FROM sqlite_master",
        "UPDATE sqlite_sequence SET seq = 0",
    ],
    "ends or begins a transaction": [
        "BEGIN",
        "COMMIT",
        "END",
        "ROLLBACK",
        "SAVEPOINT mine",
        "RELEASE mine",
        "DELETE FROM account; COMMIT",
    ],
    "changes a setting": [
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "PRAGMA synchronous = OFF",
        "PRAGMA user_version",
        "SELECT * FROM pragma_table_info('task')",
        "SELECT * FROM pragma_wal_checkpoint",
        "VACUUM",
        "VACUUM INTO 'elsewhere.db'",
        "SELECT load_extension('x')",
    ],
    "changes the schema": [
        "CREATE TABLE mine (x)",
        "CREATE TEMP TABLE mine (x)",
        "CREATE TRIGGER later AFTER INSERT ON task BEGIN DELETE FROM account; END",
        "CREATE TEMP TRIGGER later AFTER INSERT ON task BEGIN DELETE FROM account; END",
        "CREATE INDEX mine ON account (cents)",
        "CREATE VIEW mine AS SELECT 1",
        "CREATE VIRTUAL TABLE mine USING fts5(x)",
        "DROP TABLE account",
        "DROP TABLE task",
        "ALTER TABLE account RENAME TO task2",
        "ALTER TABLE task RENAME TO task2",
        "ANALYZE",
        "REINDEX",
    ],
    "is not one statement": [
        "DELETE FROM account; DELETE FROM line",
        "no sql at all",
        "DELETE FROM account WHERE name = ?",
    ],
}


@pytest.mark.parametrize("what", REFUSED)
async def test_one_is_refused_that(store: SQLiteStore, ask: Ask, what: str) -> None:
    schema = ask("SELECT name, sql FROM sqlite_schema ORDER BY name")
    settings = "SELECT (SELECT synchronous FROM pragma_synchronous), (SELECT count(*) FROM pragma_database_list)"
    for sql in REFUSED[what]:
        with pytest.raises(StatementFailed):
            await _with(store, statement(sql))
        await _nothing_was_written(store)
    assert ask("SELECT name, sql FROM sqlite_schema ORDER BY name") == schema
    assert ask("SELECT * FROM account") == [("x", 100)]
    left = await store._on(store._writer, lambda con: con.execute(settings).fetchall())
    assert left == [(2, 1)]  # the connection is as it was
    assert await _with(store) == [True]


async def test_one_that_fencepost_executes_itself_is_refused_all_the_same(store: SQLiteStore, ask: Ask) -> None:
    """SQLite keeps what it has prepared, and asks nobody about it again."""
    made = insert(task("b"))
    made.drop_checkpoints.append("b")
    await store.run(applying(made))
    with pytest.raises(StatementFailed, match=r"prohibited|not authorized"):
        await _with(store, statement(DROP_CHECKPOINT, "b"))


async def test_one_that_does_not_end_is_stopped(store: SQLiteStore, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_statements, "LONGEST", 0.05)
    endless = (
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) INSERT INTO line (number) SELECT x FROM n"
    )
    with pytest.raises(StatementFailed, match=r"stopped after 0\.05 seconds"):
        await _with(store, statement(endless))
    await _nothing_was_written(store)


@pytest.mark.parametrize(
    "payload",
    [
        encode(b"SELECT 1"),
        encode("SELECT 1"),
        encode({"parameters": []}),
        encode({"sql": "SELECT 1", "parameters": [[1]]}),
        encode({"sql": "SELECT ?", "parameters": {"x": 1}}),
        encode({"sql": "SELECT 1", "params": []}),
    ],
)
async def test_a_payload_that_is_no_statement_is_a_wrong_call(store: SQLiteStore, payload: Content) -> None:
    with pytest.raises(InvalidRequest, match="'pay'"):
        await _with(store, Statement("id", "pay", payload))
    await _nothing_was_written(store)
