"""Runs the command line as people do: a process of its own, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 60  # no command of these tests takes longer


class Folder:
    """A folder in which commands are run. `code` is what the last one ended with, `err` what it wrote to stderr."""

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
        done = subprocess.run(
            [sys.executable, "-m", "fencepost", *arguments],
            cwd=self.path,
            env=self.environment(**(env or {})),
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        self.code, self.err = done.returncode, done.stderr.decode()
        assert "Traceback" not in self.err, self.err
        return done.stdout.decode()

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
        """A command that goes on; the caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "fencepost", *arguments],
            cwd=self.path,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def write(self, name: str, content: str) -> Path:
        path = self.path / name
        path.write_text(content, "utf-8")
        return path
