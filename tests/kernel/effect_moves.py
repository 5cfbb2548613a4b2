"""How each row of the tables comes about that speaks of effects: what was before, and the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.outcomes import Outcome
from fencepost.kernel.records import EffectState, State, Terms
from fencepost.kernel.table import FINDINGS, LAST, NOT_LAST, WAITS
from tests.kernel import effect_stories as s
from tests.kernel.effect_stories import APPROVED_LOOK, APPROVED_MAIL, LOOK, MAIL, OBJECT, PAY, SEATS
from tests.model.world import World

Call = Callable[[], Any]
Story = Callable[[World], tuple[str, Call]]
TASK_STORIES: dict[tuple[str, str, State | None, str], Story] = {}
EFFECT_STORIES: dict[tuple[str, EffectState | None, str], Callable[[World], Call]] = {}

READY, CLAIMED, PARKED, CANCELLED, COMMITTED = (
    State.READY,
    State.CLAIMED,
    State.PARKED,
    State.CANCELLED,
    State.COMMITTED,
)
AWAITING, UNKNOWN, PREPARED = EffectState.AWAITING_APPROVAL, EffectState.UNKNOWN, EffectState.PREPARED
HAPPENED, ABSENT, DENIED, ABANDONED = (
    EffectState.COMMITTED,
    EffectState.ABSENT,
    EffectState.DENIED,
    EffectState.ABANDONED,
)


def effect_row(door: str, before: EffectState | None, condition: str = "") -> Callable[[Any], Any]:
    def keep(story: Any) -> Any:
        EFFECT_STORIES[door, before, condition] = story
        return story

    return keep


# what was before --------------------------------------------------------------------------------


def reach(world: World, state: EffectState, terms: Terms = PAY) -> k.Presented:
    """The effect of a new task in `state`; the claim that holds the task. It was executed once, by A."""
    claim = s.started(world)
    s.executes(world, claim, terms)
    if state is PREPARED:
        return claim
    if state is HAPPENED:
        s.accepted(world.ask(k.Settle, claim, finding="HAPPENED", receipt="r"), Outcome.SETTLED)
        return claim
    successor = s.taken_over(world)
    if state is UNKNOWN:
        return successor
    world.person(k.TakeOver)
    if state is ABANDONED:
        s.accepted(world.person(k.Resolve, finding="ABANDONED"), Outcome.RESOLVED)
        return world.claimed(owner="B")
    s.beyond_the_settle_time(world)
    s.accepted(world.person(k.Resolve, finding="ABSENT"), Outcome.RESOLVED)
    claim = world.claimed(owner="B")
    if state in (AWAITING, DENIED):
        s.says(s.prepare(world, claim, terms), Outcome.APPROVAL_REQUIRED)
    if state is DENIED:
        s.accepted(world.ask(k.Withdraw, claim), Outcome.WITHDRAWN)
    return claim


def bring(world: World, claim: k.Presented, state: State) -> None:
    """The claimed task to `state`; PARKED waits for people."""
    if state is READY:
        s.accepted(world.ask(k.Release, claim), Outcome.RELEASED)
    if state is PARKED:
        s.accepted(world.ask(k.Release, claim, wait=True), Outcome.RELEASED)
    if state is CANCELLED:
        s.accepted(world.person(k.Cancel), Outcome.CANCELLED)
    assert world.task.state == state


def first_sender(world: World) -> k.Presented:
    """A as it was when it prepared execution 1."""
    execution = world.effect.executions[0]
    return k.Presented("store", "pool", "t", execution.attempt_id, execution.generation, 0, "sha256:old", "A")


# rows of tasks ----------------------------------------------------------------------------------


def asked(door: str, condition: str, state: EffectState | None, kind: type, terms: Terms = PAY, **fields: Any) -> None:
    def story(world: World) -> tuple[str, Call]:
        claim = s.started(world) if state is None else reach(world, state, terms)
        if kind is k.Prepare:
            fields["terms"] = terms
        return "t", lambda: world.ask(kind, claim, **fields)

    TASK_STORIES[door, "task", CLAIMED, condition] = story


asked("effect.prepare", "it may be sent", None, k.Prepare)
asked("effect.prepare", "a person has to approve it first", None, k.Prepare, APPROVED_MAIL)
asked("effect.reserve", "it is reserved", PREPARED, k.Reserve, SEATS, reservation_id="r1")
asked("effect.settle", "it happened", PREPARED, k.Settle, finding="HAPPENED")
asked("effect.settle", "it did not happen", PREPARED, k.Settle, finding="ABSENT", why="REFUSED")
asked("effect.settle", "nobody can tell", PREPARED, k.Settle, finding="UNKNOWN")
asked("effect.reconcile", "it happened", UNKNOWN, k.Reconcile, finding="HAPPENED")
asked("effect.reconcile", "it did not happen", UNKNOWN, k.Reconcile, SEATS, finding="ABSENT", ground="NO_RESERVATION")
asked(
    "effect.reconcile",
    "the downstream can no longer tell",
    UNKNOWN,
    k.Reconcile,
    OBJECT,
    finding="STILL_UNKNOWN",
    ground="MOVED_ON",
)
asked("effect.withdraw", "it awaits approval", AWAITING, k.Withdraw, MAIL)


def waits(world: World) -> tuple[str, Call]:
    claim = s.started(world)
    s.executes(world, claim, MAIL)
    return "t", lambda: world.ask(k.Release, claim, wait=True)


TASK_STORIES["release", "task", CLAIMED, WAITS] = waits


def evidence(world: World, state: State) -> tuple[str, Call]:
    if state is COMMITTED:
        s.accepted(world.ask(k.Commit, reach(world, ABANDONED)), Outcome.COMMITTED)
    else:
        bring(world, reach(world, UNKNOWN, MAIL), state)
    return "t", lambda: world.ask(k.Evidence, first_sender(world))


def decided(world: World, state: State, kind: type, last: bool) -> tuple[str, Call]:
    """`state` PARKED: besides the one that is decided, another is awaited, or none (`last`)."""
    claim = s.started(world)
    s.prepare(world, claim, APPROVED_MAIL)
    if state is PARKED and not last:
        s.prepare(world, claim, APPROVED_MAIL, slot="another")
    bring(world, claim, state)
    return "t", lambda: world.person(kind)


def resolved(world: World, state: State, finding: str, last: bool) -> tuple[str, Call]:
    if state is COMMITTED:
        s.accepted(world.ask(k.Commit, reach(world, ABANDONED)), Outcome.COMMITTED)
        world.ask(k.Evidence, first_sender(world))
    else:
        claim = reach(world, UNKNOWN, MAIL)
        if state is PARKED and not last:
            s.prepare(world, claim, APPROVED_MAIL, slot="another")
        bring(world, claim, state)
    s.beyond_the_settle_time(world)
    effect = world.effects["t"][0]
    named = {"effect_id": effect.effect_id, "expected_version": effect.version, "late_evidence": len(effect.evidence)}
    return "t", lambda: world.person(k.Resolve, finding=finding, **named)


for _state in (READY, CLAIMED, PARKED, CANCELLED, COMMITTED):
    TASK_STORIES["evidence", "task", _state, "a late report says that it happened"] = lambda w, at=_state: evidence(
        w, at
    )
for _door, _kind, _states in (
    ("approve", k.Approve, (READY, CLAIMED, PARKED)),
    ("deny", k.Deny, (READY, CLAIMED, PARKED, CANCELLED)),
):
    for _state in _states:
        TASK_STORIES[_door, "task", _state, NOT_LAST] = lambda w, at=_state, kind=_kind: decided(w, at, kind, False)
    TASK_STORIES[_door, "task", PARKED, LAST] = lambda w, kind=_kind: decided(w, PARKED, kind, True)
for (_says, _), _finding in zip(FINDINGS, ("HAPPENED", "ABSENT", "ABANDONED"), strict=True):
    for _state in (READY, CLAIMED, PARKED, CANCELLED, COMMITTED):
        TASK_STORIES["resolve", "task", _state, f"{_says}; {NOT_LAST}"] = lambda w, at=_state, found=_finding: resolved(
            w, at, found, False
        )
    TASK_STORIES["resolve", "task", PARKED, f"{_says}; {LAST}"] = lambda w, found=_finding: resolved(
        w, PARKED, found, True
    )


# rows of effects --------------------------------------------------------------------------------


def call(
    door: str,
    before: EffectState | None,
    condition: str,
    kind: type,
    terms: Terms = PAY,
    approved: bool = False,
    **fields: Any,
) -> None:
    def story(world: World) -> Call:
        claim = s.started(world) if before is None else reach(world, before, terms)
        if approved:
            s.accepted(world.person(k.Approve), Outcome.APPROVED)
        asked = {**fields, "terms": terms} if kind is k.Prepare else fields
        return lambda: world.ask(kind, claim, **asked)

    EFFECT_STORIES[door, before, condition] = story


call("effect.prepare", None, "the slot is empty", k.Prepare)
call("effect.prepare", None, "the slot is empty, an approval is declared", k.Prepare, APPROVED_MAIL)
call("effect.prepare", AWAITING, "approved, which this uses up", k.Prepare, MAIL, approved=True)
call("effect.prepare", UNKNOWN, "a repeat, while REPEAT is open", k.Prepare, repeat=True)
call("effect.prepare", ABSENT, "execution + 1", k.Prepare)
call("effect.prepare", ABSENT, "NON_REPLAYABLE, or an approval is declared", k.Prepare, MAIL)
call("effect.reserve", PREPARED, "RESERVATION, none is stored", k.Reserve, SEATS, reservation_id="r1")
for _finding in ("HAPPENED", "ABSENT", "UNKNOWN"):
    call(
        "effect.settle",
        PREPARED,
        _finding,
        k.Settle,
        finding=_finding,
        why="REFUSED" if _finding == "ABSENT" else None,
    )
call("effect.reconcile", UNKNOWN, "HAPPENED", k.Reconcile, finding="HAPPENED")
call(
    "effect.reconcile",
    UNKNOWN,
    "ABSENT, on a ground that counts",
    k.Reconcile,
    OBJECT,
    finding="ABSENT",
    ground="MOVED_ON",
)
call(
    "effect.reconcile",
    UNKNOWN,
    "moved on, and its history is not complete",
    k.Reconcile,
    OBJECT,
    finding="STILL_UNKNOWN",
    ground="MOVED_ON",
)
call("effect.withdraw", AWAITING, "", k.Withdraw, MAIL)
call("release", PREPARED, "its sender's attempt ends", k.Release)
call("fail", PREPARED, "its sender's attempt ends", k.Fail)
call(
    "commit",
    None,
    "TRANSACTIONAL: executed by the commit itself",
    k.Commit,
    statements=(k.NewStatement("ledger", encode({"sql": "…"}), "sql/ledger"),),
)
for _before in (PREPARED, UNKNOWN):
    call("commit", _before, "READ_ONLY; others refuse the commit", k.Commit, LOOK)


@effect_row("commit", AWAITING, "READ_ONLY; others refuse the commit")
def commit_without_looking(world: World) -> Call:
    claim = s.started(world)
    s.says(s.prepare(world, claim, APPROVED_LOOK), Outcome.APPROVAL_REQUIRED)
    return lambda: world.ask(k.Commit, claim)


@effect_row("effect.settle", PREPARED, "ABSENT, of an execution that repeated one")
def settle_a_repeat(world: World) -> Call:
    claim = reach(world, UNKNOWN)
    s.executes(world, claim, repeat=True)
    return lambda: world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED")


@effect_row("effect.settle", PREPARED, "ABSENT by a precondition that an earlier execution carried, too")
def settle_a_precondition(world: World) -> Call:
    claim = reach(world, UNKNOWN, OBJECT)
    s.accepted(world.ask(k.Reconcile, claim, finding="ABSENT", ground="MOVED_ON"), Outcome.RECONCILED)
    s.executes(world, claim, OBJECT, precondition="e0")
    return lambda: world.ask(k.Settle, claim, finding="ABSENT", why="PRECONDITION")


def _said_unknown(world: World) -> k.Presented:
    claim = reach(world, PREPARED)
    s.accepted(world.ask(k.Settle, claim, finding="UNKNOWN"), Outcome.SETTLED)
    return claim


@effect_row("effect.settle", UNKNOWN, "HAPPENED")
def settle_late(world: World) -> Call:
    claim = _said_unknown(world)
    return lambda: world.ask(k.Settle, claim, finding="HAPPENED")


@effect_row("effect.settle", UNKNOWN, "a stored failure, which closes REPEAT")
def settle_a_stored_failure(world: World) -> Call:
    claim = _said_unknown(world)
    return lambda: world.ask(k.Settle, claim, finding="UNKNOWN", why="STORED_FAILURE")


for _door, _kind in (("cancel", k.Cancel), ("take_over", k.TakeOver), ("expire", k.Expire)):

    @effect_row(_door, PREPARED, "its sender's attempt ends")
    def ends(world: World, kind: type = _kind) -> Call:
        reach(world, PREPARED)
        if kind is k.Expire:
            world.run_out()
        return lambda: world.person(kind)


@effect_row("claim", PREPARED, "its sender's attempt ends")
def claim_in_passing(world: World) -> Call:
    reach(world, PREPARED)
    world.run_out()
    return lambda: world.claim(owner="B")


@effect_row("revise", PREPARED, "READ_ONLY; others refuse the revise")
def revise(world: World) -> Call:
    reach(world, PREPARED, LOOK)
    return lambda: world.person(k.Revise)


for _door, _kind in (("approve", k.Approve), ("deny", k.Deny)):

    @effect_row(_door, AWAITING)
    def decide(world: World, kind: type = _kind) -> Call:
        reach(world, AWAITING, MAIL)
        return lambda: world.person(kind)


for _condition, _finding in (("HAPPENED", "HAPPENED"), ("ABSENT", "ABSENT"), ("ABANDONED, by a person", "ABANDONED")):

    @effect_row("resolve", UNKNOWN, _condition)
    def resolve(world: World, finding: str = _finding) -> Call:
        reach(world, UNKNOWN, MAIL)
        s.beyond_the_settle_time(world)
        return lambda: world.person(k.Resolve, finding=finding)


for _before in (UNKNOWN, ABSENT, ABANDONED, DENIED, AWAITING):

    @effect_row("evidence", _before, "a late HAPPENED")
    def late(world: World, before: EffectState = _before) -> Call:
        reach(world, before, MAIL)
        return lambda: world.ask(k.Evidence, first_sender(world), execution=1)


@effect_row("evidence", PREPARED, "a late HAPPENED, kept beside it")
def late_beside(world: World) -> Call:
    claim = reach(world, ABSENT)
    s.executes(world, claim)
    return lambda: world.ask(k.Evidence, first_sender(world), execution=1)


__all__ = ["EFFECT_STORIES", "TASK_STORIES", "bring", "first_sender", "reach"]
