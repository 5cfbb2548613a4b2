"""Every pair of refusals at every door, from the kernel's own tables: where two are true, the higher one answers."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.fence import Guard
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted, Operation
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.prepare import Prepared
from tests.kernel.situations import ACCEPTED, BREAKERS, Situation

KERNEL = Kernel()

NO_RECORD = "without the record there is nothing to compare with"
ONE_STATE = "a task has one state"
NO_LEASE = "an attempt that has ended has no lease"
ONE_EFFECT_STATE = "an effect has one state"
NO_EFFECT = "without the effect there is nothing to compare with"

# Pairs of guards that cannot refuse at once, each with its reason. A pair that can be built may not stand here.
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("claim:other-state:not-claimable", "claim:not-yet:not-claimable"): ONE_STATE,
    ("claim:other-state:not-claimable", "claim:lease-runs:held"): ONE_STATE,
    ("claim:not-yet:not-claimable", "claim:lease-runs:held"): ONE_STATE,
    ("fence:not-claimed:fenced-or-ended", "renew:age-used-up:exhausted"): NO_LEASE,
    ("people:committed:already-committed", "revise:cancelled:conflict"): ONE_STATE,
    **dict.fromkeys(
        combinations(
            (
                "prepare:committed:replay",
                "prepare:decided:denied-or-abandoned",
                "prepare:prepared:in-flight",
                "prepare:unknown:reconcile",
                "prepare:unapproved:approval-required",
            ),
            2,
        ),
        ONE_EFFECT_STATE,
    ),
    **{
        ("decide:unknown-effect:not-found", lower): NO_EFFECT
        for lower in (
            "decide:other-payload:payload-conflict",
            "decide:other-version:conflict",
            "decide:not-awaiting:conflict",
            "approve:task-cancelled:cancelled",
            "resolve:not-unknown:conflict",
            "resolve:beyond-the-reconciler:person",
            "resolve:evidence-not-named:evidence",
            "resolve:absent-without-ground:conflict-or-person-or-too-early",
        )
    },
}

# What the call alone shows, and a request id that was used for something else, is seen without any record.
NEED_NO_RECORD = {
    guard.id
    for _, guard in KERNEL.guards()
    if guard.id.endswith((":said-again", ":first-times-again", ":as-they-stand"))
} | {"prepare:transactional:invalid", "effect:asked-later-than-now:invalid"}


def impossible(higher: Guard, lower: Guard) -> str | None:
    if higher.id in ("any:unknown-task:not-found", "any:unknown-pool:not-found") and lower.id not in NEED_NO_RECORD:
        return NO_RECORD
    return IMPOSSIBLE.get((higher.id, lower.id))


def answer_of(guard: Guard, situation: Situation) -> Any:
    """What this guard alone says; None where it lets the call pass or has nothing that it could look at."""
    try:
        return guard.check(situation.context())
    except (AttributeError, TypeError, KeyError, AssertionError):
        return None  # no record, or no value there: it is never asked in this situation


def said(answer: Any) -> Any:
    """A guard's answer as the kernel gives it."""
    return answer.answer if hasattr(answer, "answer") and hasattr(answer, "writes") else answer


def build(operation: Operation, guards: tuple[Guard, ...], *wanted: Guard) -> Situation | None:
    """A situation in which all `wanted` refuse, and nothing that stands above the first of them does."""
    above = guards[: guards.index(wanted[0])]
    for breakers in product(*(BREAKERS[guard.id] for guard in wanted)):
        for order in (breakers, tuple(reversed(breakers))):
            situation = ACCEPTED[operation.command]()
            try:
                for breaker in order:
                    breaker(situation)
            except (AttributeError, AssertionError, TypeError):
                continue  # one took away what the other would change
            if all(answer_of(guard, situation) is not None for guard in wanted) and not any(
                answer_of(guard, situation) is not None for guard in above
            ):
                return situation
    return None


def pairs() -> list[Any]:
    found = []
    for operation in KERNEL.operations:
        for low in range(len(operation.guards)):
            for high in range(low):
                higher, lower = operation.guards[high], operation.guards[low]
                name = f"{operation.command.__name__}-{higher.id}-before-{lower.id}"
                found.append(pytest.param(operation, higher, lower, id=name))
    return found


def operations(first: str = "") -> list[Any]:
    """Those whose first guard's id begins so; creating a pool has no guard at all."""
    return [
        pytest.param(operation, id=operation.command.__name__)
        for operation in KERNEL.operations
        if operation.guards and operation.guards[0].id.startswith(first)
    ]


