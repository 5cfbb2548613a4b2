"""The command line, as a user runs it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def fencepost(
    folder: Path, *arguments: str, stdin: str | bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run in `folder`, where the store is the default one."""
    return subprocess.run(
        [sys.executable, "-m", "fencepost", *arguments],
        cwd=folder,
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


def answered(folder: Path, *arguments: str, stdin: str | bytes | None = None, **environment: str) -> Any:
    """With `--json`: what it printed, from a run that must succeed."""
    done = fencepost(folder, *arguments, "--json", stdin=stdin, **environment)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)
