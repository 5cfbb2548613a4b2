"""`fencepost effects`: the side effects that wait for somebody, and what people decide about them.

JSON: `list` gives {"items": [effect]}, an effect as `fencepost.wire.EffectView` documents it; `approve`, `deny` and
`resolve` give {"outcome", "task_id", "state", "state_version", "changed", "info", "reason"}; `reconcile` gives
{"items": [{"effect", "became", "needs", "why"}]}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from fencepost.cli import output
from fencepost.cli.effect import configured
from fencepost.cli.session import Options, PersonOptions, opened
from fencepost.errors import InvalidRequest
from fencepost.kernel.digests import parse
from fencepost.wire import Done, EffectView, Refused

if TYPE_CHECKING:
    from fencepost.client.client import Client

WAITING = ("AWAITING_APPROVAL", "UNKNOWN")
PAYLOAD_SHOWN = 400  # characters of a payload in the list; `--json` shows all of it


async def list_effects(
    *,
    task: str | None = None,
    pool: str | None = None,
    state: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None,
    downstream: str | None = None,
    limit: int = 100,
    options: Options | None = None,
) -> int:
    """List side effects, oldest first: by default those that wait for a person or for an answer.

    An UNKNOWN one shows what is open: ASK its downstream, REPEAT under the same key, or only a PERSON.

    Parameters
    ----------
    task
        Only of this task; then in every state.
    pool
        Only of this pool.
    state
        AWAITING_APPROVAL, PREPARED, UNKNOWN, COMMITTED, ABSENT, DENIED or ABANDONED; may be repeated.
    downstream
        Only to this downstream, as it is bound: name, or name/account.
    limit
        How many at most.
    """
    options = options or Options()
    states = tuple(state) if state else None if task is not None else WAITING
    async with opened(options) as client:
        page = await client.effects(task_id=task, pool=pool, state=states, downstream=downstream, limit=limit)
    found: list[EffectView] = sorted(page.items, key=lambda view: view.first_prepared_at)
    if options.as_json:
        output.emit({"items": found})
        return output.DONE
    if not found:
        output.say("no effect waits for anybody" if states == WAITING else "no effects")
        return output.DONE
    for view in found:
        _print(view)
    if any(view.state == "UNKNOWN" for view in found):
        output.say(f"read at {found[0].now_us} (--asked-at for whoever looks at a downstream now)", style="dim")
    if page.next_cursor is not None:
        output.say(f"… and more: raise --limit above {limit}", style="dim")
    return output.DONE


async def approve(
    effect: str, /, *, task: str | None = None, version: int | None = None, options: PersonOptions | None = None
) -> int:
    """Allow exactly one execution of exactly the payload that is shown. Void after a cancel or an epoch raise.

    Parameters
    ----------
    effect
        The effect's id, or the beginning of it.
    task
        Its task, where the beginning alone could mean several.
    version
        Only if the effect still stands at this version.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        view = await _read(client, effect, task, version)
        if isinstance(view, Refused):
            return output.refused(view, json=options.as_json)
        return _tell(await client.approve(view, who=options.person), options)


