"""The benchmarks are scripts: their folder has to be on the path, as it is when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
