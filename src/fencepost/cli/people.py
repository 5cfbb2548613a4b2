"""What people decide about a task: `cancel`, `reopen` (`retry`), `revise`, `take-over`, `discard`.

Every one reads the task once, and asks for the change of the task as it was read: CONFLICT where somebody was
quicker. JSON, for all of them: {"outcome", "task_id", "state", "state_version", "changed", "info", "reason"}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cyclopts import App, Group

from fencepost.cli import output
from fencepost.cli.session import PersonOptions, opened
from fencepost.errors import InvalidRequest
from fencepost.kernel.digests import MAX_CONTENT_BYTES, parse
from fencepost.wire import Done, Refused


async def cancel(task: str, /, *, options: PersonOptions | None = None) -> int:
    """Cancel a task: a live attempt is over at once, and whatever it still wants to write is refused.

    Cancelling twice changes nothing the second time. A committed task stays committed: refused, exit code 1.

    Parameters
    ----------
    task
        The task's id.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        return _tell(await client.cancel(task, who=options.person), options)


async def reopen(task: str, /, *, options: PersonOptions | None = None) -> int:
    """Make a cancelled or parked task claimable again; its count of attempts starts at 0. `retry` is the same.

    Parameters
    ----------
    task
        The task's id.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        return _tell(await client.reopen(task, who=options.person), options)


async def revise(
    task: str, /, *, input: str, accept_effects: bool = False, options: PersonOptions | None = None
) -> int:
    """Replace a task's input. A live attempt ends, and what it made of the old input cannot be committed.

    Parameters
    ----------
    task
        The task's id.
    input
        The new input as JSON; @FILE reads it from a file.
    accept_effects
        Go on although side effects of the old input happened or may have: the new input may cause them again.
    """
    options = options or PersonOptions()
    value = parse(_argument(input), "input")
    async with opened(options) as client:
        return _tell(await client.revise(task, value, accept_effects=accept_effects, who=options.person), options)


def _argument(text: str) -> str | bytes:
    if not text.startswith("@"):
        return text
    try:
        with Path(text[1:]).open("rb") as file:
            return file.read(8 * MAX_CONTENT_BYTES)
    except OSError as error:
        raise InvalidRequest("input", f"{text[1:]}: {error.strerror}") from None


async def take_over(task: str, /, *, generation: int | None = None, options: PersonOptions | None = None) -> int:
    """End a live attempt now instead of waiting for its lease. Nothing is charged, and the task is claimable.

    Parameters
    ----------
    task
        The task's id.
    generation
        Only if it is still this attempt that holds the task.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        answer = await client.take_over(task, expected_generation=generation, who=options.person)
        return _tell(answer, options)


async def discard(task: str, /, *, generation: int, options: PersonOptions | None = None) -> int:
    """Throw away what one attempt has staged and not committed. It stays in the lineage, as DISCARDED.

    Parameters
    ----------
    task
        The task's id.
    generation
        The attempt's generation, as `fencepost show` lists it.
    """
    options = options or PersonOptions()
    async with opened(options) as client:
        return _tell(await client.discard(task, generation=generation, who=options.person), options)


def _tell(answer: Done | Refused, options: PersonOptions) -> int:
    if isinstance(answer, Refused):
        return output.refused(answer, json=options.as_json)
    if options.as_json:
        output.emit(answer)
        return output.DONE
    line = f"{answer.task_id}: {answer.outcome}{'' if answer.changed else ' already'}"
    if answer.state != answer.outcome.value:
        line += f", now {answer.state}"
    output.say(f"{line} (version {answer.state_version})")
    successors: Any = answer.info.get("successors")
    if successors:
        output.say(f"cancelled with it: {', '.join(successors)}")
    return output.DONE


def add_to(app: App, group: Group) -> None:
    app.command(cancel, group=group)
    app.command(reopen, name="reopen", alias="retry", group=group)
    app.command(revise, group=group)
    app.command(take_over, group=group)
    app.command(discard, group=group)
