"""What the demo's mails go to: a mail API with idempotency keys over HTTP, and a mail server that speaks SMTP.

Both are real servers on loopback with one mailbox. The first mail is stored, and its answer held back: that is when a
worker is paused. `cut` then drops that connection without an answer.
"""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"


class MailService:
    """`mailbox`: the text of every mail, in order. `stored` is set once the first one is in it."""

    def __init__(self) -> None:
        self.mailbox: list[str] = []
        self.stored = threading.Event()
        self._known: dict[str, dict[str, Any]] = {}  # idempotency key → its answer
        self._cut = threading.Event()
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer((HOST, 0), self._handler())
        self._smtp = socketserver.ThreadingTCPServer((HOST, 0), self._session())
        self._threads = []
        for server in (self._http, self._smtp):
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def ports(self) -> list[str]:
        return [str(server.server_address[1]) for server in (self._http, self._smtp)]

    def cut(self) -> None:
        """Drop the connection that waits for its answer."""
        self._cut.set()

    def close(self) -> None:
        self._cut.set()
        for server in (self._http, self._smtp):
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def _store(self, text: str, key: str | None) -> tuple[dict[str, Any], bool]:
        """The answer to this mail, and whether it is to be held back. A key that is known changes nothing."""
        with self._lock:
            if key is not None and key in self._known:
                return self._known[key], False
            self.mailbox.append(text)
            answer = {"mail": len(self.mailbox)}
            if key is not None:
                self._known[key] = answer
            first = len(self.mailbox) == 1
        if first:
            self.stored.set()
        return answer, first

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                mail = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer, held = service._store(mail["text"], self.headers.get("Idempotency-Key"))
                if held:
                    service._cut.wait()
                    self.close_connection = True
                else:
                    self._answer(201, answer)

            def do_GET(self) -> None:
                known = service._known.get(self.path.rpartition("/")[2])
                self._answer(404 if known is None else 200, known or {})

            def _answer(self, status: int, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        return Handler

    def _session(self) -> type[socketserver.StreamRequestHandler]:
        service = self

        class Session(socketserver.StreamRequestHandler):
            """As much of RFC 5321 as a client needs to hand over one mail."""

            def handle(self) -> None:
                self._say("220 demo")
                while line := self.rfile.readline():
                    verb = line[:4].upper()
                    if verb == b"DATA":
                        self._say("354 go on")
                        _, held = service._store(self._text(), None)
                        if held:
                            service._cut.wait()
                            return
                        self._say("250 stored")
                    elif verb == b"QUIT":
                        self._say("221 bye")
                        return
                    else:
                        self._say("250 ok")

            def _text(self) -> str:
                lines = []
                while (line := self.rfile.readline()) not in (b".\r\n", b""):
                    lines.append(line.decode("utf-8", "replace").rstrip("\r\n"))
                return "\n".join(lines).rpartition("\n\n")[2].strip()

            def _say(self, text: str) -> None:
                self.wfile.write(text.encode() + b"\r\n")

        return Session
