"""The doors of people and loops: submit, expire, cancel, reopen, revise, take_over, discard (claim.v1, section 4)."""

from __future__ import annotations

from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.digests import short_hash
from fencepost.kernel.fence import (
    EPOCH,
    FOUND_TASK,
    PROTOCOL,
    PROTOCOL_ONLY,
    Compare,
    Context,
    Guard,
    held_by,
)
from fencepost.kernel.graph import cancel_tree, insert_tasks
from fencepost.kernel.operations import (
    Accepted,
    Operation,
    changed,
    effects_of,
    end_attempt,
    event_of,
    guarded,
    repeat_guard,
    say,
    usage_entry,
    write_task,
)
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import End, LogEntry, Staged, StagedState, State
from fencepost.kernel.tasks import lapsed
from fencepost.kernel.writes import Decision, Proof, TaskWrite, WriteSet

# submit -----------------------------------------------------------------------------------------


def _submit_pools(c: Context) -> Any:
    for task in c.command.tasks:
        if task.pool not in c.snapshot.pools:
            return Refusal(Outcome.NOT_FOUND, Reason.POOL, {"pool": task.pool})
    return None


def _submit_protocol(c: Context) -> Any:
    for task in c.command.tasks:
        minimum = c.snapshot.pools[task.pool].min_protocol
        if c.command.protocol < minimum:
            return Refusal(
                Outcome.PROTOCOL, Reason.OLD_PROTOCOL, {"min_protocol": minimum, "protocol": c.command.protocol}
            )
    return None


def _submit_act(c: Context, proof: Proof) -> Decision:
    tasks = c.command.tasks
    writes = WriteSet(proof, tasks[0].pool if tasks else "", None)
    refused = insert_tasks(c, writes, tasks)
    if refused is not None:
        return Decision(refused)
    created = {write.task.task_id: write.task for write in writes.tasks}
    answer = [
        (created[task.task_id], True)
        if task.task_id in created and task.task_id not in c.snapshot.tasks
        else (c.snapshot.tasks[task.task_id], False)
        for task in tasks
    ]
    return Decision(
        Accepted(Outcome.SUBMITTED, None, {"tasks": answer}, changed=bool(created)), writes if created else None
    )


# expire, cancel ---------------------------------------------------------------------------------


def _expected_version(c: Context) -> Any:
    if c.command.expected_state_version != c.task.state_version:
        return Refusal(Outcome.CONFLICT, Reason.VERSION, held_by(c.task))
    return None


def _expire_state(c: Context) -> Any:
    if c.task.state != State.CLAIMED:
        return Refusal(Outcome.CONFLICT, Reason.STATE, held_by(c.task))
    if not lapsed(c):
        return Refusal(Outcome.HELD, None, held_by(c.task))
    return None


def _expire_act(c: Context, proof: Proof) -> Decision:
    task = c.task
    writes = WriteSet(proof, task.pool, None)
    after = end_attempt(c, writes, task, End.EXPIRED, state=State.READY, charge=task.scheduler_epoch == c.pool.epoch)
    write_task(writes, task, after, "claim")
    return Decision(Accepted(Outcome.EXPIRED, after, {"state": State(after.state).name}), writes)


def _committed(c: Context) -> Any:
    if c.task.state == State.COMMITTED:
        return Refusal(Outcome.ALREADY_COMMITTED, None, {"result_commit_id": c.task.result_commit_id})
    return None


def _cancel_since(c: Context) -> Any:
    """Already cancelled, or cancelled since this call was made: said so, nothing changes."""
    task, expected = c.task, c.command.expected_cancel_generation
    if expected > task.cancel_generation:
        return Refusal(Outcome.CONFLICT, Reason.VERSION, {"cancel_generation": task.cancel_generation})
    if task.state == State.CANCELLED or expected < task.cancel_generation:
        info = {"cancel_generation": task.cancel_generation, "state": State(task.state).name}
        return Decision(Accepted(Outcome.CANCELLED, task, info, changed=False))
    return None


