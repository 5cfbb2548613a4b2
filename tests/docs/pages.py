"""What a page of the documentation shows, block by block, and how each kind of block is tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("docs/reference/", "docs/spec/")  # they have checks of their own
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if not str(path.relative_to(ROOT)).startswith(GENERATED)
)
PATIENCE = 60  # seconds for one command

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """`mark` is the comment right above it: `file: NAME`, `output`, or nothing."""

    language: str
    text: str
    mark: str
    line: int


def blocks(page: str) -> list[Block]:
    content = (ROOT / page).read_text()
    return [
        Block(found["language"], found["text"], found["mark"] or "", content[: found.start()].count("\n") + 1)
        for found in _BLOCK.finditer(content)
    ]


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """A command in a folder, with this environment's programs first; its exit code and all that it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "200", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


def agrees(shown: str, printed: str) -> bool:
    """Whether the output is what the page shows; `…` there stands for anything."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def console(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output shown below it."""
    commands: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], ""))
        else:
            command, shown = commands[-1]
            commands[-1] = (command, f"{shown}{line}\n")
    return commands
