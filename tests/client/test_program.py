"""Programs as handlers: what they get, what is made of their output, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.program import ProgramHandler, absolute
from fencepost.client.worker import Worker
from fencepost.errors import InvalidRequest
from fencepost.testing import MemoryClient
from fencepost.wire import AttemptView, Claim, NewTask, Result
from tests.client.faults import BOUND, Working, reported, until

PYTHON = sys.executable


async def run(client: MemoryClient, code: str, input: Any = None, **options: Any) -> Result | AttemptView:
    """What becomes of one task that is given to a Python program: its result, or the attempt that failed."""
    await client.submit(NewTask({} if input is None else input, task_id="t"))
    program = ProgramHandler([PYTHON, "-c", code], **options)
    assert await asyncio.wait_for(Worker(client, program).run_until_idle(), BOUND) == 0
    found = await client.result("t")
    return found if isinstance(found, Result) else (await client.attempts("t"))[-1]


async def test_the_last_line_of_stdout_is_the_result(client: MemoryClient):
    found = await run(
        client, "import json,sys; d=json.load(sys.stdin); print('noise'); print(json.dumps({'n': d['n']+1})); print()",
        {"n": 41},
    )  # fmt: skip
    assert found.value == {"n": 42}


async def test_a_last_line_without_a_newline_counts(client: MemoryClient):
    assert (await run(client, "print('[1]'); print('[2]', end='')")).value == [2]


async def test_no_output_is_null(client: MemoryClient):
    assert (await run(client, "pass")).value is None


async def test_text_is_all_of_stdout(client: MemoryClient):
    assert (await run(client, "print('one'); print('zwei ü')", result="text")).value == "one\nzwei ü\n"


async def test_bytes_are_all_of_stdout_as_they_are(client: MemoryClient):
    found = await run(client, r"import sys; sys.stdout.buffer.write(b'\x00\xff\n')", result="bytes")
    assert found.value == b"\x00\xff\n"


async def test_a_binary_input_comes_as_it_is(client: MemoryClient):
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    assert (await run(client, code, b"\x00\xffabc", result="bytes")).value == b"cba\xff\x00"


async def test_a_large_input_is_read_to_its_end_and_need_not_be_read_at_all(client: MemoryClient):
    text = "x" * 900_000
    assert (await run(client, "import json,sys; print(len(json.load(sys.stdin)))", text)).value == 900_000
    await client.submit(NewTask(text, task_id="u"))
    program = ProgramHandler([PYTHON, "-c", "print(1)"])
    assert await asyncio.wait_for(Worker(client, program).run_until_idle(), BOUND) == 0
    assert (await client.result("u")).value == 1


async def test_the_environment_names_the_task_the_claim_and_the_store(client: MemoryClient):
    client.url = "postgresql://me:secret@example.invalid:5432/tasks"
    code = "import os,json; print(json.dumps({k: os.environ[k] for k in os.environ if k.startswith('FENCEPOST_')}))"
    value = (await run(client, code)).value
    assert value["FENCEPOST_TASK_ID"] == "t"
    claim = Claim.from_json(value["FENCEPOST_CLAIM"])
    assert (claim.task_id, claim.generation, claim.store_id) == ("t", 1, client.store_id)
    assert value["FENCEPOST_STORE"] == "postgresql://me@example.invalid:5432/tasks"


async def test_a_claim_with_a_large_input_still_fits_into_the_environment(client: MemoryClient):
    code = "import os; print(len(os.environ['FENCEPOST_CLAIM']))"
    assert (await run(client, code, {"text": "x" * 500_000})).value < 64 << 10


def test_a_relative_database_is_the_same_file_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("sqlite:///tasks.db") == f"sqlite:///{tmp_path}/tasks.db"
    assert absolute("sqlite:////data/tasks.db") == "sqlite:////data/tasks.db"
    assert absolute("memory://") == "memory://"


async def test_a_failing_program_is_tried_again_and_its_last_words_are_kept(client: MemoryClient):
    code = "import sys; print('x'*50_000, file=sys.stderr); print('the point', file=sys.stderr); sys.exit(3)"
    attempt = await run(client, code)
    assert attempt.end == "FAILED"
    assert attempt.error.startswith("exit code 3\n")
    assert attempt.error.rstrip().endswith("the point")
    assert len(attempt.error.encode()) <= 16 << 10
    assert "Traceback" not in attempt.error
    view = await client.task("t")
    assert (view.state, view.charged_attempts) == ("READY", 1)


async def test_a_flood_of_stderr_is_counted_whole_and_kept_at_its_end(client: MemoryClient):
    code = "import sys; sys.stderr.write('x' * 3_000_000 + 'the point'); sys.exit(3)"
    await run(client, code)
    error = (await client.attempts("t"))[0].error
    assert error.startswith("exit code 3\n… cut: 3000009 bytes in all\n") and error.endswith("the point")
    assert len(error.encode()) <= 16 << 10


async def test_stderr_is_passed_on_as_it_comes(client: MemoryClient, capfd: pytest.CaptureFixture[str]):
    await run(client, "import sys; print('working on it', file=sys.stderr)")
    assert "working on it" in capfd.readouterr().err


async def test_the_signal_that_killed_a_program_is_named(client: MemoryClient):
    attempt = await run(client, "import os; os.kill(os.getpid(), 9)")
    assert attempt.error.startswith("killed by SIGKILL")


@pytest.mark.parametrize(
    ("code", "result", "says"),
    [
        ("print('not json')", "json", "not JSON"),
        ("print('NaN')", "json", "NaN"),
        (r"print('{\"a\": 1, \"a\": 2}')", "json", "duplicate keys"),
        (r"import sys; sys.stdout.buffer.write(b'\xff\n')", "json", "UTF-8"),
        (r"import sys; sys.stdout.buffer.write(b'ok\xff')", "text", "UTF-8"),
        ("print('a\\0b', end='')", "text", "U+0000"),
        ("print('x' * (2 << 20))", "text", "1048576 bytes"),
        ("print('x' * (2 << 20))", "bytes", "1048576 bytes"),
        ("print('\"' + 'x' * (2 << 20) + '\"')", "json", "1048576"),
    ],
    ids=["no-json", "nan", "duplicate", "json-utf8", "text-utf8", "nul", "large-text", "large-bytes", "large-json"],
)
async def test_output_that_cannot_be_kept_is_a_final_failure_that_says_why(
    client: MemoryClient, code: str, result: Any, says: str
):
    attempt = await run(client, code, result=result)
    assert (attempt.end, (await client.task("t")).state) == ("FAILED", "PARKED")
    assert says in attempt.error


async def test_much_output_before_the_last_line_is_no_harm(client: MemoryClient):
    assert (await run(client, "for n in range(100_000): print('noise', 'x'*40)\nprint('[1]')")).value == [1]


async def test_a_program_without_end_to_its_output_is_killed(client: MemoryClient):
    attempt = await run(client, "import sys\nwhile True: sys.stdout.write('x' * 65536)", result="text")
    assert "limit of 1048576 bytes" in attempt.error


async def test_a_program_over_its_time_is_killed_and_may_be_tried_again(client: MemoryClient, tmp_path: Path):
    code = f"import os,time; open({str(tmp_path / 'pid')!r},'w').write(str(os.getpid())); time.sleep(600)"
    attempt = await run(client, code, timeout=1.0)
    assert "time limit of 1 s" in attempt.error
    assert not alive(int((tmp_path / "pid").read_text()))


FAMILY = """
import os, subprocess, sys, time
deaf = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
with open({path!r} + ".part", "w") as file:
    file.write(f"[{{os.getpid()}}, {{child.pid}}]")
