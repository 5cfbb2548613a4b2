"""The kernel without one of its guards on effects, searched within small bounds up to the first broken invariant."""

from __future__ import annotations

from fencepost.kernel import commands as k
from fencepost.kernel.kernel import EFFECT_COMMANDS, Kernel
from tests.model.effects import Scenario, Search
from tests.model.oracle import Violation

Mutant = tuple[type, str]

# Guards of other doors that are there for the sake of effects.
OF_EFFECTS = (
    "commit:effects-open:unsettled",
    "commit:slot-taken:payload-conflict",
    "revise:effects-open:conflict",
    "revise:effects-done:conflict",
)

# Every call is tried here, also those that the fence refuses whatever the effect is.
MAIL = Scenario("NON_REPLAYABLE", every=True, executions=1, third_party=0)
AGAIN = MAIL._replace(executions=2, revisions=0, disturbances=0)
APPROVED = MAIL._replace(approval=True, revisions=0)
PAIR = MAIL._replace(second="IDEMPOTENT", attempts=1, disturbances=0, revisions=0)
PAY = MAIL._replace(guarantee="IDEMPOTENT", revisions=0, retention=3)
PAY_AGAIN = PAY._replace(executions=2, disturbances=0)
SEATS = MAIL._replace(guarantee="RESERVATION", revisions=0)
SEATS_AGAIN = SEATS._replace(executions=2, disturbances=0)
LOOK = MAIL._replace(guarantee="READ_ONLY", disturbances=0)
SQL = Scenario("TRANSACTIONAL", every=True)

BY_COMMAND: dict[type, Scenario] = {
    k.Commit: PAIR,
    k.Revise: MAIL,
    k.Prepare: APPROVED,
    k.Reserve: SEATS,
    k.Settle: MAIL,
    k.Reconcile: PAY,
    k.Withdraw: APPROVED,
    k.Evidence: MAIL,
    k.Approve: APPROVED,
    k.Deny: APPROVED,
    k.Resolve: MAIL,
}
BY_GUARD: dict[str, Scenario] = {
    "prepare:transactional:invalid": SQL,
    "prepare:committed:replay": AGAIN,
    "prepare:prepared:in-flight": AGAIN,
    "prepare:unknown:reconcile": AGAIN,
    "prepare:another-under-way:busy": PAIR,
    "effect:other-execution:stale-execution": PAY_AGAIN,
    "settle:absent-against-evidence:evidence-or-conflict": SEATS,
    "reconcile:other-execution:stale-execution": PAY_AGAIN,
    "reconcile:nothing-to-ask:person": MAIL,
    "reconcile:not-unknown:conflict": LOOK,
    "resolve:task-held:held": PAY,
}

NOT_PREPARED = "reserve:not-prepared:stale-execution"
FENCE = "fence:not-claimed:fenced-or-ended"
CANCEL, INPUT = "fence:other-cancel-generation:cancelled", "fence:other-input:stale-input"
OTHER_REVISION = "effect:unknown-effect:not-found"  # its effects are of the present revision
# Guards whose loss others make up for; without all of them, the search finds what goes wrong.
SECOND_LOCKS: dict[Mutant, tuple[str, ...]] = {
    # A cancel or a revise ends the attempt, too.
    **{(command, CANCEL): (FENCE,) for command in (k.Prepare, k.Settle, k.Reconcile, k.Withdraw)},
    **{(command, INPUT): (FENCE, OTHER_REVISION) for command in (k.Settle, k.Reconcile, k.Withdraw)},
    (k.Prepare, INPUT): (FENCE,),
    # What an attempt was sending is UNKNOWN from its end on, and only what is PREPARED is reserved.
    (k.Reserve, "fence:other-generation-or-attempt:fenced"): (NOT_PREPARED,),
    (k.Reserve, CANCEL): (FENCE, NOT_PREPARED),
    (k.Reserve, INPUT): (FENCE, NOT_PREPARED, OTHER_REVISION),
    (k.Reserve, FENCE): (NOT_PREPARED,),
}
# What goes wrong by the loss of such another guard alone, which does not count.
BY_LOSS_OF = {FENCE: "accepted from an attempt that had ended", NOT_PREPARED: "reserved by who does not send"}

# Guards that the search cannot see: why, and the test that holds each.
UNSEEN: dict[Mutant, tuple[str, str]] = {
    (k.Prepare, "prepare:too-many:invalid"): (
        "a hundred executions and a thousand effects are beyond any bound",
        "tests/kernel/test_limits.py",
    ),
}


def of_effects(mutant: Mutant) -> bool:
    return mutant[0] in EFFECT_COMMANDS or mutant[1] in OF_EFFECTS


def scenario_of(mutant: Mutant) -> Scenario:
    if mutant in ((k.Settle, INPUT), (k.Reconcile, INPUT)):
        return LOOK
    if mutant == (k.Withdraw, INPUT):
        return LOOK._replace(approval=True)
    if mutant == (k.Reserve, INPUT):
        return SEATS._replace(revisions=1)
    if mutant == (k.Prepare, INPUT):
        return MAIL
    if mutant == (k.Reserve, "effect:other-execution:stale-execution"):
        return SEATS_AGAIN
    return BY_GUARD.get(mutant[1]) or BY_COMMAND[mutant[0]]


def caught_among_effects(mutant: Mutant, *, coverage: bool = True) -> str | None:
    """The first violation, journal masks apart where `coverage` is False; None where every search ends without one."""
    command = mutant[0]
    kernel = Kernel().without(*mutant)
    for guard_id in SECOND_LOCKS.get(mutant, ()):
        kernel = kernel.without(command, guard_id)
    search = Search(scenario_of(mutant), kernel, coverage=coverage)
    search.pass_over = tuple(BY_LOSS_OF[lock] for lock in SECOND_LOCKS.get(mutant, ()) if lock in BY_LOSS_OF)
    try:
        search.run()
    except Violation as violation:
        return f"search of effects: {violation}"
    except (AttributeError, TypeError, KeyError, IndexError, AssertionError) as error:
        return f"search of effects: {type(error).__name__}"
    return None
