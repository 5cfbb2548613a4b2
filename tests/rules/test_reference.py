"""The reference pages are made from the kernel's tables, and a page that differs is noticed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "generate_docs.py"


def check() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_reference_pages_are_those_that_the_kernels_tables_give() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr


def generator() -> ModuleType:
    found = importlib.util.spec_from_file_location("generate_docs", TOOL)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_page_that_was_edited_by_hand_is_shown_with_its_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = generator()
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_docs.py"])
    assert module.main() == 0
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])
    assert module.main() == 0
    page = tmp_path / "doors.md"
    page.write_text(page.read_text().replace("`renew`", "`prolong`", 1))
    capsys.readouterr()
    assert module.main() == 1
    shown = capsys.readouterr().out
    assert "-| `prolong`" in shown
    assert "+| `renew`" in shown


def test_every_page_of_the_reference_is_made_by_the_generator() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert pages == set(generator().PAGES)
