"""`fencepost pool`: a fencing domain's intake, epoch and policy.

JSON: `show` gives {"name", "epoch", "state_version", "intake", "stage", "min_protocol", "policy"}, `list` {"items":
[those]}; what changes a pool gives {"outcome", "pool", "changed", "reason"}.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from cyclopts import App, Group

from fencepost.cli import output
from fencepost.cli.session import Options, PersonOptions, opened
from fencepost.errors import InTheWay, InvalidRequest
from fencepost.kernel.records import Policy
from fencepost.wire import PoolChanged, PoolView, Refused, TaskView

if TYPE_CHECKING:
    from fencepost.client.client import Client

DEFAULT = "default"
NAMED = 20  # claims that are named one by one before a raise


async def show(name: str = DEFAULT, /, *, options: Options | None = None) -> int:
    """Show a pool: epoch, intake, policy.

    Parameters
    ----------
    name
        The pool.
    """
    options = options or Options()
    async with opened(options) as client:
        view = await client.pool(name)
    if isinstance(view, Refused):
        return output.refused(view, json=options.as_json)
    if options.as_json:
        output.emit(view)
    else:
        _print(view)
    return output.DONE


async def list_pools(*, options: Options | None = None) -> int:
    """List the pools of this store."""
    options = options or Options()
    async with opened(options) as client:
        found = await client.pools()
    if options.as_json:
        output.emit({"items": found})
    else:
        output.show_table(
            ("pool", "epoch", "intake", "stage", "version"),
            [(pool.name, pool.epoch, output.word(pool.intake), pool.stage, pool.state_version) for pool in found],
            right=("epoch", "version"),
        )
    return output.DONE


async def create(name: str, /, *policy: str, options: PersonOptions | None = None) -> int:
    """Create a pool, with epoch 1 and an open intake. An existing one is left as it is, and so is its policy.

    Parameters
    ----------
    name
        The new pool's name.
    policy
        Parts of its policy that differ from the defaults: max_attempts=3 max_ttl=600.
    """
    options = options or PersonOptions()
    changes = _changes(policy)
    async with opened(options, create=True) as client:
        return _tell(await client.create_pool(name, who=options.person, **changes), options)


async def close_intake(name: str = DEFAULT, /, *, options: PersonOptions | None = None) -> int:
    """Grant no more claims. Running ones may finish, and tasks may still be submitted.

    Parameters
    ----------
    name
        The pool.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        return _tell(await client.close_intake(name, who=options.person), options)


