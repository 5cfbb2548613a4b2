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


def servers(
    folder: Path, *path: Path, command: str = 'echo "postgres $FENCEPOST_TEST_POSTGRES"'
) -> tuple[int, str, str]:
    """Run tools/servers.sh as somebody who is not root, with nothing on the path but `path` and what a shell needs."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("sh", "sed", "dirname", "readlink"):
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, body in (("id", "echo 1000"), ("apt-get", "echo apt-get >&2")):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    script = (ROOT / "tools/servers.sh").read_text()
    # What this machine has installed is not what is asked about.
    script = script.replace("/usr/lib/postgresql/", f"{folder}/debian/").replace(":/usr/sbin", "")
    environment = {"PATH": ":".join(map(str, (tools, *path)))}
    run = subprocess.run(
        ["sh", "-c", script, "servers.sh", "sh", "-c", command],
        env=environment, check=False, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return run.returncode, run.stdout.strip(), run.stderr


def program(folder: Path, name: str, says: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


def test_without_servers_the_other_tests_run_and_the_end_is_code_3_with_the_line_to_type(tmp_path: Path) -> None:
    code, out, said = servers(tmp_path)
    assert (code, out) == (3, "postgres")
    assert said.count("\n") == 1
    assert said.endswith("sudo apt-get install postgresql pgbouncer\n")


def test_without_servers_a_failure_of_the_other_tests_stays_that_failure(tmp_path: Path) -> None:
    code, _, said = servers(tmp_path, command="exit 1")
    assert code == 1
    assert "sudo apt-get install postgresql pgbouncer" in said


@pytest.mark.parametrize(
    ("version", "fits"), [("14.20", False), ("15.18 (Debian 15.18-0+deb12u1)", True), ("18.1", True)]
)
def test_postgresql_is_found_on_the_path_from_version_15_on(tmp_path: Path, version: str, fits: bool) -> None:
    bin_ = tmp_path / "bin"
    program(bin_, "initdb", f"initdb (PostgreSQL) {version}")
    program(bin_, "postgres")
    program(bin_, "pgbouncer")
    code, out, said = servers(tmp_path, bin_)
    assert (code, out) == ((0, "postgres 1") if fits else (3, "postgres"))
    assert ("apt-get install postgresql\n" in said) is not fits


def test_postgresql_is_found_where_debian_puts_it(tmp_path: Path) -> None:
    program(tmp_path / "debian/17/bin", "initdb", "initdb (PostgreSQL) 17.5")
    program(tmp_path / "debian/17/bin", "postgres")
    code, out, said = servers(tmp_path)
    assert (code, out) == (3, "postgres 1")  # the tests with PostgreSQL alone do run
    assert said.endswith("sudo apt-get install pgbouncer\n")


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
