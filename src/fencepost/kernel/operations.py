"""What an operation is: a door, its guards in order, and what it does once they are passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.kernel.digests import short_hash
from fencepost.kernel.effect_rules import lose_senders
from fencepost.kernel.fence import Context, Guard
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.records import Effect, End, Event, LogEntry, Request, State, Task
from fencepost.kernel.writes import Decision, Proof, TaskWrite, WriteSet

_replace = msgspec.structs.replace


class Operation(msgspec.Struct, frozen=True):
    """`act(context, proof)` runs only when every guard has passed. `optional` guards have no comparison."""

    command: type
    door: str
    guards: tuple[Guard, ...]
    act: Callable[[Context, Proof], Decision]
    # For claim_next: guards and act that each candidate meets after `guards` have passed.
    each: tuple[Guard, ...] = ()
    # What a refused call is still a report of: another command, decided and written beside the refusal.
    report: Callable[[Any], Any] | None = None


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The kernel's yes. `task` as it stands after the change; `info` is what else the door says.

    `changed` is False where the answer was already true (a repeat, an already cancelled task).
    """

    outcome: Outcome
    task: Task | None = None
    info: dict[str, Any] = {}
    changed: bool = True


class Granted(msgspec.Struct, frozen=True, gc=False):
    """claim's yes: the tasks as claimed. Empty for claim_next that found nothing."""

    tasks: tuple[Task, ...]
    outcome: Outcome = Outcome.CLAIMED
    repeated: bool = False


def guarded(c: Context, proof: Proof) -> WriteSet:
    """What a door that compares the epoch writes: only if the pool's record still stands as it was judged."""
    return WriteSet(proof, c.pool.name, c.pool.epoch, c.pool.state_version)


def event_of(task: Task, now: int, door: str, name: str, compared: int, detail: dict[str, Any] | None = None) -> Event:
    """The event of the change that led to `task`."""
    return Event(
        task.task_id,
        task.state_version,
        now,
        door,
        name,
        task.scheduler_epoch,
        task.claim_generation,
        task.cancel_generation,
        task.revision,
        task.attempt_id,
        compared,
        task.state,
        detail,
    )


def changed(task: Task, **fields: Any) -> Task:
    """`task` with `fields`, and its state version up by one."""
    return _replace(task, state_version=task.state_version + 1, **fields)


def effects_of(c: Context, task: Task) -> list[Effect]:
    """All effects of a task, of every revision. They must have been loaded where it has any."""
    return c.snapshot.effects[task.task_id] if task.effects else []


def end_attempt(c: Context, writes: WriteSet, task: Task, end: End, *, state: int, charge: bool, **fields: Any) -> Task:
    """Every end of an attempt but COMMITTED, the same everywhere: one event, its staged results DISCARDED, what it
    was sending UNKNOWN.

    Charged ends count towards max_attempts; used up means PARKED where it would have been READY.
    """
    now = c.now
    charged = task.charged_attempts + (1 if charge else 0)
    if charge and charged >= task.max_attempts and state == State.READY:
        state = State.PARKED
        fields["park_reason"] = "ATTEMPTS"
    detail: dict[str, Any] = {"end": end.name, "charged": charge}
    if end is End.EXPIRED and task.lease_expires_at is not None and task.lease_expires_at <= now:
        detail["reclaim_delay_us"] = now - task.lease_expires_at
    extra = fields.pop("detail", None)
    if extra:
        detail.update(extra)
    if task.effects:
        unknown = lose_senders(writes, effects_of(c, task), now)
        if unknown:
            detail["effects_unknown"] = unknown
    after = changed(task, state=state, end=int(end), charged_attempts=charged, lease_expires_at=None, **fields)
    proof = writes.proof
    writes.events.append(event_of(after, now, proof.door, "attempt_ended", proof.compared, detail))
    writes.discard_attempts.append((task.task_id, task.claim_generation))
    return after


