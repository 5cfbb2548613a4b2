"""A worker that sends a mail: `python -m fencepost.demo.mail_worker usual|http|smtp NAME WHERE PARENT HTTP SMTP`.

Each worker words the mail in its own way, as a language model does. Otherwise as `fencepost.demo.worker`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
from typing import Any

from fencepost.app import App
from fencepost.client.attempt import Attempt
from fencepost.client.worker import Worker
from fencepost.connect import connect
from fencepost.demo.mail_service import HOST
from fencepost.demo.usual_queue import UsualQueue
from fencepost.demo.worker import LEASE, POLL, Leaving, Prompter, die_with
from fencepost.effects.base import Call, Declaration, Found, Guarantee, Happened, NotFound, Outcome
from fencepost.effects.failures import PayloadConflict
from fencepost.effects.smtp import Smtp

TO = "customer@example.org"
WORDS = {"A": "Dear customer, please find your invoice attached.", "B": "Hello! Here comes your invoice."}


def post(port: int, mail: dict[str, Any], key: str | None = None) -> Any:
    """One request, never repeated. Raises OSError or HTTPException where no answer comes."""
    return _ask(port, "POST", "/mails", json.dumps(mail), {"Idempotency-Key": key} if key is not None else {})[1]


def _ask(port: int, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(HOST, port)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class MailApi:
    """The mail API as a downstream: it knows keys, and can be asked."""

    def __init__(self, port: int) -> None:
        self.declaration = Declaration(
            name="mail-api", guarantee=Guarantee.IDEMPOTENT, retention=86400.0, send_window=1.0, settle_time=0.5
        )
        self.port = port

    async def execute(self, call: Call) -> Outcome:
        return Happened(await asyncio.to_thread(post, self.port, call.payload, call.key))

    async def query(self, call: Call) -> Found:
        status, known = await asyncio.to_thread(_ask, self.port, "GET", f"/mails/{call.key}", None, {})
        return Happened(known) if status == 200 else NotFound()


def usual(prompter: Prompter, where: str, port: int) -> None:
    queue = UsualQueue(where)
    leaving = Leaving()
    prompter.wait_for_go()
    while not leaving:
        job = queue.claim(prompter.name, LEASE)
        if job is None:
            time.sleep(POLL)
            continue
        job_id, payload, attempt = job
        prompter.say("claimed", job_id, attempt)
        text = WORDS[prompter.name]
        prompter.say("writes", job_id, attempt, text=text)
        try:
            receipt = post(port, {"to": payload, "text": text})
        except (OSError, http.client.HTTPException) as error:
            prompter.say("late", job_id, attempt, answer=type(error).__name__, reason="")
            continue
        queue.complete(job_id, receipt)
        prompter.say("finished", job_id, attempt, receipt=receipt)


async def fenced(prompter: Prompter, where: str, mail: Any) -> None:
    app = App()

    @app.task("invoice", ttl=LEASE)
    async def invoice(attempt: Attempt, to: str) -> Any:
        claim = attempt.claim
        prompter.say("claimed", claim.task_id, claim.generation)
        text = WORDS[prompter.name]
        prompter.say("writes", claim.task_id, claim.generation, text=text)
        payload = {"to": to, "text": text}
        if isinstance(mail, Smtp):
            payload["subject"] = "Your invoice"
        try:
            try:
                receipt = await attempt.effect("send-invoice", payload, using=mail)
            except PayloadConflict as conflict:
                bound = conflict.payload["text"]
                prompter.say("conflict", claim.task_id, claim.generation, bound=bound, state=conflict.state)
                receipt = await attempt.effect("send-invoice", payload, using=mail, on_conflict="adopt")
        except BaseException as stopped:
            name = type(stopped).__name__
            prompter.say("stopped", claim.task_id, claim.generation, answer=name, reason=str(stopped))
            raise
        prompter.say("finished", claim.task_id, claim.generation, receipt=receipt)
        return receipt

    async with connect(where) as client:
        prompter.wait_for_go()
        await Worker(client, app, owner=prompter.name, concurrency=1).run()


def main(kind: str, name: str, where: str, parent: str, api: str, smtp: str) -> None:
    die_with(int(parent))
    prompter = Prompter(name)
    if kind == "usual":
        usual(prompter, where, int(api))
    elif kind == "http":
        asyncio.run(fenced(prompter, where, MailApi(int(api))))
    else:
        declared = Declaration(name="smtp", send_window=1.0, settle_time=0.5)
        sender = "billing@example.org"
        asyncio.run(fenced(prompter, where, Smtp(declared, HOST, port=int(smtp), security="none", sender=sender)))


if __name__ == "__main__":
    main(*sys.argv[1:])
