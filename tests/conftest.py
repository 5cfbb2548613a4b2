"""What every test shares: bounds, and nothing about fencepost itself.

The bound of one test (120 s) and asyncio's mode stand in pyproject.toml. Fixtures about stores, clients and processes
stand beside the tests that use them.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

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
