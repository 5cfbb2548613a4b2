"""How commands end: exit codes, refusals with their hint, missing databases, wrong usage, Ctrl-C, no terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fencepost import Claim, Outcome, Reason, Refused, connect
from fencepost.cli import output
from tests.cli.running import SECONDS, Folder

LOOKING = [
    ("result", "a"),
    ("tasks",),
    ("show", "a"),
    ("cancel", "a"),
    ("reopen", "a"),
    ("retry", "a"),
    ("revise", "a", "--input", "1"),
    ("take-over", "a"),
    ("discard", "a", "--generation", "1"),
    ("pool",),
    ("pool", "list"),
    ("pool", "close-intake"),
    ("pool", "open-intake"),
    ("pool", "raise-epoch", "--yes"),
    ("pool", "policy", "max_attempts=3"),
    ("status",),
    ("watch", "--once"),
    ("audit",),
    ("migrate",),
    ("migrate", "up", "--dry-run"),
    ("migrate", "status"),
    ("prune",),
    ("doctor",),
]


@pytest.mark.parametrize("arguments", LOOKING, ids=" ".join)
def test_a_missing_database_is_said_and_not_made(folder: Folder, arguments: tuple[str, ...]) -> None:
    out = folder.run(*arguments)
    assert folder.code == 3
    assert "no database at fencepost.db; run `fencepost init` or `fencepost submit`" in out + folder.err
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///no/such/folder/x.db", "no database at no/such/folder/x.db"),
        ("sqlite:///text.db", "is no fencepost database"),
        ("sqlite:///folder.db", "is a folder"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line_and_exit_code_3(folder: Folder, url: str, says: str) -> None:
    folder.write("text.db", "these are not the bytes of a database, but enough of them to be looked at")
    (folder.path / "folder.db").mkdir()
    folder.run("tasks", "--store", url)
    assert folder.code == 3
    assert says in folder.err
    assert len(folder.err.splitlines()) == 1
    error = json.loads(folder.run("tasks", "--store", url, "--json"))
    assert error["error"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense",), "nonsense"),
        (("tasks", "--limit", "many"), "--limit"),
        (("tasks", "--limit", "0"), "limit: must lie within 1…1000, got 0"),
        (("tasks", "--state", "done"), "there are READY"),
        (("tasks", "--cursor", "x"), "cursor"),
        (("tasks", "--typo"), "--typo"),
        (("result",), "TASK"),
        (("result", "a", "--wait", "-1"), "wait: must be at least 0 seconds"),
        (("result", "a", "--wait", "nan"), "wait: must be a finite number"),
        (("show", "x" * 201), "task_id: must have 1 to 200 characters"),
        (("revise", "a", "--input", "@missing.json"), "missing.json"),
        (("revise", "a", "--input", "nonsense"), "input: not JSON"),
        (("discard", "a", "--generation", "0"), "generation: must lie within"),
        (("cancel", "a", "--who", "x" * 201), "who: must have 1 to 200 characters"),
        (("pool", "policy", "max_ttl"), "NAME=VALUE"),
        (("pool", "policy", "max_tll=3"), "there are max_ttl"),
        (("pool", "policy", "max_ttl=x"), "policy.max_ttl: must be a number"),
        (("pool", "policy", "max_ttl=nan"), "policy.max_ttl"),
        (("pool", "policy", "max_attempts=0"), "policy.max_attempts"),
        (("pool", "raise-epoch"), "--yes"),
        (("pool", "raise-epoch", "--yes", "--to", "1"), "to: must be above the current epoch 1"),
        (("--store",), "--store: needs a URL"),
        (("tasks", "--store", "nonsense"), "no store for"),
        (("tasks", "--store", "sqlite://tasks.db"), "three slashes"),
        (("watch", "--once", "--from", "x"), "cursor"),
        (("prune", "--older-than", "-1"), "older_than"),
        (("explain", "NO_SUCH_CODE"), "NO_SUCH_CODE"),
        (("bench", "--seconds", "0"), "seconds"),
        (("work",), "give a program"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_wrong_usage_names_the_field_and_the_limit(folder: Folder, arguments: tuple[str, ...], says: str) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    assert folder.run(*arguments) == ""
    assert folder.code == 2, folder.err
    assert says in folder.err
    assert len(folder.err.splitlines()) == 1


def test_wrong_usage_as_json(folder: Folder) -> None:
    for arguments in (("tasks", "--limit", "many"), ("nonsense",), ("submit", "--input", "NaN")):
        error = folder.json(*arguments, code=2)
        assert error.keys() == {"error", "message", "field", "limit", "hint"}
        assert error["error"] == "INVALID"
        assert folder.err == ""


async def held(folder: Folder, task_id: str = "a") -> Claim:
    folder.ok("submit", "--input", "1", "--task-id", task_id)
    async with await connect(folder.url) as client:
        claims = await client.claim_next(owner="worker-a", ttl=600.0)
    assert isinstance(claims, list)
    return claims[0]


async def test_a_refusal_says_who_holds_the_task_until_when_and_ends_with_the_hint(folder: Folder) -> None:
    await held(folder)
    folder.run("reopen", "a")
    assert folder.code == 1
    first, *rest, last = folder.err.splitlines()
    assert first == "reopen of task a refused: CONFLICT (STATE)"
    assert any(line.strip().startswith("held by worker-a until ") and "(in 10 min)" in line for line in rest)
    assert last.startswith("hint: Look at its state with `fencepost show a`")
    assert last.endswith("[fencepost explain CONFLICT/STATE]")


async def test_a_refusal_as_json_has_the_same_keys_at_every_door(folder: Folder) -> None:
    await held(folder)
    for arguments in (
        ("result", "a"),
        ("result", "nothing"),
        ("show", "nothing"),
        ("cancel", "nothing"),
        ("reopen", "a"),
        ("revise", "nothing", "--input", "1"),
        ("take-over", "a", "--generation", "7"),
        ("discard", "a", "--generation", "1"),
        ("pool", "show", "nothing"),
        ("pool", "close-intake", "nothing"),
        ("pool", "open-intake", "nothing"),
        ("pool", "raise-epoch", "nothing", "--yes"),
        ("pool", "policy", "max_attempts=2", "--pool", "nothing"),
        ("status", "--pool", "nothing"),
        ("watch", "--once", "--pool", "nothing"),
        ("submit", "--input", "2", "--task-id", "a"),
        ("submit", "--input", "2", "--pool", "nothing"),
        ("work", "--pool", "nothing", "--", "cat"),
    ):
        at = arguments.index("--") if "--" in arguments else len(arguments)
        out = folder.run(*arguments[:at], "--json", *arguments[at:])
        assert folder.code == 1, (arguments, out, folder.err)
        refused = json.loads(out)
        assert refused.keys() == {"outcome", "reason", "current", "door", "task_id", "hint"}, arguments
        assert refused["hint"].endswith(".")
        assert folder.err == ""


async def test_no_command_shows_an_attempt_id(folder: Folder) -> None:
    claim = await held(folder)
    for arguments in (("show", "a"), ("reopen", "a"), ("tasks",), ("watch", "--once"), ("status",)):
        assert claim.attempt_id not in folder.run(*arguments) + folder.err
        assert claim.attempt_id not in folder.run(*arguments, "--json") + folder.err


async def test_a_committed_task_is_not_cancelled(folder: Folder) -> None:
    claim = await held(folder)
    async with await connect(folder.url) as client:
        await client.commit(claim, {"x": 1})
    assert folder.json("cancel", "a", code=1)["outcome"] == "ALREADY_COMMITTED"
    folder.run("cancel", "a")
    assert "hint: Read it with `fencepost result a`." in folder.err


def test_colour_and_control_characters_of_tasks_reach_no_terminal(folder: Folder) -> None:
    folder.ok("submit", "--input", '"[red]\\u001b[31mboo\\u009b"', "--task-id", "[bold]x[/bold]")
    for arguments in (("show", "[bold]x[/bold]"), ("tasks",)):
        out = folder.ok(*arguments)
        assert "\x1b" not in out
        assert "\x9b" not in out
        assert "[bold]x[/bold]" in out


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_gets_colour_unless_it_is_unwanted(folder: Folder, no_colour: bool) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    environment = folder.environment(TERM="xterm-256color")
    if not no_colour:
        del environment["NO_COLOR"]
    master, slave = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "fencepost", "tasks"],
            cwd=folder.path, env=environment, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, timeout=SECONDS,
            check=True,
        )  # fmt: skip
        out = os.read(master, 65536).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert "READY" in out
    assert ("\x1b[36m" in out) is not no_colour


def test_a_reader_that_has_seen_enough_is_no_error(folder: Folder) -> None:
    folder.ok("submit", "-", stdin='{"input":1}\n' * 3000)
    done = subprocess.run(
        f"{sys.executable} -m fencepost watch --once | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=folder.path, env=folder.environment(), capture_output=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("watch",), ("result", "a", "--wait", "60"), ("submit", "--input", "2", "--wait")]
)
def test_ctrl_c_ends_without_a_traceback(folder: Folder, arguments: tuple[str, ...]) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    before = folder.ok("watch", "--once")
    process = folder.start(*arguments)
    try:
        wait_until_it_runs(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert (process.returncode, b"Traceback" in err) == (130, False), err.decode()
    assert before in folder.ok("watch", "--once")
    assert b"Traceback" not in out


def wait_until_it_runs(pid: int) -> None:
    """Until the process has started the store's threads: from then on it waits for what the test is about."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if len(list(Path(f"/proc/{pid}/task").iterdir())) >= 3:
            time.sleep(0.3)
            return
        time.sleep(0.02)
    raise AssertionError("the command did not get as far as opening the store")


def test_only_a_raised_epoch_is_exit_code_4() -> None:
    assert output.exit_code(Refused(Outcome.FENCED, Reason.EPOCH)) == 4
    assert output.exit_code(Refused(Outcome.FENCED, Reason.GENERATION)) == 1
    assert output.exit_code(Refused(Outcome.CONFLICT, Reason.VERSION)) == 1
    assert output.exit_code("anything else") == 0
