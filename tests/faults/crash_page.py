"""docs/crash-matrix.md: rendered from what the combinations came to, and read back to be compared with a run's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from tests.faults.crash_matrix import SIGNALS, Crash, points
from tests.faults.programs.sender import POINTS
from tests.faults.stage import ROOT

PAGE = ROOT / "docs" / "crash-matrix.md"
AGAIN = "FENCEPOST_TEST_WRITE_CRASH_MATRIX"
WORLDS = {
    "http IDEMPOTENT": "IDEMPOTENT",
    "http CONDITIONAL": "CONDITIONAL",
    "http RESERVATION": "RESERVATION",
    "git": "CONDITIONAL",
    "s3": "CONDITIONAL",
    "aws": "IDEMPOTENT",
    "smtp": "NON_REPLAYABLE",
    "sql": "TRANSACTIONAL",
}
HEAD = "| the sender stands | signal | in the world | sent by | the successor | result by | the late sender |"
Row = tuple[str, ...]
Key = tuple[str, str, str]

INTRODUCTION = f"""# What a crash leaves

A worker process causes one effect and stands still at one point of it. There it is killed (SIGKILL), or it is paused
(SIGSTOP) and woken when its successor is done. The lease is 1 second, send window and settle time are half a second.
Each line is one combination of downstream, point and signal, against a real server, with what came of it. Every line
came out the same on SQLite and on PostgreSQL. In each of them the effect is in the world once, the task is COMMITTED,
and the audit is clean.

This page is written by the tests, and `make soak` compares it with what it finds. To write it anew:
`{AGAIN}=1 make soak ARGS="-k crash_matrix"`.

The points:

"""

COLUMNS = """
What the columns say:

- *in the world*: how often the effect was there, counted at the downstream, when the sender was stopped → when
  everybody was done, the late sender included.
- *the successor*: what it did about the effect, up to its own call. *asks* is a query of the downstream; *sends again*
  is a repeat under the same key or precondition; *confirms* is about the reservation that the sender stored; *keeps
  the receipt* is no call at all. What *a person* did is there, too.
- *the late sender*: what the woken process was told at the doors that it tried, the last of which was always a commit
  of a result of its own. *call* is a call that it made all the same, after its `send_by`, and what it found.

Past the last look, the sender breaks the one rule that IDEMPOTENT rests on: no call after `send_by`. It ends well here
because the downstream still remembers the key. For NON_REPLAYABLE, whether such a sender is still about is what the
person has to know, so there is no such line.

A late report is kept out of the record, and looked at all the same: where its receipt reads otherwise than the kept one
(an answer to the request itself, where the kept one is the answer to a query), the journal has an alarm, since two
receipts may be two effects. Here they never were.
"""


def row(done: Crash) -> Row:
    steps = ", ".join(done.led_on) or ("keeps the receipt" if done.point == "after settle" else "commits")
    if WORLDS[done.world] == "RESERVATION" and not done.before:
        steps = steps.replace("asks: it happened", "confirms the stored one")
    if done.committed_by == "sender":
        steps = "finds it done"
    late = "–"
    if done.late:
        late = ", ".join(done.late)
    counts = f"{done.before} → {done.after}"
    return (done.point, done.signal, counts, done.sent_by, steps, f"the {done.committed_by}", late)


def render(rows: dict[Key, Row]) -> str:
    text = INTRODUCTION + "".join(f"- *{name}*: {says}.\n" for name, says in POINTS.items()) + COLUMNS
    for key in keys():
        if key[1:] == ("before prepare", SIGNALS[0]):
            text += f"\n## {heading(key[0])}\n\n{HEAD}\n{'|---' * HEAD.count(' |')}|\n"
        text += "| " + " | ".join(rows.get(key, (*key[1:], "not run yet"))) + " |\n"
    return text


def heading(world: str) -> str:
    return world if world.endswith(WORLDS[world]) else f"{world} {WORLDS[world]}"


def keys() -> list[Key]:
    return [
        (world, point, signal)
        for world, guarantee in WORLDS.items()
        for point in points(guarantee)
        for signal in SIGNALS
    ]


def read(text: str) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    world = ""
    names = {heading(name): name for name in WORLDS}
    for line in text.splitlines():
        if line.startswith("## "):
            world = names.get(line.removeprefix("## "), "")
        elif world and (cells := re.fullmatch(r"\| (.*) \|", line)) and line != HEAD:
            each = tuple(cells[1].split(" | "))
            found[world, each[0], each[1]] = each
    return found


def compare(run: Iterable[Crash], page: Path = PAGE) -> None:
    """The page says what this run found; or, where it is asked for, is written so."""
    rows = {(done.world, done.point, done.signal): row(done) for done in run}
    standing = read(page.read_text(encoding="utf-8")) if page.exists() else {}
    if os.environ.get(AGAIN):
        page.write_text(render({**standing, **rows}), encoding="utf-8")
        return
    differ = [
        f"{key[0]}: {mine}\nthe page: {standing.get(key)}" for key, mine in rows.items() if standing.get(key) != mine
    ]
    assert not differ, "\n".join([*differ, f"to write {page.name} anew: {AGAIN}=1 make soak ARGS='-k crash_matrix'"])
