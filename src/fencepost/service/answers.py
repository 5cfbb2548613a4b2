"""The kernel's decisions as the wire's answers. No rule here: only shapes, and what may be shown."""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.clock import to_datetime
from fencepost.errors import InvalidRequest, NotStaged, SpawnConflict, Unsettled
from fencepost.kernel.digests import decode, short_hash
from fencepost.kernel.operations import Accepted
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.records import Content, End, Pool, State, Task
from fencepost.kernel.writes import Snapshot
from fencepost.wire import (
    Claim,
    Committed,
    Done,
    Pending,
    PoolChanged,
    PoolView,
    Refused,
    Renewed,
    TaskView,
)

_STATE = {int(state): state.name for state in State}
_END = {int(end): end.name for end in End}
_TIMES = ("lease_expires_at", "available_at", "claimed_at")


def refused(refusal: Refusal, door: str, task_id: str | None) -> Refused:
    current = refusal.current
    if any(name in current for name in _TIMES):
        current = {
            name: to_datetime(value) if name in _TIMES and value is not None else value
            for name, value in current.items()
        }
    return Refused(refusal.outcome, refusal.reason, current, door, task_id)


def problem(found: Problem) -> Exception:
    if found.code == "NOT_STAGED":
        return NotStaged(found.field, found.limit)
    if found.code == "SPAWN_CONFLICT":
        return SpawnConflict(found.field)
    if found.code == "UNSETTLED":
        return Unsettled(found.limit.split(","))
    return InvalidRequest(found.field, found.limit)


def pool_view(pool: Pool) -> PoolView:
    return PoolView(
        pool.name,
        pool.epoch,
        pool.state_version,
        "OPEN" if pool.intake_open else "CLOSED",
        pool.stage,
        pool.min_protocol,
        msgspec.to_builtins(pool.policy),
    )


def task_view(task: Task, **more: Any) -> TaskView:
    """A record as readers may see it; `more` fills what only a look at one task gives."""
    return TaskView(
        task_id=task.task_id,
        pool=task.pool,
        queue=task.queue,
        kind=task.kind,
        state=_STATE[task.state],
        revision=task.revision,
        state_version=task.state_version,
        generation=task.claim_generation,
        cancel_generation=task.cancel_generation,
        epoch=task.scheduler_epoch,
        priority=task.priority,
        available_at=to_datetime(task.available_at),
        created_at=to_datetime(task.created_at),
        input_digest=task.input_digest,
        charged_attempts=task.charged_attempts,
        max_attempts=task.max_attempts,
        deps_remaining=task.deps_remaining,
        node_id=task.node_id,
        graph_id=task.graph_id,
        owner_id=task.owner_id,
        attempt=short_hash(task.attempt_id),
        end=_END[task.end] if task.end else None,
        claimed_at=to_datetime(task.claimed_at) if task.claimed_at is not None else None,
        lease_expires_at=to_datetime(task.lease_expires_at) if task.lease_expires_at is not None else None,
        result_commit_id=task.result_commit_id,
        park_reason=task.park_reason,
        pruned_to_version=task.pruned_to_version,
        **more,
    )


def claim(task: Task, snapshot: Snapshot, store_id: str) -> Claim:
    """A granted task as its holder gets it, with what the plan loaded for it."""
    content: Content | None = snapshot.inputs.get(task.task_id)
    checkpoint = snapshot.checkpoints.get(task.task_id) if task.checkpoint_generation else None
    if checkpoint is not None and checkpoint.revision != task.revision:
        checkpoint = None
    parents: dict[str, Any] = {}
    if task.deps_total:
        for parent_id in snapshot.parents.get(task.task_id, ()):
            result = snapshot.results.get(parent_id)
            if result is not None and result.content is not None:
                parents[parent_id] = decode(result.content)
    return Claim(
        store_id,
        task.pool,
        task.task_id,
        task.revision,
        task.queue,
        task.kind,
        task.node_id,
        task.owner_id or "",
        task.attempt_id or "",
        task.scheduler_epoch,
        task.claim_generation,
        task.cancel_generation,
        to_datetime(task.lease_expires_at or 0),
        ((task.lease_expires_at or 0) - (task.claimed_at or 0)) / 1_000_000,
        task.input_digest,
        decode(content) if content is not None else None,
        task.charged_attempts,
        task.max_attempts,
        decode(checkpoint.content) if checkpoint is not None else None,
        task.checkpoint_number,
        parents,
        (),
        task.trace_context,
    )


def pending(answer: Accepted) -> Pending:
    """What stands once the caller's own transaction has committed: of commit and submit."""
    result = answer.info.get("result")
    if result is None:
        made = answer.info["tasks"]
        ids = tuple(task.task_id for task, _ in made)
        return Pending(Outcome.SUBMITTED, ids, changed=any(created for _, created in made))
    return Pending(
        Outcome.COMMITTED,
        (result.task_id,),
        result.result_commit_id,
        result.result_digest,
        result.commit_digest,
        changed=answer.changed,
    )


def accepted(answer: Accepted, door: str) -> Any:
    """The answer of every door but claim and submit."""
    info = answer.info
    if door == "commit":
        result = info["result"]
        return Committed(
            result.task_id,
            result.result_commit_id,
            result.result_digest,
            result.commit_digest,
            replayed=not answer.changed,
        )
    if door == "renew":
        return Renewed(to_datetime(info["lease_us"]), info.get("late", False))
    if door == "pool":
        return PoolChanged(answer.outcome, pool_view(info["pool"]), answer.changed)
    task = answer.task
    assert task is not None
    if "available_at" in info:
        info = {**info, "available_at": to_datetime(info["available_at"])}
    return Done(answer.outcome, task.task_id, _STATE[task.state], task.state_version, answer.changed, info)
