"""The doors of a claim: claim, renew, checkpoint, commit, release, fail (claim.v1, sections 3 and 4)."""

from __future__ import annotations

from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.fence import (
    EPOCH,
    FENCE_HEAD,
    FENCE_TAIL,
    FENCE_TAIL_RENEW,
    FOUND_POOL,
    FOUND_TASK,
    PROTOCOL,
    Compare,
    Context,
    Guard,
    held_by,
)
from fencepost.kernel.operations import (
    Accepted,
    Granted,
    Operation,
    _replace,
    changed,
    effects_of,
    end_attempt,
    event_of,
    guarded,
    remember,
    repeat_guard,
    say,
    usage_entry,
    used_request,
    write_task,
)
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import (
    CANCELLED,
    CLAIMED,
    PARKED,
    READY,
    Checkpoint,
    End,
    LogEntry,
    Policy,
    State,
    Task,
)
from fencepost.kernel.writes import Decision, Proof, WriteSet

SECOND = 1_000_000
# Why a task is PARKED that its holder gave back until a person has decided.
WAITING = "WAITING"

# claim ------------------------------------------------------------------------------------------


def _claim_repeat(c: Context) -> Any:
    found = used_request(c, "claim")
    if found is None or isinstance(found, Problem):
        return found
    live: list[Task] = []
    ended: dict[str, Any] = {}
    for task_id, generation, attempt_id in found.answer["claims"]:
        task = c.snapshot.tasks.get(task_id)
        if task is None:
            continue
        if task.claim_generation == generation and task.attempt_id == attempt_id and task.state == CLAIMED:
            if task.scheduler_epoch == c.pool.epoch:
                live.append(task)
            else:
                ended[task_id] = "EPOCH"
        elif task.claim_generation == generation and task.attempt_id == attempt_id:
            ended[task_id] = End(task.end).name
        else:
            ended[task_id] = "RECLAIMED"
    log = (LogEntry("replay", c.now, c.pool.name, None, "claim", Outcome.CLAIMED.value),)
    if live:
        return Decision(Granted(tuple(live), repeated=True), log=log)
    how = next(iter(ended.values()), None)
    return Decision(Refusal(Outcome.ENDED, how, {"ended": ended}), log=log)


def _claim_intake(c: Context) -> Any:
    if not c.pool.intake_open:
        return Refusal(Outcome.INTAKE_CLOSED, None, {"epoch": c.pool.epoch, "state_version": c.pool.state_version})
    return None


def _claim_version(c: Context) -> Any:
    expected = getattr(c.command, "expected_state_version", None)  # claim_next compares what it scanned
    if expected is not None and expected != c.task.state_version:
        return Refusal(Outcome.CONFLICT, Reason.VERSION, held_by(c.task))
    return None


def lapsed(c: Context) -> bool:
    """A CLAIMED task may be taken back: its lease (and the pool's grace) ran out, or an older epoch granted it."""
    task = c.task
    if task.scheduler_epoch < c.pool.epoch:
        return True
    grace = c.pool.policy.reclaim_grace
    return task.lease_expires_at is not None and task.lease_expires_at + round(grace * SECOND) <= c.now


def _claim_held(c: Context) -> Any:
    if c.task.state == CLAIMED and not lapsed(c):
        return Refusal(Outcome.HELD, None, held_by(c.task))
    return None


def _claim_claimable(c: Context) -> Any:
    task = c.task
    state = task.state
    if state in (READY, CLAIMED):
        return None
    if state == CANCELLED:
        return Refusal(Outcome.CANCELLED, None, {"cancel_generation": task.cancel_generation})
    return Refusal(
        Outcome.NOT_CLAIMABLE, State(state).name, {"state": State(state).name, "park_reason": task.park_reason}
    )


def _claim_available(c: Context) -> Any:
    if c.task.state == READY and c.task.available_at > c.now:
        return Refusal(Outcome.NOT_CLAIMABLE, Reason.NOT_YET, {"available_at": c.task.available_at})
    return None


def _policy_ttl(c: Context) -> Any:
    if c.command.ttl_us > c.pool.policy.max_ttl * SECOND:
        return Problem("INVALID", "ttl", f"must be at most the pool's max_ttl of {c.pool.policy.max_ttl:g} seconds")
    return None


