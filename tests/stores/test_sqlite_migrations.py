"""The schema is made by migrations alone; what does not fit this release is refused, and migrate brings it there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from fencepost.errors import StoreRefused, Unavailable
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Task
from fencepost.stores import codec
from fencepost.stores.schema import Migration, newest
from fencepost.stores.sqlite import migrate, migration_status
from fencepost.stores.sqlite_migrations import shipped
from tests.cli.running import Folder
from tests.stores.building import applying, event, insert, loading, replace, task
from tests.stores.conftest import Open

OURS = newest(shipped())
FIRST = tuple(m for m in shipped() if m.version == 1)
SECOND = (  # this release's next, whatever its number
    *shipped(),
    Migration(
        OURS + 1, "pre", "add_note", "ALTER TABLE task ADD COLUMN note TEXT;\nCREATE INDEX task_note ON task (note);"
    ),
    Migration(OURS + 1, "post", "drop_log_index", "DROP INDEX log_task;"),
)
THIRD = (
    *SECOND,
    Migration(OURS + 2, "pre", "more", "CREATE TABLE more (at INTEGER) STRICT; INSERT INTO more VALUES (:now);"),
)
BROKEN = (*shipped(), Migration(OURS + 1, "pre", "broken", "CREATE TABLE half (x INTEGER) STRICT; SELECT nonsense;"))


def _schema(path: Path) -> list[tuple[str, str]]:
    con = apsw.Connection(str(path))
    try:
        return con.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()  # type: ignore[return-value]
    finally:
        con.close()


def test_shipped_migrations_are_numbered_without_gaps() -> None:
    assert sorted({m.version for m in shipped()}) == list(range(1, 1 + max(m.version for m in shipped())))
    assert all(m.sql.strip() for m in shipped())


async def test_a_new_file_has_every_step_applied(opened: Open, path: Path) -> None:
    await opened(shipped=THIRD)
    steps = await migration_status(path, shipped=THIRD)
    assert [(s.version, s.step, s.name) for s in steps] == [(m.version, m.step, m.name) for m in THIRD]
    assert all(s.applied_at is not None for s in steps)


async def test_an_older_schema_is_refused_until_it_is_migrated(opened: Open, path: Path) -> None:
    store = await opened()
    await store.run(applying(insert(task("a"))))
    await store.close()
    with pytest.raises(
        StoreRefused, match=f"schema {OURS}, older than this release's {OURS + 1}; run `fencepost migrate`"
    ):
        await opened(shipped=SECOND)
    done = await migrate(path, shipped=SECOND)
    assert [(m.version, m.step) for m in done] == [(OURS + 1, "pre"), (OURS + 1, "post")]
    assert await migrate(path, shipped=SECOND) == []
    again = await opened(shipped=SECOND)
    assert await again.history("a") is not None


def _write_as_the_first_release(path: Path, *tasks: Task) -> None:
    """With the columns that the first schema had; this release's statements do not fit it."""
    con = apsw.Connection(str(path))
    try:
        for table, rows in {
            "task": [dict(zip(codec.TASK_COLUMNS, codec.task_row(one), strict=True)) for one in tasks],
            "input": [
                dict(zip(codec.INPUT_COLUMNS, codec.input_row(one.task_id, 1, encode({"n": 1})), strict=True))
                for one in tasks
            ],
            "event": [
                dict(zip(("number", *codec.EVENT_COLUMNS), codec.event_row(n, event(one)), strict=True))
                for n, one in enumerate(tasks, 1)
            ],
        }.items():
            columns = [row[1] for row in con.execute(f"PRAGMA table_info({table})").fetchall()]
            for row in rows:
                con.execute(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
                    tuple(row[str(name)] for name in columns),
                )
        con.execute("UPDATE clock SET number = ?", (len(tasks),))
    finally:
        con.close()