def _cancel_act(c: Context, proof: Proof) -> Decision:
    writes = WriteSet(proof, c.task.pool, None)
    done = cancel_tree(c, writes, c.task, c.command.who)
    info = {
        "cancel_generation": done[0].cancel_generation,
        "state": "CANCELLED",
        "successors": [task.task_id for task in done[1:]],
    }
    return Decision(Accepted(Outcome.CANCELLED, done[0], info), writes)


# reopen, revise, take_over, discard -------------------------------------------------------------


def _reopen_state(c: Context) -> Any:
    if c.task.state not in (State.CANCELLED, State.PARKED):
        return Refusal(Outcome.CONFLICT, Reason.STATE, held_by(c.task))
    return None


def _open_state(c: Context) -> tuple[State, int | None]:
    """READY, or BLOCKED while a parent is open; and the first ready_at of this revision."""
    if c.task.deps_remaining > 0:
        return State.BLOCKED, None
    return State.READY, c.now


def _reopen_act(c: Context, proof: Proof) -> Decision:
    task = c.task
    state, ready_at = _open_state(c)
    after = changed(
        task,
        state=int(state),
        charged_attempts=0,
        park_reason=None,
        available_at=min(task.available_at, c.now) if state is State.READY else task.available_at,
        ready_at=task.ready_at if task.ready_at is not None else ready_at,
    )
    writes = guarded(c, proof)
    writes.events.append(
        event_of(
            after,
            c.now,
            "reopen",
            "task_reopened",
            proof.compared,
            {"who": c.command.who, "from": State(task.state).name},
        )
    )
    write_task(writes, task, after)
    return say(c, writes, "reopen", Outcome.REOPENED, after, {"state": state.name})


def _revise_revision(c: Context) -> Any:
    if c.command.expected_revision != c.task.revision:
        return Refusal(Outcome.CONFLICT, Reason.REVISION, {"revision": c.task.revision})
    return None


def _revise_state(c: Context) -> Any:
    if c.task.state == State.CANCELLED:
        return Refusal(Outcome.CONFLICT, Reason.STATE, held_by(c.task))
    return None


def _revise_open(c: Context) -> Any:
    """A new revision has new effect ids: what is under way under the old ones must be settled first."""
    revision = c.task.revision
    found = [e.effect_id for e in effects_of(c, c.task) if rules.blocks(e, revision)]
    return Refusal(Outcome.CONFLICT, Reason.EFFECTS, {"effects": found}) if found else None


def _revise_done(c: Context) -> Any:
    if c.command.accept_effects:
        return None
    revision = c.task.revision
    found = [e.effect_id for e in effects_of(c, c.task) if rules.took_place(e, revision)]
    return Refusal(Outcome.CONFLICT, Reason.EFFECTS, {"accept_effects": found}) if found else None


def _revise_act(c: Context, proof: Proof) -> Decision:
    task, command = c.task, c.command
    writes = guarded(c, proof)
    after = task
    if after.state == State.CLAIMED:
        after = end_attempt(c, writes, after, End.SUPERSEDED, state=State.READY, charge=False)
    state, ready_at = _open_state(c)
    after = changed(
        after,
        revision=task.revision + 1,
        input_digest=command.input.digest,
        state=int(state),
        charged_attempts=0,
        park_reason=None,
        ready_at=ready_at,
        available_at=min(task.available_at, c.now) if state is State.READY else task.available_at,
        checkpoint_number=0,
        checkpoint_generation=0,
    )
    writes.inputs.append((task.task_id, after.revision, command.input))
    writes.drop_checkpoints.append(task.task_id)
    writes.events.append(
        event_of(
            after,
            c.now,
            "revise",
            "input_revised",
            proof.compared,
            {"who": command.who, "input_digest": after.input_digest},
        )
    )
    write_task(writes, task, after)
    return say(c, writes, "revise", Outcome.REVISED, after, {"revision": after.revision, "state": state.name})


def _take_over_generation(c: Context) -> Any:
    if c.command.expected_generation != c.task.claim_generation:
        return Refusal(Outcome.CONFLICT, Reason.GENERATION, held_by(c.task))
    return None


