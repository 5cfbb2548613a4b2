"""The demo, played as a user would, with real processes; and what is left of it when it is interrupted: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fencepost import demo
from fencepost.demo import documents, usual_queue
from fencepost.demo.documents import Document, Findings, Reading
from fencepost.demo.mail_story import MailEnding
from fencepost.demo.story import Ending
from fencepost.demo.telling import Teller

COMMAND = [sys.executable, "-m", "fencepost", "demo"]
PATIENCE = 90  # seconds; the demo takes about half a minute on an idle machine


def play(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_late_result_wins_in_the_usual_queue_and_is_fenced_by_fencepost() -> None:
    done = play("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["as_promised"] is True
    endings = [report["usual_queue"], report["fencepost"], *report["mails"].values()]
    assert all(ending["seconds"] < 40 for ending in endings)

    usual = report["usual_queue"]
    assert usual["canonical"]["read_by"] == "A"
    assert usual["taken_over_by"] == "B"
    assert usual["late_answer"] == "accepted"
    assert usual["stands"] is False, "the usual queue's result is about a text that no longer exists"
    assert usual["attempts"] == 2

    fenced = report["fencepost"]
    assert fenced["canonical"]["read_by"] == fenced["taken_over_by"] == "B"
    assert (fenced["late_answer"], fenced["late_reason"]) == ("FENCED", "GENERATION")
    assert fenced["stands"] is True
    assert fenced["attempts"] == 2
    assert fenced["refusals"] == 1
    assert fenced["discarded_seconds"] > 0
    assert fenced["audit_clean"] is True

    # The second story: a mail, its answer lost, and a successor that words it anew.
    mails = report["mails"]
    assert {name: ending["mails"] for name, ending in mails.items()} == {
        "usual_queue": 2,
        "mail_api": 1,
        "plain_smtp": 1,
    }
    assert mails["usual_queue"]["texts"][0].startswith("Dear customer") and len(set(mails["usual_queue"]["texts"])) == 2
    for name in ("mail_api", "plain_smtp"):
        assert mails[name]["texts"][0].startswith("Dear customer"), "the bound text is the first one's"
        assert mails[name]["conflict"] and mails[name]["audit_clean"] is True
        assert mails[name]["late_answer"] == "FENCED (GENERATION)"
        assert mails[name]["state"] == "COMMITTED"
    assert mails["plain_smtp"]["waited_for_a_person"] and not mails["mail_api"]["waited_for_a_person"]


@pytest.mark.slow
def test_the_demo_reads_a_readers_own_folder_without_colour_in_a_narrow_terminal(tmp_path: Path) -> None:
    texts, picture = tmp_path / "texts", tmp_path / "picture.svg"
    texts.mkdir()
    (texts / "only.txt").write_text("one short text\n")
    done = play(str(texts), "--svg", str(picture), NO_COLOR="1", COLUMNS="40", TERM="dumb")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 40
    told = re.sub(r"\s+", " ", done.stdout)
    for word in (
        "Act 1: the usual queue",
        "SIGSTOP",
        "SIGCONT",
        "accepted",
        "Act 2: fencepost",
        "FENCED (GENERATION)",
        "Act 4",
        "PAYLOAD_CONFLICT",
    ):
        assert word in told
    assert (texts / "only.txt").read_text() == "one short text\n", "the reader's own file was changed"
    drawn = re.sub(r"&#160;|<[^>]+>", " ", picture.read_text())
    assert "FENCED" in drawn


def test_a_folder_without_texts_is_a_wrong_call(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    done = play(str(tmp_path))
    assert done.returncode == 2
    assert "no text file" in done.stderr


# nothing is left ----------------------------------------------------------------------------------


def children_of(pid: int) -> dict[int, str]:
    """Child processes with their states (T: stopped), as /proc has them."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == pid:
                    found[int(entry.name)] = state
    return found


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add(pid)
    return found


