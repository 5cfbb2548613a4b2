"""Kits for testing what is built on fencepost, with any test runner.

memory_client, advance, reclaim      one's own handlers, on a store in memory whose clock is moved by hand
downstream_suite, DownstreamWorld    one's own downstream: what it must survive, against what it really reaches
"""

from fencepost.testing.downstreams import DownstreamWorld, Scenario, downstream_suite
from fencepost.testing.memory import MemoryClient, advance, memory_client, reclaim

__all__ = [
    "DownstreamWorld",
    "MemoryClient",
    "Scenario",
    "advance",
    "downstream_suite",
    "memory_client",
    "reclaim",
]