@pytest.mark.parametrize("operation", operations())
def test_the_situation_that_the_breakers_start_from_is_accepted(operation: Operation) -> None:
    decision = ACCEPTED[operation.command]().decide(KERNEL)
    assert type(decision.answer) in (Accepted, Granted, Prepared), decision.answer
    if type(decision.answer) is Prepared:
        assert decision.answer.outcome is Outcome.EXECUTE
    assert decision.writes is not None
    if type(decision.answer) is Granted:
        assert decision.answer.tasks


@pytest.mark.parametrize(("operation", "higher", "lower"), pairs())
def test_of_two_refusals_that_are_both_true_the_higher_one_answers(
    operation: Operation, higher: Guard, lower: Guard
) -> None:
    situation = build(operation, operation.guards, higher, lower)
    reason = impossible(higher, lower)
    if reason is not None:
        assert situation is None, f"listed as impossible ({reason}), but it can be built"
        return
    assert situation is not None, "no breakers make both refuse: add one, or list the pair with its reason"
    expected = said(answer_of(higher, situation))
    assert situation.decide(KERNEL).answer == expected


@pytest.mark.parametrize("operation", operations("any:unknown"))
def test_an_unknown_task_or_pool_is_not_found_whatever_else_is_wrong_with_the_call(operation: Operation) -> None:
    """Row 0 cannot be judged without the pool, so that NOT_FOUND comes first at every door."""
    first = operation.guards[0].id
    situation = ACCEPTED[operation.command]()
    for guard in operation.guards[1:]:
        for breaker in BREAKERS[guard.id]:
            breaker(situation)
    for breaker in BREAKERS[first]:
        breaker(situation)
    decision = situation.decide(KERNEL)
    assert type(decision.answer) is Refusal
    assert decision.answer.outcome is Outcome.NOT_FOUND
    assert decision.writes is None


def single_guards() -> list[Any]:
    return [
        pytest.param(operation, guard, id=f"{operation.command.__name__}-{guard.id}")
        for operation in KERNEL.operations
        for guard in operation.guards
    ]


@pytest.mark.parametrize(("operation", "guard"), single_guards())
def test_every_way_to_break_a_guard_is_answered_by_it_and_changes_no_record(operation: Operation, guard: Guard) -> None:
    above = operation.guards[: operation.guards.index(guard)]
    tried = 0
    for breaker in BREAKERS[guard.id]:
        situation = ACCEPTED[operation.command]()
        breaker(situation)
        answer = answer_of(guard, situation)
        if answer is None or any(answer_of(g, situation) is not None for g in above):
            continue  # this way breaks the guard at another door
        tried += 1
        decision = situation.decide(KERNEL)
        assert decision.answer == said(answer)
        assert decision.writes is None
    assert tried, "no breaker reaches this guard"


def candidate_guards() -> list[Any]:
    """Without the version: claim_next expects the one that it scanned, which is the candidate's own."""
    every = [guard for operation in KERNEL.operations for guard in operation.each]
    return [pytest.param(guard, id=guard.id) for guard in every if guard.id != "claim:other-version:conflict"]


@pytest.mark.parametrize("guard", candidate_guards())
def test_claim_next_passes_over_a_candidate_that_claim_would_refuse(guard: Guard) -> None:
    for breaker in BREAKERS[guard.id]:
        situation = ACCEPTED[k.ClaimNext]()
        breaker(situation)
        assert guard.check(situation.context()) is not None
        decision = situation.decide(KERNEL)
        assert type(decision.answer) is Granted
        assert decision.answer.tasks == ()
        assert decision.writes is None
        assert decision.log == ()


def test_every_guard_has_a_breaker_and_every_breaker_a_guard() -> None:
    ids = {guard.id for _, guard in KERNEL.guards()}
    assert ids == set(BREAKERS)


def test_the_pairs_listed_as_impossible_are_pairs_of_one_door() -> None:
    at_one_door = set()
    for operation in KERNEL.operations:
        ids = [guard.id for guard in operation.guards]
        at_one_door |= {(high, low) for n, low in enumerate(ids) for high in ids[:n]}
    assert set(IMPOSSIBLE) <= at_one_door


def fence_rows(claimed: bool) -> list[tuple[str, str]]:
    return [
        ("fence:no-epoch-or-old-protocol:protocol", "PROTOCOL"),
        ("fence:other-epoch:fenced", "FENCED"),
        ("fence:other-generation-or-attempt:fenced", "FENCED"),
        ("fence:other-or-no-owner:fenced" if claimed else "fence:other-owner:fenced", "FENCED"),
        ("fence:granted-under-older-epoch:fenced", "FENCED"),
        ("fence:other-cancel-generation:cancelled", "CANCELLED"),
        ("fence:other-input:stale-input", "STALE_INPUT"),
        ("fence:not-claimed:fenced-or-ended", "FENCED"),
    ]


