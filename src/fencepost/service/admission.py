"""What every command must look like before it is queued: ids, numbers, sizes. The same on every store.

Admission knows no records. A wrong call raises InvalidRequest naming the field and the limit; nothing
was read or written.
"""

from __future__ import annotations

from typing import Any

from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.commands import check_id, check_integer
from fencepost.kernel.digests import MAX_CONTENT_BYTES
from fencepost.kernel.records import Content
from fencepost.service import effect_admission

_MAX_US = round(k.MAX_SECONDS * 1_000_000)


def admit(command: Any, store_id: str) -> None:
    """Raise InvalidRequest where `command` is wrong in itself."""
    check_id(command.request_id, "request_id")
    check_integer(command.protocol, "protocol", 0)
    kind = type(command)
    if isinstance(command, k.ClaimCommand) or kind is k.Stage or kind is k.Usage or kind is k.Evidence:
        _claim(command.claim, store_id)
    if isinstance(command, k.ClaimCommand):
        _epoch(command.epoch, "epoch")
    check = _CHECKS.get(kind)
    if check is not None:
        check(command)


def _epoch(value: Any, field: str) -> None:
    if value is not None:
        check_integer(value, field, 0)


def _claim(claim: k.Presented, store_id: str) -> None:
    if claim.store_id != store_id:
        raise InvalidRequest("claim.store_id", "this claim was granted by another store")
    check_id(claim.task_id, "claim.task_id")
    check_id(claim.pool, "claim.pool")
    check_id(claim.attempt_id, "claim.attempt_id")
    if claim.owner_id is not None:
        check_id(claim.owner_id, "claim.owner_id")
    check_integer(claim.generation, "claim.generation", 0)
    check_integer(claim.cancel_generation, "claim.cancel_generation", 0)
    check_id(claim.input_digest, "claim.input_digest")


def _ttl(ttl_us: Any) -> None:
    check_integer(ttl_us, "ttl", 1, _MAX_US)


def _content(content: Any, field: str) -> None:
    if not isinstance(content, Content):
        raise InvalidRequest(field, "must be encoded content")
    if len(content.data) > MAX_CONTENT_BYTES:
        raise InvalidRequest(field, f"{len(content.data)} bytes is over the limit of {MAX_CONTENT_BYTES}")


def _claim_one(command: k.Claim) -> None:
    check_id(command.task_id, "task_id")
    check_id(command.owner_id, "owner")
    check_id(command.attempt_id, "attempt_id")
    check_integer(command.expected_state_version, "expected_state_version", 1)
    _epoch(command.epoch, "epoch")
    _ttl(command.ttl_us)


def _claim_next(command: k.ClaimNext) -> None:
    check_id(command.pool, "pool")
    check_id(command.owner_id, "owner")
    _epoch(command.epoch, "epoch")
    _ttl(command.ttl_us)
    if not command.queues:
        raise InvalidRequest("queues", "must name at least one queue")
    for name in command.queues:
        check_id(name, "queues")
    for name in command.kinds or ():
        check_id(name, "kinds")
    if command.kinds is not None and not command.kinds:
        raise InvalidRequest("kinds", "must name at least one kind, or be None for any")
    if not 1 <= len(command.attempt_ids) <= k.MAX_BATCH:
        raise InvalidRequest("limit", f"must lie within 1…{k.MAX_BATCH}")


def _new_tasks(tasks: Any, field: str) -> None:
    if len(tasks) > k.MAX_BATCH:
        raise InvalidRequest(field, f"at most {k.MAX_BATCH} tasks in a batch, got {len(tasks)}")
    for position, task in enumerate(tasks):
        at = f"{field}[{position}]."
        try:
            check_id(task.task_id, "task_id")
            check_id(task.pool, "pool")
            check_id(task.queue, "queue")
            check_id(task.kind, "kind")
            check_id(task.node_id, "node_id")
            if task.graph_id is not None:
                check_id(task.graph_id, "graph_id")
            if task.trace_context is not None:
                check_id(task.trace_context, "trace_context")
            check_integer(task.priority, "priority", -k.MAX_PRIORITY, k.MAX_PRIORITY)
            check_integer(task.delay_us, "delay", 0, _MAX_US)
            if task.max_attempts is not None:
                check_integer(task.max_attempts, "max_attempts", 1, k.MAX_ATTEMPTS_LIMIT)
            for parent in task.depends_on:
                check_id(parent, "depends_on")
            _content(task.input, "input")
        except InvalidRequest as error:
            raise InvalidRequest(at + error.field, error.limit) from None


