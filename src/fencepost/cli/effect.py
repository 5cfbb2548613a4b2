"""`fencepost effect`: what `attempt.effect` is for a handler, for a program under `fencepost work -- CMD`; and
`fencepost downstreams`.

JSON: `effect` prints the receipt, and nothing else, with and without --json; `downstreams check` gives {"items":
[{"name", "downstream", "guarantee", "ok", "says"}]}.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

from cyclopts import App, Group

from fencepost import config
from fencepost.cli import output
from fencepost.cli.session import Options
from fencepost.effects.base import Checks, Guarantee
from fencepost.effects.config import Downstreams
from fencepost.errors import Fenced, GiveBack, InvalidRequest
from fencepost.kernel.digests import MAX_CONTENT_BYTES, parse
from fencepost.wire import Claim, Refused

# What a program passes on so that its task is given back until a person has decided.
GIVE_BACK = 75
# The worker that started the program keeps the lease, and ends the program when it loses it.
TRUSTED = 3600.0


def configured() -> Downstreams:
    """The downstreams of fencepost.toml in the current folder, where modules of their own are found, too."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return Downstreams(config.load().downstreams, folder=Path())


async def effect(
    slot: str,
    /,
    *,
    using: str,
    timeout: float = 30.0,
    patience: float = 30.0,
    node: str | None = None,
    adopt: bool = False,
    on_approval: Literal["release", "raise"] = "release",
    options: Options | None = None,
) -> int:
    """Cause one side effect of the task in hand, once: fencepost effect send-invoice --using mail < payload.json

    For programs that `fencepost work -- CMD` runs: the claim comes from FENCEPOST_CLAIM. Prints the receipt of the call
    made now, or the kept one of a call that an earlier attempt made. Exit code 75: a person has to decide first; a
    program that ends with 75 too has its task given back until then.

    Parameters
    ----------
    slot
        The effect's name in this task; a second effect needs a second slot.
    using
        NAME of a [downstreams.NAME] in fencepost.toml.
    timeout
        Seconds that one call may take.
    patience
        Seconds of waiting in all: for a key in progress, a settle time, another effect.
    node
        The node whose slot it is. Default: the task's own.
    adopt
        Where the slot is bound to another payload: finish that one, and print its receipt.
    on_approval
        Where only a person can lead on: release (exit code 75) or raise (exit code 1).
    """
    from fencepost.client.effect_port import AttemptPort
    from fencepost.connect import connect
    from fencepost.effects.performing import perform

    options = options or Options()
    text = os.environ.get("FENCEPOST_CLAIM")
    if not text:
        raise InvalidRequest("FENCEPOST_CLAIM", "is not set: this is for programs that `fencepost work -- CMD` runs")
    claim = Claim.from_json(text)
    payload = parse(sys.stdin.buffer.read(8 * MAX_CONTENT_BYTES), "payload")
    downstreams = configured()
    try:
        downstream = downstreams.named(using)
        if downstream.declaration.guarantee == Guarantee.TRANSACTIONAL:
            raise InvalidRequest("--using", f"{using!r} is TRANSACTIONAL: its statements come with a handler's commit")
        async with connect(options.url, create=False, epoch={claim.pool: claim.epoch}) as client:
            receipt = await perform(
                AttemptPort(client, claim, lambda: TRUSTED),
                downstream,
                slot,
                payload,
                node_id=node,
                timeout=timeout,
                patience=patience,
                on_conflict="adopt" if adopt else "raise",
                on_approval=on_approval,
            )
    except GiveBack as error:
        output.note(str(error))
        return GIVE_BACK
    except Fenced as error:
        if isinstance(error.refused, Refused):
            return output.refused(error.refused, json=options.as_json)
        output.failed("FENCED", error.reason, json=options.as_json)
        return output.REFUSED
    finally:
        await downstreams.close()
    output.emit(receipt, pretty=False)
    return output.DONE


async def check(*names: str, options: Options | None = None) -> int:
    """Ask each downstream of fencepost.toml whether it is there, and tell which guarantee it earns. Sends nothing.

    Exit code 1 where one cannot be used as it is configured.

    Parameters
    ----------
    names
        Only these.
    """
    options = options or Options()
    downstreams = configured()
    rows: list[dict[str, Any]] = []
    try:
        rows = [await _check(downstreams, name) for name in names or tuple(downstreams)]
    finally:
        await downstreams.close()
    if options.as_json:
        output.emit({"items": rows})
    elif not rows:
        output.say("no [downstreams.NAME] in fencepost.toml")
    else:
        for row in rows:
            output.say(output.word("ok" if row["ok"] else "fail"), before=f"{row['name']}: {row['guarantee'] or '–'}  ")
            for line in row["says"]:
                output.say(f"  {output.clean(line)}")
    return output.DONE if all(row["ok"] for row in rows) else output.REFUSED


async def _check(downstreams: Downstreams, name: str) -> dict[str, Any]:
    if name not in downstreams:
        downstreams.named(name)
    declared = downstreams.declaration(name)
    row: dict[str, Any] = {"name": name, "downstream": declared.downstream, "guarantee": None, "ok": False, "says": []}
    try:
        downstream = downstreams[name]
    except InvalidRequest as error:
        return {**row, "says": [str(error)]}
    if not isinstance(downstream, Checks):
        says = ["it cannot be asked; this is what it declares"]
        return {**row, "guarantee": str(declared.guarantee), "ok": True, "says": says}
    found = await downstream.check()
    return {**row, "guarantee": str(found.guarantee), "ok": found.ok, "says": list(found.says)}


def add_to(app: App, group: Group) -> None:
    app.command(effect, group=group)
    downstreams = App(name="downstreams", help="What effects are sent to, as fencepost.toml names it.", group=group)
    downstreams.default(check)
    downstreams.command(check)
    app.command(downstreams)
