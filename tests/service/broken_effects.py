"""Ways to break what a store says of effects, each with what audit must say: of a store in which `lives.live` happened,
effects included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.kernel.digests import encode
from fencepost.kernel.records import Effect, EffectState
from tests.service.broken import Tamper

replace = msgspec.structs.replace

# The effects of task "sender", in order of their first prepare.
MAIL, FILE, SEAT, LOST, LOOK = range(1, 6)


def effect(t: Tamper, number: int, task_id: str = "sender", /, **fields: Any) -> None:
    """Change a record; `of`, where it is given, makes the change from the standing one."""
    rows = t.store._effects.rows[task_id]
    rows[number] = replace(rows[number], **fields)


def standing(t: Tamper, number: int, task_id: str = "sender") -> Effect:
    return t.store._effects.rows[task_id][number]


def execution(t: Tamper, number: int, count: int, /, **fields: Any) -> None:
    executions = list(standing(t, number).executions)
    executions[count - 1] = replace(executions[count - 1], **fields)
    effect(t, number, executions=tuple(executions))


def told(t: Tamper, name: str, task_id: str = "sender", /, **changes: Any) -> None:
    """Change the detail of the first event of that name."""
    event = next(event for event in t.store._by_task[task_id] if event.name == name)
    t.event(task_id, name, detail={**(event.detail or {}), **changes})


def another_payload(t: Tamper) -> None:
    payloads = t.store._effects.bound
    payloads[("sender", MAIL)] = encode({"slot": "forged"})


def sent_again(t: Tamper) -> None:
    """A second execution of what nobody can ask about, as if nobody had to approve it."""
    t.again("waiter", "effect_prepared")
    effect(t, 1, "waiter", version=standing(t, 1, "waiter").version)


# (invariant, what happened, how, what audit says)
BREAKS: list[tuple[int, str, Callable[[Tamper], Any], str]] = [
    (4, "a payload is another", another_payload, "payload is not the one that was bound to it"),
    (4, "an effect has another id", lambda t: effect(t, MAIL, effect_id="0" * 64), "the id of its slot"),
    (7, "an effect has another payload digest", lambda t: effect(t, MAIL, payload_digest="x"), "payload digest is x"),
    (
        4,
        "an event shows another payload",
        lambda t: told(t, "effect_committed", payload="x"),
        "shows another payload than was bound",
    ),
    (
        4,
        "an event shows another downstream",
        lambda t: told(t, "effect_committed", downstream="x"),
        "shows another downstream",
    ),
    (
        7,
        "a guarantee was changed",
        lambda t: effect(t, MAIL, terms=replace(standing(t, MAIL).terms, guarantee="READ_ONLY")),
        "guarantee is READ_ONLY, its journal says IDEMPOTENT",
    ),
    (7, "a state was changed", lambda t: effect(t, MAIL, state=int(EffectState.ABSENT)), "state is"),
    (7, "a version was changed", lambda t: effect(t, MAIL, version=9), "version is 9, its journal says 2"),
    (
        7,
        "an execution is missing",
        lambda t: effect(t, FILE, executions=standing(t, FILE).executions[:1]),
        "executions",
    ),
    (
        7,
        "an execution is of another attempt",
        lambda t: execution(t, MAIL, 1, attempt_id="x"),
        "not the execution that",
    ),
    (7, "an execution may be sent longer", lambda t: execution(t, MAIL, 1, send_by=1 << 60), "not the execution that"),
    (4, "a number was given twice", lambda t: execution(t, LOOK, 2, execution=1), "is the 2. of its effect"),
    (
        4,
        "one request id started two",
        lambda t: execution(t, LOOK, 2, request_id=standing(t, LOOK).executions[0].request_id),
        "the request id of an earlier one",
    ),
    (4, "a repeat goes under another precondition", lambda t: execution(t, LOOK, 2, precondition="e9"), "precondition"),
    (
        4,
        "a repeat may be sent after the key was forgotten",
        lambda t: effect(t, LOOK, terms=replace(standing(t, LOOK).terms, guarantee="IDEMPOTENT", retention_us=1)),
        "after its key was forgotten",
    ),
    (
        4,
        "retention counts from later",
        lambda t: effect(t, MAIL, first_prepared_at=5),
        "count from its first execution",
    ),
    (4, "what cannot be replayed was sent again", sent_again, "leads on from DENIED"),
    (
        4,
        "a slot holds two effects",
        lambda t: effect(t, SEAT, slot="mail"),
        "slot 'mail' holds two effects",
    ),
    (
        7,
        "an event of an effect is missing",
        lambda t: t.drop("sender", "effect_reserved"),
        "is version 4 of the effect, after 2",
    ),
    (
        4,
        "a task was committed with an effect open",
        lambda t: (told(t, "effect_awaiting", "waiter", effect="e"), t.drop("waiter", "effect_denied")),
        "was committed while effect 1 was AWAITING_APPROVAL",
    ),
    (
        4,
        "a commit took for absent what was sent",
        lambda t: told(t, "result_committed", "sender", effects_absent=[standing(t, MAIL).effect_id]),
        "for ABSENT, which it was not",
    ),
    (
        7,
        "a commit ended an effect that there is not",
        lambda t: told(t, "result_committed", "sender", effects_absent=["e"]),
        "ends an unknown effect",
    ),
    (
        4,
        "a task was committed while what it read was open",
        lambda t: told(t, "result_committed", "reader", effects_absent=[]),
        "was committed while effect 1 was PREPARED",
    ),
    (7, "an effect has no record", lambda t: t.store._effects.rows["sender"].pop(LOOK), "has no record"),
    (7, "a count is wrong", lambda t: t.task("sender", effects=7), "counts 7 effects, 5 stand with it"),
    (
        7,
        "an effect is PREPARED, and nobody holds its task",
        lambda t: effect(t, MAIL, state=int(EffectState.PREPARED)),
        "the attempt that prepared it does not hold the task",
    ),
    (
        4,
        "a receipt is another",
        lambda t: effect(t, MAIL, receipt=replace(encode({"id": 1}), data=b'{"id":3}')),
        "receipt does not have its digest",
    ),
    (4, "one that happened happened again", lambda t: t.again("sender", "effect_committed"), "leads on from COMMITTED"),
]
