"""The kernel with one guard less, for every guard of the kernel's own list: what notices?

First the rows: a situation in which that guard alone refuses is now answered otherwise. Then the journal: an accepted
change no longer shows the comparison that its door declares. Then the search (of one task, or of effects), within
smaller bounds, up to the first change that breaks an invariant.
"""

from __future__ import annotations

from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel.fence import DOORS, Guard
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Operation
from tests.kernel.situations import ACCEPTED, BREAKERS, Situation
from tests.model.calls import Bounds
from tests.model.effect_mutants import UNSEEN, caught_among_effects, of_effects
from tests.model.oracle import Violation
from tests.model.single import Search

SMALLER = Bounds(workers=2, claims=2)
SHIPPED = Kernel()


def mutants() -> list[tuple[type, str]]:
    """Every guard at every operation, once."""
    return list(dict.fromkeys((command, guard.id) for command, guard in SHIPPED.guards()))


def operation_of(command: type) -> Operation:
    return next(operation for operation in SHIPPED.operations if operation.command is command)


def guard_of(command: type, guard_id: str) -> Guard:
    operation = operation_of(command)
    return next(guard for guard in (*operation.guards, *operation.each) if guard.id == guard_id)


def outcome_of(kernel: Kernel, situation: Situation) -> Any:
    """Answer and versions written; or the error, where the mutant stumbles over what its guard kept away."""
    try:
        decision = situation.decide(kernel)
    except (AttributeError, TypeError, KeyError, AssertionError, IndexError) as error:
        return type(error).__name__
    writes = decision.writes
    moved = [] if writes is None else [write.task.state_version for write in writes.tasks]
    return decision.answer, moved


def caught_by_a_row(command: type, guard_id: str) -> str | None:
    mutant = SHIPPED.without(command, guard_id)
    for breaker in BREAKERS[guard_id]:
        situation = ACCEPTED[command]()
        try:
            breaker(situation)
        except TypeError:
            continue  # this call does not present what that breaker changes
        shipped, mutated = outcome_of(SHIPPED, situation), outcome_of(mutant, situation)
        if shipped != mutated:
            return f"row: {says(shipped)} became {says(mutated)}"
    return None


def says(outcome: Any) -> str:
    if isinstance(outcome, str):
        return outcome
    answer = outcome[0]
    word = getattr(answer, "outcome", None) or getattr(answer, "code", "?")
    reason = getattr(answer, "reason", None)
    return f"{word}/{reason}" if reason else str(word)


def caught_by_coverage(command: type, guard_id: str) -> str | None:
    mutant = SHIPPED.without(command, guard_id)
    writes = ACCEPTED[command]().decide(mutant).writes
    declared = DOORS[operation_of(command).door].compares if operation_of(command).door in DOORS else 0
    if writes is not None and writes.proof.compared & declared != declared:
        return "coverage: the journal lacks a comparison"
    return None


def caught_by_the_search(command: type, guard_id: str, *, coverage: bool = True) -> str | None:
    """The first violation, journal masks apart where `coverage` is False; None where the search ends without one."""
    if of_effects((command, guard_id)):
        return caught_among_effects((command, guard_id), coverage=coverage)
    mutant = SHIPPED.without(command, guard_id)
    second = SECOND_LOCK.get((command, guard_id))
    if second is not None:
        mutant = mutant.without(command, second)
    try:
        Search(SMALLER, mutant, coverage=coverage).run()
    except Violation as violation:
        return f"search: {violation}"
    except (AttributeError, TypeError, KeyError) as error:
        return f"search: {type(error).__name__}"
    return None


def caught(command: type, guard_id: str) -> str | None:
    return (
        caught_by_a_row(command, guard_id)
        or caught_by_coverage(command, guard_id)
        or caught_by_the_search(command, guard_id)
    )


# What the searched world does not contain, so that the search cannot miss these guards: nothing unknown, one protocol,
# no missing epoch, ttls within the policy. And what is answered again changes nothing, whichever way it is answered.
NOT_IN_THE_SEARCH = (
    ":not-found",
    ":protocol",
    ":said-again",
    ":as-they-stand",
    ":committed-again",
    ":first-times-again",
    "any:ttl-over-policy:invalid",
)
# An attempt that never prepared the effect is not unknown: it is there, and asks.
NEVER_PREPARED = "evidence:never-prepared:not-found"

# Guards whose loss changes only which refusal is given: another one keeps the change away. Each with that other one,
# and the test takes both away. The order of refusals is what the rows are for.
SECOND_LOCK: dict[tuple[type, str], str] = {
    **{
        (command, guard_id): "fence:not-claimed:fenced-or-ended"  # a cancel or a revise ends the attempt, too
        for command in (k.Renew, k.SaveCheckpoint, k.Commit, k.Release, k.Fail)
        for guard_id in ("fence:other-cancel-generation:cancelled", "fence:other-input:stale-input")
    },
    (k.Reopen, "people:committed:already-committed"): "reopen:not-cancelled-or-parked:conflict",
}


def searched() -> list[tuple[type, str]]:
    """The guards whose loss the search alone must notice, by the records and not only by the journal's masks."""
    passed_over = (
        k.ClaimNext,
        "claim:other-version:conflict",
    )  # the version is the candidate's own: only the mask tells
    return [
        mutant
        for mutant in mutants()
        if (not mutant[1].endswith(NOT_IN_THE_SEARCH) or mutant[1] == NEVER_PREPARED)
        and mutant[0] is not k.SetPolicy
        and mutant != passed_over
        and mutant not in UNSEEN
    ]
