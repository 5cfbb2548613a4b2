"""The kernel is a function: the same values in give the same values out, and nothing else happens."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fencepost.kernel
from fencepost.kernel.fence import DOORS
from fencepost.kernel.kernel import OPERATIONS, Kernel
from fencepost.kernel.operations import Operation
from fencepost.kernel.writes import Decision, Proof, WriteSet, _prove
from tests.kernel.situations import ACCEPTED, BREAKERS, Situation

FOLDER = Path(fencepost.kernel.__file__).parent
# One by one, because most of the standard library is not pure. What is not here needs a reason to come in.
ALLOWED = {"__future__", "collections.abc", "enum", "hashlib", "json", "math", "typing", "msgspec", "rfc8785"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "globals", "id"}


def modules_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_this_module_imports_and_calls_only_what_has_no_effects(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for module in modules_of(tree):
        ours = module.startswith("fencepost.kernel") or module == "fencepost.errors"
        assert ours or module in ALLOWED, f"{path.name} imports {module}"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global | ast.Nonlocal), f"line {node.lineno}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{path.name} calls {node.func.id}"


def told(decision: Decision) -> Any:
    writes = decision.writes
    fields = None if writes is None else {name: getattr(writes, name) for name in WriteSet.__slots__ if name != "proof"}
    compared = None if writes is None else (writes.proof.door, writes.proof.compared)
    return decision.answer, decision.log, fields, compared


def situations(operation: Operation) -> Iterator[Situation]:
    yield ACCEPTED[operation.command]()
    for guard in operation.guards:
        for breaker in BREAKERS[guard.id]:
            situation = ACCEPTED[operation.command]()
            breaker(situation)
            yield situation


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.command.__name__)
def test_deciding_twice_says_the_same_and_leaves_what_it_read_as_it_was(operation: Operation) -> None:
    kernel = Kernel()
    for situation in situations(operation):
        snapshot = situation.snapshot()
        before = copy.deepcopy(snapshot)
        candidates = (situation.candidate,) if situation.candidate is not None else ()
        first = kernel.decide(snapshot, situation.command, candidates)
        second = kernel.decide(snapshot, situation.command, candidates)
        assert told(first) == told(second)
        assert snapshot == before


def test_no_write_can_be_built_without_the_proof_of_a_passed_fence() -> None:
    for made_up in (object(), None, "proof", 255):
        with pytest.raises(TypeError, match="needs the Proof"):
            WriteSet(made_up, "pool", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be made"):
        Proof("commit", 255, object())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.command.__name__)
def test_an_accepted_change_shows_the_comparisons_that_its_door_declares(operation: Operation) -> None:
    writes = ACCEPTED[operation.command]().decide(Kernel()).writes
    door = DOORS.get(operation.door)
    if writes is None or door is None or not operation.guards:
        return
    assert writes.proof.door == operation.door
    assert writes.proof.compared & door.compares == door.compares
    for event in writes.events:
        assert event.compared == writes.proof.compared
        assert event.name in door.events


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.command.__name__)
def test_a_door_that_is_not_on_the_list_writes_no_event(operation: Operation) -> None:
    writes = ACCEPTED[operation.command]().decide(Kernel()).writes
    if operation.door in DOORS or writes is None:
        return
    assert writes.events == []
    assert all(write.family == "compare" for write in writes.tasks)


def test_records_and_commands_are_frozen_values() -> None:
    proof = _prove("commit", 0)
    for value in (ACCEPTED[o.command]().command for o in OPERATIONS):
        with pytest.raises(AttributeError):
            value.request_id = "another"
        assert msgspec.structs.replace(value) == value
    assert proof.door == "commit"
