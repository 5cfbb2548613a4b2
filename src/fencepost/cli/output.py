"""What the commands print: tables for people on stdout, one JSON document for programs, everything else on stderr.

Text from tasks is never taken for markup or terminal codes. Without a terminal, or with NO_COLOR, there is no colour
and nothing is cut to a width.
"""

from __future__ import annotations

import base64
import enum
import json as stdlib_json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fencepost import clock
from fencepost.cli.explain import best_code, hint
from fencepost.wire import Refused

DONE, REFUSED, USAGE, UNAVAILABLE, EPOCH_RAISED = 0, 1, 2, 3, 4

STYLES = {
    "READY": "cyan",
    "CLAIMED": "yellow",
    "BLOCKED": "blue",
    "PARKED": "red",
    "CANCELLED": "magenta",
    "COMMITTED": "green",
    "OPEN": "green",
    "CLOSED": "red",
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
}
_WIDE = 10_000  # where nobody looks at a screen


class _Console(Console):
    """Leaves a reader that went away to `main`, where Rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """A console for people: literal text, no emoji codes, no highlighting; unbounded width without a terminal."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() or os.environ.get("COLUMNS") else _WIDE
    return _Console(file=file, markup=False, highlight=False, emoji=False, soft_wrap=True, width=width)


def say(text: str | Text = "", style: str | None = None, *, before: str = "") -> None:
    """A line for people on stdout."""
    shown = Text(clean(text)) if isinstance(text, str) else text
    console().print(Text(before).append_text(shown) if before else shown, style=style)


def note(text: str, style: str | None = None) -> None:
    """A line about what is going on, on stderr: never mixed into a result."""
    console(stderr=True).print(Text(clean(text)), style=style)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says on stderr, where a person looks at it, that something takes its time."""
    printer = console(stderr=True)
    if not printer.is_terminal:
        yield
        return
    with printer.status(what):
        yield


def clean(value: Any, *, keep: str = "\n\t") -> str:
    """Text that cannot move the cursor or change the terminal: control characters are shown, not sent."""
    text = str(value)
    if text.isprintable():
        return text
    shown = []
    for character in text:
        number = ord(character)
        if character in keep or not (number < 0x20 or 0x7F <= number < 0xA0 or 0xD800 <= number <= 0xDFFF):
            shown.append(character)
        elif number < 0x20:
            shown.append(chr(0x2400 + number))
        else:
            shown.append(f"\\u{number:04x}")
    return "".join(shown)


def word(value: str) -> Text:
    """A state, intake or verdict in its colour."""
    return Text(clean(value), style=STYLES.get(value, ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> Table:
    """A plain table. Cells are literal text; None is shown as a dash."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell_text(cell)) for cell in row))
    return made


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    printer = console()
    printer.soft_wrap = False
    printer.print(table(columns, rows, right=right))