os.rename({path!r} + ".part", {path!r})
{then}
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


async def gone(*pids: int) -> bool:
    return not any(alive(pid) for pid in pids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize("how", ["cancelled", "reclaimed", "drained"])
async def test_the_whole_process_group_is_killed_when_the_claim_is_lost_or_the_worker_ends(
    client: MemoryClient, tmp_path: Path, how: str
):
    path = tmp_path / "pids"
    await client.submit(NewTask({}, task_id="t"))
    code = FAMILY.format(path=str(path), then="time.sleep(600)")
    program = ProgramHandler([PYTHON, "-c", code], ttl=0.9, grace=0.2)

    async def written() -> bool:
        return path.exists()

    async with Working(Worker(client, program, drain_timeout=0.0)) as working:
        await until(written, "the program did not start")
        pids = json.loads(path.read_text())
        assert all(alive(pid) for pid in pids)
        if how == "cancelled":
            await client.cancel("t")
            await reported(client, "t")
        elif how == "reclaimed":
            view = await client.task("t")
            client.advance(60)
            answer = await client.claim("t", expected_state_version=view.state_version, owner="B")
            if isinstance(answer, Claim):
                await reported(client, "t")
            else:  # a beat came in between; the drain has it
                working.worker.stop()
    assert working.code == 0
    await until(lambda: gone(*pids), "the group was not killed")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
async def test_what_a_program_leaves_running_is_killed_when_it_has_ended(client: MemoryClient, tmp_path: Path):
    path = tmp_path / "pids"
    found = await run(client, FAMILY.format(path=str(path), then="print('{}')"))
    assert found.value == {}
    await until(lambda: gone(*json.loads(path.read_text())), "the leftover was not killed")


async def test_sigterm_comes_first_so_that_a_program_can_tidy_up(client: MemoryClient, tmp_path: Path):
    path, tidy = tmp_path / "started", tmp_path / "tidy"
    code = (
        "import signal,sys,time,pathlib\n"
        f"signal.signal(15, lambda *a: (pathlib.Path({str(tidy)!r}).write_text('yes'), sys.exit(0)))\n"
        f"pathlib.Path({str(path)!r}).write_text('x')\n"
        "time.sleep(600)"
    )
    await client.submit(NewTask({}, task_id="t"))

    async def started() -> bool:
        return path.exists()

    async with Working(Worker(client, ProgramHandler([PYTHON, "-c", code]), drain_timeout=0.0)):
        await until(started, "the program did not start")
    assert tidy.read_text() == "yes"
    assert (await client.task("t")).end == "RELEASED"


async def test_only_the_kinds_that_were_named_are_claimed(client: MemoryClient):
    await client.submit_many([NewTask(1, task_id="a", kind="mine"), NewTask(1, task_id="b", kind="other")])
    program = ProgramHandler(["true"], kinds=["mine"])
    assert await asyncio.wait_for(Worker(client, program).run_until_idle(), BOUND) == 0
    assert (await client.task("a")).state == "COMMITTED"
    assert (await client.task("b")).generation == 0


@pytest.mark.parametrize(
    "options",
    [{"command": ["no-such-program-here"]}, {"command": []}, {"command": "true"}, {"result": "xml"}, {"ttl": 0}],
)
def test_a_program_that_cannot_run_is_refused_at_once(options: dict[str, Any]):
    with pytest.raises(InvalidRequest):
        ProgramHandler(**{"command": ["true"], **options})


async def test_a_program_that_vanished_is_a_failure_that_may_be_tried_again(client: MemoryClient, tmp_path: Path):
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\necho 1\n")
    script.chmod(0o755)
    program = ProgramHandler([str(script)])
    script.unlink()
    await client.submit(NewTask({}, task_id="t"))
    assert await asyncio.wait_for(Worker(client, program).run_until_idle(), BOUND) == 0
    (attempt,) = await client.attempts("t")
    assert "could not be started" in attempt.error
