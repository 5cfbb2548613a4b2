"""What every test shares: bounds, and nothing about fencepost itself.

The bound of one test (120 s) and asyncio's mode stand in pyproject.toml. Fixtures about stores, clients and processes
stand beside the tests that use them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# A shared or busy machine makes single examples slow without making them wrong; the test's own bound still holds.
# On CI the examples are the same in every run, so that a red run is red again on the next machine.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A store or a claim named in the caller's environment must not reach a test, nor a process that a test starts.
# FENCEPOST_TEST_… is the caller speaking to the tests, so it stays.
for _name in [name for name in os.environ if name.startswith("FENCEPOST_")]:
    if not _name.startswith("FENCEPOST_TEST_"):
        del os.environ[_name]
# Nor does the width of the caller's terminal, which processes that share a run are told: what is printed stays as wide.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)


class _ByFile(LoadScopeScheduling):
    """Which process of a run has which tests: one has all that need the PostgreSQL server, so that there is one server
    (tests/postgres/server.py fails a test that is not known by its name); a file's other tests stay together."""

    def _split_scope(self, nodeid: str) -> str:
        return "postgres" if "postgres" in nodeid else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    """Asked where processes share the tests, as in `make test`."""
    config.option.loadscopereorder = False  # the largest files first would leave the longest test for the end
    return _ByFile(config, log)
