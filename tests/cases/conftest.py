"""Real processes on one SQLite file, for the tests of this folder."""

from tests.faults.stage import stage

__all__ = ["stage"]
