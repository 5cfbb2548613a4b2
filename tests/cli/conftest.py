from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty folder."""
    return Folder(tmp_path)
