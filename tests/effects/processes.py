"""Server processes of these tests: started on a free loopback port, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class HttpServer:
    """The server of `http_server`, in a process of its own."""

    def __init__(self, file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.effects.http_server", str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["port"])
        self.url = f"http://127.0.0.1:{self.port}"

    def control(self, **told: Any) -> None:
        data = json.dumps(told).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/control", data=data), timeout=10):
            pass

    def faults(self, *faults: dict[str, Any]) -> None:
        self.control(faults=list(faults))

    def world(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/control", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
        return state

    @property
    def executed(self) -> list[dict[str, Any]]:
        executed: list[dict[str, Any]] = self.world()["executed"]
        return executed

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[HttpServer]:
    server = HttpServer(folder / "world.db")
    try:
        yield server
    finally:
        server.close()


class MailServer:
    """The server of `smtp_server`, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mailbox.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.effects.smtp_server", str(self.file)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["port"])

    @property
    def mails(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def mail_server(folder: Path) -> Iterator[MailServer]:
    server = MailServer(folder)
    try:
        yield server
    finally:
        server.close()
