"""What the benchmarks share: where files go, what the machine is, medians, and how figures are shown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
from rich.console import Console
from rich.table import Table

from fencepost.stores.sqlite_file import file_system_of

INPUT = {"text": "x" * 89}  # 100 bytes as JSON
RESULT = {"text": "y" * 89}
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    found.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    found.add_argument("--repeat", type=at_least_one, default=3, help="repetitions; the median counts (default 3)")
    found.add_argument("--folder", type=Path, help="where the temporary files go (default: a folder on a real disk)")
    return found


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


@contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A folder that is removed again, on a disk: `folder`, the system's temporary one, or the current one."""
    choices = [folder] if folder is not None else [Path(tempfile.gettempdir()), Path.cwd()]
    for choice in choices:
        kind = file_system_of(os.path.realpath(choice))
        if kind not in IN_MEMORY:
            with tempfile.TemporaryDirectory(prefix="fencepost-bench-", dir=choice) as made:
                yield Path(made)
            return
    sys.exit(f"{choices[-1]} lies in memory: nothing is durable there; name another with --folder")


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on. Nothing that names a person, a host or a path."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": file_system_of(os.path.realpath(folder)),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux; the platform's own word is good enough
    return platform.processor() or platform.machine()


def median(values: Iterable[float], digits: int = 0) -> float:
    return round(statistics.median(values), digits) if digits else round(statistics.median(values))


def show(
    found: dict[str, Any], as_json: bool, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """`found` as JSON, or `rows` as a table with the machine below it."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:,}" for cell in row))
    console = Console()
    console.print(table)
    about = found["machine"]
    console.print(
        f"{about['cores']} cores ({about['processor']}), {about['system']}, {about['file_system']}, "
        f"Python {about['python']}, SQLite {about['sqlite']}, load before {about['load_before']}",
        style="dim",
        highlight=False,
    )


def progress(as_json: bool, text: str) -> None:
    """A line for whoever waits; on stderr, and only where somebody looks."""
    if not as_json and sys.stderr.isatty():
        print(text, file=sys.stderr)