def grant(c: Context, writes: WriteSet, attempt_id: str) -> Task | None:
    """Generation + 1, a new attempt, this epoch, the lease. First ends a lapsed attempt as `expire` would;
    None when that used up the task's attempts and parked it instead."""
    before, now, proof = c.task, c.now, writes.proof
    task: Task = before
    if task.state == CLAIMED:
        task = end_attempt(c, writes, task, End.EXPIRED, state=READY, charge=task.scheduler_epoch == c.pool.epoch)
        if task.state == PARKED:
            write_task(writes, before, task, "claim")
            return None
    after: Task = _replace(
        task,
        state=CLAIMED,
        state_version=task.state_version + 1,
        scheduler_epoch=c.pool.epoch,
        claim_generation=task.claim_generation + 1,
        attempt_id=attempt_id,
        owner_id=c.command.owner_id,
        claimed_at=now,
        lease_expires_at=now + min(c.command.ttl_us, round(c.pool.policy.max_claim_age * SECOND)),
        checkpoint_number=0,
        end=0,
    )
    writes.events.append(
        event_of(
            after,
            now,
            "claim",
            "attempt_started",
            proof.compared,
            {"owner": after.owner_id, "lease_us": after.lease_expires_at},
        )
    )
    write_task(writes, before, after, "claim")
    return after


def _claim_act(c: Context, proof: Proof) -> Decision:
    writes = guarded(c, proof)
    after = grant(c, writes, c.command.attempt_id)
    if after is None:
        parked = writes.tasks[0].task
        return Decision(
            Refusal(Outcome.NOT_CLAIMABLE, Reason.ATTEMPTS, {"state": "PARKED", "attempts": parked.charged_attempts}),
            writes,
        )
    remember(
        c, writes, "claim", c.command.owner_id, {"claims": ((after.task_id, after.claim_generation, after.attempt_id),)}
    )
    return Decision(Granted((after,)), writes)


def _claim_next_act(c: Context, proof: Proof) -> Decision:
    raise AssertionError("claim_next is decided candidate by candidate (Kernel.decide)")


# renew, checkpoint ------------------------------------------------------------------------------


def _renew_repeat(c: Context) -> Any:
    found = used_request(c, "renew")
    if found is None or isinstance(found, Problem):
        return found
    return Decision(
        Accepted(Outcome.RENEWED, c.task, found.answer["info"], changed=False),
        log=(LogEntry("replay", c.now, c.pool.name, c.task.task_id, "renew", Outcome.RENEWED.value),),
    )


def _renew_age(c: Context) -> Any:
    cap = c.task.claimed_at + round(c.pool.policy.max_claim_age * SECOND)
    if c.task.lease_expires_at >= cap or c.now >= cap:
        return Refusal(
            Outcome.EXHAUSTED,
            Reason.MAX_CLAIM_AGE,
            {"lease_expires_at": c.task.lease_expires_at, "claimed_at": c.task.claimed_at},
        )
    return None


def _renew_act(c: Context, proof: Proof) -> Decision:
    task, now, ttl = c.task, c.now, c.command.ttl_us
    cap = task.claimed_at + round(c.pool.policy.max_claim_age * SECOND)
    stood: int = task.lease_expires_at
    lease = max(stood, min(now + ttl, cap))
    after = changed(task, lease_expires_at=lease)
    left = stood - now
    detail: dict[str, Any] = {"lease_us": lease}
    if left <= 0:
        detail["late_renew"] = True
    elif left * 5 < ttl:
        detail["near_miss"] = True
    writes = guarded(c, proof)
    writes.events.append(event_of(after, now, "renew", "attempt_renewed", proof.compared, detail))
    write_task(writes, task, after, "renew")
    return say(c, writes, "renew", Outcome.RENEWED, after, {"lease_us": lease, "late": left <= 0})


def _checkpoint_number(c: Context) -> Any:
    if c.command.number <= c.task.checkpoint_number:
        return Refusal(Outcome.CONFLICT, Reason.NUMBER, {"checkpoint_number": c.task.checkpoint_number})
    return None


def _checkpoint_act(c: Context, proof: Proof) -> Decision:
    task, number, content = c.task, c.command.number, c.command.content
    after = changed(task, checkpoint_number=number, checkpoint_generation=task.claim_generation)
    writes = guarded(c, proof)
    writes.checkpoints.append(Checkpoint(task.task_id, task.revision, task.claim_generation, number, content))
    writes.events.append(
        event_of(
            after, c.now, "checkpoint", "checkpoint_saved", proof.compared, {"number": number, "digest": content.digest}
        )
    )
    write_task(writes, task, after, "renew")
    return say(c, writes, "checkpoint", Outcome.CHECKPOINTED, after, {"number": number})


# release, fail ----------------------------------------------------------------------------------


def _release_act(c: Context, proof: Proof) -> Decision:
    task, command = c.task, c.command
    writes = guarded(c, proof)
    fields: dict[str, Any] = {"available_at": c.now + command.delay_us}
    state = READY
    if command.wait and _waits(c):
        state = PARKED
        fields["park_reason"] = WAITING
    after = end_attempt(c, writes, task, End.RELEASED, state=state, charge=False, **fields)
    write_task(writes, task, after)
    said = {"available_at": after.available_at, "state": State(after.state).name}
    return say(c, writes, "release", Outcome.RELEASED, after, said)