@contextlib.contextmanager
def demo_in_mid_task(act: int) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """The demo at the moment when one of its workers stands still, and the pids of all three."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    children: set[int] = set()
    try:
        stopped = 0
        for line in process.stdout:
            stopped += "SIGSTOP" in line
            if stopped == act:
                break
        found = children_of(process.pid)
        children = set(found)
        assert sorted(found.values()).count("T") == 1, found
        assert len(children) == 3
        yield process, children
    finally:
        for pid in {process.pid, *alive(children)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are found in /proc")


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "number"),
    [(1, signal.SIGINT), (2, signal.SIGINT), (1, signal.SIGTERM)],
    ids=["ctrl-c-in-act-1", "ctrl-c-in-act-2", "sigterm"],
)
def test_an_interrupted_demo_leaves_no_process_running_or_stopped(act: int, number: signal.Signals) -> None:
    with demo_in_mid_task(act) as (process, children):
        process.send_signal(number)
        _, problems = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, problems
        assert "Traceback" not in problems
        assert alive(children) == set()


@linux_only
@pytest.mark.slow
def test_a_killed_demo_leaves_no_process_either() -> None:
    with demo_in_mid_task(1) as (process, children):
        watched = [os.pidfd_open(pid) for pid in children]
        process.kill()
        process.wait(timeout=PATIENCE)
        for descriptor in watched:  # readable when that process has ended
            assert select.select([descriptor], [], [], 10)[0], "a worker outlived the demo"
            os.close(descriptor)


# its parts ----------------------------------------------------------------------------------------


def ending(**changes: object) -> Ending:
    findings = Findings(title="a.md", words=3, headings=0, links=0, digest="sha256:00", read_by="B")
    usual = Ending("a queue", findings, "B", "FENCED", "GENERATION", 2, 1, 1.0, "clean", True, True, 1, 9.0)
    return msgspec.structs.replace(usual, **changes)


LATE = {
    "canonical": Findings(title="a.md", words=3, headings=0, links=0, digest="sha256:00", read_by="A"),
    "late_answer": "accepted",
    "late_reason": "",
    "refusals": 0,
    "stands": False,
    "audit_clean": None,
}


def test_the_promised_outcome_is_recognised() -> None:
    assert demo.as_promised(ending(**LATE), ending())


@pytest.mark.parametrize(
    ("usual", "fenced"),
    [
        ({"late_answer": "gave up"}, {}),
        ({"stands": True}, {}),
        ({"canonical": ending().canonical}, {}),
        ({"attempts": 3}, {}),
        ({}, {"late_answer": "COMMITTED"}),
        ({}, {"late_reason": "EPOCH"}),
        ({}, {"canonical": LATE["canonical"]}),
        ({}, {"stands": False}),
        ({}, {"refusals": 0}),
        ({}, {"attempts": 1}),
        ({}, {"audit_clean": False}),
    ],
)
def test_any_other_outcome_ends_the_demo_with_exit_code_1(
    usual: dict[str, object], fenced: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endings = ending(**{**LATE, **usual}), ending(**fenced)
    assert not demo.as_promised(*endings)
    (tmp_path / "a.txt").write_text("a text\n")
    monkeypatch.setattr(demo, "_acts", lambda *_: endings)
    monkeypatch.setattr(demo, "_mail_acts", lambda *_: MAILS)
    assert demo.run(tmp_path, console=Console(quiet=True)) == 1


def mail_ending(**changes: object) -> MailEnding:
    sent_once = MailEnding("q", 1, ["text"], True, False, "FENCED (GENERATION)", "COMMITTED", True, 3.0)
    return msgspec.structs.replace(sent_once, **changes)


MAILS = [
    mail_ending(mails=2, conflict=False, state="done", audit_clean=None),
    mail_ending(),
    mail_ending(waited_for_a_person=True),
]


@pytest.mark.parametrize(
    ("act", "changes"),
    [
        (0, {"mails": 1}),
        (1, {"mails": 2}),
        (1, {"conflict": False}),
        (1, {"waited_for_a_person": True}),
        (1, {"late_answer": "RemoteDisconnected"}),
        (1, {"audit_clean": False}),
        (2, {"mails": 2}),
        (2, {"waited_for_a_person": False}),
        (2, {"state": "UNKNOWN"}),
        (2, {"audit_clean": False}),
    ],
)
def test_two_mails_or_nobody_asked_is_not_what_was_promised(act: int, changes: dict[str, object]) -> None:
    assert demo.one_mail(MAILS)
    endings = [*MAILS]
    endings[act] = mail_ending(**{**msgspec.structs.asdict(MAILS[act]), **changes})
    assert not demo.one_mail(endings)


def test_a_narrow_terminal_still_shows_both_queues_side_by_side() -> None:
    console = Console(width=40, record=True, quiet=False, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    Teller(console).side_by_side(ending(**LATE), ending())
    Teller(console).mails(MAILS)
    console.file.close()
    shown = console.export_text()
    assert max(len(line) for line in shown.splitlines()) <= 40
    assert "FENCED" in shown


def test_the_usual_queue_can_be_read_in_sixty_lines() -> None:
    assert len(Path(usual_queue.__file__).read_text().splitlines()) <= 60


def test_the_usual_queue_gives_a_job_to_one_owner_until_its_lease_is_over(tmp_path: Path) -> None:
    queue = usual_queue.UsualQueue(str(tmp_path / "queue.db"))
    queue.put("one", {"n": 1})
    assert queue.claim("A", 60.0) == ("one", {"n": 1}, 1)
    assert queue.claim("B", 60.0) is None
    assert queue.heartbeat("one", "A", -1.0)  # and so its lease is over
    assert queue.claim("B", 60.0) == ("one", {"n": 1}, 2)
    assert not queue.heartbeat("one", "A", 60.0), "a fair heartbeat tells the old owner"
    queue.complete("one", "B's")
    queue.complete("one", "A's, late")
    assert queue.result("one") == ("A's, late", 2)
    queue.db.close()


def test_words_headings_and_links_are_counted_and_the_text_is_named_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("# One\n\ntwo [three](four.md) <https://five.example/>\n\n```\n# no heading\n```\n")
    reading = Reading(Document("a.md", str(path), 100.0))
    pieces = list(reading.pieces())
    assert [percent for percent, _ in pieces] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert sum(seconds for _, seconds in pieces) == pytest.approx(path.stat().st_size / 100.0)
    findings = reading.findings("B")
    assert (findings.headings, findings.links, findings.read_by) == (1, 2, "B")
    assert findings.digest == documents.digest(Document("a.md", str(path), 1.0))


def test_only_text_is_found_and_the_longest_comes_first(tmp_path: Path) -> None:
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    (folder / ".hidden").mkdir(parents=True)
    copies.mkdir()
    for name, content in [
        ("short.md", b"short\n"), ("long.txt", b"long " * 40), ("image.png", b"\x89\0\0"), ("empty.md", b"\n"),
        ("drawn.svg", b"<svg/>"), (".hidden/secret.txt", b"secret"), ("latin.txt", b"caf\xe9"),
    ]:  # fmt: skip
        (folder / name).write_bytes(content)
    copied = documents.copy(documents.find(folder), folder, copies)
    assert [document.title for document in copied] == ["long.txt", "short.md"]
    assert copied[0].bytes_per_second * documents.CHOSEN_SECONDS == pytest.approx(200)


def test_an_installation_without_the_projects_docs_has_texts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "__file__", "/nowhere/lib/site-packages/fencepost/demo/documents.py")
    assert len(documents.find(documents.default_folder())) >= 3
