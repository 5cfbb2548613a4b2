"""`fencepost work`: programs and apps, from init to the result."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fencepost import connect
from tests.cli.running import SECONDS, Folder


def test_init_writes_a_folder_in_which_the_commands_that_it_names_work(folder: Folder) -> None:
    out = folder.ok("init")
    assert {path.name for path in folder.path.iterdir()} == {
        "fencepost.toml",
        "tasks.jsonl",
        "agent.py",
        "fencepost.db",
    }
    named = re.findall(r"^  fencepost (.+)$", out, re.MULTILINE)
    assert [command.split()[0] for command in named] == ["submit", "work", "result"]
    last = ""
    for command in named:
        last = folder.ok(*command.split())
    assert json.loads(last) == {"words": 9, "longest": "nothing.", "after": ["doc-1", "doc-2"]}
    assert folder.json("audit")["clean"] is True


def test_init_keeps_what_exists_unless_it_is_forced(folder: Folder) -> None:
    folder.write("agent.py", "# mine\n")
    assert folder.json("init") == {
        "written": ["fencepost.toml", "tasks.jsonl"],
        "kept": ["agent.py"],
        "store": "sqlite:///fencepost.db",
    }
    assert "kept agent.py" in folder.ok("init")
    assert (folder.path / "agent.py").read_text() == "# mine\n"
    folder.ok("submit", "--input", "1", "--task-id", "a")
    assert folder.json("init", "--force")["kept"] == []
    assert "fencepost.App" in (folder.path / "agent.py").read_text()
    assert len(folder.json("tasks")["items"]) == 1, "a database is never replaced"


def test_init_writes_the_store_that_it_was_given(folder: Folder) -> None:
    folder.ok("init", "--store", "sqlite:///other.db")
    assert (folder.path / "other.db").exists()
    assert folder.json("tasks") == {"items": [], "next_cursor": None}
    assert not (folder.path / "fencepost.db").exists()


@pytest.mark.parametrize(
    ("kind", "command", "out"),
    [
        ("json", ("sh", "-c", "echo noise; cat"), '{"x": "é"}\n'),
        ("text", ("sh", "-c", "printf 'two\\nlines'"), "two\nlines\n"),
        ("bytes", ("sh", "-c", "printf raw"), "raw"),
    ],
)
def test_a_result_is_printed_as_it_is(folder: Folder, kind: str, command: tuple[str, ...], out: str) -> None:
    folder.ok("submit", "--input", '{"x": "é"}', "--task-id", "a")
    folder.ok("work", "--until-idle", "--result", kind, "--", *command)
    assert folder.ok("result", "a") == out


def test_a_program_gets_its_own_options_and_not_ours(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    folder.ok("work", "--until-idle", "--result", "text", "--", "echo", "--result", "json", "--json", "-x", "--", "y")
    assert folder.ok("result", "a") == "--result json --json -x -- y\n\n"


def test_only_the_asked_kinds_and_queues_are_claimed(folder: Folder) -> None:
    for task_id, kind, queue in (("a", "k1", "q1"), ("b", "k2", "q1"), ("c", "k1", "q2"), ("d", "k3", "q3")):
        folder.ok("submit", "--input", "1", "--task-id", task_id, "--kind", kind, "--queue", queue)
    done = folder.run(
        "work", "--until-idle", "--json", "--kinds", "k1", "--kinds", "k3", "--queues", "q1", "--queue", "q3",
        "--owner", "me", "--", "cat",
    )  # fmt: skip
    assert folder.code == 0, folder.err
    assert json.loads(done) == {"owner": "me", "exit_code": 0, "ended": {"COMMITTED": 2}}
    states = {task["task_id"]: task["state"] for task in folder.json("tasks")["items"]}
    assert states == {"a": "COMMITTED", "b": "READY", "c": "READY", "d": "COMMITTED"}


def test_a_failing_program_is_counted_and_its_error_shown(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a", "--max-attempts", "1")
    done = json.loads(folder.run("work", "--until-idle", "--json", "--", "sh", "-c", "echo no such page >&2; exit 3"))
    assert (folder.code, done["ended"]) == (0, {"FAILED": 1})
    assert "no such page" in folder.ok("show", "a")
    assert [task["park_reason"] for task in folder.json("tasks", "--state", "parked")["items"]] == ["ATTEMPTS"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--app", "agent"), "must read module:name"),
        (("--app", "nowhere:app"), "no module 'nowhere'"),
        (("--app", "mine:nothing"), "mine has no 'nothing'"),
        (("--app", "mine:number"), "is a int, not a fencepost.App"),
        (("--app", "mine:app", "--ttl", "3"), "--ttl: is for programs"),
        (("--app", "mine:app", "--", "cat"), "one of the two"),
        (("--ttl", "0", "--", "cat"), "ttl: must be above 0 seconds"),
        (("--ttl", "inf", "--", "cat"), "ttl: must be a finite number"),
        (("--ttl", "3601", "--", "cat"), "max_ttl of 3600 seconds"),
        (("--concurrency", "0", "--", "cat"), "concurrency: must lie within"),
        (("--drain-timeout", "-1", "--", "cat"), "drain_timeout"),
        (("--on-epoch", "ignore", "--", "cat"), "--on-epoch"),
        (("--result", "xml", "--", "cat"), "--result"),
        (("--owner", "x" * 201, "--", "cat"), "owner: must have 1 to 200 characters"),
        (("--", "no-such-program-anywhere"), "no program 'no-such-program-anywhere'"),
    ],
)
def test_a_worker_that_cannot_work_says_why(folder: Folder, arguments: tuple[str, ...], says: str) -> None:
    folder.write("mine.py", "import fencepost\n\napp = fencepost.App()\nnumber = 3\n")
    folder.run("work", *arguments)
    assert folder.code == 2, folder.err
    assert says in folder.err
    assert len(folder.err.splitlines()) == 1


def test_settings_of_the_file_hold_where_no_option_speaks(folder: Folder) -> None:
    folder.write("fencepost.toml", '[work]\nkinds = ["k1"]\nresult = "text"\n')
    folder.ok("submit", "--input", "1", "--task-id", "a", "--kind", "k1")
    folder.ok("submit", "--input", "1", "--task-id", "b", "--kind", "k2")
    folder.ok("work", "--until-idle", "--", "echo", "not json")
    assert folder.ok("result", "a").startswith("not json")
    assert folder.json("result", "b", code=1)["reason"] == "READY"
    folder.write("fencepost.toml", "[work]\nttl = 10\ntrust_window = 10\n")
    folder.run("work", "--", "cat")
    assert (folder.code, "work.trust_window: must be below work.ttl" in folder.err) == (2, True)


def test_a_worker_that_is_told_to_stop_gives_its_task_back(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    worker = folder.start("work", "--drain-timeout", "0", "--json", "--", "sh", "-c", "touch started; sleep 60")
    try:
        wait_for(folder.path / "started")
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=SECONDS)
    finally:
        worker.kill()
    assert (worker.returncode, json.loads(out)["ended"]) == (0, {"RELEASED": 1}), err.decode()
    task = folder.json("show", "a")["task"]
    assert (task["state"], task["end"], task["charged_attempts"]) == ("READY", "RELEASED", 0)


async def test_a_raised_epoch_ends_the_worker_with_exit_code_4(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    worker = folder.start("work", "--ttl", "3", "--", "sh", "-c", "touch started; sleep 60")
    try:
        wait_for(folder.path / "started")
        folder.ok("pool", "raise-epoch", "--yes")
        _, err = worker.communicate(timeout=SECONDS)
    finally:
        worker.kill()
    assert worker.returncode == 4, err.decode()
    last = err.decode().splitlines()[-2:]
    assert last[0].startswith("hint: Find out who raised it")
    assert "dropped" in last[1]
    async with await connect(folder.url) as client:
        claims = await client.claim_next(owner="after")
        assert isinstance(claims, list)
        assert (claims[0].epoch, claims[0].generation) == (2, 2)


def test_result_waits_for_a_task_that_is_still_being_worked_on(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    assert folder.json("result", "a", "--wait", "0.1", code=1)["outcome"] == "NOT_COMMITTED"
    waiting = folder.start("result", "a", "--wait", "50")
    try:
        folder.ok("work", "--until-idle", "--", "cat")
        out, err = waiting.communicate(timeout=SECONDS)
    finally:
        waiting.kill()
    assert (waiting.returncode, out) == (0, b"1\n"), err.decode()


@pytest.mark.parametrize("state", ["CANCELLED", "PARKED"])
async def test_result_waits_for_nothing_that_takes_a_person_first_and_says_what(folder: Folder, state: str) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    folder.ok("submit", "--input", "2", "--task-id", "behind", "--depends-on", "a")
    async with await connect(folder.url) as client:
        if state == "CANCELLED":
            await client.cancel("a")
        else:
            [claim] = await client.claim_next(owner="w")  # type: ignore[misc]
            await client.fail(claim, "no", retry=False)

    began = time.monotonic()
    said = folder.json("result", "a", "--wait", "50", code=1)
    assert (said["outcome"], said["reason"]) == ("NOT_COMMITTED", state)
    folder.run("result", "a", "--wait", "50")
    assert folder.code == 1
    assert state in folder.err and "fencepost reopen a" in folder.err
    assert folder.json("result", "behind", "--wait", "50", code=1)["reason"] == "BLOCKED"
    assert time.monotonic() - began < 25.0


def test_watch_prints_what_happens_while_it_runs(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    [first] = folder.run("watch", "--once", "--json").splitlines()
    watcher = folder.start("watch", "--json", "--from", json.loads(first)["cursor"])
    try:
        folder.ok("cancel", "a")
        assert watcher.stdout is not None
        event = json.loads(watcher.stdout.readline())
    finally:
        watcher.kill()
        watcher.communicate(timeout=SECONDS)
    assert (event["name"], event["task_id"], event["state"]) == ("task_cancelled", "a", "CANCELLED")


def test_the_script_finds_an_app_in_the_current_folder(folder: Folder) -> None:
    folder.ok("init")
    folder.ok("submit", "tasks.jsonl")
    subprocess.run(
        [Path(sys.executable).with_name("fencepost"), "work", "--app", "agent:app", "--until-idle"],
        cwd=folder.path, env=folder.environment(), capture_output=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert folder.json("result", "doc-1")["value"]["words"] == 9


def test_the_script_and_the_module_say_the_same_version(folder: Folder) -> None:
    script = Path(sys.executable).with_name("fencepost")
    out = subprocess.run([script, "--version"], capture_output=True, timeout=SECONDS, check=True).stdout.decode()
    assert out == folder.ok("--version")
    assert re.fullmatch(r"fencepost \d+\.\d+\.\d+\n", out)


def test_bench_measures_three_kinds_of_callers(folder: Folder) -> None:
    found = folder.json("bench", "--seconds", "0.05", "--folder", str(folder.path))
    assert found.keys() == {"cycles_per_s", "submits_per_s", "seconds", "store"}
    assert found["cycles_per_s"].keys() == {"1", "16", "128"}
    assert all(number > 0 for number in found["cycles_per_s"].values())
    assert list(folder.path.iterdir()) == [], "its database is removed"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)
