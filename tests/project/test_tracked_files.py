"""The repository speaks of itself alone: no machine, no registry, and nothing too long to read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SOURCE_FILE = 500  # lines

# Written with one-letter classes, so that this file does not match itself.
REGISTRY_ADDRESS = re.compile(
    r"pypi[.]org|pythonhosted[.]org|registry[.]npmjs|registry[.]yarnpkg|crates[.]io|proxy[.]golang"
    r"|rubygems[.]org|deb[.]debian[.]org|(?:index|find-links)[-_]?u?r?l?\s*[=:]\s*\S*https?://"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.$}-])(?:/w[o]rk/|/r[o]ot/|/f[a]rm/|/h[o]me/\w|/Us[e]rs/\w|/tmp/f[p]/|/opt/w[h]eels|[.]p[y]env/)"
)
# Names that say nothing about what is inside, and so collect everything.
SHAPELESS_NAMES = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}

Finding = tuple[str, int, str]


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True, timeout=30
    ).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file()]  # one deleted but not yet committed is no finding


def lines(paths: Iterable[Path]) -> Iterator[Finding]:
    for path in paths:
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
            yield str(path.relative_to(ROOT)), number, line


def findings(pattern: re.Pattern[str], where: Iterable[Finding]) -> list[str]:
    return [f"{name}:{number}: {line.strip()[:160]}" for name, number, line in where if pattern.search(line)]


def test_no_tracked_file_names_a_package_registry() -> None:
    assert findings(REGISTRY_ADDRESS, lines(tracked())) == []


def test_no_tracked_file_names_a_path_of_somebodys_machine() -> None:
    assert findings(MACHINE_PATH, lines(tracked())) == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install --index-url " + "https://pypi" + ".org/simple x",
        "index-url = " + "https://mirror.example/simple",
        "https://files.python" + "hosted.org/packages/x.whl",
        "resolved https://registry" + ".npmjs.org/x",
    ],
)
def test_a_registry_address_is_recognised(line: str) -> None:
    assert REGISTRY_ADDRESS.search(line)


@pytest.mark.parametrize("path", ["/ro" + "ot/x", "see /wo" + "rk/main", "'/ho" + "me/ada/x'", "(/Us" + "ers/ada)"])
def test_a_machine_path_is_recognised(path: str) -> None:
    assert MACHINE_PATH.search(path)


@pytest.mark.parametrize("text", ["docs/wo" + "rk/x", "client/ro" + "ot/x", "$HOME/ro" + "ot/", "the root, the work"])
def test_a_path_inside_the_project_is_not_taken_for_a_machines(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_no_source_file_is_too_long_to_read() -> None:
    sources = tracked("src/*.py")
    counted = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert counted, "no source file found: this test would pass on anything"
    assert {name: n for name, n in counted.items() if n > LONGEST_SOURCE_FILE} == {}


def test_every_module_is_named_after_what_it_holds() -> None:
    paths = [path.relative_to(ROOT) for path in tracked("*.py")]
    assert paths
    assert [str(path) for path in paths if SHAPELESS_NAMES & {path.stem, *path.parent.parts}] == []


def test_no_lock_file_of_a_tool_that_records_addresses_is_tracked() -> None:
    assert [path.name for path in tracked("*uv.lock", "*pylock*.toml", "*poetry.lock")] == []