def _waits(c: Context) -> bool:
    """After this end, an effect is left that only a person can lead on. Of this revision, as for a commit."""
    task = c.task
    return any(
        rules.waits(rules.without_sender(effect, c.now), c.now, c.pool.epoch, task.cancel_generation)
        for effect in effects_of(c, task)
        if effect.revision == task.revision
    )


def backoff_us(policy: Policy, charged: int, jitter: float) -> int:
    """min(base^n, max) ± jitter, in microseconds; `charged` counts this failure."""
    exponent = min(charged, 64)
    seconds = min(policy.backoff_base**exponent, policy.backoff_max)
    return round(seconds * (1.0 + policy.backoff_jitter * max(-1.0, min(1.0, jitter))) * SECOND)


def _fail_act(c: Context, proof: Proof) -> Decision:
    task, command = c.task, c.command
    writes = guarded(c, proof)
    wait = backoff_us(c.pool.policy, task.charged_attempts + 1, command.jitter)
    fields: dict[str, Any] = {"detail": {"error": command.error, "retry": command.retry}}
    if command.retry:
        state = READY
        fields["available_at"] = c.now + wait
    else:
        state = PARKED
        fields["park_reason"] = "FINAL"
    after = end_attempt(c, writes, task, End.FAILED, state=state, charge=True, **fields)
    write_task(writes, task, after)
    if command.usage:
        writes.log.append(usage_entry(c, task, command.usage))
    return say(
        c,
        writes,
        "fail",
        Outcome.FAILED,
        after,
        {
            "state": State(after.state).name,
            "available_at": after.available_at,
            "charged_attempts": after.charged_attempts,
        },
    )


def _guard(id: str, check: Any, says: str, compares: int = 0) -> Guard:
    return Guard(id, compares, check, says)


CLAIM_REPEAT = _guard("claim:request-used:as-they-stand", _claim_repeat, "the request id is new")
CLAIM_INTAKE = _guard("claim:intake-closed:intake-closed", _claim_intake, "the pool's intake is open", Compare.INTAKE)
CLAIM_VERSION = _guard(
    "claim:other-version:conflict", _claim_version, "the task stands at the expected state version", Compare.VERSION
)
CLAIM_CLAIMABLE = _guard(
    "claim:other-state:not-claimable", _claim_claimable, "the task is READY or CLAIMED", Compare.STATE
)
CLAIM_AVAILABLE = _guard(
    "claim:not-yet:not-claimable", _claim_available, "a READY task's available_at has come", Compare.STATE
)
CLAIM_HELD = _guard(
    "claim:lease-runs:held", _claim_held, "a CLAIMED task's lease ran out, or an older epoch granted it", Compare.STATE
)
TTL = _guard("any:ttl-over-policy:invalid", _policy_ttl, "the ttl is within the pool's max_ttl")

CLAIM_EACH = (CLAIM_VERSION, CLAIM_CLAIMABLE, CLAIM_AVAILABLE, CLAIM_HELD)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        k.Claim,
        "claim",
        (FOUND_TASK, PROTOCOL, EPOCH, CLAIM_REPEAT, CLAIM_INTAKE, *CLAIM_EACH, TTL),
        _claim_act,
    ),
    Operation(
        k.ClaimNext,
        "claim",
        (FOUND_POOL, PROTOCOL, EPOCH, CLAIM_REPEAT, CLAIM_INTAKE, TTL),
        _claim_next_act,
        each=CLAIM_EACH,
    ),
    Operation(
        k.Renew,
        "renew",
        (
            *FENCE_HEAD,
            *FENCE_TAIL_RENEW,
            _guard("renew:repeated:first-times-again", _renew_repeat, "the request id is new"),
            TTL,
            _guard("renew:age-used-up:exhausted", _renew_age, "the claim is younger than max_claim_age"),
        ),
        _renew_act,
    ),
    Operation(
        k.SaveCheckpoint,
        "checkpoint",
        (
            *FENCE_HEAD,
            _guard("checkpoint:repeated:said-again", repeat_guard("checkpoint"), "the request id is new"),
            *FENCE_TAIL,
            _guard(
                "checkpoint:not-above-newest:conflict", _checkpoint_number, "the number is above the attempt's newest"
            ),
        ),
        _checkpoint_act,
    ),
    Operation(
        k.Release,
        "release",
        (
            *FENCE_HEAD,
            _guard("release:repeated:said-again", repeat_guard("release"), "the request id is new"),
            *FENCE_TAIL,
        ),
        _release_act,
    ),
    Operation(
        k.Fail,
        "fail",
        (*FENCE_HEAD, _guard("fail:repeated:said-again", repeat_guard("fail"), "the request id is new"), *FENCE_TAIL),
        _fail_act,
    ),
)
