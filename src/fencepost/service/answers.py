"""The kernel's decisions as the wire's answers. No rule here: only shapes, and what may be shown."""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.clock import to_datetime
from fencepost.errors import InvalidRequest, NotStaged, SpawnConflict, Unsettled
from fencepost.kernel import effect_rules
from fencepost.kernel.digests import decode, short_hash
from fencepost.kernel.operations import Accepted
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.prepare import Prepared as KernelPrepared
from fencepost.kernel.records import Content, Effect, EffectState, End, Pool, State, Task
from fencepost.kernel.writes import Snapshot
from fencepost.wire import (
    Claim,
    Committed,
    Done,
    EffectView,
    ExecutionView,
    LateEvidenceView,
    Pending,
    PoolChanged,
    PoolView,
    Prepared,
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


def _body(content: Content | None) -> Any:
    """A receipt or payload as its reader gets it; None where there is none, and where retention has removed it."""
    return None if content is None or (not content.data and not content.binary) else decode(content)


def effect_view(effect: Effect, now: int, payload: Content | None = None) -> EffectView:
    """An effect as readers may see it: attempts as short hashes, no request ids. `open` and `age` are as of `now`."""
    approval = effect.approval
    return EffectView(
        effect_id=effect.effect_id,
        task_id=effect.task_id,
        pool=effect.pool,
        revision=effect.revision,
        node_id=effect.node_id,
        slot=effect.slot,
        state=EffectState(effect.state).name,
        version=effect.version,
        downstream=effect.terms.downstream,
        guarantee=effect.terms.guarantee,
        payload_digest=effect.payload_digest,
        first_prepared_at=to_datetime(effect.first_prepared_at),
        changed_at=to_datetime(effect.changed_at),
        age=max(0, now - effect.first_prepared_at) / 1_000_000,
        open=effect_rules.open_ways(effect, now),
        executions=tuple(
            ExecutionView(
                e.execution,
                e.generation,
                short_hash(e.attempt_id) or "",
                e.epoch,
                to_datetime(e.prepared_at),
                to_datetime(e.send_by),
                e.precondition,
                e.reservation_id,
                e.repeats,
                e.approved_by,
            )
            for e in effect.executions
        ),
        payload=_body(payload),
        receipt=_body(effect.receipt),
        receipt_digest=effect.receipt.digest if effect.receipt is not None else None,
        etag=effect.etag,
        absent_ground=effect.absent_ground,
        approved_by=approval.who if approval is not None else None,
        evidence=tuple(
            LateEvidenceView(to_datetime(e.at), e.execution, e.generation, e.receipt, e.receipt_digest, e.etag)
            for e in effect.evidence
        ),
        contested=effect_rules.contested(effect),
        decided_by=effect.decided_by,
        note=effect.note,
        now_us=now,
    )


def prepared(answer: KernelPrepared, snapshot: Snapshot) -> Prepared:
    """What prepare says, with the payload that the slot is bound to."""
    effect, execution = answer.effect, answer.execution
    if execution is None and effect.executions:
        execution = effect.executions[-1]
    payload = snapshot.payloads.get((effect.task_id, effect.number))
    return Prepared(
        outcome=answer.outcome,
        effect_id=effect.effect_id,
        slot=effect.slot,
        node_id=effect.node_id,
        state=EffectState(effect.state).name,
        version=effect.version,
        downstream=effect.terms.downstream,
        guarantee=effect.terms.guarantee,
        payload_digest=effect.payload_digest,
        now_us=answer.now,
        execution=len(effect.executions),
        send_by_us=execution.send_by if execution is not None else None,
        send_window=effect.terms.send_window_us / 1_000_000,
        settle_time=effect.terms.settle_time_us / 1_000_000,
        precondition=execution.precondition if execution is not None else None,
        reservation_id=execution.reservation_id if execution is not None else None,
        open=answer.open,
        busy=answer.busy,
        payload=_body(payload),
        receipt=_body(effect.receipt),
        etag=effect.etag,
        contested=effect_rules.contested(effect),
    )


def _effects(task: Task, snapshot: Snapshot, written: list[Effect]) -> tuple[EffectView, ...]:
    """This revision's effects as they stand once what was written with the claim is in."""
    if not task.effects:
        return ()
    standing = {effect.number: effect for effect in snapshot.effects.get(task.task_id, ())}
    standing.update({effect.number: effect for effect in written if effect.task_id == task.task_id})
    return tuple(
        effect_view(standing[number], snapshot.now)
        for number in sorted(standing)
        if standing[number].revision == task.revision
    )


def claim(task: Task, snapshot: Snapshot, store_id: str, written: list[Effect]) -> Claim:
    """A granted task as its holder gets it, with what the plan loaded for it, and `written` with it."""
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
        _effects(task, snapshot, written),
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
