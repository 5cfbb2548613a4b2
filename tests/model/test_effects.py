"""The search of effects within CI's bounds, what falls without an assumption, and proof that its judges find fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost.kernel import effect_rules, effects, operations, prepare
from fencepost.kernel.outcomes import Outcome, Reason, Refusal
from fencepost.kernel.records import EffectState
from fencepost.kernel.table import EFFECT_MOVES
from tests.model import effect_mutants, effect_oracle
from tests.model.effect_downstreams import Scenario
from tests.model.effect_mutants import MAIL, PAY, PAY_AGAIN
from tests.model.effects import CI, LATE, UNTRUE, Search, says
from tests.model.mutants import caught_by_a_row, mutants
from tests.model.oracle import Violation

# What is too small for the bounds: a search that shrinks below has lost something.
LEAST = {"IDEMPOTENT": 30_000, "CONDITIONAL": 25_000, "RESERVATION": 12_000, "NON_REPLAYABLE": 2_500}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", CI, ids=says)
def test_no_order_of_events_makes_an_effect_take_place_twice_or_a_record_untrue_or_leaves_it_stuck(
    scenario: Scenario,
) -> None:
    found = Search(scenario).run(stuck=True)
    print(
        f"\n{says(scenario)}: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}, "
        f"{found.seconds:.1f} s"
    )
    assert found.stuck == ()
    moves = {(door, EffectState(was) if was else None, EffectState(now)) for door, was, now in found.moves}
    assert moves <= EFFECT_MOVES
    if not scenario.second and not scenario.approval:
        assert found.states >= LEAST.get(scenario.guarantee, 0), (
            "the search has become smaller: what does it leave out?"
        )


@pytest.mark.parametrize("scenario", [effect_mutants.PAY, effect_mutants.APPROVED], ids=says)
def test_nor_do_calls_that_the_fence_refuses_by_whoever_presents_them(scenario: Scenario) -> None:
    assert scenario.every
    assert Search(scenario).run().decisions > 50_000


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LATE, ids=says)
def test_this_guarantee_survives_a_sender_that_is_paused_without_bound(scenario: Scenario) -> None:
    assert not scenario.in_time
    assert Search(scenario).run().states > 10


@pytest.mark.parametrize("scenario", UNTRUE, ids=says)
def test_where_every_assumption_has_failed_the_rules_hold_and_nothing_is_stuck(scenario: Scenario) -> None:
    found = Search(scenario, truth=None).run(stuck=True)
    assert found.stuck == ()
    late = {(EffectState(was), EffectState(now)) for door, was, now in found.moves if door == "evidence"}
    assert {was for was, _ in late} > {EffectState.ABSENT, EffectState.ABANDONED, EffectState.UNKNOWN}


SMALL = Scenario("", revisions=0, disturbances=0)
IDEMPOTENT, NON_REPLAYABLE, CONDITIONAL = (
    SMALL._replace(guarantee=name) for name in ("IDEMPOTENT", "NON_REPLAYABLE", "CONDITIONAL")
)
FALLS = {
    "IDEMPOTENT: a call arrives after its send_by": IDEMPOTENT._replace(in_time=False, person="right"),
    "IDEMPOTENT: a key is forgotten too early": IDEMPOTENT._replace(forgets_early=True),
    "IDEMPOTENT: a query misses what the settle time should have shown": IDEMPOTENT._replace(lags=True),
    "NON_REPLAYABLE: a call arrives after the person looked": NON_REPLAYABLE._replace(in_time=False),
    "NON_REPLAYABLE: the person is wrong": NON_REPLAYABLE._replace(person="wrong"),
    "CONDITIONAL: an old version comes back (X06)": CONDITIONAL._replace(returns=True, third_party=2),
    "CONDITIONAL: a person who merely looks decides, and a call is let in later": CONDITIONAL._replace(in_time=False),
}


@pytest.mark.parametrize("without", FALLS)
def test_without_this_assumption_the_search_finds_the_effect_twice_in_the_world(without: str) -> None:
    with pytest.raises(Violation, match="took place 2 times"):
        Search(FALLS[without], truth=False).run()


def never(*_: Any, **__: Any) -> bool:
    return False


BROKEN: dict[str, tuple[Scenario, Any, str, Callable[..., Any], str]] = {
    "not found counts late enough": (
        PAY,
        effect_rules,
        "too_early",
        lambda effect, asked_at: None,
        "it took place, and its state is 5",
    ),
    "the margin is at least the send window": (
        PAY_AGAIN,
        effect_rules,
        "window_ends",
        lambda effect: (
            effect.first_prepared_at + effect.terms.retention_us if effect.terms.guarantee == "IDEMPOTENT" else None
        ),
        "only a person",
    ),
    "the retention ends": (PAY_AGAIN, effect_rules, "window_ends", lambda effect: None, "only a person"),
    "a repeat's ABSENT says nothing": (
        PAY_AGAIN,
        effects,
        "_says_nothing",
        lambda effect, why: None,
        "a repeat's ABSENT",
    ),
    "what is open depends on the guarantee": (
        MAIL._replace(executions=2, disturbances=0),
        effect_rules,
        "open_ways",
        lambda effect, now: ("ASK", "REPEAT") if effect.state == effect_rules.UNKNOWN else (),
        "a second time while the first may take effect|only a person",
    ),
    "only a certain ground counts at once": (
        PAY,
        effect_rules,
        "absent",
        lambda effect, ground, asked_at, *, person: "CERTAIN",
        "it took place, and its state is 5",
    ),
    "late evidence speaks against ABSENT": (PAY_AGAIN, effect_rules, "contested", never, "late evidence"),
    "an attempt's end makes UNKNOWN what it was sending": (
        MAIL,
        operations,
        "lose_senders",
        lambda writes, effects, now: [],
        "does not hold the task",
    ),
    "an approval is void after a cancel or a raise": (
        effect_mutants.APPROVED,
        effect_rules,
        "approved",
        lambda effect, epoch, cancel_generation: effect.approval is not None,
        "an approval that is void",
    ),
    "a task is not revised over what may have happened": (MAIL, effect_rules, "took_place", never, "revised as if"),
    "what is open keeps its task from being committed": (MAIL, effect_rules, "blocks", never, "does not hold|is open"),
    "what cannot be asked about goes alone": (
        effect_mutants.PAIR,
        effect_rules,
        "in_the_way",
        lambda effects, wanted, guarantee: (),
        "two at once",
    ),
    "what cannot be replayed is approved again": (
        effect_mutants.AGAIN,
        prepare,
        "asks_approval",
        lambda effect, command: bool(command.terms.approval) if effect is None else effect.terms.approval,
        "executed without asking",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_without_this_rule_the_search_finds_what_goes_wrong(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, module, name, broken, said = BROKEN[rule]
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Violation, match=said):
        Search(scenario, coverage=False).run()


def test_a_margin_of_nothing_lets_the_effect_happen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """X04, counted in the world: the first sender's call arrives at once, the repeat after the key was forgotten."""

    def without_margin(effect: Any) -> int | None:
        if effect.terms.guarantee != "IDEMPOTENT":
            return None
        ends: int = effect.first_prepared_at + effect.terms.retention_us
        return ends

    monkeypatch.setattr(effect_rules, "window_ends", without_margin)
    monkeypatch.setattr(effect_oracle, "past_window", never)
    with pytest.raises(Violation, match="took place 2 times"):
        Search(IDEMPOTENT, truth=False).run()


def test_the_search_finds_states_that_nothing_leads_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reservation that is gone counts no more than one that stands, nobody can ever say ABSENT."""
    shipped = effect_rules.absent

    def never_gone(effect: Any, ground: str | None, asked_at: int, *, person: bool) -> Any:
        if effect.executions[-1].reservation_id is not None:
            return Refusal(Outcome.CONFLICT, Reason.RESERVATION)
        return shipped(effect, ground, asked_at, person=person)

    monkeypatch.setattr(effect_rules, "absent", never_gone)
    found = Search(Scenario("RESERVATION", executions=1)).run(stuck=True)
    assert found.stuck
    assert {core.effects[0].executions[-1].reservation_id for core, _ in found.stuck} == {"r1"}


def test_guards_that_the_search_cannot_see_are_few_and_named() -> None:
    known = set(mutants())
    assert set(effect_mutants.UNSEEN) <= known
    assert set(effect_mutants.SECOND_LOCKS) <= known
    root = Path(__file__).resolve().parents[2]
    for (command, guard_id), (why, test) in effect_mutants.UNSEEN.items():
        assert why
        assert caught_by_a_row(command, guard_id)
        assert (root / test).exists()