def refusal_entry(c: Context, door: str, refusal: Refusal | Problem) -> LogEntry:
    """How a refusal is journalled: what was presented, and what stands. Attempt ids as short hashes only."""
    command, claim = c.command, c.claim
    presented: dict[str, Any] = {}
    epoch = getattr(command, "epoch", getattr(command, "expected_epoch", None))
    if epoch is not None:
        presented["epoch"] = epoch
    if claim is not None:
        presented["generation"] = claim.generation
        presented["cancel_generation"] = claim.cancel_generation
        presented["owner"] = claim.owner_id
    elif getattr(command, "owner_id", None) is not None:
        presented["owner"] = command.owner_id
    return LogEntry(
        "refusal",
        c.now,
        c.pool.name if c.pool is not None else None,
        c.task.task_id if c.task is not None else getattr(command, "task_id", None),
        door,
        refusal.outcome.value if isinstance(refusal, Refusal) else refusal.code,
        refusal.reason if isinstance(refusal, Refusal) else refusal.field,
        short_hash(claim.attempt_id) if claim is not None else None,
        claim.generation if claim is not None else None,
        {
            "presented": presented,
            "current": refusal.current if isinstance(refusal, Refusal) else {"limit": refusal.limit},
        },
    )


def usage_entry(
    c: Context, task: Task, usage: dict[str, float], generation: int | None = None, attempt: str | None = None
) -> LogEntry:
    return LogEntry(
        "usage",
        c.now,
        c.pool.name,
        task.task_id,
        "usage",
        Outcome.RECORDED.value,
        None,
        short_hash(attempt or task.attempt_id),
        generation or task.claim_generation,
        {"usage": usage},
    )


# Repeats ----------------------------------------------------------------------------------------


def remember(c: Context, writes: WriteSet, door: str, owner: str, answer: Any) -> None:
    """Keep what was said under this request id; ten minutes, and by the same transaction."""
    writes.requests.append(Request(c.command.request_id, owner, door, c.now, answer))


def speaker(c: Context) -> str:
    """Who may hear an answer again: the attempt, the claiming owner, or this person about this very call."""
    if c.claim is not None:
        return str(c.claim.attempt_id)
    owner = getattr(c.command, "owner_id", None)
    if owner is not None:
        return str(owner)
    about = c.command.pool if hasattr(c.command, "pool") else c.command.task_id
    return f"{type(c.command).__name__} {about} {c.command.who}"


def used_request(c: Context, door: str) -> Request | Problem | None:
    found = c.snapshot.requests.get(c.command.request_id)
    if found is None:
        return None
    if found.owner != speaker(c) or found.door != door:
        return Problem("INVALID", "request_id", "was used for another call; request ids are new for each call")
    return found


def repeat_guard(door: str) -> Callable[[Context], Any]:
    """The guard that says a finished change again: same request id, same speaker, same door."""

    def check(c: Context) -> Any:
        found = used_request(c, door)
        if found is None or isinstance(found, Problem):
            return found
        said = found.answer
        about = getattr(c.command, "effect_id", None)
        if about is not None and said["info"]["effect_id"] != about:
            return Problem("INVALID", "request_id", "was used for another effect; request ids are new for each call")
        return Decision(
            Accepted(Outcome(said["outcome"]), c.task, said.get("info", {}), changed=False),
            log=(
                LogEntry(
                    "replay", c.now, c.pool.name, c.task.task_id if c.task is not None else None, door, said["outcome"]
                ),
            ),
        )

    return check


def say(
    c: Context, writes: WriteSet, door: str, outcome: Outcome, task: Task | None, info: dict[str, Any] | None = None
) -> Decision:
    """Accept, and remember the answer under its request id."""
    info = info or {}
    remember(c, writes, door, speaker(c), {"outcome": outcome.value, "info": info})
    return Decision(Accepted(outcome, task, info), writes)


def write_task(writes: WriteSet, before: Task, after: Task, family: str = "any") -> None:
    writes.tasks.append(TaskWrite(before.state_version, after, family))
