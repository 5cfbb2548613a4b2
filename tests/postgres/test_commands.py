"""Every command on a PostgreSQL store, with a password in the URL that nothing may print."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Folder
from tests.postgres.server import Server

PASSWORD = "geh%65im"  # the server asks for none, and takes any
SPELT = ("geheim", PASSWORD)


class Remote(Folder):
    """Commands on one database; fails where a password is printed."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path)
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(FENCEPOST_STORE=self._url, **more)

    def run(self, *arguments: str, **more: Any) -> str:
        out = super().run(*arguments, **more)
        for word in SPELT:
            assert word not in out and word not in self.err, arguments
        return out


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def remote(server: Server, tmp_path: Path) -> Iterator[Remote]:
    """An empty database."""
    name = asyncio.run(server.new_database())
    yield Remote(tmp_path, server.url(name).replace("tester@", f"tester:{PASSWORD}@"))
    asyncio.run(server.drop_database(name))


def test_a_task_from_submit_to_audit(remote: Remote) -> None:
    remote.ok("submit", "--kind", "count", "--task-id", "t1", "--input", '"five words are in here"')
    remote.write("tasks.jsonl", "".join(f'{{"task_id": "m{n}", "input": {n}}}\n' for n in range(5)))
    remote.ok("submit", "tasks.jsonl")
    script = "import os, sys; sys.stdin.read(); print(os.environ['FENCEPOST_STORE'])"
    remote.ok("work", "--until-idle", "--result", "text", "--concurrency", "3", "--", sys.executable, "-c", script)
    told = remote.json("result", "t1")["value"]
    assert told.strip() == remote.url.replace(f":{PASSWORD}", "")
    assert {item["state"] for item in remote.json("tasks")["items"]} == {"COMMITTED"}
    assert remote.json("show", "t1")["task"]["state"] == "COMMITTED"
    assert "COMMITTED" in remote.ok("show", "t1")
    assert "6" in remote.ok("status")
    assert remote.json("audit")["clean"] is True


def test_what_people_do_to_tasks_and_pools(remote: Remote) -> None:
    remote.ok("submit", "--task-id", "t1", "--input", "1")
    remote.ok("cancel", "t1")
    remote.ok("reopen", "t1")
    remote.ok("revise", "t1", "--input", "2")
    remote.ok("pool", "create", "night")
    remote.ok("pool", "close-intake", "night")
    remote.ok("pool", "raise-epoch", "default", "--yes")
    pools = {pool["name"]: pool for pool in remote.json("pool", "list")["items"]}
    assert (pools["default"]["epoch"], pools["night"]["intake"]) == (2, "CLOSED")
    assert remote.json("prune", "--older-than", "0")["removed"]["tasks"] == 0
    assert remote.json("audit")["clean"] is True


def test_migrate_makes_a_schema_only_where_it_is_asked_to(remote: Remote) -> None:
    remote.run("migrate")
    assert (remote.code, "holds no fencepost schema" in remote.err) == (3, True)
    assert "CREATE TABLE fencepost.task" in remote.ok("migrate", "--dry-run")
    assert remote.json("migrate", "status")["pending"] > 0
    assert remote.json("migrate", "up", "--create")["applied"]
    assert remote.json("migrate", "status")["pending"] == 0
    assert "nothing to do" in remote.ok("migrate", "--create")


def test_roles_are_printed_without_a_server_and_for_postgresql_only(folder: Folder) -> None:
    out = folder.ok("migrate", "--roles", "--store", "postgresql://nobody.invalid/none")
    assert out.startswith("-- Run this") and out.rstrip().endswith("COMMIT;")
    assert "CREATE POLICY" in folder.json("migrate", "--roles", "--store", "postgresql://nobody.invalid/none")["sql"]
    folder.run("migrate", "--roles")
    assert (folder.code, "PostgreSQL" in folder.err) == (2, True)


def test_doctor_looks_at_the_server_the_schema_the_role_the_pooler_and_the_clock(remote: Remote) -> None:
    remote.run("doctor")
    assert remote.code != 0
    remote.ok("migrate", "--create")
    checks = {check["name"]: check for check in remote.json("doctor")["checks"]}
    looked_at = ("server", "schema", "role", "pooler", "clock", "durability", "statements")
    assert [checks[name]["verdict"] for name in looked_at] == ["ok"] * len(looked_at)
    assert "owns the schema" in checks["role"]["says"]
    claimed = remote.json("doctor", "--store", remote.url + "?pgbouncer=true")["checks"]
    assert [check["verdict"] for check in claimed if check["name"] == "pooler"] == ["warn"]


def test_doctor_warns_where_the_server_does_not_count_so_that_commits_with_statements_are_refused(
    server: Server, remote: Remote
) -> None:
    remote.ok("migrate", "--create")
    database = remote.url.rpartition("/")[2]
    asyncio.run(server.administer(f'ALTER DATABASE "{database}" SET track_counts = off'))
    [found] = [check for check in remote.json("doctor")["checks"] if check["name"] == "statements"]
    assert (found["verdict"], "commits that bring statements are refused" in found["says"]) == ("warn", True)
    assert "track_counts is off" in remote.ok("doctor")


@pytest.mark.parametrize("change", [("test_", "no_such_"), ("postgresql://", "postgresql://no_")])
def test_a_failure_says_why_and_prints_no_password(remote: Remote, change: tuple[str, str]) -> None:
    url = remote.url.replace(*change)
    for command in (("status",), ("migrate", "status"), ("submit", "--input", "1")):
        remote.run(*command, "--store", url)
        assert (remote.code, "does not exist" in remote.err) == (3, True)
    assert "does not exist" in remote.run("doctor", "--store", url)
    assert remote.code in (1, 3)


@pytest.mark.parametrize("setting", ["pool_size=0", "pool_size=x", "statement_timeout=-1"])
def test_a_wrong_setting_is_a_wrong_call(remote: Remote, setting: str) -> None:
    remote.run("status", "--store", f"{remote.url}?{setting}")
    assert remote.code == 2
    assert setting.partition("=")[0] in remote.err


def test_json_of_a_failure_has_no_password_either(remote: Remote) -> None:
    out = remote.run("status", "--store", remote.url.replace("test_", "no_such_"), "--json")
    assert remote.code == 3
    assert "no_such_" in json.dumps([out, remote.err])