def _checkpoint(command: k.SaveCheckpoint) -> None:
    check_integer(command.number, "number", 1)
    _content(command.content, "checkpoint")


def _commit(command: k.Commit) -> None:
    check_id(command.result_digest, "result_digest")
    check_id(command.result_commit_id, "result_commit_id")
    if command.content is not None:
        _content(command.content, "result")
        if command.content.digest != command.result_digest:
            raise InvalidRequest("result_digest", "is not the digest of the result that came along")
    if command.spawn:
        _new_tasks(command.spawn, "spawn")
        for position, task in enumerate(command.spawn):
            if task.pool != command.claim.pool:
                raise InvalidRequest(f"spawn[{position}].pool", "must be the committing task's pool")
    if command.usage is not None:
        k.check_usage(command.usage)
    if command.statements:
        _statements(command.statements)


def _statements(statements: Any) -> None:
    if len(statements) > k.MAX_STATEMENTS:
        raise InvalidRequest("statements", f"at most {k.MAX_STATEMENTS} in a commit, got {len(statements)}")
    slots = set()
    for position, statement in enumerate(statements):
        at = f"statements[{position}]."
        check_id(statement.slot, at + "slot")
        check_id(statement.downstream, at + "downstream")
        if statement.node_id is not None:
            check_id(statement.node_id, at + "node_id")
        _content(statement.payload, at + "payload")
        if (statement.node_id, statement.slot) in slots:
            raise InvalidRequest(at + "slot", f"{statement.slot!r} stands twice; an effect needs a slot of its own")
        slots.add((statement.node_id, statement.slot))


def _fail(command: k.Fail) -> None:
    if not isinstance(command.error, str):
        raise InvalidRequest("error", "must be text")
    if type(command.retry) is not bool:
        raise InvalidRequest("retry", f"must be True or False, got {type(command.retry).__name__}")
    if command.usage is not None:
        k.check_usage(command.usage)


def _named(command: Any) -> None:
    check_id(command.task_id, "task_id")
    _epoch(getattr(command, "epoch", None), "epoch")
    for field in ("expected_state_version", "expected_cancel_generation", "expected_revision", "expected_generation"):
        if hasattr(command, field):
            check_integer(getattr(command, field), field, 0)
    _who(command)


def _who(command: Any) -> None:
    who = getattr(command, "who", "")
    if who:
        check_id(who, "who")


def _revise(command: k.Revise) -> None:
    _named(command)
    if type(command.accept_effects) is not bool:
        raise InvalidRequest("accept_effects", f"must be True or False, got {type(command.accept_effects).__name__}")
    _content(command.input, "input")


def _discard(command: k.Discard) -> None:
    _named(command)
    check_integer(command.generation, "generation", 1)


def _pool(command: k.PoolCommand) -> None:
    check_id(command.pool, "pool")
    _epoch(command.expected_epoch, "expected_epoch")
    if command.expected_state_version is not None:
        check_integer(command.expected_state_version, "expected_state_version", 0)
    _who(command)
    if isinstance(command, k.RaiseEpoch) and command.to is not None:
        check_integer(command.to, "to", 1)
    if isinstance(command, k.SetPolicy):
        k.check_policy(command.policy)


def _create_pool(command: k.CreatePool) -> None:
    check_id(command.pool, "pool")
    k.check_policy(command.policy)
    _who(command)


def _release(command: k.Release) -> None:
    check_integer(command.delay_us, "delay", 0, _MAX_US)
    if type(command.wait) is not bool:
        raise InvalidRequest("wait", f"must be True or False, got {type(command.wait).__name__}")


_CHECKS: dict[type, Any] = {
    k.Claim: _claim_one,
    k.ClaimNext: _claim_next,
    k.Renew: lambda command: _ttl(command.ttl_us),
    k.SaveCheckpoint: _checkpoint,
    k.Commit: _commit,
    k.Release: _release,
    k.Fail: _fail,
    k.Stage: lambda command: _content(command.content, "content"),
    k.Usage: lambda command: k.check_usage(command.usage),
    k.Submit: lambda command: _new_tasks(command.tasks, "tasks"),
    k.Expire: _named,
    k.Cancel: _named,
    k.Reopen: _named,
    k.Revise: _revise,
    k.TakeOver: _named,
    k.Discard: _discard,
    k.CloseIntake: _pool,
    k.OpenIntake: _pool,
    k.RaiseEpoch: _pool,
    k.SetPolicy: _pool,
    k.CreatePool: _create_pool,
    **effect_admission.CHECKS,
}