async def open_intake(name: str = DEFAULT, /, *, options: PersonOptions | None = None) -> int:
    """Grant claims again.

    Parameters
    ----------
    name
        The pool.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        view = await client.pool(name)
        if isinstance(view, Refused):
            return output.refused(view, json=options.as_json)
        answer = await client.open_intake(name, expected_state_version=view.state_version, who=options.person)
        return _tell(answer, options)


async def raise_epoch(
    name: str = DEFAULT,
    /,
    *,
    to: int | None = None,
    yes: bool = False,
    terminate: bool = False,
    options: PersonOptions | None = None,
) -> int:
    """Pull the kill switch: every client that learnt the old epoch, and every claim granted under it, is refused.

    Shows what it discards beforehand, and asks; with --yes it does not ask. --json never asks, and needs --yes.

    Parameters
    ----------
    name
        The pool.
    to
        The new epoch. Default: the current one + 1.
    yes
        Do not ask.
    terminate
        On PostgreSQL: end the sessions that are still in the way after raise_timeout, and raise then. What they had
        open is rolled back. Without it they are named, and nothing is changed.
    """
    options = options or PersonOptions()
    if not yes and (options.as_json or not sys.stdin.isatty()):
        raise InvalidRequest("--yes", "raising an epoch discards running work: without a terminal it must be given")
    async with opened(options) as client:
        view = await client.pool(name)
        if isinstance(view, Refused):
            return output.refused(view, json=options.as_json)
        if to is not None and to <= view.epoch:
            raise InvalidRequest("to", f"must be above the current epoch {view.epoch}, got {to}")
        if not options.as_json:
            _warn(view, await _claimed(client, name), view.epoch + 1 if to is None else to)
        if not yes and not _agreed():
            output.note("nothing was changed")
            return output.REFUSED

        # What was shown is what is raised: a pool that moved since answers CONFLICT.
        async def ask() -> PoolChanged | Refused:
            return await client.raise_epoch(
                name,
                expected_epoch=view.epoch,
                expected_state_version=view.state_version,
                to=to,
                who=options.person,
            )

        try:
            answer = await ask()
        except InTheWay as error:
            if not terminate:
                output.note("`fencepost pool raise-epoch --terminate` ends these sessions, and raises then")
                raise
            output.note(str(error))
            ended = await client.report("end_sessions", sessions=error.sessions)
            output.note(f"ended {ended} sessions")
            answer = await ask()
        return _tell(answer, options)


async def _claimed(client: Client, pool: str) -> list[TaskView]:
    found: list[TaskView] = []
    cursor = None
    while True:
        page = await client.tasks(pool=pool, state="CLAIMED", cursor=cursor, limit=1000)
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found


def _warn(view: PoolView, claimed: list[TaskView], to: int) -> None:
    output.note(f"pool {view.name}: epoch {view.epoch} → {to}, intake {view.intake}")
    if not claimed:
        output.note("no claim is live: nothing is discarded")
        return
    owners = {task.owner_id for task in claimed}
    output.note(
        f"discards the running attempts of {len(claimed)} tasks, held by {len(owners)} owners:", style="bold yellow"
    )
    for task in claimed[:NAMED]:
        ends = f" until {output.at(task.lease_expires_at)}" if task.lease_expires_at is not None else ""
        output.note(f"  {task.task_id}  generation {task.generation}, {task.owner_id}{ends}")
    if len(claimed) > NAMED:
        output.note(f"  … and {len(claimed) - NAMED} more (fencepost tasks --pool {view.name} --state claimed)")


def _agreed() -> bool:
    sys.stderr.write("raise it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def policy(*changes: str, pool: str = DEFAULT, options: PersonOptions | None = None) -> int:
    """Show a pool's policy, or change parts of it: max_attempts=3 retention=86400. Durations are seconds.

    Parameters
    ----------
    changes
        What to change, as NAME=VALUE; nothing: show it.
    pool
        The pool.
    """
    options = options or PersonOptions()
    wanted = _changes(changes)
    if not wanted:
        return await show(pool, options=options)
    async with opened(options) as client:
        return _tell(await client.set_policy(pool, who=options.person, **wanted), options)


def _changes(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`NAME=VALUE` as a policy's fields, with the field's own type. Raises InvalidRequest naming the field."""
    known = {field.name: field.type for field in msgspec.structs.fields(Policy)}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise InvalidRequest("policy", f"{pair!r} must read NAME=VALUE")
        if name not in known:
            raise InvalidRequest(f"policy.{name}", f"is no policy; there are {', '.join(known)}")
        try:
            found[name] = msgspec.convert(text, known[name], strict=False)
        except msgspec.ValidationError:
            kind = "a whole number" if known[name] is int else "a number"
            raise InvalidRequest(f"policy.{name}", f"must be {kind}, got {text!r}") from None
    return found


def _tell(answer: PoolChanged | Refused, options: PersonOptions) -> int:
    if isinstance(answer, Refused):
        return output.refused(answer, json=options.as_json)
    if options.as_json:
        output.emit(answer)
        return output.DONE
    output.say(f"{answer.outcome}{'' if answer.changed else ' already'}")
    _print(answer.pool)
    return output.DONE


def _print(view: PoolView) -> None:
    output.say(f"pool {view.name}", style="bold")
    output.say(f"  {'epoch':<16} {view.epoch}")
    output.say(output.word(view.intake), before=f"  {'intake':<16} ")
    output.say(f"  {'stage':<16} {view.stage}")
    output.say(f"  {'min protocol':<16} {view.min_protocol}")
    output.say(f"  {'state version':<16} {view.state_version}")
    for name, value in view.policy.items():
        seconds = f"  ({output.span(value)})" if isinstance(value, float) and value >= 120 else ""
        output.say(f"  {name:<16} {value:.10g}{seconds}")


def add_to(app: App, group: Group) -> None:
    pool = App(name="pool", help="Show or change a pool: its intake, epoch and policy.", group=group)
    pool.default(show)
    pool.command(show)
    pool.command(list_pools, name="list")
    pool.command(create)
    pool.command(close_intake)
    pool.command(open_intake)
    pool.command(raise_epoch)
    pool.command(policy)
    app.command(pool)
