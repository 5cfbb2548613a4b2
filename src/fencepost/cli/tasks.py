"""Looking at tasks: `result`, `tasks`, `show`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from cyclopts import App, Group
from rich.text import Text

from fencepost.cli import output
from fencepost.cli.explain import hint
from fencepost.cli.journal import line_of
from fencepost.cli.session import Options, opened
from fencepost.cli.waiting import result_of
from fencepost.clock import elapsed
from fencepost.kernel.commands import check_seconds
from fencepost.wire import Outcome, Refused, TaskView

SHOWN_CHARACTERS = 4000  # of an input or a result, to people; --json has all of it


async def result(task: str, /, *, wait: float | None = None, options: Options | None = None) -> int:
    """Print a task's canonical result, and nothing else: text and bytes as they are, anything else as JSON.

    Without a result: exit code 1, saying how far the task is; at once where it is CANCELLED or PARKED, or BLOCKED
    behind one that is, because then a person has to do something first.

    JSON: {"task_id", "value", "result_digest", "result_commit_id", "revision", "generation", "attempt",
    "committed_at", "parents", "pruned", "outcome", "reason"}; bytes are {"$bytes": base64}.

    Parameters
    ----------
    task
        The task's id.
    wait
        Wait up to so many seconds for it, as long as it can still come.
    """
    options = options or Options()
    async with opened(options) as client:
        seconds = 0.0 if wait is None else check_seconds(wait, "wait") / 1_000_000
        answer = await result_of(client, task, elapsed() + seconds)
    if isinstance(answer, Refused):
        return output.refused(answer, json=options.as_json, task_id=task)
    if options.as_json:
        output.emit(answer)
    elif answer.pruned:
        output.note(f"the result was {answer.result_digest}; its body was pruned", style="yellow")
    elif isinstance(answer.value, bytes):
        sys.stdout.buffer.write(answer.value)
        sys.stdout.buffer.flush()
    elif sys.stdout.isatty():
        output.say(output.value_text(answer.value, indent=True))
    else:
        sys.stdout.write(output.value_text(answer.value) + "\n")
    return output.DONE


async def tasks(
    *,
    pool: str | None = None,
    queue: str | None = None,
    kind: str | None = None,
    state: list[str] | None = None,
    parent: str | None = None,
    limit: int = 100,
    cursor: str | None = None,
    options: Options | None = None,
) -> int:
    """List tasks in order of their ids, a page at a time.

    JSON: {"items": [task], "next_cursor"}; a task has the fields of `fencepost.wire.TaskView`, `input` always null.

    Parameters
    ----------
    pool
        Only of this pool.
    queue
        Only of this queue.
    kind
        Only of this kind.
    state
        Only in this state: ready, claimed, blocked, parked, cancelled, committed. May be repeated.
    parent
        Only those that depend on this task.
    limit
        How many on a page, 1 to 1000.
    cursor
        Where to go on: what the page before said.
    """
    options = options or Options()
    async with opened(options) as client:
        page = await client.tasks(
            pool=pool, queue=queue, kind=kind, state=state or None, parent=parent, cursor=cursor, limit=limit
        )
    if options.as_json:
        output.emit(page)
        return output.DONE
    if not page.items:
        output.note("no tasks" if cursor is None else "no more tasks")
        return output.DONE
    output.show_table(
        ("task", "state", "kind", "queue", "gen", "attempts", "owner", "note"),
        [
            (
                item.task_id,
                output.word(item.state),
                item.kind,
                item.queue,
                item.generation,
                f"{item.charged_attempts}/{item.max_attempts}",
                item.owner_id if item.state == "CLAIMED" else None,
                _remark(item),
            )
            for item in page.items
        ],
        right=("gen", "attempts"),
    )
    if page.next_cursor is not None:
        output.note(f"more: --cursor {page.next_cursor}")
    return output.DONE


def _remark(task: TaskView) -> str:
    """What a person would ask next about a task in this state."""
    if task.state == "CLAIMED" and task.lease_expires_at is not None:
        return f"lease ends {output.until(task.lease_expires_at)}"
    if task.state == "PARKED":
        return task.park_reason or ""
    if task.state == "BLOCKED":
        if task.unreachable:
            return f"unreachable: {', '.join(task.unreachable)}"
        return f"waits for {task.deps_remaining} task{'' if task.deps_remaining == 1 else 's'}"
    if task.state == "READY" and output.seconds_to(task.available_at) > 0:
        return f"from {output.until(task.available_at)}"
    return ""


async def show(task: str, /, *, options: Options | None = None) -> int:
    """Everything about one task: its record, attempts, staged results, and the journal as a timeline.

    JSON: {"task", "attempts", "timeline", "staged", "result", "canonical", "conflict", "lineage", "successors",
    "truncated", "effects"}. Attempt ids appear as short hashes: they are keys to the door.

    Parameters
    ----------
    task
        The task's id.
    """
    options = options or Options()
    async with opened(options) as client:
        history = await client.report("history", task_id=task)
    if history is None:
        missing = Refused(Outcome.NOT_FOUND, "TASK", {}, "show", task)
        return output.refused(missing, json=options.as_json, task_id=task)
    if options.as_json:
        output.emit(history)
        return output.DONE
    view: TaskView = history.task
    head = Text(output.clean(view.task_id, keep=""), style="bold")
    head.append("  ").append_text(output.word(view.state))
    output.say(head)
    for name, value in _facts(view, history):
        output.say(f"  {name:<12} {value}")
    if history.attempts:
        output.say()
        output.show_table(
            ("gen", "attempt", "owner", "started", "ended", "end", "cost", "error"),
            [
                (
                    item.generation,
                    item.attempt,
                    item.owner_id,
                    item.started_at,
                    item.ended_at,
                    output.word(item.end or "live"),
                    _cost(item.usage),
                    _first_line(item.error),
                )
                for item in history.attempts
            ],
            right=("gen",),
        )
    if history.effects:
        output.say()
        output.show_table(
            ("effect", "slot", "state", "guarantee", "downstream", "executions", "open"),
            [
                (
                    item.effect_id[:12],
                    item.slot,
                    output.word(item.state),
                    item.guarantee,
                    item.downstream,
                    len(item.executions),
                    " ".join(item.open) or None,
                )
                for item in history.effects
            ],
            right=("executions",),
        )
    if history.staged:
        output.say()
        output.show_table(
            ("staged by gen", "digest", "state", "at"),
            [(item.generation, item.digest, output.word(item.state), item.staged_at) for item in history.staged],
        )
        if history.conflict:
            output.say("different results were staged: canonical is the committed one", style="yellow")
    output.say()
    output.show_table(
        ("at", "version", "what", "door", "", ""), [line_of(event, with_task=False) for event in history.timeline]
    )
    if history.truncated:
        output.note("the timeline is longer; `fencepost watch --once` pages through all of it")
    return output.DONE


def _facts(view: TaskView, history: Any) -> list[tuple[str, str]]:
    facts = [
        ("kind", f"{view.kind}  queue {view.queue}  pool {view.pool}  priority {view.priority}"),
        (
            "numbers",
            (
                f"version {view.state_version}  revision {view.revision}  generation {view.generation}"
                f"  cancelled {view.cancel_generation}×  epoch {view.epoch}"
            ),
        ),
        ("attempts", f"{view.charged_attempts} charged of {view.max_attempts}"),
        ("submitted", output.at(view.created_at)),
    ]
    if view.state == "CLAIMED" and view.lease_expires_at is not None:
        facts.append(("held by", f"{view.owner_id} until {output.until(view.lease_expires_at)}"))
    elif remark := _remark(view):
        facts.append(("note", remark))
    lost = [item for item in history.attempts if item.end not in (None, "COMMITTED")]
    total: dict[str, float] = {}
    for item in lost:
        for name, value in item.usage.items():
            total[name] = total.get(name, 0) + value
    if spent := _cost(total):
        facts.append(("lost", f"{len(lost)} attempt{'' if len(lost) == 1 else 's'}, which cost {spent}"))
    if view.depends_on:
        facts.append(("depends on", ", ".join(view.depends_on)))
    if history.successors:
        facts.append(("successors", ", ".join(history.successors)))
    facts.append(("input", _shown(view.input)))
    if history.result is not None:
        facts.append(("result", "(pruned)" if history.result.pruned else _shown(history.result.value)))
    if view.state == "PARKED":
        facts.append(("hint", hint("PARKED", view.park_reason).replace("TASK", view.task_id)))
    return facts


def _shown(value: Any) -> str:
    text = f"({len(value)} bytes)" if isinstance(value, bytes) else output.value_text(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


def _cost(usage: Mapping[str, float]) -> str | None:
    """What was reported of an attempt, or of several: its seconds last, the rest as its reporter named it."""
    named = sorted(usage.items(), key=lambda item: (item[0] == "seconds", item[0]))
    return ", ".join(f"{name} {output.cell_text(value)}" for name, value in named) or None


def _first_line(text: str | None) -> str | None:
    """An error's last line that says something: of a traceback, that is the exception."""
    lines = [line for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:200] if lines else None


def add_to(app: App, group: Group) -> None:
    app.command(result, group=group)
    app.command(tasks, group=group)
    app.command(show, group=group)
