"""The second story, played three times: a worker has sent a mail, lost the answer, and is paused; another takes over,
and words the mail anew.

The usual queue sends two mails. fencepost sends one: where the mail API knows idempotency keys, the successor asks for
the first mail by its key; over plain SMTP nobody can be asked, and the task waits for a person.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fencepost import sync
from fencepost.demo.mail_service import MailService
from fencepost.demo.mail_worker import TO
from fencepost.demo.processes import PATIENCE, Cast, Line, NotAsExpected
from fencepost.demo.usual_queue import UsualQueue
from fencepost.wire import EffectView, NewTask, Refused, TaskView

TASK = "invoice-7"
MODULE = "fencepost.demo.mail_worker"
Say = Callable[[float, str], None]


class MailEnding(msgspec.Struct, frozen=True):
    """What is true after an act: how many mails there are, and how it came to that."""

    queue: str
    mails: int
    texts: list[str]
    conflict: bool  # the successor's own text was refused under the slot
    waited_for_a_person: bool
    late_answer: str  # how the paused worker was stopped when it woke
    state: str  # of the effect; the job's state where the queue knows no effects
    audit_clean: bool | None  # None: there is none
    seconds: float


class _Act:
    """The part that the three have in common."""

    def __init__(self, kind: str, folder: Path, say: Say) -> None:
        self.kind = kind
        self.file = str(folder / "mails.db")
        self.where = self.file if kind == "usual" else f"sqlite:///{self.file}"
        self.service = MailService()
        self.began = time.monotonic()
        self._say = say

    def tell(self, line: str) -> None:
        self._say(time.monotonic() - self.began, line)

    def cast(self) -> Cast:
        def arguments(name: str) -> list[str]:
            return [self.kind, name, self.where, str(os.getpid()), *self.service.ports]

        return Cast("AB", arguments, MODULE)

    def until_a_has_sent_and_is_paused(self, cast: Cast) -> None:
        for _ in "AB":
            cast.expect("every worker is ready", lambda line: line.did == "ready")
        self.began = time.monotonic()
        cast.start("A")
        line = cast.expect("A words its mail", lambda line: line.did == "writes")
        self.tell(f"A takes {TASK} and writes: {line.detail['text']}")
        if not self.service.stored.wait(PATIENCE):
            raise NotAsExpected("no mail arrived")
        cast.pause("A", self.file)
        self.service.cut()
        self.tell("the mail is in the mailbox; its answer is lost, and A is stopped (SIGSTOP) before it knows")
        cast.start("B")
        line = cast.expect("B words its mail", lambda line: (line.worker, line.did) == ("B", "writes"))
        self.tell(f"A's lease ran out. B takes {TASK}: attempt {line.attempt}, and writes: {line.detail['text']}")

    def wake(self, cast: Cast) -> Line:
        cast.wake("A")
        return cast.expect("A is stopped", lambda line: line.worker == "A" and line.did in ("stopped", "late"))

    def ending(self, **more: object) -> MailEnding:
        fields: dict[str, object] = {
            "mails": len(self.service.mailbox),
            "texts": list(self.service.mailbox),
            "seconds": time.monotonic() - self.began,
            "conflict": False,
            "waited_for_a_person": False,
            "audit_clean": None,
            **more,
        }
        return msgspec.convert(fields, MailEnding)


def usual(folder: Path, say: Say) -> MailEnding:
    act = _Act("usual", folder, say)
    queue = UsualQueue(act.where)
    queue.put(TASK, TO)
    try:
        with act.cast() as cast:
            act.until_a_has_sent_and_is_paused(cast)
            cast.expect("B finishes", lambda line: (line.worker, line.did) == ("B", "finished"))
            act.tell("B sends its mail and finishes the job")
            late = act.wake(cast)
            act.tell(f"A is woken (SIGCONT) and finds its connection gone ({late.detail['answer']})")
            cast.dismiss()
        return act.ending(queue="the usual queue", late_answer=late.detail["answer"], state="done")
    finally:
        queue.db.close()
        act.service.close()


def by_http(folder: Path, say: Say) -> MailEnding:
    act = _Act("http", folder, say)
    client = sync.connect(act.where)
    client.submit(NewTask(TO, task_id=TASK, kind="invoice"))
    try:
        with act.cast() as cast:
            act.until_a_has_sent_and_is_paused(cast)
            line = cast.expect("B's text is refused", lambda line: (line.worker, line.did) == ("B", "conflict"))
            act.tell(f"PAYLOAD_CONFLICT: the slot send-invoice is bound to A's text and {line.detail['state']}")
            line = cast.expect("B finishes", lambda line: (line.worker, line.did) == ("B", "finished"))
            act.tell(
                f"B asks the mail API by A's key: it happened. Receipt {line.detail['receipt']}, and no second call"
            )
            _committed(client)
            late = act.wake(cast)
            act.tell(
                f"A is woken (SIGCONT), and is stopped where it says what became of its mail: {_why(client, late)}"
            )
            cast.dismiss()
        return act.ending(
            queue="fencepost, mail API", conflict=True, late_answer=_why(client, late), **_of_fencepost(client)
        )
    finally:
        client.close()
        act.service.close()


def by_smtp(folder: Path, say: Say) -> MailEnding:
    act = _Act("smtp", folder, say)
    client = sync.connect(act.where)
    client.submit(NewTask(TO, task_id=TASK, kind="invoice"))
    try:
        with act.cast() as cast:
            act.until_a_has_sent_and_is_paused(cast)
            cast.expect("B adopts or waits", lambda line: line.worker == "B" and line.did == "stopped")
            waiting = _waiting(client)
            act.tell(
                f"SMTP can be asked nothing: {waiting.guarantee}, {waiting.state}. The task is PARKED, nobody sends"
            )
            late = act.wake(cast)
            act.tell(f"A is woken (SIGCONT), and is stopped as well: {_why(client, late)}")
            act.tell("a person looks into the mailbox: fencepost effects resolve … --happened --evidence 'I saw it'")
            answer = client.resolve(waiting, "HAPPENED", who="you", evidence="it is in the mailbox", receipt="seen")
            if isinstance(answer, Refused):
                raise NotAsExpected(f"the person was refused: {answer.outcome}")
            _committed(client)
            act.tell("the task is claimable again, and is committed with that receipt")
            cast.dismiss()
        return act.ending(
            queue="fencepost, plain SMTP",
            conflict=True,
            waited_for_a_person=True,
            late_answer=_why(client, late),
            **_of_fencepost(client),
        )
    finally:
        client.close()
        act.service.close()


def _committed(client: sync.SyncClient) -> None:
    result = client.result(TASK, wait=PATIENCE)
    if isinstance(result, Refused):
        raise NotAsExpected(f"{TASK} has no result after {PATIENCE:.0f} s: {result.outcome}")


def _waiting(client: sync.SyncClient) -> EffectView:
    """The effect, once its task waits for a person."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        view = client.task(TASK)
        if isinstance(view, TaskView) and view.state == "PARKED":
            found: EffectView = client.effects(task_id=TASK).items[0]
            return found
        time.sleep(0.05)
    raise NotAsExpected(f"{TASK} does not wait for a person")


def _why(client: sync.SyncClient, late: Line) -> str:
    """How the late worker was refused, as the journal has it; else how it stopped itself."""
    for event in client.events(task_id=TASK).items:
        if not event.accepted and event.outcome == "FENCED" and event.door in ("effect.settle", "renew"):
            return f"FENCED ({event.reason})"
    return f"by its own worker, whose lease is over ({late.detail['answer']})"


def _of_fencepost(client: sync.SyncClient) -> dict[str, object]:
    found = client.effects(task_id=TASK).items
    return {"state": found[0].state, "audit_clean": client.report("audit").clean}
