"""The Makefile is the project's front door for people: what it lists is there, and it refuses with one useful line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"help", "demo", "test", "check", "soak", "model", "bench", "lock", "clean"}
PRETENDS_TO_BE_OLD = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv.pop(1))"


def make(*arguments: str) -> str:
    # Without MAKEFLAGS: these tests may themselves be running under `make test`.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return run.stdout


def set_up(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run tools/setup.sh in a folder that holds only what it reads, so that no real environment is touched."""
    (folder / "requirements").mkdir()
    for name in ("requirements/runtime.lock", "requirements/dev.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return subprocess.run(
        ["sh", str(ROOT / "tools/setup.sh"), "runtime"],
        cwd=folder, env={**os.environ, "PYTHON": python}, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def stand_in(folder: Path, body: str) -> str:
    python = folder / "stand-in"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    return str(python)


def test_make_alone_lists_every_target_with_one_line_each() -> None:
    listed = dict(re.findall(r"^  make (\w+) +(\S.*)$", make(), re.MULTILINE))
    assert listed.keys() == TARGETS
    assert make("help") == make()


def test_no_test_is_left_out_of_both_test_and_soak() -> None:
    assert 'pytest -m "not soak"' in make("--dry-run", "test")
    assert "pytest -m soak" in make("--dry-run", "soak")


def test_ci_runs_check_test_soak_and_demo() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "for target in check test soak demo; do" in script.read_text()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit 127", "does not run"),
        (f"exec '{sys.executable}' -c '{PRETENDS_TO_BE_OLD}' \"$2\"", "is Python 3.10, 3.11 or newer is needed"),
        ('case "$2" in *print*) echo 3.11;; *ensurepip*) exit 1;; esac', "apt-get install python3.11-venv"),
    ],
    ids=["broken", "too-old", "without-ensurepip"],
)
def test_an_unfit_python_is_refused_with_one_line_that_says_what_to_do(tmp_path: Path, body: str, said: str) -> None:
    run = set_up(tmp_path, stand_in(tmp_path, body))
    assert run.returncode == 1
    assert said in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_a_missing_python_is_refused_with_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    run = set_up(tmp_path, str(tmp_path / "nowhere"))
    assert run.returncode == 1
    assert "PYTHON=" in run.stderr
    assert run.stderr.count("\n") == 1


def test_an_environment_left_half_made_is_named_and_not_silently_rebuilt(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    run = set_up(tmp_path, sys.executable)
    assert run.returncode == 1
    assert "make clean" in run.stderr
    assert (tmp_path / ".venv").is_dir()
