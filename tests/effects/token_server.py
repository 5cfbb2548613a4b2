"""EC2's documented rule for ClientToken, in front of moto, which ignores it.

The rule: the same token with the same parameters gets the recorded answer, and nothing is started; with others,
IdempotentParameterMismatch; for an instance that was terminated since, IdempotentInstanceTerminated. Every request is
recorded. Not verified against EC2 itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EMPTY = b"<DescribeInstancesResponse><requestId>r</requestId><reservationSet/></DescribeInstancesResponse>"


class TokenServer:
    """`cut`: "request" before anything is done, "answer" after; `started`: how often moto was asked to start one."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self.cut: str | None = None
        self.lose = False  # the next answer
        self.late = 0.0  # seconds by which the next start comes late; it is done even if its client has gone
        self.started = 0
        self.machines: list[str] = []  # the token of each machine that was started
        self.tokens: list[str] = []
        self.agents: list[str] = []
        self.terminated: set[str] = set()
        self.shows = True  # whether describing finds what was started: EC2 is eventually consistent
        self.shows_from = 0.0  # and from when on, by time.monotonic()
        self._kept: dict[str, tuple[dict[str, str], bytes]] = {}
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer._serve(self, body)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def forget(self) -> None:
        """Every token, as some time after the termination."""
        self._kept.clear()

    def _serve(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked = dict(urllib.parse.parse_qsl(body.decode()))
        if asked["Action"] == "RunInstances":
            if self.cut == "request":
                return
            late, self.late = self.late, 0.0
            lost, self.lose = self.lose or self.cut == "answer", False
            time.sleep(late)
            with self._lock:
                status, answer = self._run(asked, body, handler)
            if lost:
                return
        else:
            status, answer = self._describe(asked, body, handler)
        with contextlib.suppress(ConnectionError):
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(answer)))
            handler.end_headers()
            handler.wfile.write(answer)

    def _run(self, asked: dict[str, str], body: bytes, handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        token = asked.pop("ClientToken", "")
        self.tokens.append(token)
        self.agents.append(handler.headers["User-Agent"])
        if token in self.terminated:
            return 400, _refusal("IdempotentInstanceTerminated")
        if token in self._kept:
            before, answer = self._kept[token]
            return (200, answer) if before == asked else (400, _refusal("IdempotentParameterMismatch"))
        status, answer = self._forward(body, handler)
        if status == 200:
            self.started += 1
            self.machines.append(token)
            self._kept[token] = asked, answer
        return status, answer

    def _describe(self, asked: dict[str, str], body: bytes, handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        assert asked["Filter.1.Name"] == "client-token"
        token = asked["Filter.1.Value.1"]
        if not self.shows or time.monotonic() < self.shows_from or token not in self._kept:
            return 200, EMPTY
        instance = self._kept[token][1].partition(b"<instanceId>")[2].partition(b"<")[0].decode()
        question = {"Action": "DescribeInstances", "Version": asked["Version"], "InstanceId.1": instance}
        return self._forward(urllib.parse.urlencode(question).encode(), handler)

    def _forward(self, body: bytes, handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        headers = {name: handler.headers[name] for name in ("Authorization", "Content-Type", "X-Amz-Date")}
        request = urllib.request.Request(self._behind, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


def _refusal(code: str) -> bytes:
    return (
        f"<Response><Errors><Error><Code>{code}</Code><Message>documented</Message></Error></Errors>"
        "<RequestID>r</RequestID></Response>"
    ).encode()