def _take_over_live(c: Context) -> Any:
    if c.task.state != State.CLAIMED:
        return Refusal(Outcome.CONFLICT, Reason.STATE, held_by(c.task))
    return None


def _take_over_act(c: Context, proof: Proof) -> Decision:
    task = c.task
    writes = guarded(c, proof)
    after = end_attempt(
        c,
        writes,
        task,
        End.EXPIRED,
        state=State.READY,
        charge=False,
        detail={"who": c.command.who, "taken_over": True},
    )
    write_task(writes, task, after)
    return say(c, writes, "take_over", Outcome.TAKEN_OVER, after, {"state": State(after.state).name})


def _discard_generation(c: Context) -> Any:
    generation = c.command.generation
    if not 1 <= generation <= c.task.claim_generation:
        return Refusal(Outcome.NOT_FOUND, Reason.GENERATION, {"generation": c.task.claim_generation})
    return None


def _discard_staged(c: Context) -> Any:
    for staged in c.snapshot.staged.get(c.task.task_id, ()):
        if staged.generation == c.command.generation and staged.state == StagedState.STAGED:
            return None
    return Refusal(Outcome.CONFLICT, Reason.STATE, {"staged": 0})


def _discard_act(c: Context, proof: Proof) -> Decision:
    task = c.task
    after = changed(task)
    writes = guarded(c, proof)
    writes.discard_attempts.append((task.task_id, c.command.generation))
    writes.events.append(
        event_of(
            after,
            c.now,
            "discard",
            "staged_discarded",
            proof.compared,
            {"who": c.command.who, "generation": c.command.generation},
        )
    )
    write_task(writes, task, after)
    return say(c, writes, "discard", Outcome.DISCARDED, after, {"generation": c.command.generation})


# stage, usage: beside the records, no fence -------------------------------------------------------


def _attempt_existed(c: Context) -> Any:
    claim, task = c.claim, c.task
    if claim.generation == task.claim_generation and claim.attempt_id == task.attempt_id:
        return None
    start = c.snapshot.starts.get((task.task_id, claim.generation))
    if start is not None and start.attempt_id == claim.attempt_id:
        return None
    if task.pruned_to_version and 0 < claim.generation <= task.claim_generation and start is None:
        return Refusal(Outcome.NOT_FOUND, "ATTEMPT_PRUNED", {"pruned_to_version": task.pruned_to_version})
    return Refusal(Outcome.NOT_FOUND, "ATTEMPT", {})


def _stage_act(c: Context, proof: Proof) -> Decision:
    task, claim, content = c.task, c.claim, c.command.content
    live = (
        task.state == State.CLAIMED
        and task.claim_generation == claim.generation
        and task.cancel_generation == claim.cancel_generation
    )
    state = StagedState.STAGED if live else StagedState.DISCARDED
    writes = WriteSet(proof, task.pool, None)
    writes.staged.append(Staged(task.task_id, claim.generation, claim.attempt_id, content, int(state), c.now))
    writes.log.append(
        LogEntry(
            "result_staged",
            c.now,
            task.pool,
            task.task_id,
            "stage",
            Outcome.STAGED.value,
            state.name,
            short_hash(claim.attempt_id),
            claim.generation,
            {"digest": content.digest, "bytes": len(content.data)},
        )
    )
    # Staging moves no version, so that the store has to be told which state of the task it was decided on.
    writes.tasks.append(TaskWrite(task.state_version, task, "compare"))
    return say(c, writes, "stage", Outcome.STAGED, task, {"digest": content.digest, "state": state.name})


def _usage_act(c: Context, proof: Proof) -> Decision:
    writes = WriteSet(proof, c.task.pool, None)
    writes.log.append(usage_entry(c, c.task, c.command.usage, c.claim.generation, c.claim.attempt_id))
    return say(c, writes, "usage", Outcome.RECORDED, c.task)


