"""Runs the command line in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from fencepost.cli import main

SECONDS = 60  # no command of these tests takes longer

# What catches signals, logs for the whole process or imports modules from the folder gets a process of its own.
OWN_PROCESS = {"work", "demo", "bench"}


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Folder:
    """A folder in which commands are run. `code` is what the last one ended with, `err` what it wrote to stderr.

    Most commands run in this process, in a thread (starting Python is what takes the time); some in one of their own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code = -1
        self.err = ""

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path / 'fencepost.db'}"

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
        return {**kept, "NO_COLOR": "1", **more}

    def run(self, *arguments: str, stdin: str | bytes = b"", env: dict[str, str] | None = None) -> str:
        """One command to its end; what it wrote to stdout."""
        given = stdin.encode() if isinstance(stdin, str) else stdin
        environment = self.environment(**(env or {}))
        if OWN_PROCESS & set(arguments):
            out = self._in_a_process(arguments, given, environment)
        else:
            out = self._in_a_thread(arguments, given, environment)
        assert "Traceback" not in self.err, self.err
        return out

    def _in_a_process(self, arguments: tuple[str, ...], stdin: bytes, environment: dict[str, str]) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fencepost", *arguments],
            cwd=self.path, env=environment, input=stdin, capture_output=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        self.code, self.err = done.returncode, done.stderr.decode()
        return done.stdout.decode()

    def _in_a_thread(self, arguments: tuple[str, ...], stdin: bytes, environment: dict[str, str]) -> str:
        streams = [io.TextIOWrapper(io.BytesIO(data), "utf-8", write_through=True) for data in (stdin, b"", b"")]
        failures: list[BaseException] = []
        self.code = -1

        def command() -> None:
            try:
                self.code = main(arguments)
            except BaseException as error:  # noqa: BLE001 - raised again by the test
                failures.append(error)

        with (
            contextlib.chdir(self.path),
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.multiple(sys, stdin=streams[0], stdout=streams[1], stderr=streams[2]),
        ):
            thread = threading.Thread(target=command, daemon=True)
            thread.start()
            thread.join(SECONDS)
            assert not thread.is_alive(), f"{arguments} did not end"
        if failures:
            raise failures[0]
        out, self.err = (stream.buffer.getvalue().decode() for stream in streams[1:])  # type: ignore[attr-defined]
        return str(out)

    def ok(self, *arguments: str, stdin: str | bytes = b"") -> str:
        out = self.run(*arguments, stdin=stdin)
        assert self.code == 0, (arguments, self.code, out, self.err)
        return out

    def json(self, *arguments: str, code: int = 0, stdin: str | bytes = b"") -> Any:
        """The one JSON document that the command wrote to stdout."""
        out = self.run(*arguments, "--json", stdin=stdin)
        assert self.code == code, (arguments, self.code, out, self.err)
        return json.loads(out)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command in a process of its own, that goes on; the caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "fencepost", *arguments],
            cwd=self.path,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C reaches it even where these tests run in a shell's background, which ignores it.
            preexec_fn=_heed_interrupts,  # noqa: PLW1509 - one call, before anything else could run
        )

    def write(self, name: str, content: str) -> Path:
        path = self.path / name
        path.write_text(content, "utf-8")
        return path
