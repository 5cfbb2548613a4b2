"""fencepost: leases say when work may be taken back, generations say whose write counts.

`connect(url)` gives a `Client`; `App` and `Worker` run handlers under it. Every name here is public and
nothing else is, but for the modules `sync` (the same for plain functions), `testing` and `wire` (the answers).
"""

from fencepost.app import App, Final, Snooze
from fencepost.client.attempt import Attempt, SyncAttempt
from fencepost.client.client import Client
from fencepost.client.worker import Worker
from fencepost.connect import connect
from fencepost.errors import (
    Fenced,
    FencepostError,
    InvalidRequest,
    NotStaged,
    SpawnConflict,
    StatementFailed,
    Unavailable,
    Unsettled,
)
from fencepost.wire import (
    AttemptView,
    Claim,
    Committed,
    Done,
    EventView,
    NewTask,
    Outcome,
    Page,
    Pending,
    PoolChanged,
    PoolView,
    Reason,
    Refused,
    Renewed,
    Result,
    Submitted,
    TaskView,
)

__all__ = [
    "App",
    "Attempt",
    "AttemptView",
    "Claim",
    "Client",
    "Committed",
    "Done",
    "EventView",
    "Fenced",
    "FencepostError",
    "Final",
    "InvalidRequest",
    "NewTask",
    "NotStaged",
    "Outcome",
    "Page",
    "Pending",
    "PoolChanged",
    "PoolView",
    "Reason",
    "Refused",
    "Renewed",
    "Result",
    "Snooze",
    "SpawnConflict",
    "StatementFailed",
    "Submitted",
    "SyncAttempt",
    "TaskView",
    "Unavailable",
    "Unsettled",
    "Worker",
    "connect",
]


def __getattr__(name: str) -> object:
    # So that `import fencepost` alone is enough for `fencepost.sync` and `fencepost.testing`, and costs nothing.
    if name in ("sync", "testing"):
        import importlib

        return importlib.import_module(f"fencepost.{name}")
    raise AttributeError(f"module 'fencepost' has no attribute {name!r}")
