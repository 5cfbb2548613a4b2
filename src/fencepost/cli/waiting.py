"""Waiting for a task's result, as long as one can still come without a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost.clock import elapsed
from fencepost.wire import Outcome, Refused, Result

if TYPE_CHECKING:
    from fencepost.client.client import Client

LONGEST_WAIT = 5.0  # seconds of one wait, before it is asked again whether a result can still come


async def result_of(client: Client, task_id: str, ends: float | None) -> Result | Refused:
    """The result; else why there is none: the task needs a person, or it is `ends` (on `elapsed`; None: never).

    At once for a CANCELLED or PARKED task, and for a BLOCKED one whose parents are.
    """
    patience = 0.0  # the first look is at how things stand; what can never come is not waited for
    while True:
        left = patience if ends is None else max(0.0, min(patience, ends - elapsed()))
        answer = await client.result(task_id, wait=left)
        patience = LONGEST_WAIT
        if isinstance(answer, Result) or answer.outcome is not Outcome.NOT_COMMITTED:
            return answer
        if answer.reason in ("PARKED", "CANCELLED") or (ends is not None and elapsed() >= ends):
            return answer
        if answer.reason == "BLOCKED":
            view = await client.task(task_id)
            if not isinstance(view, Refused) and view.unreachable:
                return answer
