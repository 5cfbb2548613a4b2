"""The demo: a worker is paused in mid-task, another takes over, the first wakes up and goes on.

Played with real processes, before the usual queue and before fencepost: first on real documents, where the late worker
tries to commit; then with a mail that it has sent, whose answer is lost.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from fencepost.demo import documents, mail_story
from fencepost.demo.documents import Document
from fencepost.demo.mail_story import MailEnding
from fencepost.demo.processes import NotAsExpected
from fencepost.demo.story import Ending, FencepostStage, UsualStage, play
from fencepost.demo.telling import WIDTH, Teller, recorder, write_picture

__all__ = ["run"]

DONE, NOT_AS_PROMISED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def run(
    folder: Path | None = None, *, svg: Path | None = None, json: bool = False, console: Console | None = None
) -> int:
    """Play all acts and return an exit code.

    `folder`: every text file below it becomes a task; without one, the project's own docs, or the sample texts that
    come with the package. Files are copied and never changed. `svg`: where to write a picture of what was printed.
    `json`: print all endings as one JSON object, and nothing else.

    0: all acts ended as promised (in the usual queue the late result won, and two mails were sent; by fencepost it was
    FENCED, and one was sent). 1: they did not, or could not be played to their end. 2: there is no text file.
    130: interrupted. However it ends, no worker process is left. Each act takes well under 40 seconds on an idle
    machine; that is not promised.
    """
    began = time.monotonic()
    problems = Console(stderr=True)
    folder = documents.default_folder() if folder is None else folder
    found = documents.find(folder) if folder.is_dir() else []
    if not found:
        problems.print(f"fencepost demo: no text file below {folder}", highlight=False)
        return WRONG_USAGE

    recorded = recorder()
    teller = Teller(recorded if json else _readers(console), *([recorded] if svg is not None and not json else []))
    try:
        with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="fencepost-demo-") as scratch:
            usual, fenced = _acts(found[: documents.MOST_DOCUMENTS], folder, Path(scratch), teller)
            mails = _mail_acts(Path(scratch), teller)
    except KeyboardInterrupt:
        problems.print("interrupted; no worker process is left")
        return INTERRUPTED
    except NotAsExpected as error:
        problems.print(f"fencepost demo: {error}", highlight=False, markup=False)
        return NOT_AS_PROMISED

    kept = as_promised(usual, fenced) and one_mail(mails)
    seconds = time.monotonic() - began
    teller.side_by_side(usual, fenced)
    teller.mails(mails)
    teller.closing(kept, seconds)
    if svg is not None:
        write_picture(recorded, svg)
    if json:
        report = {
            "as_promised": kept,
            "seconds": seconds,
            "usual_queue": usual,
            "fencepost": fenced,
            "mails": dict(zip(MAIL_ACTS, mails, strict=True)),
        }
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    return DONE if kept else NOT_AS_PROMISED


def as_promised(usual: Ending, fenced: Ending) -> bool:
    """What the demo promises, compared with what happened."""
    return (
        usual.canonical.read_by == "A"
        and not usual.stands
        and usual.late_answer == "accepted"
        and fenced.canonical.read_by == fenced.taken_over_by != "A"
        and fenced.stands
        and (fenced.late_answer, fenced.late_reason) == ("FENCED", "GENERATION")
        and fenced.refusals >= 1
        and usual.attempts == fenced.attempts == 2
        and fenced.audit_clean is True
    )


# The acts with the mail, in order: as the report names them.
MAIL_ACTS = {"usual_queue": mail_story.usual, "mail_api": mail_story.by_http, "plain_smtp": mail_story.by_smtp}


def one_mail(endings: list[MailEnding]) -> bool:
    """What the acts with the mail promise, compared with what happened."""
    usual, api, smtp = endings
    return (
        usual.mails == 2
        and api.mails == smtp.mails == 1
        and api.conflict
        and (api.state, api.waited_for_a_person) == ("COMMITTED", False)
        and (smtp.state, smtp.waited_for_a_person) == ("COMMITTED", True)
        and api.late_answer.startswith("FENCED")
        and api.audit_clean is True
        and smtp.audit_clean is True
    )


def _mail_acts(scratch: Path, teller: Teller) -> list[MailEnding]:
    endings = []
    for name, act in MAIL_ACTS.items():
        place = scratch / f"mail-{name}"
        place.mkdir()
        teller.act(name)
        endings.append(act(place, teller.happened))
    return endings


def _acts(found: list[Path], folder: Path, scratch: Path, teller: Teller) -> tuple[Ending, Ending]:
    endings: list[Ending] = []
    for Stage in (UsualStage, FencepostStage):  # noqa: N806 (a class)
        place = scratch / Stage.kind
        place.mkdir()
        texts: list[Document] = documents.copy(found, folder, place)
        if not endings:
            teller.opening(texts, folder)
        teller.act(Stage.kind)
        stage: Any = Stage(place)
        try:
            endings.append(play(stage, texts, teller.happened))
        finally:
            stage.close()
        teller.late(endings[-1])
    return endings[0], endings[1]


def _readers(given: Console | None) -> Console:
    console = given or Console()
    if console.width > WIDTH:
        console.width = WIDTH
    return console


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: by an exception, so that its children are ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
