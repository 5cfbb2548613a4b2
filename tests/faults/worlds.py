"""The downstreams of the crash matrix: real servers on loopback, and how often each effect is in their world."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.effects.object_stores import boto, moto, seaweedfs, shared_bucket
from tests.effects.processes import HttpServer, MailServer
from tests.effects.repositories import MAIN, Daemon, Remote
from tests.faults.stage import Stage

# The windows are as short as the matrix asks for; nothing is waited for that they do not bound.
WINDOWS: dict[str, Any] = {"send_window": 0.5, "settle_time": 0.5}
SECRETS = {"TEST_ACCESS_KEY": "test", "TEST_SECRET_KEY": "testtest"}
AMAZON = {"access_key_env": "TEST_ACCESS_KEY", "secret_key_env": "TEST_SECRET_KEY", "region": "us-east-1"}
KEYED = {"guarantee": "IDEMPOTENT", "retention": 3600.0}


@dataclass(frozen=True)
class World:
    """One downstream. `table`, `payload`: of the task of that name; `count(stage, task, effect id)`: what is there."""

    name: str
    guarantee: str
    table: Callable[[str], dict[str, Any]]
    payload: Callable[[str], Any]
    count: Callable[[Stage, str, str], int]


@pytest.fixture(scope="module")
def every_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    with worlds(tmp_path_factory.mktemp("worlds")) as made:
        yield made


@contextlib.contextmanager
def worlds(folder: Path) -> Iterator[dict[str, World]]:
    """All of them, their servers running."""
    with contextlib.ExitStack() as stack:
        for name in ("http", "mail", "git"):
            (folder / name).mkdir()
        http = HttpServer(folder / "http" / "world.db")
        stack.callback(http.close)
        mail = MailServer(folder / "mail")
        stack.callback(mail.close)
        remote = Remote(folder / "git")
        daemon = Daemon(remote)
        stack.callback(daemon.close)
        made = (*_http(http), _smtp(mail), _git(remote, daemon, folder), _s3(), _aws(), _sql())
        yield {world.name: world for world in made}


def _http(server: HttpServer) -> tuple[World, ...]:
    def executed(stage: Stage, task: str, effect: str) -> int:
        return [each["effect"] for each in server.executed].count(effect)

    def world(guarantee: str, path: str, **more: Any) -> World:
        table = {"type": "http", "guarantee": guarantee, "url": f"{server.url}/{path}", **WINDOWS, **more}
        return World(f"http {guarantee}", guarantee, lambda task: table, lambda task: {"name": task}, executed)

    return (
        world("IDEMPOTENT", "mail", retention=3600.0, query=f"{server.url}/mail/by-key/{{key}}"),
        world("CONDITIONAL", "docs/{name}", method="PUT", history=f"{server.url}/docs/{{name}}/history"),
        world(
            "RESERVATION",
            "rooms",
            confirm=f"{server.url}/rooms/{{reservation}}/confirm",
            cancel=f"{server.url}/rooms/{{reservation}}/cancel",
            query=f"{server.url}/rooms/{{reservation}}",
        ),
    )


def _smtp(server: MailServer) -> World:
    table = {"type": "smtp", "host": "127.0.0.1", "port": server.port, "security": "none", "sender": "a@example.org"}

    def mails(stage: Stage, task: str, effect: str) -> int:
        return [mail["headers"]["Fencepost-Effect"] for mail in server.mails].count(effect)

    def payload(task: str) -> Any:
        return {"to": "fine@example.org", "subject": task, "text": "paid"}

    return World("smtp", "NON_REPLAYABLE", lambda task: {**table, **WINDOWS}, payload, mails)


def _git(remote: Remote, daemon: Daemon, folder: Path) -> World:
    """A branch for each task."""

    def table(task: str) -> dict[str, Any]:
        remote.git("update-ref", f"refs/heads/{task}", MAIN)
        url = f"git://127.0.0.1:{daemon.port}/remote.git"
        return {"type": "git", "url": url, "ref": f"refs/heads/{task}", **WINDOWS}

    def commits(stage: Stage, task: str, effect: str) -> int:
        return remote.git("log", "--format=%B", f"refs/heads/{task}").count(f"Fencepost-Effect: {effect}")

    def payload(task: str) -> Any:
        return {"files": {"report.txt": f"{task}\n"}, "message": f"Report {task}"}

    return World("git", "CONDITIONAL", table, payload, commits)


def _s3() -> World:
    """A bucket that keeps versions, so that each write is there to be counted."""
    address, run = seaweedfs(), uuid.uuid4().hex  # one server for all tests of a process
    bucket = shared_bucket(address, versions=True)
    table = {"type": "s3", "bucket": bucket, "endpoint": address, "addressing": "path", **AMAZON, **WINDOWS}

    def versions(stage: Stage, task: str, effect: str) -> int:
        found = boto(address).list_object_versions(Bucket=bucket, Prefix=f"{run}/{task}.txt").get("Versions", [])
        heads = [
            boto(address).head_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"]) for each in found
        ]
        return [head["Metadata"]["fencepost-effect"] for head in heads].count(effect)

    def payload(task: str) -> Any:
        return {"key": f"{run}/{task}.txt", "body": "x"}

    return World("s3", "CONDITIONAL", lambda task: table, payload, versions)


def _aws() -> World:
    table = {"type": "aws", "service": "efs", "operation": "create_file_system", "endpoint": moto()}
    run = uuid.uuid4().hex

    def made(stage: Stage, task: str, effect: str) -> int:
        """By its tag, so that one that was made under another token would be seen, too."""
        pages = boto(moto(), "efs").get_paginator("describe_file_systems").paginate()
        return sum(payload(task)["Tags"][0] in each["Tags"] for page in pages for each in page["FileSystems"])

    def payload(task: str) -> Any:
        return {"Tags": [{"Key": "task", "Value": f"{run} {task}"}]}

    return World("aws", "IDEMPOTENT", lambda task: {**table, **KEYED, **AMAZON, **WINDOWS}, payload, made)


def _sql() -> World:
    """A table of the store's own database, which the stage makes."""

    def rows(stage: Stage, task: str, effect: str) -> int:
        return [row[0] for row in stage.rows(f"SELECT task FROM {TABLE[stage.store]}")].count(task)

    return World("sql", "TRANSACTIONAL", lambda task: {"type": "sql"}, lambda task: task, rows)


TABLE = {"sqlite": "world", "postgres": "public.world"}
INSERT = {"sqlite": "INSERT INTO world VALUES (?)", "postgres": "INSERT INTO public.world VALUES ($1)"}


def statement(stage: Stage, task: str) -> Any:
    return {"sql": INSERT[stage.store], "parameters": [task]}


async def make_table(stage: Stage) -> None:
    """As the store's owner would; any change of a database's tables comes before the tasks that use them."""
    create = f"CREATE TABLE {TABLE[stage.store]} (task text)"
    if stage.store == "sqlite":
        with stage.sql() as con:
            con.execute(create)
    else:
        async with stage.connection() as con:  # type: ignore[attr-defined]
            await con.execute(create)
