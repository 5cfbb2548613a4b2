"""`doctor`, `migrate`, `prune` and `audit`, on databases that are well and on some that are not."""

from __future__ import annotations

import sys
from pathlib import Path

import apsw
import pytest

from fencepost import clock, connect
from fencepost.cli import checkup
from tests.cli.running import Folder


def change(folder: Folder, sql: str) -> None:
    """Behind the API's back."""
    con = apsw.Connection(str(folder.path / "fencepost.db"))
    try:
        con.execute(sql)
    finally:
        con.close()


async def commit_one(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    async with await connect(folder.url) as client:
        claims = await client.claim_next(owner="worker-a")
        assert isinstance(claims, list)
        await client.commit(claims[0], {"words": 3})


async def test_audit_finds_a_row_that_was_changed_around_the_api(folder: Folder) -> None:
    await commit_one(folder)
    assert "clean" in folder.ok("audit")
    change(folder, "UPDATE task SET state_version = state_version + 1")
    found = folder.json("audit", code=1)
    assert found["clean"] is False
    assert {violation["task_id"] for violation in found["violations"]} == {"a"}
    assert f"{found['violation_count']} violations" in folder.run("audit")
    assert folder.code == 1


async def test_pruning_removes_bodies_and_keeps_what_a_late_caller_could_hit(folder: Folder) -> None:
    await commit_one(folder)
    assert sum(folder.json("prune")["removed"].values()) == 0, "retention is 30 days"
    assert sum(folder.json("prune", "--older-than", "0")["removed"].values()) > 0
    found = folder.json("result", "a")
    assert (found["pruned"], found["value"]) == (True, None)
    assert "its body was pruned" in folder.ok("result", "a") + folder.err
    folder.run("submit", "--input", "2", "--task-id", "a")
    assert folder.code == 1
    assert folder.json("audit")["clean"] is True


def test_migrate_leaves_a_current_schema_alone(folder: Folder) -> None:
    folder.ok("submit", "--input", "1")
    assert folder.ok("migrate") == "nothing to do: the schema is this release's\n"
    assert folder.ok("migrate", "up", "--dry-run") == "nothing to do: the schema is this release's\n"
    assert "0001" in folder.ok("migrate", "status")


def test_migrate_refuses_what_is_no_database_of_ours(folder: Folder) -> None:
    con = apsw.Connection(str(folder.path / "fencepost.db"))
    con.execute("CREATE TABLE theirs (x)")
    con.close()
    for arguments in (("migrate",), ("migrate", "status"), ("tasks",)):
        folder.run(*arguments)
        assert (folder.code, "is no fencepost database" in folder.err) == (3, True), arguments
    folder.run("migrate", "--store", "memory://")
    assert folder.code == 2


def verdicts(folder: Folder, code: int) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in folder.json("doctor", code=code)["checks"]}


def test_doctor_finds_a_healthy_store_healthy_and_writes_nothing(folder: Folder) -> None:
    folder.ok("submit", "--input", "1")
    before = folder.json("watch", "--once")
    found = verdicts(folder, 0)
    assert found.keys() >= set("python sqlite disk schema store integrity durability clock epoch".split())  # noqa: SIM905
    assert "fail" not in found.values()
    assert folder.json("watch", "--once") == before
    assert folder.ok("doctor").splitlines()[0].startswith("ok   python")


def test_doctor_fails_on_a_newer_schema(folder: Folder) -> None:
    folder.ok("submit", "--input", "1")
    change(folder, "INSERT INTO migration (version, name, step, applied_at) VALUES (9, 'later', 'post', 1)")
    found = verdicts(folder, 1)
    assert found["store"] == "fail"
    assert "newer than this release" in folder.run("doctor")


def test_doctor_fails_on_a_damaged_file(folder: Folder) -> None:
    folder.write("fencepost.db", "SQLite format 3\x00" + "x" * 5000)
    found = verdicts(folder, 1)
    assert found["schema"] == "fail"
    assert found["store"] == "fail"


def test_doctor_warns_of_a_clock_that_was_set_back(folder: Folder) -> None:
    folder.ok("submit", "--input", "1")
    change(folder, f"UPDATE clock SET at = {clock.wall_us() + 3_600_000_000}")
    assert verdicts(folder, 0)["clock"] == "warn"
    assert "60 min behind the newest time stored" in folder.ok("doctor")


async def test_the_checks_fail_and_warn_where_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.45.1")
    found, code = await checkup.examine(f"sqlite:///{tmp_path / 'none.db'}")
    assert [(check.name, check.verdict) for check in found] == [
        ("python", "fail"),
        ("sqlite", "fail"),
        ("database", "fail"),
    ]
    assert code == 3


@pytest.mark.parametrize(("version", "verdict"), [("3.51.2", "fail"), ("3.51.3", "ok"), ("3.54.1", "ok")])
def test_releases_of_sqlite_that_corrupt_a_shared_wal_fail(
    monkeypatch: pytest.MonkeyPatch, version: str, verdict: str
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: version)
    assert checkup._sqlite().verdict == verdict


@pytest.mark.parametrize(("name", "verdict"), [("nfs4", "fail"), ("tmpfs", "warn"), ("ext4", "ok"), (None, "warn")])
def test_a_file_system_that_is_shared_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, verdict: str
) -> None:
    from fencepost.stores import sqlite_file

    monkeypatch.setattr(sqlite_file, "file_system_of", lambda path: name)
    assert checkup._file_system(tmp_path / "x.db").verdict == verdict
