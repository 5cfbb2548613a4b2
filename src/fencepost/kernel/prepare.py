"""Tool acceptance: what `prepare` says of a slot, row by row (claim.v1, section 5).

An execution is stored before it is sent; payload, downstream and guarantee are bound at the first one, for good.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.effect_rules import (
    ABANDONED,
    ABSENT,
    AWAITING_APPROVAL,
    COMMITTED,
    DENIED,
    PREPARED,
    UNKNOWN,
    effect_event,
    moved,
    shown,
)
from fencepost.kernel.fence import FENCE_HEAD, FENCE_TAIL, Compare, Context, Guard
from fencepost.kernel.operations import (
    Operation,
    changed,
    effects_of,
    guarded,
    refusal_entry,
    remember,
    speaker,
    used_request,
    write_task,
)
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.records import Effect, EffectState, Execution, Guarantee, LogEntry, Task
from fencepost.kernel.writes import Decision, Proof, WriteSet


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """What prepare says of its slot: `effect` as it then stands; EXECUTE alone allows a call, that of `execution`."""

    outcome: Outcome
    task: Task
    effect: Effect
    now: int
    execution: Execution | None = None
    open: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()


def write_effect(
    c: Context, writes: WriteSet, effect: Effect, name: str, more: dict[str, Any] | None = None, **fields: Any
) -> Task:
    """The effect's row, its event, and the task's record that carries both."""
    before: Task = c.task
    after = changed(before, **fields)
    writes.effects.append(effect)
    writes.events.append(effect_event(after, effect, c.now, writes.proof, name, more))
    narrow = not fields or fields.keys() == {"effects"}
    write_task(writes, before, after, "effect" if narrow else "any")
    return after


def _node(c: Context) -> str:
    node: str | None = c.command.node_id
    task: Task = c.task
    return task.node_id if node is None else node


def _held(c: Context) -> Effect | None:
    """What the slot holds."""
    command, task = c.command, c.task
    node = _node(c)
    for effect in effects_of(c, c.task):
        if effect.slot == command.slot and effect.node_id == node and effect.revision == task.revision:
            return effect
    return None


def _said(c: Context, effect: Effect, outcome: Outcome, *, refused: bool = False, **more: Any) -> Decision:
    answer = Prepared(outcome, c.task, effect, c.now, **more)
    if not refused:
        return Decision(answer)
    refusal = Refusal(outcome, None, {**shown(effect), "payload": effect.payload_digest})
    return Decision(answer, log=(refusal_entry(c, "effect.prepare", refusal),))


def _prepare_declared(c: Context) -> Any:
    if c.command.terms.guarantee == Guarantee.TRANSACTIONAL:
        return Problem("INVALID", "guarantee", "TRANSACTIONAL has no prepare: the statement comes with the commit")
    return None


def _prepare_payload(c: Context) -> Any:
    effect, command = _held(c), c.command
    if effect is None:
        return None
    if effect.payload_digest == command.payload.digest and effect.terms.downstream == command.terms.downstream:
        return None
    return _said(c, effect, Outcome.PAYLOAD_CONFLICT, refused=True, open=rules.open_ways(effect, c.now))


def _prepare_done(c: Context) -> Any:
    effect = _held(c)
    if effect is None or effect.state != COMMITTED:
        return None
    entry = LogEntry(
        "replay", c.now, c.pool.name, c.task.task_id, "effect.prepare", "REPLAY", detail={"effect": effect.effect_id}
    )
    return Decision(Prepared(Outcome.REPLAY, c.task, effect, c.now), log=(entry,))


def _prepare_over(c: Context) -> Any:
    effect = _held(c)
    if effect is not None and effect.state in (DENIED, ABANDONED):
        return _said(c, effect, Outcome(EffectState(effect.state).name), refused=True)
    return None


def _prepare_request(c: Context) -> Any:
    """A request id that an execution has used starts no other: the same execution again, or RECONCILE. Nor does one
    that was answered APPROVAL_REQUIRED use an approval up: a late copy of it is told that again."""
    effect, command = _held(c), c.command
    if effect is not None:
        for execution in effect.executions:
            if execution.request_id != command.request_id:
                continue
            newest = execution.execution == len(effect.executions)
            if newest and effect.state == PREPARED and execution.attempt_id == c.claim.attempt_id:
                return Decision(Prepared(Outcome.EXECUTE, c.task, effect, c.now, execution))
            return _said(c, effect, Outcome.RECONCILE, open=rules.open_ways(effect, c.now))
    if not asks_approval(effect, command) and (effect is None or effect.state != AWAITING_APPROVAL):
        return None
    asked = used_request(c, "effect.prepare")
    if asked is None or isinstance(asked, Problem):
        return asked
    if effect is None or asked.answer["effect"] != effect.effect_id:
        return Problem("INVALID", "request_id", "was used for another slot; request ids are new for each call")
    return _said(c, effect, Outcome.APPROVAL_REQUIRED)


def _prepare_in_flight(c: Context) -> Any:
    effect = _held(c)
    if effect is not None and effect.state == PREPARED:
        return _said(c, effect, Outcome.IN_FLIGHT, execution=rules.latest(effect))
    return None


def _prepare_unknown(c: Context) -> Any:
    effect = _held(c)
    if effect is None or effect.state != UNKNOWN:
        return None
    ways = rules.open_ways(effect, c.now)
    if c.command.repeat and rules.REPEAT in ways:
        return None
    return _said(c, effect, Outcome.RECONCILE, open=ways)


def _prepare_unapproved(c: Context) -> Any:
    effect = _held(c)
    if effect is None or effect.state != AWAITING_APPROVAL:
        return None
    if rules.approved(effect, c.pool.epoch, c.task.cancel_generation):
        return None
    return _said(c, effect, Outcome.APPROVAL_REQUIRED)


def asks_approval(effect: Effect | None, command: Any) -> bool:
    """Before this execution a person has to approve: where the terms say so, and always before a second one of what
    cannot be replayed. A repeat is the same effect under the same key: it was approved."""
    if effect is None:
        return bool(command.terms.approval)
    if effect.state != ABSENT:
        return False
    return effect.terms.approval or effect.terms.guarantee == Guarantee.NON_REPLAYABLE


def _prepare_busy(c: Context) -> Any:
    effect, command = _held(c), c.command
    if asks_approval(effect, command):
        return None
    guarantee = command.terms.guarantee if effect is None else effect.terms.guarantee
    wanted = "" if effect is None else effect.effect_id
    busy = rules.in_the_way(effects_of(c, c.task), wanted, guarantee)
    if not busy:
        return None
    if effect is None:
        effect = _fresh(c)
    return _said(c, effect, Outcome.BUSY, refused=True, busy=busy)


def _prepare_precondition(c: Context) -> Any:
    effect, command = _held(c), c.command
    terms = command.terms if effect is None else effect.terms
    presented = command.precondition
    if terms.guarantee != Guarantee.CONDITIONAL:
        if presented is not None:
            return Problem("INVALID", "precondition", f"is for CONDITIONAL; this effect is {terms.guarantee}")
        return None
    if effect is not None and effect.state == UNKNOWN:
        if presented is not None and presented != rules.latest(effect).precondition:
            return Problem("INVALID", "precondition", "a repeat goes under the precondition that is bound")
        return None
    if presented is None and not asks_approval(effect, command):
        return Problem("INVALID", "precondition", "CONDITIONAL needs the version that the write expects to find")
    return None


def _prepare_limits(c: Context) -> Any:
    effect = _held(c)
    if effect is None and c.task.effects >= k.MAX_EFFECTS:
        return Problem("INVALID", "slot", f"a task may have at most {k.MAX_EFFECTS} effects")
    if effect is not None and len(effect.executions) >= k.MAX_EXECUTIONS:
        return Problem("INVALID", "slot", f"an effect may have at most {k.MAX_EXECUTIONS} executions")
    return None


def _fresh(c: Context) -> Effect:
    """The effect as this prepare would bind it: payload, downstream and guarantee, for good."""
    command, task, node = c.command, c.task, _node(c)
    return Effect(
        task_id=task.task_id,
        number=task.effects + 1,
        effect_id=rules.effect_id(command.namespace, task.task_id, task.revision, node, command.slot),
        pool=task.pool,
        revision=task.revision,
        node_id=node,
        slot=command.slot,
        payload_digest=command.payload.digest,
        terms=command.terms,
        state=int(AWAITING_APPROVAL),
        version=0,
        first_prepared_at=c.now,
        changed_at=c.now,
    )


def _remember(c: Context, writes: WriteSet, outcome: Outcome, effect: Effect) -> None:
    """What was said under this request id, where an approval was asked for or used up."""
    answer = {"outcome": outcome.value, "effect": effect.effect_id}
    remember(c, writes, "effect.prepare", speaker(c), answer)


def _prepare_act(c: Context, proof: Proof) -> Decision:
    held, command, task = _held(c), c.command, c.task
    writes = guarded(c, proof)
    fields: dict[str, Any] = {}
    if held is None:
        effect = _fresh(c)
        fields["effects"] = effect.number
        writes.payloads.append((task.task_id, effect.number, command.payload))
    else:
        effect = held
    if asks_approval(held, command):
        effect = moved(effect, c.now, state=int(AWAITING_APPROVAL), approval=None)
        after = write_effect(c, writes, effect, "effect_awaiting", **fields)
        _remember(c, writes, Outcome.APPROVAL_REQUIRED, effect)
        return Decision(Prepared(Outcome.APPROVAL_REQUIRED, after, effect, c.now), writes)
    repeats = effect.state == UNKNOWN
    execution = Execution(
        execution=len(effect.executions) + 1,
        request_id=command.request_id,
        generation=task.claim_generation,
        attempt_id=task.attempt_id or "",
        epoch=c.pool.epoch,
        prepared_at=c.now,
        send_by=c.now + effect.terms.send_window_us,
        precondition=rules.latest(effect).precondition if repeats else command.precondition,
        repeats=repeats,
        approved_by=effect.approval.who if effect.approval is not None else None,
    )
    effect = moved(
        effect,
        c.now,
        state=int(PREPARED),
        executions=(*effect.executions, execution),
        first_prepared_at=effect.first_prepared_at if effect.executions else c.now,
        approval=None,
        note=None,
    )
    more = {"send_by_us": execution.send_by, "repeats": repeats}
    if execution.approved_by is not None:
        # A store that decides on what it remembers then notices where this request was answered before.
        _remember(c, writes, Outcome.EXECUTE, effect)
    after = write_effect(c, writes, effect, "effect_prepared", more, **fields)
    return Decision(Prepared(Outcome.EXECUTE, after, effect, c.now, execution), writes)


def _guard(id: str, check: Any, says: str, compares: int = 0) -> Guard:
    return Guard(id, compares, check, says)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        k.Prepare,
        "effect.prepare",
        (
            *FENCE_HEAD,
            *FENCE_TAIL,
            _guard("prepare:transactional:invalid", _prepare_declared, "the downstream is not TRANSACTIONAL"),
            _guard(
                "prepare:other-payload:payload-conflict",
                _prepare_payload,
                "the slot is empty, or bound to this payload digest and downstream",
                Compare.PAYLOAD,
            ),
            _guard("prepare:committed:replay", _prepare_done, "the effect has not happened yet"),
            _guard("prepare:decided:denied-or-abandoned", _prepare_over, "nobody has denied or abandoned it"),
            _guard(
                "prepare:request-used:execute-again-or-reconcile",
                _prepare_request,
                "no execution has used this request id",
            ),
            _guard("prepare:prepared:in-flight", _prepare_in_flight, "no execution is under way"),
            _guard(
                "prepare:unknown:reconcile", _prepare_unknown, "it is not UNKNOWN, or a repeat is asked for and open"
            ),
            _guard("prepare:unapproved:approval-required", _prepare_unapproved, "it awaits no approval"),
            _guard(
                "prepare:another-under-way:busy",
                _prepare_busy,
                "nothing else is PREPARED or UNKNOWN, where this or that is NON_REPLAYABLE",
            ),
            _guard(
                "prepare:precondition:invalid",
                _prepare_precondition,
                "CONDITIONAL comes with a precondition, a repeat with the bound one, others with none",
            ),
            _guard(
                "prepare:too-many:invalid", _prepare_limits, "the task's effects and their executions are within limits"
            ),
        ),
        _prepare_act,
    ),
)
