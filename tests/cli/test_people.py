"""What people decide, from the command line: it is done, told, and journalled under their name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fencepost import Claim, Refused, connect
from fencepost.client.client import Client
from tests.cli.running import SECONDS, Folder


async def claim(client: Client, owner: str = "worker-a", **more: float) -> Claim:
    claims = await client.claim_next(owner=owner, **more)  # type: ignore[arg-type]
    assert isinstance(claims, list)
    return claims[0]


async def test_a_cancelled_task_is_refused_to_its_holder_and_comes_back_with_reopen(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    async with await connect(folder.url) as client:
        held = await claim(client)
        assert folder.ok("cancel", "a", "--who", "ada") == "a: CANCELLED (version 4)\n"
        refused = await client.commit(held, 1)
        assert isinstance(refused, Refused)
        assert refused.outcome == "CANCELLED"
        assert folder.ok("cancel", "a") == "a: CANCELLED already (version 4)\n"
        assert folder.ok("retry", "a") == "a: REOPENED, now READY (version 5)\n"
        events = [event for event in (await client.events(task_id="a")).items if event.detail.get("who")]
    assert events[0].detail["who"] == "ada"
    assert "@" in events[-1].detail["who"]


async def test_a_revised_task_has_its_new_input(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    folder.write("new.json", '{"pages": [1, 2]}')
    folder.ok("revise", "a", "--input", "@new.json")
    assert folder.json("show", "a")["task"]["input"] == {"pages": [1, 2]}
    assert folder.json("revise", "a", "--input", "2")["info"]["revision"] == 3


async def test_taking_over_ends_the_live_attempt_only_if_it_is_the_one_that_was_meant(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    async with await connect(folder.url) as client:
        await claim(client)
    refused = folder.json("take-over", "a", "--generation", "2", code=1)
    assert (refused["outcome"], refused["reason"], refused["current"]["owner"]) == (
        "CONFLICT",
        "GENERATION",
        "worker-a",
    )
    assert folder.ok("take-over", "a", "--generation", "1") == "a: TAKEN_OVER, now READY (version 3)\n"
    assert folder.json("take-over", "a", code=1)["reason"] == "STATE"


async def test_a_parked_task_shows_its_error_and_the_way_on(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    folder.ok("submit", "--input", "1", "--task-id", "b", "--depends-on", "a")
    async with await connect(folder.url) as client:
        await client.fail(await claim(client), "Traceback …\nValueError: \x1b[31mno pages", retry=False)
    out = folder.ok("show", "a")
    assert "PARKED" in out
    assert "ValueError: ␛[31mno pages" in out
    assert "fencepost reopen a" in out
    assert "FINAL" in folder.ok("tasks", "--state", "parked")
    assert "unreachable: a" in folder.ok("show", "b")


async def test_raising_an_epoch_shows_what_it_discards_and_asks(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    async with await connect(folder.url) as client:
        held = await claim(client, owner="worker-a", ttl=600.0)
        assert answer_at_a_terminal(folder, "n") == (1, True)
        assert folder.json("pool")["epoch"] == 1
        assert answer_at_a_terminal(folder, "y") == (0, True)
        assert folder.json("pool")["epoch"] == 2
        refused = await client.commit(held, 1)
        assert isinstance(refused, Refused)
        assert refused.reason == "EPOCH"


def answer_at_a_terminal(folder: Folder, answer: str) -> tuple[int, bool]:
    """The exit code, and whether the running attempt was named before the question."""
    script = (
        "import os, pty, sys\n"
        "pid, fd = pty.fork()\n"
        "if pid == 0:\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'fencepost', 'pool', 'raise-epoch'])\n"
        "seen = b''\n"
        "while b'[y/N]' not in seen:\n"
        "    seen += os.read(fd, 4096)\n"
        "os.write(fd, sys.argv[1].encode() + b'\\n')\n"
        "named = b'worker-a' in seen and b'generation 1' in seen\n"
        "try:\n"
        "    while os.read(fd, 4096):\n"
        "        pass\n"
        "except OSError:\n"
        "    pass\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), named)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, answer],
        cwd=folder.path, env=folder.environment(), stdout=subprocess.PIPE, timeout=SECONDS, check=True,
    )  # fmt: skip
    code, named = done.stdout.decode().split()
    return int(code), named == "True"


async def test_an_epoch_is_never_raised_without_a_yes(folder: Folder) -> None:
    folder.ok("submit", "--input", "1")
    for arguments in (("pool", "raise-epoch"), ("pool", "raise-epoch", "--json")):
        folder.run(*arguments, stdin="y\n")
        assert folder.code == 2
    assert folder.json("pool")["epoch"] == 1
    assert folder.json("pool", "raise-epoch", "--yes", "--to", "9")["pool"]["epoch"] == 9


async def test_a_closed_intake_refuses_claims_until_it_is_opened(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    folder.ok("pool", "close-intake")
    async with await connect(folder.url) as client:
        refused = await client.claim_next(owner="worker-a")
        assert isinstance(refused, Refused)
        assert refused.outcome == "INTAKE_CLOSED"
    assert "CLOSED" in folder.ok("pool")
    doctor = folder.json("doctor")
    assert [check["verdict"] for check in doctor["checks"] if check["name"] == "epoch"] == ["warn"]
    folder.ok("pool", "open-intake")
    async with await connect(folder.url) as client:
        await claim(client)


@pytest.mark.parametrize("pool", ["default", "second"])
async def test_a_policy_is_changed_in_parts(folder: Folder, pool: str) -> None:
    folder.ok("pool", "create", "second")
    folder.ok("pool", "policy", "max_attempts=2", "max_ttl=60", "--pool", pool)
    found = folder.json("pool", "show", pool)["policy"]
    assert (found["max_attempts"], found["max_ttl"], found["backoff_max"]) == (2, 60.0, 300.0)
    if pool == "second":
        assert folder.json("pool", "show")["policy"]["max_attempts"] == 5
        assert folder.json("pool", "create", "second", "max_attempts=9")["changed"] is False
