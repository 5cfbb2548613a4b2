"""What the stories about effects have in common: downstreams by their guarantee, and few words for common turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.prepare import Prepared
from fencepost.kernel.records import Effect, EffectState, Terms
from tests.model.world import SECOND, World

Told = Callable[[World], None]

WINDOW, SETTLE, RETENTION = 10, 20, 100  # seconds
MAIL = Terms("smtp", "NON_REPLAYABLE", WINDOW * SECOND, SETTLE * SECOND)
APPROVED_MAIL = Terms("smtp", "NON_REPLAYABLE", WINDOW * SECOND, SETTLE * SECOND, approval=True)
PAY = Terms("pay/account", "IDEMPOTENT", WINDOW * SECOND, SETTLE * SECOND, retention_us=RETENTION * SECOND)
OBJECT = Terms("s3/bucket", "CONDITIONAL", WINDOW * SECOND, SETTLE * SECOND)
SEATS = Terms("seats", "RESERVATION", WINDOW * SECOND, SETTLE * SECOND)
LOOK = Terms("search", "READ_ONLY", WINDOW * SECOND, SETTLE * SECOND)
APPROVED_LOOK = Terms("search", "READ_ONLY", WINDOW * SECOND, SETTLE * SECOND, approval=True)


def prepare(world: World, claim: k.Presented, terms: Terms = PAY, **fields: Any) -> Prepared:
    """Asks; the answer must be one about the slot. CONDITIONAL goes under the version e0 unless told otherwise."""
    if terms.guarantee == "CONDITIONAL" and not fields.get("repeat"):
        fields.setdefault("precondition", "e0")
    answer = world.ask(k.Prepare, claim, terms=terms, **fields)
    assert type(answer) is Prepared, answer
    return answer


def executes(world: World, claim: k.Presented, terms: Terms = PAY, **fields: Any) -> int:
    """The number of the execution that may now be sent."""
    answer = prepare(world, claim, terms, **fields)
    assert answer.outcome is Outcome.EXECUTE, answer
    assert answer.execution is not None
    assert answer.execution.execution == len(answer.effect.executions)
    return answer.execution.execution


def says(answer: Prepared, outcome: Outcome, *open_ways: str) -> Prepared:
    assert (answer.outcome, answer.open) == (outcome, open_ways), answer
    return answer


def state(world: World) -> str:
    """Of the latest effect of `t`."""
    return EffectState(world.effect.state).name


def stands(world: World, wanted: str, *, executions: int | None = None) -> Effect:
    assert state(world) == wanted
    if executions is not None:
        assert len(world.effect.executions) == executions
    return world.effect


def accepted(answer: Any, outcome: Outcome, *, changed: bool = True) -> Accepted:
    assert type(answer) is Accepted, answer
    assert (answer.outcome, answer.changed) == (outcome, changed)
    return answer


def refused(answer: Any, outcome: Outcome, reason: str | None = None) -> Refusal:
    assert type(answer) is Refusal, answer
    assert answer.outcome is outcome, answer
    if reason is not None:
        assert answer.reason == reason, answer
    return answer


def problem(answer: Any, code: str, field: str) -> Problem:
    assert type(answer) is Problem, answer
    assert (answer.code, answer.field) == (code, field), answer
    return answer


def started(world: World, **fields: Any) -> k.Presented:
    """A new task `t`, claimed by A."""
    world.submit()
    return world.claimed(**fields)


def taken_over(world: World, owner: str = "B") -> k.Presented:
    """The holder's attempt ends, its sender unheard of; another claims."""
    accepted(world.person(k.TakeOver), Outcome.TAKEN_OVER)
    return world.claimed(owner=owner)


def unknown(world: World, terms: Terms = PAY) -> k.Presented:
    """A prepared, and may have sent; B holds the task now. Nothing was heard."""
    executes(world, started(world), terms)
    claim = taken_over(world)
    stands(world, "UNKNOWN", executions=1)
    return claim


def reconciler(world: World, finding: str, **fields: Any) -> Any:
    return world.person(k.Resolve, finding=finding, reconciler=True, who="reconciler", **fields)


def beyond_the_settle_time(world: World) -> None:
    world.advance(WINDOW + SETTLE)


def fails_without(story: Told, command: type, *guards: str) -> None:
    """The kernel that lacks these guards cannot tell the story to its end."""
    mutant = Kernel()
    for guard in guards:
        mutant = mutant.without(command, guard)
    with pytest.raises((AssertionError, AttributeError, TypeError, KeyError)):
        story(World(mutant))


def fails_with(monkeypatch: pytest.MonkeyPatch, story: Told, module: Any, name: str, broken: Any) -> None:
    """Where the mending rule is no guard of its own: the kernel with this function replaced cannot tell the story."""
    story(World())
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        with pytest.raises((AssertionError, AttributeError, TypeError, KeyError)):
            story(World())


def of_another_account(terms: Terms) -> Terms:
    return msgspec.structs.replace(terms, downstream=f"{terms.downstream}/another")