def cell_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, datetime):
        return at(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return clean(value, keep="")


# times ----------------------------------------------------------------------------------------------------------


def seconds_to(value: datetime) -> float:
    """Seconds from now on this machine's clock: for showing, never for deciding."""
    return (value - clock.to_datetime(clock.wall_us())).total_seconds()


def moment(value: Any) -> datetime | None:
    """A time of an answer, whether it is a datetime, ISO text or a record's microseconds."""
    if isinstance(value, datetime):
        return value
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 10**14:
        return clock.to_datetime(value)
    return None


def at(value: datetime) -> str:
    """`14:03:22` today, with the date on other days; UTC, as everything is stored."""
    value = value.astimezone(UTC)
    today = clock.to_datetime(clock.wall_us()).date()
    return f"{value:%H:%M:%S}" if value.date() == today else f"{value:%Y-%m-%d %H:%M:%S}"


def span(seconds: float) -> str:
    """A duration as a person would say it."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86_400:.0f} days"


def until(value: datetime) -> str:
    """`14:03:22 (in 21 s)`."""
    left = seconds_to(value)
    return f"{at(value)} ({f'in {span(left)}' if left >= 0 else f'{span(left)} ago'})"


# JSON -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Builtins with a JSON form: aware times as ISO 8601 in UTC, bytes as {"$bytes": base64}."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return msgspec.to_builtins(value)


def value_text(value: Any, *, indent: bool = False) -> str:
    """A value as people read it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return stdlib_json.dumps(plain(value), ensure_ascii=False, indent=2 if indent else None)


def emit(document: Any, *, pretty: bool = True) -> None:
    """The JSON document of a command, on stdout: one line; indented for a terminal where `pretty`."""
    data = msgspec.json.encode(plain(document))
    if pretty and sys.stdout.isatty():
        data = msgspec.json.format(data, indent=2)
    sys.stdout.write(data.decode() + "\n")
    sys.stdout.flush()


# refusals and errors --------------------------------------------------------------------------------------------


def exit_code(answer: Any) -> int:
    """0 where something was done, 4 where the epoch was raised over the caller, else 1."""
    if not isinstance(answer, Refused):
        return DONE
    return EPOCH_RAISED if (answer.outcome, answer.reason) == ("FENCED", "EPOCH") else REFUSED


def refused(answer: Refused, *, json: bool = False, task_id: str | None = None) -> int:
    """Prints a refusal: what was asked, what stands instead, what to do. Returns the exit code.

    JSON: `{"outcome", "reason", "current", "door", "task_id", "hint"}`, with exactly these keys.
    """
    task_id = answer.task_id or task_id
    advice = hint(answer.outcome.value, answer.reason)
    if task_id is not None:
        advice = advice.replace("TASK", shlex.quote(task_id))
    if json:
        emit(
            {
                "outcome": answer.outcome,
                "reason": answer.reason,
                "current": answer.current,
                "door": answer.door,
                "task_id": task_id,
                "hint": advice,
            }
        )
        return exit_code(answer)
    head = answer.outcome.value + (f" ({answer.reason})" if answer.reason else "")
    about = [f"{answer.door} " if answer.door else "", f"of task {task_id} " if task_id else ""]
    note(f"{''.join(about)}refused: {head}".strip(), style="bold red")
    for line in describe(answer.current):
        note(f"  {line}")
    note(f"hint: {advice}  [fencepost explain {best_code(answer.outcome.value, answer.reason)}]")
    return exit_code(answer)


def describe(current: dict[str, Any]) -> list[str]:
    """What stands instead, in a sentence or two: who holds it and until when, the state, the numbers."""
    left = dict(current)
    lines = []
    owner, ends = left.pop("owner", None), moment(left.pop("lease_expires_at", None))
    if owner is not None and ends is not None:
        lines.append(f"held by {owner} until {until(ends)}")
    elif owner is not None:
        lines.append(f"last owner: {owner}")
    if (time := moment(left.get("available_at"))) is not None:
        left.pop("available_at")
        lines.append(f"claimable at {until(time)}")
    # A number that is 0 says that something never happened: no news to whoever is refused.
    left = {name: item for name, item in left.items() if item not in (None, 0, "", {}, [])}
    if "state" in left:
        left = {"state": left.pop("state"), **left}
    numbers = [f"{name.replace('_', ' ')} {cell_text(plain(item))}" for name, item in left.items()]
    if numbers:
        lines.append("now: " + ", ".join(numbers))
    return lines


def failed(code: str, message: str, *, json: bool = False, field: str | None = None, limit: str | None = None) -> None:
    """Prints an error: one line, and the hint. JSON: `{"error", "message", "field", "limit", "hint"}`."""
    advice = hint(code)
    if json:
        emit({"error": code, "message": message, "field": field, "limit": limit, "hint": advice})
        return
    note(f"fencepost: {message}", style="bold red" if code != "UNAVAILABLE" else None)
    if code not in ("INVALID", "UNAVAILABLE"):  # there the message says it all
        note(f"hint: {advice}")