ATTEMPT_EXISTED = Guard("stage:unknown-attempt:not-found", 0, _attempt_existed, "the attempt existed")
COMMITTED = Guard("people:committed:already-committed", Compare.STATE, _committed, "the task is not COMMITTED")
VERSION = Guard(
    "people:other-version:conflict", Compare.VERSION, _expected_version, "the task stands at the expected state version"
)


def _repeated(door: str) -> Guard:
    return Guard(f"{door}:repeated:said-again", 0, repeat_guard(door), "the request id is new")


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        k.Submit,
        "submit",
        (
            Guard("submit:unknown-pool:not-found", 0, _submit_pools, "every task's pool exists"),
            Guard(
                "submit:old-protocol:protocol",
                Compare.PROTOCOL,
                _submit_protocol,
                "the protocol is at least each pool's minimum",
            ),
        ),
        _submit_act,
    ),
    Operation(
        k.Expire,
        "expire",
        (
            FOUND_TASK,
            PROTOCOL_ONLY,
            VERSION,
            Guard(
                "expire:not-lapsed:conflict-or-held",
                Compare.STATE,
                _expire_state,
                "the task is CLAIMED and its lease ran out, or an older epoch granted it",
            ),
        ),
        _expire_act,
    ),
    Operation(
        k.Cancel,
        "cancel",
        (
            FOUND_TASK,
            PROTOCOL_ONLY,
            COMMITTED,
            Guard(
                "cancel:cancelled-since:said-so",
                Compare.CANCEL,
                _cancel_since,
                "it was not cancelled since this call was made",
            ),
        ),
        _cancel_act,
    ),
    Operation(
        k.Reopen,
        "reopen",
        (
            FOUND_TASK,
            PROTOCOL,
            EPOCH,
            _repeated("reopen"),
            COMMITTED,
            VERSION,
            Guard(
                "reopen:not-cancelled-or-parked:conflict",
                Compare.STATE,
                _reopen_state,
                "the task is CANCELLED or PARKED",
            ),
        ),
        _reopen_act,
    ),
    Operation(
        k.Revise,
        "revise",
        (
            FOUND_TASK,
            PROTOCOL,
            EPOCH,
            _repeated("revise"),
            COMMITTED,
            Guard(
                "revise:other-revision:conflict",
                Compare.REVISION,
                _revise_revision,
                "the task stands at the expected revision",
            ),
            Guard(
                "revise:cancelled:conflict",
                Compare.STATE,
                _revise_state,
                "the task is BLOCKED, READY, CLAIMED or PARKED",
            ),
            Guard(
                "revise:effects-open:conflict",
                0,
                _revise_open,
                "no effect of the revision is AWAITING_APPROVAL, PREPARED or UNKNOWN",
            ),
            Guard(
                "revise:effects-done:conflict",
                0,
                _revise_done,
                "none happened or may have, or the caller says that those are done with",
            ),
        ),
        _revise_act,
    ),
    Operation(
        k.TakeOver,
        "take_over",
        (
            FOUND_TASK,
            PROTOCOL,
            EPOCH,
            _repeated("take_over"),
            Guard(
                "take_over:other-generation:conflict",
                Compare.GENERATION,
                _take_over_generation,
                "the task stands at the expected generation",
            ),
            Guard("take_over:none-live:conflict", Compare.STATE, _take_over_live, "an attempt is live"),
        ),
        _take_over_act,
    ),
    Operation(
        k.Discard,
        "discard",
        (
            FOUND_TASK,
            PROTOCOL,
            EPOCH,
            _repeated("discard"),
            Guard(
                "discard:unknown-generation:not-found", Compare.GENERATION, _discard_generation, "that attempt existed"
            ),
            Guard("discard:nothing-staged:conflict", 0, _discard_staged, "it has a staged result that is not decided"),
        ),
        _discard_act,
    ),
    Operation(k.Stage, "stage", (FOUND_TASK, PROTOCOL_ONLY, _repeated("stage"), ATTEMPT_EXISTED), _stage_act),
    Operation(k.Usage, "usage", (FOUND_TASK, PROTOCOL_ONLY, _repeated("usage"), ATTEMPT_EXISTED), _usage_act),
)

__all__ = ["OPERATIONS", "Problem"]
