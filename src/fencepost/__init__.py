"""fencepost: leases say when work may be taken back, generations say whose write counts."""

from fencepost.client.client import Client
from fencepost.connect import connect
from fencepost.errors import (
    Fenced,
    FencepostError,
    InvalidRequest,
    NotStaged,
    SpawnConflict,
    Unavailable,
    Unsettled,
)
from fencepost.wire import Claim, NewTask, Outcome, Reason, Refused

__all__ = [
    "Claim",
    "Client",
    "Fenced",
    "FencepostError",
    "InvalidRequest",
    "NewTask",
    "NotStaged",
    "Outcome",
    "Reason",
    "Refused",
    "SpawnConflict",
    "Unavailable",
    "Unsettled",
    "connect",
]
