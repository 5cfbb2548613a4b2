"""`fencepost submit`: tasks from a file, from stdin or from the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from cyclopts import App, Group, Parameter
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fencepost.cli import output
from fencepost.cli.explain import hint
from fencepost.cli.lines import BadLine, CheckedLines, new_task
from fencepost.cli.session import Options, opened
from fencepost.cli.waiting import result_of
from fencepost.clock import elapsed
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_BATCH, check_seconds
from fencepost.kernel.digests import parse
from fencepost.wire import Refused, Result, Submitted

if TYPE_CHECKING:
    from fencepost.client.client import Client

LISTED = 10  # tasks that are named one by one for people


async def submit(
    file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *,
    input: str | None = None,
    task_id: str | None = None,
    kind: str | None = None,
    queue: str | None = None,
    pool: str | None = None,
    priority: int | None = None,
    depends_on: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None,
    delay: float | None = None,
    max_attempts: int | None = None,
    on_failure: Literal["keep", "cancel"] | None = None,
    wait: bool = False,
    timeout: float | None = None,
    options: Options | None = None,
) -> int:
    """Add tasks. The same submission again finds them standing and adds nothing.

    A line of FILE is one task: {"input": …} and, where wanted, "task_id", "kind", "queue", "pool", "priority",
    "depends_on", "delay", "available_at", "max_attempts", "on_failure". All lines are checked first: with one bad line
    nothing is written at all. Up to 10000 tasks are written all or nothing; larger files in batches of that size.

    JSON: {"submitted", "created", "tasks": [{"task_id", "created", "state"}], "results"}; `results` is null without
    --wait, else [{"task_id", "outcome", "reason", "value"}].

    Parameters
    ----------
    file
        A JSON Lines file; - is stdin.
    input
        One task's input, as JSON, instead of a file.
    task_id
        The task's own id, and its deduplication key (with --input). Generated otherwise.
    kind
        The handler that a task needs, where its line names none.
    queue
        Its queue, where its line names none.
    pool
        Its pool, where its line names none.
    priority
        Its priority, where its line names none: smaller first, -1000 to 1000.
    depends_on
        A task that must be committed before (with --input); may be repeated.
    delay
        Seconds until it may be claimed, where its line names no time.
    max_attempts
        How often it may fail or lapse before it is parked. Default: the pool's policy.
    on_failure
        What becomes of it when a parent is cancelled: keep it blocked, or cancel it too.
    wait
        Wait until every task has its result, or needs a person.
    timeout
        With --wait: give up after so many seconds.
    """
    options = options or Options()
    if file is not None and file.startswith("-") and file != "-":
        raise InvalidRequest(file, "is no option of submit (a file of this name: ./…); see `fencepost submit --help`")
    given = {
        "task_id": task_id,
        "kind": kind,
        "queue": queue,
        "pool": pool,
        "priority": priority,
        "depends_on": depends_on,
        "delay": delay,
        "max_attempts": max_attempts,
        "on_failure": on_failure,
    }
    defaults = {name: value for name, value in given.items() if value is not None}
    if (file is None) == (input is None):
        raise InvalidRequest("file", "give a JSON Lines file (- for stdin) or --input JSON, one of the two")
    if timeout is not None:
        check_seconds(timeout, "timeout")
        if not wait:
            raise InvalidRequest("timeout", "means nothing without --wait")
    if input is not None:
        tasks = [new_task({"input": parse(input, "input")}, defaults)]
        async with opened(options, create=True) as client:
            answer = await client.submit_many(tasks)
            if isinstance(answer, Refused):
                return output.refused(answer, json=options.as_json)
            return await _told(client, answer, options.as_json, wait, timeout)
    for name in ("task_id", "depends_on"):
        if name in defaults:
            raise InvalidRequest(name, "belongs to one task: use it with --input, or write it into the lines")
    lines = CheckedLines(defaults)
    try:
        _read(lines, file or "-")
        async with opened(options, create=True) as client:
            answer = await _write(client, lines)
            if isinstance(answer, Refused):
                return output.refused(answer, json=options.as_json)
            return await _told(client, answer, options.as_json, wait, timeout)
    finally:
        lines.close()


def _read(lines: CheckedLines, file: str) -> None:
    source: BinaryIO
    if file == "-":
        lines.read(sys.stdin.buffer)
        return
    try:
        with Path(file).open("rb") as source:
            lines.read(source)
    except OSError as error:
        raise InvalidRequest("file", f"{file}: {error.strerror}") from None


async def _write(client: Client, lines: CheckedLines) -> list[Submitted] | Refused:
    """Writes all batches. What only the store knows about later batches is asked before the first is written."""
    if lines.count > MAX_BATCH:
        pools = {pool.name for pool in await client.pools()}
        for pool, number in lines.pools.items():
            if pool not in pools:
                raise BadLine(number, f"no pool {pool!r} in this store")
        for parent, number in lines.parents.items():
            if isinstance(await client.task(parent), Refused):
                raise BadLine(number, f"depends on {parent!r}, which is neither in the file nor in the store")
    written: list[Submitted] = []
    with _progress() as progress:
        bar = progress.add_task("submitting", total=lines.count, visible=lines.count > MAX_BATCH)
        for numbers, tasks in lines.batches():
            try:
                answer = await client.submit_many(tasks)
            except InvalidRequest as error:
                _told_partly(written, lines.count)
                raise _named_by_line(error, numbers) from None
            if isinstance(answer, Refused):
                _told_partly(written, lines.count)
                return answer
            written += answer
            progress.update(bar, completed=len(written))
    return written


def _named_by_line(error: InvalidRequest, numbers: Sequence[int]) -> InvalidRequest:
    """`tasks[3].depends_on` as a person sees it: the line."""
    found = re.match(r"tasks\[(\d+)\]\.(.+)", error.field)
    if found is None or int(found[1]) >= len(numbers):
        return error
    return BadLine(numbers[int(found[1])], f"{found[2]}: {error.limit}")


def _told_partly(written: Sequence[Submitted], count: int) -> None:
    if written:
        output.note(
            f"{len(written)} of {count} tasks were written before this one; those with a task_id are "
            "recognised when the file is submitted again",
            style="yellow",
        )


async def _told(client: Client, answer: list[Submitted], json: bool, wait: bool, timeout: float | None) -> int:
    created = sum(item.created for item in answer)
    if not json and not wait:
        stood = f" ({len(answer) - created} stood already)" if created < len(answer) else ""
        output.say(f"submitted {len(answer)} task{'' if len(answer) == 1 else 's'}{stood}")
        if len(answer) <= LISTED:
            rows = [(i.task.task_id, output.word(i.task.state), "" if i.created else "stood already") for i in answer]
            output.show_table(("task", "state", ""), rows)
    results = await _results(client, [item.task.task_id for item in answer], timeout) if wait else None
    if json:
        output.emit(
            {
                "submitted": len(answer),
                "created": created,
                "tasks": [
                    {"task_id": item.task.task_id, "created": item.created, "state": item.task.state} for item in answer
                ],
                "results": None
                if results is None
                else [
                    {
                        "task_id": task_id,
                        "outcome": found.outcome,
                        "reason": found.reason,
                        "value": found.value if isinstance(found, Result) else None,
                    }
                    for task_id, found in results
                ],
            }
        )
    elif results is not None:
        for task_id, found in results:
            if isinstance(found, Result):
                output.say(f"{task_id}\t{output.value_text(found.value)}")
            else:
                output.note(
                    f"{task_id}: {found.outcome} ({found.reason}); hint: {hint(found.reason or found.outcome)}",
                    style="red",
                )
    missing = results is not None and any(isinstance(found, Refused) for _, found in results)
    return output.REFUSED if missing else output.DONE


async def _results(client: Client, task_ids: Sequence[str], timeout: float | None) -> list[tuple[str, Any]]:
    """Every task's result, or why it has none: it needs a person, or the time is up."""
    ends = None if timeout is None else elapsed() + timeout
    found: list[tuple[str, Any]] = []
    with _progress() as progress:
        bar = progress.add_task("waiting", total=len(task_ids))
        for task_id in task_ids:
            found.append((task_id, await result_of(client, task_id, ends)))
            progress.update(bar, completed=len(found))
    return found


def _progress() -> Progress:
    """A bar on stderr, where a person looks at it."""
    printer = output.console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=printer,
        transient=True,
        disable=not printer.is_terminal,
    )


def add_to(app: App, group: Group) -> None:
    app.command(submit, group=group)
