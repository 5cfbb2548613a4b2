"""Random orders of events around an effect: nothing happens twice by the shipped rules, and without one it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules, effects
from fencepost.kernel.kernel import Kernel
from tests.model.effect_walks import walk
from tests.model.oracle import Violation

GUARANTEES = ("CONDITIONAL", "IDEMPOTENT", "RESERVATION", "READ_ONLY", "NON_REPLAYABLE")
# What the walks must have met, or they prove little.
MET = {
    "CONDITIONAL": ("report: ABSENT RECONCILED", "report: HAPPENED RESOLVED", "settle: HAPPENED FENCED"),
    "IDEMPOTENT": ("report: ABSENT TOO_EARLY", "report: ABSENT RECONCILED", "report: ABSENT PERSON"),
    "RESERVATION": ("reserve: RESERVED", "report: ABSENT RESOLVED", "send: ABSENT"),
    "READ_ONLY": ("prepare: REPLAY", "settle: HAPPENED SETTLED"),
    "NON_REPLAYABLE": ("prepare: APPROVAL_REQUIRED", "prepare: RECONCILE", "settle: UNKNOWN SETTLED"),
}


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_whatever_is_paused_lost_or_repeated_the_effect_takes_place_at_most_once(guarantee: str) -> None:
    seen = walk(guarantee, range(400))
    assert [met for met in MET[guarantee] if not seen[met]] == []
    assert seen["prepare: EXECUTE"] > 100


@pytest.mark.soak
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_it_holds_over_long_walks(guarantee: str) -> None:
    walk(guarantee, range(1_000_000, 1_004_000), steps=80)


RULES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a repeat's ABSENT says nothing": (effects, "_says_nothing", lambda effect, why: None, "CONDITIONAL"),
    "not found counts late enough": (effect_rules, "nothing_arrives_before", lambda effect: 0, "IDEMPOTENT"),
    "the margin": (
        effect_rules,
        "window_ends",
        lambda effect: effect.first_prepared_at + effect.terms.retention_us,
        "IDEMPOTENT",
    ),
    "what is open": (
        effect_rules,
        "open_ways",
        lambda effect, now: ("ASK", "REPEAT") if effect.state == effect_rules.UNKNOWN else (),
        "NON_REPLAYABLE",
    ),
    "what a guarantee can tell": (
        effect_rules,
        "absent",
        lambda effect, ground, asked_at, *, person: "CERTAIN",
        "CONDITIONAL",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_without_this_rule_a_walk_finds_what_goes_wrong(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, broken, guarantee = RULES[rule]
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Violation):
        walk(guarantee, range(4_000))


@pytest.mark.parametrize(
    ("command", "guard", "guarantee"),
    [
        (k.Settle, "effect:other-execution:stale-execution", "IDEMPOTENT"),
        (k.Prepare, "prepare:unknown:reconcile", "NON_REPLAYABLE"),
        (k.Reconcile, "reconcile:nothing-to-ask:person", "IDEMPOTENT"),
    ],
)
def test_without_this_guard_a_walk_finds_what_goes_wrong(command: type, guard: str, guarantee: str) -> None:
    with pytest.raises(Violation):
        walk(guarantee, range(4_000), kernel=Kernel().without(command, guard))
