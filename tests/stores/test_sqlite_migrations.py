"""The schema is made by migrations alone; what does not fit this release is refused, and migrate brings it there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from fencepost.errors import StoreRefused, Unavailable
from fencepost.stores.schema import Migration
from fencepost.stores.sqlite import migrate, migration_status
from fencepost.stores.sqlite_migrations import shipped
from tests.stores.building import applying, insert, task
from tests.stores.conftest import Open

SECOND = (
    *shipped(),
    Migration(2, "pre", "add_note", "ALTER TABLE task ADD COLUMN note TEXT;\nCREATE INDEX task_note ON task (note);"),
    Migration(2, "post", "drop_log_index", "DROP INDEX log_task;"),
)
THIRD = (*SECOND, Migration(3, "pre", "more", "CREATE TABLE more (at INTEGER) STRICT; INSERT INTO more VALUES (:now);"))
BROKEN = (*shipped(), Migration(2, "pre", "broken", "CREATE TABLE half (x INTEGER) STRICT; SELECT nonsense;"))


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
    with pytest.raises(StoreRefused, match="schema 1, older than this release's 2; run `fencepost migrate`"):
        await opened(shipped=SECOND)
    done = await migrate(path, shipped=SECOND)
    assert [(m.version, m.step) for m in done] == [(2, "pre"), (2, "post")]
    assert await migrate(path, shipped=SECOND) == []
    again = await opened(shipped=SECOND)
    assert await again.history("a") is not None


async def test_migrated_and_new_files_have_the_same_schema(opened: Open, path: Path, tmp_path: Path) -> None:
    await (await opened()).close()
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
        (1, "pre", True),
        (2, "pre", False),
        (2, "post", False),
    ]


async def test_this_release_works_while_the_next_one_is_being_prepared_and_not_after(opened: Open, path: Path) -> None:
    await (await opened()).close()
    await migrate(path, shipped=[m for m in SECOND if m.step == "pre"])
    store = await opened()  # knows nothing of version 2
    await store.run(applying(insert(task("a"))))
    await store.close()
    await (await opened(shipped=SECOND)).close()  # its own post step may still be to come
    await migrate(path, shipped=SECOND)
    with pytest.raises(StoreRefused, match="schema 2, newer than this release's 1"):
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
    assert done == [(2, "post"), (2, "pre"), (3, "pre")]


async def test_migrating_refuses_what_is_no_store(path: Path) -> None:
    with pytest.raises(StoreRefused, match="there is no database"):
        await migrate(path)
    path.write_text("text, and not a database of any kind")
    with pytest.raises(StoreRefused, match="no fencepost database"):
        await migration_status(path)


async def test_a_step_known_to_a_newer_release_only_is_listed(opened: Open, path: Path) -> None:
    await (await opened(shipped=SECOND)).close()
    steps = await migration_status(path)
    assert [(s.version, s.step, s.name) for s in steps][-1] == (2, "post", "drop_log_index")


async def test_doctor_sees_versions_sizes_and_integrity(opened: Open) -> None:
    store = await opened()
    await store.run(applying(insert(task("a"))))
    seen = await store.diagnose()
    assert seen["quick_check"] == "ok" and seen["journal_mode"] == "wal" and seen["synchronous"] == 2
    assert seen["schema"] == seen["newest_schema"] == 1 and seen["pending"] == []
    assert seen["pages"] > 10 and seen["wal_bytes"] > 0 and seen["path"] == store.path
    assert seen["sqlite"].split(".") >= ["3", "51"] and seen["file_system"]