async def test_a_store_of_the_first_schema_is_carried_over_with_its_tasks(opened: Open, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    path = tmp_path / "fencepost.db"
    await (await opened(path, shipped=FIRST)).close()
    before = [task("a", owner_id="w", claim_generation=3), task("b", trace_context="tc", pruned_to_version=0)]
    _write_as_the_first_release(path, *before)
    with pytest.raises(StoreRefused, match="schema 1, older than"):
        await opened(path)
    done = await asyncio.to_thread(folder.ok, "migrate")
    assert "0002" in done and "effects" in done
    store = await opened(path)
    assert (await store.run(loading(tasks=["a", "b"]))).tasks == {one.task_id: one for one in before}
    assert [one.effects for one in before] == [0, 0]
    history = await store.history("a")
    assert history is not None and len(history.events) == 1 and history.input is not None
    assert history.effects == [] and history.payload_digests == {}
    after = task("a", owner_id="w", claim_generation=3, state_version=2, effects=1)
    assert await store.run(applying(replace(before[0], after, "effect"))) == [True]
    assert (await store.run(loading(tasks=["a"]))).tasks == {"a": after}


async def test_migrated_and_new_files_have_the_same_schema(opened: Open, path: Path, tmp_path: Path) -> None:
    await (await opened(shipped=FIRST)).close()
    await migrate(path, shipped=THIRD)
    fresh = tmp_path / "fresh.db"
    await (await opened(fresh, shipped=THIRD)).close()
    assert _schema(path) == _schema(fresh)


async def test_a_dry_run_says_the_sql_and_changes_nothing(opened: Open, path: Path) -> None:
    await (await opened()).close()
    before = _schema(path)
    would = await migrate(path, dry_run=True, shipped=SECOND)
    assert [m.sql for m in would] == [m.sql for m in SECOND[len(shipped()) :]]
    assert _schema(path) == before
    steps = await migration_status(path, shipped=SECOND)
    assert [(s.version, s.step, s.applied_at is not None) for s in steps] == [
        *((m.version, m.step, True) for m in shipped()),
        (OURS + 1, "pre", False),
        (OURS + 1, "post", False),
    ]


async def test_this_release_works_while_the_next_one_is_being_prepared_and_not_after(opened: Open, path: Path) -> None:
    await (await opened()).close()
    await migrate(path, shipped=[m for m in SECOND if m.step == "pre"])
    store = await opened()  # knows nothing of the next version
    await store.run(applying(insert(task("a"))))
    await store.close()
    await (await opened(shipped=SECOND)).close()  # its own post step may still be to come
    await migrate(path, shipped=SECOND)
    with pytest.raises(StoreRefused, match=f"schema {OURS + 1}, newer than this release's {OURS}"):
        await opened()


async def test_a_version_must_be_finished_before_the_next_one_begins(opened: Open, path: Path) -> None:
    await (await opened()).close()
    await migrate(path, shipped=[m for m in THIRD if m.step == "pre"])
    with pytest.raises(StoreRefused, match="run `fencepost migrate`"):
        await opened(shipped=THIRD)


async def test_a_step_that_fails_changes_nothing(opened: Open, path: Path) -> None:
    await (await opened()).close()
    before = _schema(path)
    with pytest.raises(Unavailable, match="no such column: nonsense"):
        await migrate(path, shipped=BROKEN)
    assert _schema(path) == before
    assert await (await opened()).pools()


async def test_two_that_migrate_at_once_apply_each_step_once(opened: Open, path: Path) -> None:
    await (await opened()).close()
    both = await asyncio.gather(migrate(path, shipped=THIRD), migrate(path, shipped=THIRD))
    done = sorted((m.version, m.step) for part in both for m in part)
    assert done == [(OURS + 1, "post"), (OURS + 1, "pre"), (OURS + 2, "pre")]


async def test_migrating_refuses_what_is_no_store(path: Path) -> None:
    with pytest.raises(StoreRefused, match="there is no database"):
        await migrate(path)
    path.write_text("text, and not a database of any kind")
    with pytest.raises(StoreRefused, match="no fencepost database"):
        await migration_status(path)


async def test_a_step_known_to_a_newer_release_only_is_listed(opened: Open, path: Path) -> None:
    await (await opened(shipped=SECOND)).close()
    steps = await migration_status(path)
    assert [(s.version, s.step, s.name) for s in steps][-1] == (OURS + 1, "post", "drop_log_index")


async def test_doctor_sees_versions_sizes_and_integrity(opened: Open) -> None:
    store = await opened()
    await store.run(applying(insert(task("a"))))
    seen = await store.diagnose()
    assert seen["quick_check"] == "ok" and seen["journal_mode"] == "wal" and seen["synchronous"] == 2
    assert seen["schema"] == seen["newest_schema"] == OURS and seen["pending"] == []
    assert seen["pages"] > 10 and seen["wal_bytes"] > 0 and seen["path"] == store.path
    assert seen["sqlite"].split(".") >= ["3", "51"] and seen["file_system"]
