"""Sentences of the contract and tests, tied in both directions."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fencepost.kernel.kernel import Kernel

TESTS = Path(__file__).resolve().parents[1]
SPEC = TESTS.parent / "docs" / "spec" / "claim-v1.md"
RULES: list[dict[str, Any]] = [
    rule
    for name in ("claim_v1.toml", "claim_v1_effects.toml")
    for rule in tomllib.loads((TESTS / "rules" / name).read_text("utf-8"))["rule"]
]

# Guards that hold what a neighbour's sentence says at another door: they need no sentence of their own.
COVERED = {
    "any:unknown-pool:not-found": "any:unknown-task:not-found",
    "any:old-protocol:protocol": "fence:no-epoch-or-old-protocol:protocol",
    "submit:unknown-pool:not-found": "any:unknown-task:not-found",
    "submit:old-protocol:protocol": "fence:no-epoch-or-old-protocol:protocol",
    "pool:no-epoch-or-old-protocol:protocol": "fence:no-epoch-or-old-protocol:protocol",
    "people:other-version:conflict": "take_over:other-generation:conflict",
    "discard:unknown-generation:not-found": "stage:unknown-attempt:not-found",
    "pool:raise-not-above:invalid": "invariant:2:never-down",
    **dict.fromkeys(
        (
            "checkpoint:repeated:said-again",
            "release:repeated:said-again",
            "fail:repeated:said-again",
            "reopen:repeated:said-again",
            "revise:repeated:said-again",
            "take_over:repeated:said-again",
            "discard:repeated:said-again",
            "pool:repeated:said-again",
            "stage:repeated:said-again",
            "usage:repeated:said-again",
            "reserve:repeated:said-again",
            "settle:repeated:said-again",
            "reconcile:repeated:said-again",
            "withdraw:repeated:said-again",
            "approve:repeated:said-again",
            "deny:repeated:said-again",
            "resolve:repeated:said-again",
        ),
        "repeats:finished-change:said-again",
    ),
}


def plain(text: str) -> str:
    return " ".join(text.split())


@cache
def functions_in(name: str) -> frozenset[str]:
    path = TESTS / name
    assert path.is_file(), f"no such file: tests/{name}"
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["id"])
def test_this_rule_is_a_sentence_of_the_contract_and_has_tests_that_exist(rule: dict[str, Any]) -> None:
    assert set(rule) == {"id", "says", "tests"}
    assert plain(rule["says"]) in plain(SPEC.read_text("utf-8")), "the contract does not say this (any more)"
    assert rule["tests"], "a rule without a test"
    for test in rule["tests"]:
        name, _, function = test.partition("::")
        assert function.startswith("test_")
        assert function in functions_in(name), f"no such test: {test}"


def test_every_id_stands_once() -> None:
    ids = [rule["id"] for rule in RULES]
    assert sorted(ids) == sorted(set(ids))


def test_every_guard_of_the_kernel_has_its_rule() -> None:
    ids = {rule["id"] for rule in RULES}
    guards = {guard.id for _, guard in Kernel().guards()}
    assert guards - ids == set(COVERED)
    assert set(COVERED.values()) <= ids


def test_every_attack_told_to_the_kernel_is_tied_to_a_rule() -> None:
    told = ("test_attacks", "test_effect_attacks", "test_execution_attacks", "test_effect_decisions")
    attacks = {name for page in told for name in functions_in(f"kernel/{page}.py") if name.startswith("test_x")}
    tied = {test.partition("::")[2] for rule in RULES for test in rule["tests"]}
    assert attacks - tied == {"test_x24_a_repeated_claim_of_an_older_epoch_is_fenced_before_its_id_is_looked_up"}
