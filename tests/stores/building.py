"""Records and plans for tests that meet a store without a coordinator: small, and with nothing decided."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, Event, LogEntry, ResultCommit, Staged, StagedState, State, Task
from fencepost.kernel.writes import Keys, Snapshot, TaskWrite, WriteSet, _prove
from fencepost.stores.base import Apply, Load, Scan

Plan = Generator[Any, Any, Any]


def task(task_id: str, **fields: Any) -> Task:
    values: dict[str, Any] = {
        "pool": "default",
        "queue": "default",
        "kind": "default",
        "graph_id": None,
        "node_id": task_id,
        "revision": 1,
        "input_digest": "sha256:input",
        "submitted_digest": "sha256:submitted",
        "state": int(State.READY),
        "state_version": 1,
        "scheduler_epoch": 0,
        "claim_generation": 0,
        "attempt_id": None,
        "owner_id": None,
        "claimed_at": None,
        "lease_expires_at": None,
        "cancel_generation": 0,
        "result_commit_id": None,
        "priority": 0,
        "available_at": 0,
        "ready_at": 0,
        "charged_attempts": 0,
        "max_attempts": 5,
        "deps_total": 0,
        "deps_remaining": 0,
        "successors": 0,
        "checkpoint_number": 0,
        "checkpoint_generation": 0,
        "end": 0,
        "cancel_with_parent": False,
        "park_reason": None,
        "created_at": 0,
    }
    return Task(task_id=task_id, **{**values, **fields})


def event(of: Task, at: int = 1, name: str = "submitted", **fields: Any) -> Event:
    values: dict[str, Any] = {
        "door": "submit",
        "epoch": of.scheduler_epoch,
        "generation": of.claim_generation,
        "cancel_generation": of.cancel_generation,
        "revision": of.revision,
        "attempt_id": of.attempt_id,
        "compared": 1,
        "state": of.state,
    }
    return Event(task_id=of.task_id, state_version=of.state_version, at=at, name=name, **{**values, **fields})


def staged(task_id: str, generation: int, value: Any, state: StagedState = StagedState.STAGED) -> Staged:
    return Staged(task_id, generation, f"attempt-{generation}", encode(value), int(state), 1)


def result(of: Task, content: Content | None, digest: str | None = None, at: int = 1) -> ResultCommit:
    found = digest if digest is not None else content.digest  # type: ignore[union-attr]
    attempt = of.attempt_id or "attempt"
    return ResultCommit(of.task_id, f"rc-{of.task_id}", 1, attempt, of.claim_generation, found, "c", (), at, content)


def writes(pool: str = "default", epoch: int | None = None) -> WriteSet:
    return WriteSet(_prove("submit", 1), pool, epoch)


def insert(*tasks: Task, at: int = 1, body: Any = None) -> WriteSet:
    """One set that inserts these tasks, each with an event and an input."""
    made = writes()
    for one in tasks:
        made.tasks.append(TaskWrite(0, one, "insert"))
        made.inputs.append((one.task_id, 1, encode({"n": one.task_id} if body is None else body)))
        made.events.append(event(one, at))
    return made


def replace(before: Task, after: Task, family: str = "any", epoch: int | None = None, at: int = 1) -> WriteSet:
    made = writes(before.pool, epoch)
    made.tasks.append(TaskWrite(before.state_version, after, family))
    made.events.append(event(after, at, "attempt_renewed"))
    return made


def applying(*sets: WriteSet, log: Sequence[LogEntry] = ()) -> Plan:
    """A plan that applies without having read anything: what was decided on an older look."""
    return (yield Apply(sets, log))


def loading(**keys: Any) -> Plan:
    snapshot = Snapshot()
    yield Load(Keys(**{name: set(values) for name, values in keys.items()}), snapshot)
    return snapshot


def scanning(**fields: Any) -> Plan:
    values: dict[str, Any] = {"pool": "default", "queues": ("default",), "kinds": None, "limit": 10}
    return (yield Scan(**{**values, "into": Snapshot(), **fields}))
