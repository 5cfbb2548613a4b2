"""How the story is told: a line for each thing that happens, and both endings side by side."""

from __future__ import annotations

import io
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fencepost.demo.documents import Document
from fencepost.demo.mail_story import MailEnding
from fencepost.demo.story import Ending

WIDTH = 100  # of the picture, and the most that is used of a wide terminal

_COLOURS = {
    "FENCED": "bold green",
    "SIGSTOP": "yellow",
    "SIGCONT": "yellow",
    "accepted": "bold red",
    "attempt 2": "cyan",
    "PAYLOAD_CONFLICT": "bold green",
    "NON_REPLAYABLE": "bold green",
}
# rich's own frame asks a public server for a font; this picture asks nobody for anything.
_FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: Arial, "DejaVu Sans", sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

INTRODUCTIONS = {
    "usual": (
        "Act 1: the usual queue",
        "Claim by owner_id and expires_at, heartbeat, completion by id: demo/usual_queue.py, 60 lines.",
    ),
    "fencepost": (
        "Act 2: fencepost",
        "The same documents, processes and signals. Every claim has a generation, and commit compares it.",
    ),
    "usual_queue": (
        "Act 3: a mail, and the usual queue",
        "A worker sends a mail, loses the answer, and is paused. The next one words it anew, as a language model does.",
    ),
    "mail_api": (
        "Act 4: the same mail, and fencepost",
        "A mail API that knows idempotency keys. The mail has a slot in the task, and its text is bound to it.",
    ),
    "plain_smtp": (
        "Act 5: the same over plain SMTP",
        "SMTP knows no key, and cannot be asked what it did.",
    ),
}


class Teller:
    """Tells every line to each console: the reader's, and where a picture is wanted one that records."""

    def __init__(self, *consoles: Console) -> None:
        self._consoles = consoles

    def opening(self, texts: list[Document], folder: Path) -> None:
        total = sum(Path(text.path).stat().st_size for text in texts)
        self._line(
            f"{len(texts)} text files ({total:,} bytes) below {folder.name}/ are the tasks; the demo reads copies of "
            "them. Three worker processes, A, B and C, count words, headings and links, slowly enough to watch."
        )

    def act(self, kind: str) -> None:
        title, explanation = INTRODUCTIONS[kind]
        self._line("")
        self._line(title, "bold")
        self._line(explanation, "dim")

    def happened(self, seconds: float, what: str) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", no_wrap=True, min_width=7)
        grid.add_column(overflow="fold")
        text = Text(what)
        for word, style in _COLOURS.items():
            text.highlight_words([word], style)
        grid.add_row(Text(f"{seconds:.1f} s", "dim"), text)
        self._print(grid)

    def late(self, ending: Ending) -> None:
        canonical = ending.canonical
        if ending.late_answer == "FENCED":
            what = (
                f"A commits: FENCED ({ending.late_reason}). Its claim was the first, the task's is the second. "
                f"{ending.taken_over_by}'s result stands: {_counts(ending)}"
            )
        elif ending.late_answer != "accepted":
            what = f"A delivers its result and is told: {ending.late_answer} {ending.late_reason}"
        else:
            what = (
                f"A completes {canonical.title} by its id: {ending.late_answer}. "
                f"{ending.taken_over_by}'s result is overwritten: {_counts(ending)}"
            )
        self.happened(ending.seconds, what)

    def side_by_side(self, usual: Ending, fenced: Ending) -> None:
        table = Table(title="Side by side", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("")
        table.add_column(usual.queue, overflow="fold")
        table.add_column(fenced.queue, overflow="fold")
        rows = [
            ("canonical result", _whose(usual), _whose(fenced)),
            ("it describes", _which(usual), _which(fenced)),
            ("late worker was told", usual.late_answer, f"{fenced.late_answer} ({fenced.late_reason})"),
            ("attempts", str(usual.attempts), str(fenced.attempts)),
            ("refusals", str(usual.refusals), f"{fenced.refusals}, at commit"),
            ("discarded seconds", "not counted", f"{fenced.discarded_seconds or 0.0:.1f}"),
            ("audit", usual.audit, fenced.audit),
        ]
        for name, left, right in rows:
            told = name in ("canonical result", "it describes", "late worker was told")
            table.add_row(name, Text(left, "red" if told else ""), Text(right, "green" if told else ""))
        self._line("")
        self._print(table)

    def mails(self, endings: list[MailEnding]) -> None:
        table = Table(title="One mail or two", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in ("", *(ending.queue for ending in endings)):
            table.add_column(column, overflow="fold")
        rows = [
            ("mails in the mailbox", [str(ending.mails) for ending in endings]),
            ("the second text", ["was sent" if not ending.conflict else "PAYLOAD_CONFLICT" for ending in endings]),
            ("who decided", [_decided(ending) for ending in endings]),
            ("late worker was told", [ending.late_answer for ending in endings]),
        ]
        for name, cells in rows:
            told = name == "mails in the mailbox"
            style = ["" if not told else "green" if ending.mails == 1 else "red" for ending in endings]
            table.add_row(name, *(Text(cell, colour) for cell, colour in zip(cells, style, strict=True)))
        self._print(table)

    def closing(self, kept: bool, seconds: float) -> None:
        if kept:
            self._line(f"As promised, in {seconds:.0f} s: running twice was allowed, taking effect twice was not.")
        else:
            self._line("This is not what was promised: see the table. Please report it.", "bold red")

    def _line(self, text: str, style: str = "") -> None:
        self._print(Text(text, style))

    def _print(self, what: RenderableType) -> None:
        for console in self._consoles:
            console.print(what)


def recorder() -> Console:
    """A console of the picture's own width and colours, whatever the reader's terminal can do."""
    return Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")


def write_picture(recorded: Console, file: Path) -> None:
    file.write_text(recorded.export_svg(title="fencepost demo", unique_id="fencepost", code_format=_FRAME), "utf-8")


def _decided(ending: MailEnding) -> str:
    if ending.audit_clean is None:
        return "nobody"
    return "a person" if ending.waited_for_a_person else "the mail API, by the key"


def _counts(ending: Ending) -> str:
    text = f"{ending.canonical.words:,} words"
    return f"{text}, of the text as it stands" if ending.stands else f"{text}, of a text that no longer exists"


def _whose(ending: Ending) -> str:
    late = ending.canonical.read_by == "A"
    return f"{ending.canonical.read_by}'s, {'the late one' if late else 'who took over'}"


def _which(ending: Ending) -> str:
    return "the text as it stands" if ending.stands else "a text that no longer exists"
