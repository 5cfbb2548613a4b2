"""Real processes on one SQLite file, for the tests of this folder."""

from tests.faults.stage import stage
from tests.faults.worlds import every_world

__all__ = ["every_world", "stage"]
