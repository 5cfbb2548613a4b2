"""The lock files: each package once, pinned, hashed, without addresses, and everything that pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
REQUIREMENT = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))?$")
HASH = re.compile(r"^--hash=sha256:[0-9a-f]{64}$")


def entries(lock: Path) -> list[list[str]]:
    """Each logical line, cut into the requirement and its hashes."""
    joined = lock.read_text().replace("\\\n", " --next ")
    return [[part.strip() for part in line.split(" --next ")] for line in joined.splitlines() if line.strip()]


def pins(lock: Path) -> dict[str, str]:
    found = [REQUIREMENT.match(parts[0]) for parts in entries(lock)]
    return {match["name"]: match["version"] for match in found if match}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def test_there_is_one_lock_to_run_and_one_to_develop() -> None:
    assert [lock.name for lock in LOCKS] == ["dev.lock", "runtime.lock"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_line_of_a_lock_is_a_pin_with_hashes(lock: Path) -> None:
    assert entries(lock)
    for requirement, *hashes in entries(lock):
        assert REQUIREMENT.match(requirement), f"not a plain pin: {requirement}"
        assert hashes, f"{requirement} has no hash"
        assert all(HASH.match(each) for each in hashes), f"{requirement} has something beside hashes"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_no_lock_holds_an_address_or_a_path(lock: Path) -> None:
    assert "//" not in lock.read_text()
    assert not re.search(r"^\s*(?:#|-(?!-hash))|--(?:extra-)?index|--find-links|@ ", lock.read_text(), re.MULTILINE)


def test_each_lock_covers_what_pyproject_asks_for() -> None:
    asked = project()
    groups = asked["dependency-groups"]
    runtime = names(asked["project"]["dependencies"]) | names(groups["build"])
    assert runtime <= pins(ROOT / "requirements/runtime.lock").keys()
    assert runtime | names(groups["dev"]) <= pins(ROOT / "requirements/dev.lock").keys()


def test_the_build_backend_is_pinned_because_the_project_is_installed_without_isolation() -> None:
    asked = project()
    assert names(asked["build-system"]["requires"]) == names(asked["dependency-groups"]["build"])


def test_who_develops_runs_the_same_versions_as_who_only_runs() -> None:
    runtime, dev = (pins(ROOT / "requirements" / name) for name in ("runtime.lock", "dev.lock"))
    assert runtime
    assert {name: (version, dev.get(name)) for name, version in runtime.items() if dev.get(name) != version} == {}
