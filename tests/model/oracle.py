"""The contract's invariants (claim.v1, section 9) and the rules behind them, judged on one accepted change.

Written without the kernel: it imports nothing of fencepost, compares plain fields, and spells the numbers of states,
ends and comparisons anew. It asks what must be true of any change, never how the kernel came to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

READY, CLAIMED, BLOCKED, PARKED, CANCELLED, COMMITTED = 1, 2, 3, 4, 5, 6
END_COMMITTED, END_EXPIRED, END_RELEASED, END_FAILED = 1, 2, 3, 4
STAGED = 1

PROTOCOL, EPOCH, GENERATION, OWNER, GRANT, CANCEL, INPUT, STATE, VERSION, REVISION, INTAKE = (1 << n for n in range(11))
PAYLOAD, EXECUTION, PREPARER = 2048, 4096, 8192
FENCE = PROTOCOL | EPOCH | GENERATION | OWNER | GRANT | CANCEL | INPUT | STATE

FENCED_DOORS = frozenset({"renew", "checkpoint", "commit", "release", "fail"})
# The comparisons that an accepted change must show in the journal, by door.
MASKS = {
    **dict.fromkeys(FENCED_DOORS, FENCE),
    "claim": PROTOCOL | EPOCH | INTAKE | VERSION | STATE,
    "submit": PROTOCOL,
    "expire": PROTOCOL | VERSION | STATE,
    "cancel": PROTOCOL | CANCEL | STATE,
    "reopen": PROTOCOL | EPOCH | VERSION | STATE,
    "revise": PROTOCOL | EPOCH | REVISION | STATE,
    "take_over": PROTOCOL | EPOCH | GENERATION | STATE,
    "discard": PROTOCOL | EPOCH | GENERATION,
    "effect.prepare": FENCE | PAYLOAD,
    **dict.fromkeys(("effect.reserve", "effect.settle", "effect.reconcile"), FENCE | EXECUTION),
    "effect.withdraw": FENCE,
    "evidence": PROTOCOL | PREPARER,
    **dict.fromkeys(("approve", "deny"), PROTOCOL | EPOCH | PAYLOAD | VERSION | STATE),
    "resolve": PROTOCOL | EPOCH | VERSION | STATE,
}
EPOCH_FREE_DOORS = frozenset({"submit", "cancel", "expire", "stage", "evidence"})
EFFECT_DOORS = frozenset({"effect.prepare", "effect.reserve", "effect.settle", "effect.reconcile", "effect.withdraw"})
# What may still be said of the effects of a task that is COMMITTED.
AFTERWARDS = frozenset({"evidence", "resolve"})


class Asked(NamedTuple):
    """What the caller showed. None: this door is not shown it."""

    door: str
    task_id: str | None = None
    epoch: int | None = None
    generation: int | None = None
    attempt: str | None = None
    cancel: int | None = None
    digest: str | None = None
    owner: str | None = None
    version: int | None = None
    revision: int | None = None
    number: int | None = None
    request: str | None = None


class Violation(AssertionError):
    """`rule` names the invariant (`1` … `9` of section 9) or the rule that was broken."""

    def __init__(self, rule: str, text: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {text}")


def _must(true: bool, rule: str, text: str) -> None:
    if not true:
        raise Violation(rule, text)


def judge(
    asked: Asked,
    now: int,
    pool: Any,
    before: Mapping[str, Any],
    results: Iterable[str],
    parents: Mapping[str, Iterable[str]],
    accepted: bool,
    writes: Any,
    *,
    coverage: bool = True,
) -> None:
    """Raise Violation where `writes` break the contract. `pool` and `before` are the records before it.

    `results` are the tasks that have a result commit, `parents` the graph; `accepted` whether the answer was a yes;
    `coverage` whether the journal must show the comparisons, too.
    """
    after = dict(before)
    events: dict[str, list[Any]] = {}
    for event in writes.events:
        events.setdefault(event.task_id, []).append(event)
        mask = MASKS[asked.door]
        _must(not coverage or event.compared & mask == mask, "coverage", f"{asked.door} skipped a comparison")
    if not accepted:
        parked = asked.door == "claim" and all(write.task.state == PARKED for write in writes.tasks)
        _must(parked, "refusal", "a refusal changed a record")
    for write in writes.tasks:
        task = write.task
        old = before.get(task.task_id)
        _must(write.expected_version == (old.state_version if old else 0), "7", "decided on another version")
        if write.family == "compare":
            continue
        if old is not None and task.task_id == asked.task_id:
            _judge_presented(asked, pool, old)
        _judge_record(asked, now, pool, old, task, events.pop(task.task_id, []))
        after[task.task_id] = task
    _must(not events, "7", "an event of a record that did not change")
    if writes.pool_write is not None:
        _judge_pool(asked, pool, writes.pool_write[1])
    _judge_results(asked, before, after, set(results), writes.results)
    edges = {task_id: list(found) for task_id, found in parents.items()}
    for edge in writes.dependencies:
        edges.setdefault(edge.task_id, []).append(edge.parent_id)
    for task_id in {write.task.task_id for write in writes.tasks} | {
        child for child, found in edges.items() if any(p in found for p in (w.task.task_id for w in writes.tasks))
    }:
        judge_graph(after, edges, task_id)


def judge_graph(tasks: Mapping[str, Any], parents: Mapping[str, Iterable[str]], task_id: str) -> None:
    """Invariant 5, of one task."""
    task = tasks[task_id]
    still_open = sum(tasks[parent].state != COMMITTED for parent in parents.get(task_id, ()))
    _must(
        task.deps_remaining == still_open, "5", f"{task_id} counts {task.deps_remaining} open parents of {still_open}"
    )
    if task.state in (READY, CLAIMED, COMMITTED):
        _must(still_open == 0, "5", f"{task_id} left BLOCKED before its parents were COMMITTED")
    if task.state == BLOCKED:
        _must(still_open > 0, "5", f"{task_id} is BLOCKED with no open parent")


def _judge_record(asked: Asked, now: int, pool: Any, old: Any, task: Any, events: list[Any]) -> None:
    first = old.state_version + 1 if old else 1
    found = [event.state_version for event in events]
    _must(found == list(range(first, task.state_version + 1)), "7", f"events {found} for versions from {first}")
    _must(bool(events) and events[-1].state == task.state, "7", "the journal says another state than the record")
    _must(all(event.door == asked.door for event in events), "7", "an event of another door")
    _must((task.lease_expires_at is not None) == (task.state == CLAIMED), "records", "a lease without a claim")
    if old is None:
        _must(task.claim_generation == 0 and task.cancel_generation == 0, "2", "a new task that was claimed before")
        return
    _must(old.state != COMMITTED or asked.door in AFTERWARDS, "1", "a COMMITTED task was changed")
    for name in ("claim_generation", "cancel_generation", "scheduler_epoch", "revision"):
        _must(getattr(task, name) >= getattr(old, name), "2", f"{name} went down")
    _judge_attempts(asked, now, pool, old, task, events)


def _judge_attempts(asked: Asked, now: int, pool: Any, old: Any, task: Any, events: list[Any]) -> None:
    started = [event for event in events if event.name == "attempt_started"]
    ended = [event for event in events if event.name in ("attempt_ended", "result_committed")]
    _must(task.claim_generation - old.claim_generation == len(started) <= 1, "2", "a generation without its attempt")
    was_live = old.state == CLAIMED
    is_live = task.state == CLAIMED
    _must(len(ended) == int(was_live and (bool(started) or not is_live)), "7", "an attempt's end is not in the journal")
    ran_out = was_live and old.lease_expires_at <= now
    older = old.scheduler_epoch < pool.epoch
    if started:
        _must(pool.intake_open, "intake", "claimed while the intake was closed")
        _must(task.attempt_id != old.attempt_id, "2", "an attempt id came twice")
        _must(task.scheduler_epoch == pool.epoch, "8", "granted under another epoch than the pool's")
        claimable = (old.state == READY and old.available_at <= now) or (was_live and (ran_out or older))
        _must(claimable, "lease", "claimed what was not to be had")
        _must(task.lease_expires_at > now, "lease", "a lease that never ran")
    if ended and asked.door in ("claim", "expire"):
        _must(ran_out or older, "lease", "a running lease was taken back")
    if asked.door in ("reopen", "revise"):
        charge = -old.charged_attempts
    elif asked.door == "fail":
        charge = 1
    else:
        charge = int(bool(ended) and asked.door in ("claim", "expire") and not older)
    _must(task.charged_attempts - old.charged_attempts == charge, "charge", f"charged otherwise than {charge}")
    if is_live and was_live and not started:
        _must(task.lease_expires_at >= old.lease_expires_at, "lease", "a lease was shortened")
        same = (task.attempt_id, task.owner_id, task.claimed_at) == (old.attempt_id, old.owner_id, old.claimed_at)
        _must(same, "2", "an attempt changed hands without a claim")
    if asked.door == "renew":
        young = now < old.claimed_at + pool.policy.max_claim_age * 1_000_000
        _must(young, "lease", "a claim was renewed beyond its age")
    if asked.door == "checkpoint":
        _must(task.checkpoint_number > old.checkpoint_number, "checkpoint", "an older checkpoint replaced a newer one")


def _judge_presented(asked: Asked, pool: Any, old: Any) -> None:
    if asked.door not in EPOCH_FREE_DOORS:
        _must(asked.epoch == pool.epoch, "8", f"accepted under epoch {asked.epoch} while the pool's is {pool.epoch}")
    if asked.door in FENCED_DOORS or asked.door in EFFECT_DOORS:
        _must(old.scheduler_epoch == pool.epoch, "3", "accepted from an attempt granted under an older epoch")
        _must(asked.generation == old.claim_generation, "3", "accepted another generation")
        _must(asked.attempt == old.attempt_id, "3", "accepted another attempt")
        _must(asked.cancel == old.cancel_generation, "3", "accepted another cancel generation")
        _must(asked.digest == old.input_digest, "3", "accepted another input digest")
        _must(old.state == CLAIMED, "3", "accepted from an attempt that had ended")
        other = asked.owner is not None or asked.door == "renew"
        _must(not other or asked.owner == old.owner_id, "3", "accepted another owner")
    if asked.door in ("claim", "expire", "reopen") and asked.version is not None:
        _must(asked.version == old.state_version, "expected", "another state version than the caller expected")
    if asked.door == "revise":
        _must(asked.revision == old.revision, "expected", "another revision than the caller expected")
    if asked.door == "take_over":
        _must(asked.generation == old.claim_generation, "expected", "another generation than the caller expected")
        _must(old.state == CLAIMED, "expected", "took over what nobody held")
    if asked.door == "discard":
        _must(0 < asked.generation <= old.claim_generation, "expected", "discarded for an attempt that never was")
    if asked.door == "reopen":
        _must(old.state in (CANCELLED, PARKED), "expected", "reopened what was open")
    if asked.door == "revise":
        _must(old.state not in (CANCELLED, COMMITTED), "expected", "revised what is over")
    if asked.door == "expire":
        _must(old.state == CLAIMED, "expected", "expired what nobody held")
    if asked.door == "cancel" and asked.cancel is not None:
        _must(asked.cancel == old.cancel_generation, "expected", "another cancel generation than the caller expected")


def _judge_results(asked: Asked, before: Any, after: Any, results: set[str], new: list[Any]) -> None:
    for result in new:
        old = before[result.task_id]
        _must(result.task_id not in results, "1", "a second result commit")
        _must(asked.door == "commit" and result.task_id == asked.task_id, "1", "a result by another door")
        held = (result.attempt_id, result.generation) == (old.attempt_id, old.claim_generation) and old.state == CLAIMED
        _must(held, "1", "its attempt did not hold the task's generation at that moment")
        _must(result.attempt_id == asked.attempt, "1", "a result of another attempt than the caller's")
        results.add(result.task_id)
    for task_id, task in after.items():
        _must((task.state == COMMITTED) == (task_id in results), "1", f"{task_id}: COMMITTED and its result differ")


def _judge_pool(asked: Asked, pool: Any, after: Any) -> None:
    _must(after.epoch >= pool.epoch, "2", "the epoch went down")
    _must(after.state_version == pool.state_version + 1, "2", "the pool's version did not move by one")
    _must(asked.epoch == pool.epoch, "8", "a pool command presented another epoch")
    if asked.version is not None:
        _must(asked.version == pool.state_version, "expected", "another pool version than the caller expected")


def judge_staged(task: Any, staged: Iterable[Any]) -> None:
    """What an attempt that ended has staged is decided: COMMITTED or DISCARDED, in the same change."""
    for row in staged:
        live = task.state == CLAIMED and row.generation == task.claim_generation
        _must(row.state != STAGED or live, "staged", "an ended attempt still has an undecided result")
