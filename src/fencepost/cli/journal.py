"""What happened, line by line: `watch`, and how a line of the journal is shown."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cyclopts import App, Group
from rich.text import Text

from fencepost.cli import output
from fencepost.cli.session import Options, opened
from fencepost.wire import EventView, Refused

PAGE = 500


def line_of(event: EventView, *, with_task: bool = True) -> tuple[Any, ...]:
    """One line of the journal as cells: time, version (none for a log entry), what, door, task, and the rest."""
    what = Text(event.name)
    if event.outcome and event.name == "refusal":
        what = Text(f"{event.outcome}{f'/{event.reason}' if event.reason else ''}", style="red")
    elif event.name == "alarm":
        what = Text("alarm", style="bold red")
    elif event.outcome:
        what = Text(f"{event.name} {event.outcome}")
    if event.count > 1:
        what.append(f" ×{event.count}")
    rest = []
    if event.generation:
        rest.append(f"generation {event.generation}")
    if event.state:
        rest.append(f"→ {event.state}")
    rest += [f"{name} {short}" for name, item in event.detail.items() if (short := _short(item)) and name != "compared"]
    time = f"{event.at:%H:%M:%S}.{event.at.microsecond // 1000:03d}"
    if not output.at(event.at).startswith(f"{event.at:%H}"):
        time = f"{event.at:%Y-%m-%d} {time}"
    version = f"v{event.state_version}" if event.state_version is not None else ""
    return (time, version, what, event.door, (event.task_id or "") if with_task else "", "  ".join(rest))


def _short(value: Any) -> str:
    """A detail in a few words; containers as `name value` pairs."""
    if value is None or value in ("", {}, []):
        return ""
    if isinstance(value, datetime):
        return output.at(value)
    if isinstance(value, Mapping):
        parts = [f"{name} {short}" for name, item in value.items() if (short := _short(item))]
        return f"({', '.join(parts)})" if parts else ""
    text = output.cell_text(output.plain(value))
    if text.startswith("sha256:"):
        return f"{text[:19]}…"  # enough to tell two apart; --json has all of it
    return text if len(text) <= 120 else f"{text[:120]}…"


async def watch(
    *,
    pool: str | None = None,
    from_: str | None = None,
    once: bool = False,
    options: Options | None = None,
) -> int:
    """Print the journal as it grows: accepted changes, refusals, pool events. Ends with Ctrl-C.

    JSON: one object a line, with the fields of `fencepost.wire.EventView`; `cursor` is where to go on.

    Parameters
    ----------
    pool
        Only of this pool.
    from_
        Go on behind this cursor. Default: from now on; with --once, from the beginning.
    once
        Print what there is, and end.
    """
    options = options or Options()
    async with opened(options) as client:
        if pool is not None and isinstance(missing := await client.pool(pool), Refused):
            return output.refused(missing, json=options.as_json)
        if once:
            cursor = from_
            while True:
                page = await client.events(pool=pool, cursor=cursor, limit=PAGE)
                for event in page.items:
                    _print(event, options.as_json)
                cursor = page.next_cursor
                if cursor is None:
                    return output.DONE
        async for event in client.watch(pool, cursor=from_):
            _print(event, options.as_json)
    return output.DONE


def _print(event: EventView, json: bool) -> None:
    if json:
        output.emit(event, pretty=False)
        return
    time, version, what, door, task, rest = line_of(event)
    line = Text(f"{time} {version:>5} ", style="dim")
    line.append_text(what)
    line.append(f"  {door}" if door else "", style="dim")
    line.append(f"  {output.clean(task, keep='')}" if task else "", style="bold")
    line.append(f"  {output.clean(rest, keep='')}" if rest else "")
    output.say(line)


def add_to(app: App, group: Group) -> None:
    app.command(watch, group=group)
