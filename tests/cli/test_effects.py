"""`fencepost effect` for programs, `fencepost effects` for people, `fencepost downstreams`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost import connect
from fencepost.client.client import Client
from fencepost.kernel.records import Terms
from fencepost.wire import Claim, NewTask, Prepared
from tests.cli.running import Folder

TOY = '''
from pathlib import Path
from fencepost.effects.base import Happened, NotFound

class Mail:
    """A mailbox that is a file, with a line for each mail: its key and what it says."""

    def __init__(self, declaration, box: Path):
        self.declaration = declaration
        self.box = box

    def _keys(self):
        return [line.split(" ", 1)[0] for line in self.box.read_text().splitlines()] if self.box.exists() else []

    async def execute(self, call):
        if call.key not in self._keys():
            with self.box.open("a") as box:
                box.write(f"{call.key} {call.payload}\\n")
        return Happened({"mail": len(self._keys())})

    async def query(self, call):
        return Happened({"mail": "found"}) if call.key in self._keys() else NotFound()
'''
CONFIG = """
[downstreams.mail]
type = "toy_mail:Mail"
guarantee = "IDEMPOTENT"
retention = 3600
send_window = 0.05
settle_time = 0.0
box = "box.txt"

[downstreams.letter]
type = "toy_mail:Mail"
approval = true
box = "box.txt"
"""
MAIL = Terms("mail", "IDEMPOTENT", send_window_us=50_000, settle_time_us=0, retention_us=3_600_000_000)
EFFECT = f"{sys.executable} -m fencepost effect"


@pytest.fixture
def mailing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    (folder.path / "toy_mail.py").write_text(TOY)
    (folder.path / "fencepost.toml").write_text(CONFIG)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "toy_mail", raising=False)
    return folder


def mails(folder: Folder) -> int:
    box: Path = folder.path / "box.txt"
    return len(box.read_text().splitlines()) if box.exists() else 0


def work(folder: Folder, script: str) -> dict[str, Any]:
    out = folder.run("work", "--json", "--until-idle", "--", "sh", "-c", script)
    assert folder.code == 0, (out, folder.err)
    return dict(json.loads(out)["ended"])


def fails(folder: Folder, *arguments: str, code: int) -> str:
    """What a command says that does not do it."""
    out = folder.run(*arguments)
    assert folder.code == code, (arguments, folder.code, out, folder.err)
    return out + folder.err


async def unknown(client: Client, payload: Any = "hello", slot: str = "send") -> Prepared:
    """An effect whose sender is gone."""
    (claim,) = await client.claim_next(owner="ann")  # type: ignore[misc]
    assert isinstance(claim, Claim)
    prepared = await client.prepare(claim, slot, payload, MAIL)
    assert isinstance(prepared, Prepared)
    await client.take_over(claim.task_id)
    return prepared


def test_a_program_sends_once_however_often_it_runs(mailing: Folder) -> None:
    mailing.ok("submit", "--input", "1", "--task-id", "a")
    send = f'echo \'{{"to": "bob"}}\' | {EFFECT} send --using mail'
    assert work(mailing, f"{send} && exit 1") == {"FAILED": 1}
    assert mails(mailing) == 1
    shown = mailing.json("effects", "--task", "a")["items"]
    assert [(one["slot"], one["state"], one["receipt"]) for one in shown] == [("send", "COMMITTED", {"mail": 1})]


def test_a_program_gives_its_task_back_until_a_person_has_decided(mailing: Folder) -> None:
    mailing.ok("submit", "--input", "1", "--task-id", "a")
    send = f"echo '\"hello\"' | {EFFECT} send --using letter"
    assert work(mailing, f"{send} || exit $?") == {"RELEASED": 1}
    assert (mailing.json("show", "a")["task"]["state"], mails(mailing)) == ("PARKED", 0)
    assert work(mailing, send) == {}  # nothing to claim: no hot loop
    (waiting,) = mailing.json("effects")["items"]
    assert (waiting["state"], waiting["payload"]) == ("AWAITING_APPROVAL", "hello")
    said = mailing.ok("effects")
    assert f"fencepost effects approve {waiting['effect_id'][:12]} --version {waiting['version']}" in said
    fails(mailing, "effects", "approve", waiting["effect_id"][:8], "--version", "9", code=1)
    mailing.ok("effects", "approve", waiting["effect_id"][:8], "--who", "eve")
    assert mailing.json("show", "a")["task"]["state"] == "READY"
    assert work(mailing, f"{send} || exit $?") == {"COMMITTED": 1}
    assert mailing.json("result", "a")["value"] == {"mail": 1}
    assert mails(mailing) == 1
    fails(mailing, "effects", "approve", waiting["effect_id"][:8], code=1)  # it waits for nobody any more


def test_a_denied_effect_is_never_sent_and_the_program_is_told(mailing: Folder) -> None:
    mailing.ok("submit", "--input", "1", "--task-id", "a")
    send = f"echo '\"hello\"' | {EFFECT} send --using letter"
    work(mailing, f"{send} || exit $?")
    (waiting,) = mailing.json("effects")["items"]
    mailing.ok("effects", "deny", waiting["effect_id"], "--note", "not today")
    assert work(mailing, f"{send}; echo '\"code '$?'\"'") == {"COMMITTED": 1}
    assert mailing.json("result", "a")["value"] == "code 1"
    assert mails(mailing) == 0


async def test_the_reconciler_decides_what_the_downstream_knows_with_the_intake_closed(mailing: Folder) -> None:
    async with connect(mailing.url) as client:
        await client.submit(NewTask(1, task_id="a"))
        known = await unknown(client)
        other = await unknown(client, slot="other")
    (mailing.path / "box.txt").write_text(f"{known.effect_id} hello\n")
    mailing.ok("pool", "close-intake")
    while mailing.json("effects", "reconcile")["items"]:  # the send window has to pass before "not found" counts
        pass
    states = {
        one["effect_id"]: one["state"]
        for one in mailing.json("effects", "--state", "COMMITTED", "--state", "ABSENT")["items"]
    }
    assert states == {known.effect_id: "COMMITTED", other.effect_id: "ABSENT"}
    assert mails(mailing) == 1
    assert "no effect is UNKNOWN" in mailing.ok("effects", "reconcile")
    assert mailing.json("audit")["clean"]


async def test_a_person_resolves_with_a_time_and_evidence(mailing: Folder) -> None:
    async with connect(mailing.url) as client:
        await client.submit(NewTask(1, task_id="a"))
        effect = await unknown(client)
    wanted = effect.effect_id[:10]
    assert "--asked-at" in fails(mailing, "effects", "resolve", wanted, "--absent", "--evidence", "looked", code=2)
    fails(mailing, "effects", "resolve", wanted, "--evidence", "looked", code=2)
    early = str(effect.now_us)
    said = fails(mailing, "effects", "resolve", wanted, "--absent", "--asked-at", early, "--evidence", "looked", code=1)
    assert "TOO_EARLY" in said
    (shown,) = mailing.json("effects")["items"]
    done = mailing.json("effects", "resolve", wanted, "--happened", "--receipt", '{"id": 7}', "--evidence", "asked bob")
    assert (done["outcome"], done["info"]["state"]) == ("RESOLVED", "COMMITTED")
    assert shown["open"] == ["ASK", "REPEAT"]
    (shown,) = mailing.json("effects", "--task", "a")["items"]
    assert (shown["receipt"], shown["note"]) == ({"id": 7}, "asked bob")
    assert "effect_committed" in mailing.ok("show", "a")


def test_what_is_configured_is_checked_by_name(mailing: Folder) -> None:
    found = mailing.json("downstreams", "check")["items"]
    assert [(one["name"], one["guarantee"], one["ok"]) for one in found] == [
        ("mail", "IDEMPOTENT", True),
        ("letter", "NON_REPLAYABLE", True),
    ]
    assert "mial" in fails(mailing, "downstreams", "check", "mial", code=2)
    assert "FENCEPOST_CLAIM" in fails(mailing, "effect", "send", "--using", "mail", code=2)


def test_revise_says_that_effects_happened_unless_they_are_accepted(mailing: Folder) -> None:
    mailing.ok("submit", "--input", "1", "--task-id", "a")
    work(mailing, f"echo 1 | {EFFECT} send --using mail && exit 1")
    assert "EFFECTS" in fails(mailing, "revise", "a", "--input", "2", code=1)
    mailing.ok("revise", "a", "--input", "2", "--accept-effects")


def test_an_app_may_bring_the_downstreams_that_fencepost_toml_names_too(mailing: Folder) -> None:
    mailing.write(
        "agent.py",
        "import fencepost\nfrom fencepost import config\nfrom fencepost.effects.config import Downstreams\n\n"
        "downstreams = Downstreams(config.load().downstreams)\n"
        "app = fencepost.App(downstreams=downstreams.values())\n\n\n"
        "@app.task('thank')\nasync def thank(attempt):\n"
        "    return await attempt.effect('thanks', {'text': 'Thank you'}, using=downstreams['mail'])\n",
    )
    mailing.ok("submit", "--input", "1", "--task-id", "a", "--kind", "thank")
    mailing.ok("work", "--app", "agent:app", "--until-idle")
    assert json.loads(mailing.ok("result", "a")) == {"mail": 1}
