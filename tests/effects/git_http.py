"""Git's own server program for HTTP (`git http-backend`), with a token at the door and faults behind it."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.effects.repositories import Remote

TOKEN = "right"


class GitHttp:
    """`answers` maps a part of a request's address to the status that is given instead of serving it."""

    def __init__(self, remote: Remote) -> None:
        self.answers: dict[str, int] = {}
        self.asked: list[str] = []
        remote.git("config", "http.receivepack", "true")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._serve(self, remote)

            do_POST = do_GET  # noqa: N815 - the base class's name for it

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/remote.git"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler, remote: Remote) -> None:
        body = _body(handler)
        self.asked.append(handler.path)
        expected = "Basic " + base64.b64encode(f"fencepost:{TOKEN}".encode()).decode()
        status = next((status for part, status in self.answers.items() if part in handler.path), 0)
        if not status and handler.headers.get("Authorization") != expected:
            status = 401
        if status:
            handler.send_response(status)
            handler.send_header("WWW-Authenticate", "Basic")
            handler.send_header("Location", f"{self.url}-elsewhere")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        where = urlsplit(handler.path)
        run = subprocess.run(
            ["git", "http-backend"],
            input=body, capture_output=True, check=True, timeout=20,
            env={
                "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(remote.path.parent), "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": where.path, "QUERY_STRING": where.query, "REQUEST_METHOD": handler.command,
                "CONTENT_TYPE": handler.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""), "REMOTE_USER": "somebody",
                "GIT_PROTOCOL": handler.headers.get("Git-Protocol", ""), "GIT_CONFIG_GLOBAL": os.devnull,
            },
        )  # fmt: skip
        head, _, answer = run.stdout.partition(b"\r\n\r\n")
        handler.send_response(200)
        for line in head.decode().split("\r\n"):
            name, _, text = line.partition(": ")
            handler.send_header(name, text)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    body = b""
    while size := int(handler.rfile.readline(), 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    return body
