"""`fencepost submit`: all lines are checked before any is written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fencepost.cli.lines import BadLine, CheckedLines
from fencepost.kernel.commands import MAX_BATCH
from tests.cli.running import Folder

GOOD = '{"task_id": "a", "input": 1}\n'


def read(text: str | bytes, **defaults: Any) -> CheckedLines:
    lines = CheckedLines(defaults)
    try:
        lines.read(io.BytesIO(text.encode() if isinstance(text, str) else text))
    except BaseException:
        lines.close()
        raise
    return lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"input": 1', "not JSON"),
        ('{"input": 1, "input": 2}', "duplicate keys"),
        ('{"input": {"a": 1, "a": 2}}', "duplicate keys"),
        ('{"input": NaN}', "NaN is not JSON"),
        ('{"input": 1e999}', "too large"),
        ('{"input": 9007199254740993}', "±2^53"),
        ('{"input": "\\u0000"}', "U+0000"),
        ('{"input": "\\ud800"}', "surrogate"),
        ("[1]", "must be an object"),
        ('{"task_id": "x"}', "input: is missing"),
        ('{"input": 1, "prioritty": 2}', "prioritty"),
        ('{"input": 1, "priority": "2"}', "priority"),
        ('{"input": 1, "priority": 1001}', "priority: must lie within"),
        ('{"input": 1, "task_id": ""}', "task_id: must have 1 to 200 characters"),
        ('{"input": 1, "task_id": "' + "x" * 201 + '"}', "task_id: must have 1 to 200 characters"),
        ('{"input": 1, "queue": "a\\u0007"}', "queue: control character"),
        ('{"input": 1, "delay": -1}', "delay"),
        ('{"input": 1, "delay": 1, "available_at": "2026-01-01T00:00:00Z"}', "not both"),
        ('{"input": 1, "available_at": "2026-01-01T00:00:00"}', "time zone"),
        ('{"input": 1, "max_attempts": 0}', "max_attempts"),
        ('{"input": 1, "max_attempts": true}', "max_attempts"),
        ('{"input": 1, "on_failure": "explode"}', "on_failure"),
        ('{"input": 1, "depends_on": ["p", "p"]}', "names a task twice"),
        ('{"input": 1, "depends_on": "p"}', "depends_on"),
        ('{"input": 1, "task_id": "a"}', "stands in line 1 already"),
        ('{"input": 1, "task_id": "me", "depends_on": ["me"]}', "depends on itself"),
        ('{"input": 1, "task_id": "b", "pool": "other", "depends_on": ["a"]}', "another pool"),
        ('{"input": "' + "x" * (1 << 20) + '"}', "over the limit of 1048576"),
        ('{"input": ' + "[" * 101 + "]" * 101 + "}", "nest"),
        ('{"input": ' + " " * (9 << 20) + "1}", "is longer than"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_reason(line: str, reason: str) -> None:
    with pytest.raises(BadLine) as refused:
        read(f"{GOOD}\n{line}\n")
    assert (refused.value.number, refused.value.field) == (3, "line 3")
    assert reason in refused.value.limit


def test_a_line_that_is_no_utf8_is_refused_by_its_number() -> None:
    with pytest.raises(BadLine, match=r"line 2: .*UTF-8"):
        read(GOOD.encode() + b'{"input": "\xff"}\n')


def test_a_cycle_through_several_lines_is_refused() -> None:
    with pytest.raises(BadLine, match="depends on itself"):
        read('{"task_id":"x","input":1,"depends_on":["y"]}\n{"task_id":"y","input":1,"depends_on":["x"]}\n')


def test_what_the_lines_do_not_define_is_left_to_the_store() -> None:
    lines = read('{"input": 1, "depends_on": ["elsewhere"], "pool": "p"}\n')
    assert (lines.parents, lines.pools, lines.count) == ({"elsewhere": 1}, {"p": 1}, 1)
    lines.close()


def test_options_fill_what_a_line_does_not_say() -> None:
    lines = read('{"input": 1}\n{"input": 2, "kind": "own", "available_at": "2026-01-01T00:00:00Z"}', kind="k", delay=5)
    [(numbers, tasks)] = list(lines.batches())
    assert numbers == [1, 2]
    assert [(task.kind, task.delay) for task in tasks] == [("k", 5), ("own", None)]
    lines.close()


def test_large_files_come_in_batches_and_parents_must_stand_before_their_children() -> None:
    many = "".join(f'{{"task_id":"t{n}","input":{n}}}\n' for n in range(MAX_BATCH))
    lines = read(many + '{"task_id":"last","input":0,"depends_on":["t0"]}\n')
    assert [len(tasks) for _, tasks in lines.batches()] == [MAX_BATCH, 1]
    lines.close()
    with pytest.raises(BadLine, match="parents stand before their children") as refused:
        read('{"input":0,"depends_on":["t9999"]}\n' + many)
    assert refused.value.number == 1


# the command ------------------------------------------------------------------------------------------------------


def test_with_a_bad_line_nothing_is_written_at_all(folder: Folder) -> None:
    folder.write("tasks.jsonl", GOOD + '{"input": NaN}\n{"input": 3}\n')
    assert folder.run("submit", "tasks.jsonl") == ""
    assert folder.code == 2
    assert folder.err.strip() == "fencepost: line 2: NaN is not JSON"
    assert not (folder.path / "fencepost.db").exists()


def test_what_only_the_store_finds_wrong_is_named_by_its_line(folder: Folder) -> None:
    error = folder.json("submit", "-", code=2, stdin=GOOD + '\n{"input": 2, "depends_on": ["nowhere"]}\n')
    assert (error["error"], error["field"]) == ("INVALID", "line 3")
    assert "nowhere" in error["limit"]
    assert folder.json("tasks")["items"] == []


def test_a_large_file_is_checked_against_the_store_before_its_first_batch(folder: Folder) -> None:
    many = "".join(f'{{"input":{n}}}\n' for n in range(MAX_BATCH))
    folder.json("submit", "-", code=2, stdin=many + '{"input":0,"depends_on":["nowhere"]}\n')
    folder.json("submit", "-", code=2, stdin=many + '{"input":0,"pool":"nopool"}\n')
    assert folder.json("tasks")["items"] == []
    assert folder.json("submit", "-", stdin=many + '{"input":0}\n')["created"] == MAX_BATCH + 1


def test_the_same_submission_again_adds_nothing(folder: Folder) -> None:
    folder.write("tasks.jsonl", GOOD + '{"task_id": "b", "input": {"x": [1]}, "depends_on": ["a"]}\n')
    first = folder.json("submit", "tasks.jsonl")
    assert first == {
        "submitted": 2,
        "created": 2,
        "tasks": [
            {"task_id": "a", "created": True, "state": "READY"},
            {"task_id": "b", "created": True, "state": "BLOCKED"},
        ],
        "results": None,
    }
    again = folder.json("submit", "-", stdin=(folder.path / "tasks.jsonl").read_bytes())
    assert (again["submitted"], again["created"]) == (2, 0)


def test_an_id_that_stands_for_something_else_is_a_conflict(folder: Folder) -> None:
    folder.ok("submit", "--input", "1", "--task-id", "a")
    refused = folder.json("submit", "--input", "2", "--task-id", "a", code=1)
    assert (refused["outcome"], refused["reason"], refused["task_id"]) == ("CONFLICT", "DIFFERENT_TASK", "a")
    assert "fencepost revise a" in folder.run("submit", "--input", "2", "--task-id", "a") + folder.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit",),
        ("submit", "tasks.jsonl", "--input", "1"),
        ("submit", "missing.jsonl"),
        ("submit", "--inptu", "1"),
        ("submit", "tasks.jsonl", "--task-id", "x"),
        ("submit", "tasks.jsonl", "--depends-on", "x"),
        ("submit", "--input", "{"),
        ("submit", "--input", "1", "--priority", "x"),
        ("submit", "--input", "1", "--delay", "nan"),
        ("submit", "--input", "1", "--timeout", "3"),
    ],
)
def test_wrong_usage_is_told_and_makes_no_database(folder: Folder, arguments: tuple[str, ...]) -> None:
    folder.write("tasks.jsonl", GOOD)
    folder.run(*arguments)
    assert folder.code == 2, folder.err
    assert folder.err.startswith("fencepost: ")
    assert not (folder.path / "fencepost.db").exists()


def test_waiting_ends_with_the_results_or_with_what_stands_in_their_way(folder: Folder) -> None:
    worker = folder.start("work", "--", "cat")
    try:
        done = folder.json("submit", "--input", '{"x": 1}', "--task-id", "a", "--wait", "--timeout", "30")
        assert done["results"] == [{"task_id": "a", "outcome": "COMMITTED", "reason": None, "value": {"x": 1}}]
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    folder.ok("submit", "--input", "1", "--task-id", "b", "--delay", "1000")
    folder.ok("cancel", "b")
    late = folder.json("submit", "--input", "2", "--task-id", "c", "--depends-on", "b", "--wait", code=1)
    assert late["results"] == [{"task_id": "c", "outcome": "NOT_COMMITTED", "reason": "BLOCKED", "value": None}]


def test_a_path_is_taken_from_the_options_then_the_environment_then_the_file(folder: Folder, tmp_path: Path) -> None:
    folder.write("fencepost.toml", '[store]\nurl = "sqlite:///of-file.db"\n')
    folder.ok("submit", "--input", "1")
    folder.run("submit", "--input", "1", env={"FENCEPOST_STORE": "sqlite:///of-env.db"})
    folder.run("--store", "sqlite:///of-option.db", "submit", "--input", "1", env={"FENCEPOST_STORE": "sqlite:///x.db"})
    folder.run("submit", "--input", "1", "--store", "sqlite:///of-option2.db")
    assert {path.name for path in tmp_path.glob("*.db")} == {"of-file.db", "of-env.db", "of-option.db", "of-option2.db"}


def test_json_is_the_same_however_the_input_was_spelled(folder: Folder) -> None:
    folder.ok("submit", "--input", '{"a": 1, "b": 2.0}', "--task-id", "a")
    again = folder.json("submit", "--input", json.dumps({"b": 2, "a": 1}), "--task-id", "a")
    assert again["created"] == 0
