"""Arguments of the client's methods as the kernel's commands: encoded, digested, checked.

A wrong argument raises InvalidRequest naming it, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.digests import digest, encode
from fencepost.kernel.records import Policy
from fencepost.wire import Claim, NewTask, new_id


def presented(claim: Claim) -> k.Presented:
    """What of a claim is shown at a door."""
    if type(claim) is not Claim:
        raise InvalidRequest("claim", f"must be a Claim, got {type(claim).__name__}")
    return k.Presented(
        claim.store_id,
        claim.pool,
        claim.task_id,
        claim.attempt_id,
        claim.generation,
        claim.cancel_generation,
        claim.input_digest,
        claim.owner_id,
    )


def request(request_id: str | None) -> str:
    """The request id of a call: the caller's, or a new one."""
    return new_id() if request_id is None else k.check_id(request_id, "request_id")


def ttl_us(ttl: Any) -> int:
    """Finite, above zero; the pool's max_ttl is compared in the store."""
    return k.check_seconds(ttl, "ttl", above=True)


def names(value: Any, field: str) -> tuple[str, ...]:
    kind = type(value)
    if kind is not tuple and kind is not list:
        if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
            raise InvalidRequest(field, "must be a list of names")
        value = sorted(value) if isinstance(value, set | frozenset) else tuple(value)
    for name in value:
        k.check_id(name, field)
    return tuple(value)


def new_tasks(tasks: Any, field: str, base: str | None) -> tuple[k.NewTask, ...]:
    """Submitted tasks, checked and digested. `field[3]` names one in errors.

    Those without an id of their own get one: a new one, or with `base` the same one again for the same `base`.
    """
    if not isinstance(tasks, Sequence) or isinstance(tasks, str):
        raise InvalidRequest(field, f"must be a list of NewTasks, got {type(tasks).__name__}")
    if len(tasks) > k.MAX_BATCH:
        raise InvalidRequest(field, f"at most {k.MAX_BATCH} tasks in a batch, got {len(tasks)}")
    made = []
    for position, task in enumerate(tasks):
        if not isinstance(task, NewTask):
            raise InvalidRequest(f"{field}[{position}]", f"must be a NewTask, got {type(task).__name__}")
        try:
            made.append(_new_task(task, base, position))
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}[{position}].{error.field}", error.limit) from None
    return tuple(made)


def generated_id(base: str | None, position: int) -> str:
    """A UUIDv7: a new one, or with `base` (another) of the base's time, and for each position always the same."""
    if base is None:
        return new_id()
    bits = int.from_bytes(sha256(f"{base}/{position}".encode()).digest()[:10], "big")
    number = UUID(base).int >> 80 << 80 | bits
    number = number & ~(0xF << 76) | 7 << 76  # version
    return str(UUID(int=number & ~(3 << 62) | 2 << 62))  # variant


def _new_task(task: NewTask, base: str | None, position: int) -> k.NewTask:
    depends_on = names(task.depends_on, "depends_on")
    delay_us, available_at = 0, None
    if task.delay is not None and task.available_at is not None:
        raise InvalidRequest("available_at", "give delay or available_at, not both")
    if task.delay is not None:
        delay_us = k.check_seconds(task.delay, "delay")
    if task.available_at is not None:
        available_at = _instant(task.available_at)
    if task.on_failure not in ("keep", "cancel"):
        raise InvalidRequest("on_failure", "must be 'keep' or 'cancel'")
    content = encode(task.input, "input")
    pool = k.check_id(task.pool, "pool")
    node_id = k.check_id(task.node_id, "node_id")
    return k.NewTask(
        task_id=k.check_id(task.task_id, "task_id") if task.task_id is not None else generated_id(base, position),
        pool=pool,
        queue=k.check_id(task.queue, "queue"),
        kind=k.check_id(task.kind, "kind"),
        node_id=node_id,
        input=content,
        submitted_digest=digest([content.digest, pool, node_id, sorted(depends_on)]),
        graph_id=task.graph_id,
        priority=k.check_integer(task.priority, "priority", -k.MAX_PRIORITY, k.MAX_PRIORITY),
        delay_us=delay_us,
        available_at=available_at,
        max_attempts=task.max_attempts,
        depends_on=depends_on,
        cancel_with_parent=task.on_failure == "cancel",
        trace_context=task.trace_context,
    )


def _instant(moment: Any) -> int:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidRequest("available_at", "must be a datetime with a time zone")
    return round(moment.timestamp() * 1_000_000)


def policy(changes: dict[str, Any], standing: dict[str, Any]) -> Policy:
    """The standing policy with `changes`; unknown names and wrong types raise InvalidRequest."""
    for name in changes:
        if name not in Policy.__struct_fields__:
            known = ", ".join(Policy.__struct_fields__)
            raise InvalidRequest(f"policy.{name}", f"is no policy; there are {known}")
    try:
        found = msgspec.convert({**standing, **changes}, Policy)
    except msgspec.ValidationError as error:
        raise InvalidRequest("policy", str(error)) from None
    return k.check_policy(found)