async def deny(
    effect: str,
    /,
    *,
    task: str | None = None,
    version: int | None = None,
    note: str | None = None,
    options: PersonOptions | None = None,
) -> int:
    """Refuse an effect for good: nothing is ever sent under its slot.

    Parameters
    ----------
    effect
        The effect's id, or the beginning of it.
    task
        Its task, where the beginning alone could mean several.
    version
        Only if the effect still stands at this version.
    note
        Why, for the journal.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        view = await _read(client, effect, task, version)
        if isinstance(view, Refused):
            return output.refused(view, json=options.as_json)
        return _tell(await client.deny(view, who=options.person, note=note), options)


async def resolve(
    effect: str,
    /,
    *,
    evidence: str,
    happened: bool = False,
    absent: bool = False,
    abandon: bool = False,
    receipt: str | None = None,
    asked_at: int | None = None,
    overrule: int = 0,
    reservation_cancelled: bool = False,
    task: str | None = None,
    version: int | None = None,
    options: PersonOptions | None = None,
) -> int:
    """Decide an UNKNOWN effect, after looking at the downstream: it happened, it did not, or it is given up.

    "It did not" has to rest on a look that was late enough: a sender that was paused may act after an earlier one. So
    --absent needs --asked-at, the number that `fencepost effects` printed before the look.

    Parameters
    ----------
    effect
        The effect's id, or the beginning of it.
    evidence
        What the decision rests on, for the journal.
    happened
        It took effect; it is never sent again.
    absent
        It did not; it may be sent (what cannot be replayed, after an approval).
    abandon
        Nobody will ever know. It is never sent again, and no longer keeps the task from its commit.
    receipt
        What the downstream said, as JSON; with --happened.
    asked_at
        The store's time of the list that the look followed, in microseconds, as it was printed there.
    overrule
        How many late reports that it happened are known, and are overruled.
    reservation_cancelled
        With --absent: the stored reservation can never be confirmed any more.
    task
        Its task, where the beginning alone could mean several.
    version
        Only if the effect still stands at this version.
    """
    options = options or PersonOptions()
    findings = [name for name, given in (("HAPPENED", happened), ("ABSENT", absent), ("ABANDONED", abandon)) if given]
    if len(findings) != 1:
        raise InvalidRequest("finding", "give one of --happened, --absent and --abandon")
    if receipt is not None and not happened:
        raise InvalidRequest("--receipt", "comes with --happened")
    if absent and asked_at is None:
        raise InvalidRequest("--asked-at", "--absent needs it: what `fencepost effects` printed before the look")
    value: Any = None if receipt is None else parse(receipt, "receipt")
    async with opened(options) as client:
        view = await _read(client, effect, task, version)
        if isinstance(view, Refused):
            return output.refused(view, json=options.as_json)
        answer = await client.resolve(
            view,
            findings[0],
            who=options.person,
            evidence=evidence,
            asked_at=asked_at,
            late_evidence=overrule,
            ground="RESERVATION_CANCELLED" if reservation_cancelled else None,
            receipt=value,
        )
        return _tell(answer, options)


async def reconcile(pool: str | None = None, /, *, options: Options | None = None) -> int:
    """Ask the downstreams of fencepost.toml about every UNKNOWN effect that nobody holds, and record what they say.

    Nothing is executed, repeated or confirmed; a stored reservation may be cancelled. Works with a closed intake. What
    is left names what it waits for: time, its holder, a repeat by a worker, or a person.

    Parameters
    ----------
    pool
        Only of this pool.
    """
    from fencepost.client.reconciler import Reconciler

    options = options or Options()
    downstreams = configured()
    try:
        async with opened(options) as client:
            if pool is not None and isinstance(missing := await client.pool(pool), Refused):
                return output.refused(missing, json=options.as_json)
            with output.busy("asking the downstreams …"):
                done = await Reconciler(client, downstreams.values()).round(pool)
    finally:
        await downstreams.close()
    if options.as_json:
        output.emit({"items": done})
        return output.DONE
    if not done:
        output.say("no effect is UNKNOWN")
        return output.DONE
    output.show_table(
        ("effect", "task", "slot", "downstream", "now", "needs", ""),
        [
            (
                one.effect.effect_id[:12],
                one.effect.task_id,
                one.effect.slot,
                one.effect.downstream,
                output.word(one.became),
                one.needs,
                one.why,
            )
            for one in done
        ],
    )
    left = sum(one.became == "UNKNOWN" for one in done)
    output.say(f"{len(done) - left} decided, {left} UNKNOWN still")
    return output.DONE


async def _read(client: Client, effect: str, task: str | None, version: int | None) -> EffectView | Refused:
    """The effect as it stands; with the version that the person saw in place of the present one."""
    view = await client.effect(effect, task_id=task)
    if isinstance(view, Refused) or version is None:
        return view
    import msgspec

    return msgspec.structs.replace(view, version=version)


def _tell(answer: Done | Refused, options: PersonOptions) -> int:
    if isinstance(answer, Refused):
        return output.refused(answer, json=options.as_json)
    if options.as_json:
        output.emit(answer)
        return output.DONE
    info = answer.info
    already = "" if answer.changed else " already"
    output.say(f"{info['slot']} ({info['effect_id'][:12]}): {answer.outcome}{already}, now {info['state']}")
    output.say(f"task {answer.task_id} is {answer.state}")
    return output.DONE


def _print(view: EffectView) -> None:
    open_now = f", open: {' '.join(view.open)}" if view.open else ""
    contested = f", {len(view.evidence)} late report(s) that it happened" if view.contested else ""
    output.say(output.word(view.state), before=f"{view.effect_id[:12]}  {view.slot} of {view.task_id}  ")
    output.say(
        f"  {view.guarantee} by {view.downstream}, {output.span(view.age)} old, version {view.version},"
        f" {len(view.executions)} execution(s){open_now}{contested}"
    )
    for name, value in (("payload", view.payload), ("receipt", view.receipt), ("note", view.note)):
        if value is not None:
            text = output.value_text(value)
            output.say(f"  {name}: {output.clean(text[:PAYLOAD_SHOWN])}{'…' if len(text) > PAYLOAD_SHOWN else ''}")
    for late in view.evidence:
        output.say(
            f"  generation {late.generation}, execution {late.execution}, said: {output.value_text(late.receipt)}"
        )
    if view.approved_by is not None:
        output.say(f"  approved by {view.approved_by}")
    elif view.state == "AWAITING_APPROVAL":
        output.say(f"  fencepost effects approve {view.effect_id[:12]} --version {view.version}", style="dim")


def add_to(app: App, group: Group) -> None:
    effects = App(name="effects", help="List side effects; approve, deny, resolve or reconcile them.", group=group)
    effects.default(list_effects)
    effects.command(list_effects, name="list")
    effects.command(approve)
    effects.command(deny)
    effects.command(resolve)
    effects.command(reconcile)
    app.command(effects)