EFFECT_DOORS = [k.Prepare, k.Reserve, k.Settle, k.Reconcile, k.Withdraw]


@pytest.mark.parametrize("command", [k.Renew, k.SaveCheckpoint, k.Commit, k.Release, k.Fail, *EFFECT_DOORS])
def test_the_fence_stands_at_every_door_of_a_claim_in_the_order_of_the_contract(command: type) -> None:
    operation = next(o for o in KERNEL.operations if o.command is command)
    rows = fence_rows(command is k.Renew)
    found = [guard.id for guard in operation.guards if guard.id.startswith("fence:")]
    assert found == [row for row, _ in rows]
    for guard_id, outcome in rows:
        guard = next(g for g in operation.guards if g.id == guard_id)
        situation = build(operation, operation.guards, guard)
        assert situation is not None
        answer = situation.decide(KERNEL).answer
        assert type(answer) is Refusal
        assert answer.outcome.value == outcome


REASONS: list[tuple[str, int, Outcome, str | None, bool]] = [
    # guard, which of its breakers, outcome, reason, alarm
    ("fence:other-epoch:fenced", 0, Outcome.FENCED, Reason.EPOCH, False),
    ("fence:other-epoch:fenced", 1, Outcome.FENCED, Reason.REWOUND, True),
    ("fence:other-epoch:fenced", 2, Outcome.FENCED, Reason.EPOCH, False),
    ("fence:other-generation-or-attempt:fenced", 0, Outcome.FENCED, Reason.GENERATION, False),
    ("fence:other-generation-or-attempt:fenced", 1, Outcome.FENCED, Reason.REWOUND, True),
    ("fence:other-generation-or-attempt:fenced", 2, Outcome.FENCED, Reason.REWOUND, True),
    ("fence:other-owner:fenced", 0, Outcome.FENCED, Reason.OWNER, False),
    ("fence:granted-under-older-epoch:fenced", 0, Outcome.FENCED, Reason.EPOCH, False),
    ("fence:other-cancel-generation:cancelled", 0, Outcome.CANCELLED, None, False),
    ("fence:other-input:stale-input", 0, Outcome.STALE_INPUT, None, False),
    ("fence:not-claimed:fenced-or-ended", 0, Outcome.FENCED, Reason.STATE, False),
    ("fence:not-claimed:fenced-or-ended", 1, Outcome.ENDED, "RELEASED", False),
    ("fence:not-claimed:fenced-or-ended", 2, Outcome.ENDED, "FAILED", False),
    ("fence:not-claimed:fenced-or-ended", 3, Outcome.ENDED, "COMMITTED", False),
]


@pytest.mark.parametrize("row", REASONS, ids=lambda row: f"{row[0]}-{row[1]}")
@pytest.mark.parametrize("command", [k.SaveCheckpoint, k.Commit, k.Release, k.Fail, *EFFECT_DOORS])
def test_each_row_of_the_fence_gives_its_reason_and_alarms_where_time_ran_backwards(
    command: type, row: tuple[str, int, Outcome, str | None, bool]
) -> None:
    guard_id, which, outcome, reason, alarm = row
    situation = ACCEPTED[command]()
    BREAKERS[guard_id][which](situation)
    decision = situation.decide(KERNEL)
    assert type(decision.answer) is Refusal
    assert (decision.answer.outcome, decision.answer.reason, decision.answer.alarm) == (outcome, reason, alarm)
    assert [entry.kind for entry in decision.log] == (["refusal", "alarm"] if alarm else ["refusal"])


def test_a_claim_whose_task_moved_is_fenced_by_epoch_even_where_its_number_is_above_the_new_pools() -> None:
    situation = ACCEPTED[k.Commit]()
    situation.set_claim(pool="the-pool-it-left")
    situation.set_command(epoch=9)
    answer = situation.decide(KERNEL).answer
    assert type(answer) is Refusal
    assert (answer.outcome, answer.reason, answer.alarm) == (Outcome.FENCED, Reason.EPOCH, False)


def test_a_refusal_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="no truth value"):
        bool(Refusal(Outcome.FENCED))


def test_a_wrong_call_is_no_event_of_the_pool() -> None:
    situation = ACCEPTED[k.Commit]()
    situation.set_command(content=None)
    decision = situation.decide(KERNEL)
    assert type(decision.answer) is Problem
    assert decision.log == ()
