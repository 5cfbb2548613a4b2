"""A real mail server process (aiosmtpd) that keeps every mail in a file and then misbehaves as its recipient asks.

    python -m tests.effects.smtp_server FILE      prints its port, serves until it is ended

Recipients: drop@ (keep the mail, then abort the connection), cut@ (abort instead of keeping it), silent@ (keep it, and
never answer), slow0.4@ (keep it after 0.4 s), later@ (451), never@ (554), closing@ (421), nobody@ (550 to RCPT);
everybody else gets the mail.
"""

from __future__ import annotations

import asyncio
import email
import json
import sys
from typing import Any

from aiosmtpd.smtp import SMTP

ENDINGS = {"later": "451 4.3.0 not now", "never": "554 5.6.0 not ever", "closing": "421 4.3.2 closing"}


class Handler:
    def __init__(self, file: str) -> None:
        self.file = file

    def keep(self, envelope: Any) -> None:
        message = email.message_from_bytes(envelope.content)
        kept = {"to": envelope.rcpt_tos, "headers": dict(message.items()), "body": message.get_payload()}
        with open(self.file, "a") as mailbox:
            mailbox.write(json.dumps(kept, default=str) + "\n")

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if address.startswith("nobody@"):
            return "550 5.1.1 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        wish = envelope.rcpt_tos[0].partition("@")[0]
        if wish == "cut":
            server.transport.abort()
            return "250 OK"
        if wish in ENDINGS:
            return ENDINGS[wish]
        if wish.startswith("slow"):  # whatever becomes of the connection meanwhile
            slow = asyncio.create_task(asyncio.sleep(float(wish.removeprefix("slow"))))
            slow.add_done_callback(lambda _: self.keep(envelope))
            await asyncio.shield(slow)
            return "250 2.0.0 queued"
        self.keep(envelope)
        if wish == "drop":
            server.transport.abort()
        if wish == "silent":
            await asyncio.sleep(3600)
        return "250 2.0.0 queued"


async def main() -> None:
    loop = asyncio.get_running_loop()
    handler = Handler(sys.argv[1])
    server = await loop.create_server(lambda: SMTP(handler, hostname="localhost", loop=loop), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
