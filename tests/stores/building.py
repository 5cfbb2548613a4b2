"""Records and plans for tests that meet a store without a coordinator: small, and with nothing decided."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from fencepost.kernel.digests import encode
from fencepost.kernel.records import (
    Approval,
    Content,
    Effect,
    EffectState,
    Event,
    Execution,
    LateEvidence,
    LogEntry,
    ResultCommit,
    Staged,
    StagedState,
    State,
    Statement,
    Task,
    Terms,
)
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


def effect(task_id: str, number: int = 1, **fields: Any) -> Effect:
    values: dict[str, Any] = {
        "effect_id": f"{task_id}-{number}",
        "pool": "default",
        "revision": 1,
        "node_id": "main",
        "slot": f"slot-{number}",
        "payload_digest": encode({"of": number}).digest,
        "terms": Terms("mail"),
        "state": int(EffectState.PREPARED),
        "version": 1,
        "first_prepared_at": 100 + number,
        "changed_at": 100 + number,
    }
    return Effect(task_id=task_id, number=number, **{**values, **fields})


def full_effect(task_id: str, number: int = 1) -> Effect:
    """One that has something in every field."""
    return effect(
        task_id,
        number,
        terms=Terms("ü@mail", "IDEMPOTENT", 1, 2, 3, 4, True),
        state=int(EffectState.UNKNOWN),
        version=1 << 40,
        first_prepared_at=1 << 52,
        executions=(
            Execution(1, "r1", 2, "at1", 3, 4, 5),
            Execution(2, "r2", 3, "at2", 3, 14, 15, '"etag\u202e"', "reservation", True, "chief"),
        ),
        repeat_closed=True,
        person_only=True,
        absent_ground="NOT_FOUND",
        receipt=encode({"id": "\U0001f600", "n": [1.5, None, True]}),
        etag='W/"x"',
        approval=Approval("who", 6, 7, 8),
        evidence=(LateEvidence(9, 1, 2, "sha256:d", {"id": [1, "x"]}, "e"), LateEvidence(10, 2, 3, None)),
        evidence_settled=1,
        decided_by="a person",
        note="it took\nlong",
    )


def with_effects(before: Task, *effects: Effect, payloads: dict[int, Content] | None = None) -> WriteSet:
    """The next version of `before`, with these effects and payloads."""
    after = msgspec.structs.replace(
        before, state_version=before.state_version + 1, effects=max(before.effects, *(e.number for e in effects))
    )
    made = replace(before, after, "effect")
    made.effects.extend(effects)
    for number, payload in (payloads or {}).items():
        made.payloads.append((before.task_id, number, payload))
    return made


def statement(sql: str, *parameters: Any, slot: str = "count") -> Statement:
    return Statement(f"id-{slot}", slot, encode({"sql": sql, "parameters": list(parameters)}))


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
