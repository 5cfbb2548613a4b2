"""commit: the one door through which a result becomes canonical (claim.v1, section 4)."""

from __future__ import annotations

from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.digests import digest, digest_bytes
from fencepost.kernel.fence import FENCE_HEAD, FENCE_TAIL, FOUND_TASK, Context, Guard
from fencepost.kernel.graph import insert_tasks, release_successors
from fencepost.kernel.operations import (
    Accepted,
    Operation,
    _replace,
    effects_of,
    event_of,
    guarded,
    usage_entry,
    write_task,
)
from fencepost.kernel.outcomes import Outcome, Problem, Refusal
from fencepost.kernel.records import (
    COMMITTED,
    END_COMMITTED,
    Effect,
    EffectState,
    Execution,
    Guarantee,
    LogEntry,
    ResultCommit,
    StagedState,
    Statement,
    Task,
    Terms,
)
from fencepost.kernel.writes import Decision, Proof, WriteSet


def commit_digest(command: k.Commit) -> str:
    """Digest of [result digest, spawned tasks, statements]: what makes two commits the same commit."""
    if not command.spawn and not command.statements:
        return digest_bytes(b'["%b",[],[]]' % command.result_digest.encode())
    spawned = [
        [task.task_id, task.submitted_digest, task.queue, task.kind, task.priority, task.max_attempts]
        for task in command.spawn
    ]
    statements = [[s.node_id, s.slot, s.payload.digest, s.downstream] for s in command.statements]
    return digest([command.result_digest, spawned, statements])


def _commit_replay(c: Context) -> Any:
    """A repeat by the attempt whose commit has this very digest is answered from the record, before the fence."""
    if c.task.state != COMMITTED:
        return None
    result = c.snapshot.results.get(c.task.task_id)
    if result is None or result.attempt_id != c.claim.attempt_id or result.commit_digest != commit_digest(c.command):
        return None
    return Decision(
        Accepted(Outcome.COMMITTED, c.task, {"result": result}, changed=False),
        log=(LogEntry("replay", c.now, c.pool.name, c.task.task_id, "commit", Outcome.COMMITTED.value),),
    )


def _commit_staged(c: Context) -> Any:
    command = c.command
    if command.content is not None:
        return None
    for staged in c.snapshot.staged.get(c.task.task_id, ()):
        if staged.generation == c.task.claim_generation and staged.content.digest == command.result_digest:
            if staged.state != StagedState.DISCARDED:
                return None
    return Problem("NOT_STAGED", c.task.task_id, command.result_digest)


def _commit_settled(c: Context) -> Any:
    task = c.task
    if not task.effects:
        return None
    found = [e for e in effects_of(c, task) if rules.blocks(e, task.revision)]
    if not found:
        return None
    return Problem("UNSETTLED", task.task_id, ",".join(e.effect_id for e in found))


def _commit_slots(c: Context) -> Any:
    """A statement's slot is empty: what it was bound to before is not this statement's to do."""
    task = c.task
    if not c.command.statements:
        return None
    taken: set[tuple[str, str]] = set()
    for position, statement in enumerate(c.command.statements):
        node = statement.node_id or task.node_id
        if (node, statement.slot) in taken:
            return Problem("INVALID", f"statements[{position}].slot", f"{statement.slot!r} appears twice")
        taken.add((node, statement.slot))
        for effect in effects_of(c, task):
            if (effect.revision, effect.node_id, effect.slot) == (task.revision, node, statement.slot):
                return Refusal(Outcome.PAYLOAD_CONFLICT, None, rules.shown(effect))
    if task.effects + len(c.command.statements) > k.MAX_EFFECTS:
        return Problem("INVALID", "statements", f"a task may have at most {k.MAX_EFFECTS} effects")
    return None


def _execute_statements(c: Context, writes: WriteSet, before: Task) -> list[dict[str, Any]]:
    """TRANSACTIONAL effects: bound, executed and COMMITTED by the very transaction that commits the result."""
    command, now, said = c.command, c.now, []
    for number, statement in enumerate(command.statements, before.effects + 1):
        node = statement.node_id or before.node_id
        effect_id = rules.effect_id(command.namespace, before.task_id, before.revision, node, statement.slot)
        execution = Execution(
            1,
            command.request_id,
            before.claim_generation,
            before.attempt_id or "",
            before.scheduler_epoch,
            now,
            now,
        )
        effect = Effect(
            task_id=before.task_id,
            number=number,
            effect_id=effect_id,
            pool=before.pool,
            revision=before.revision,
            node_id=node,
            slot=statement.slot,
            payload_digest=statement.payload.digest,
            terms=Terms(statement.downstream, Guarantee.TRANSACTIONAL.value, 0, 0),
            state=int(EffectState.COMMITTED),
            version=1,
            first_prepared_at=now,
            changed_at=now,
            executions=(execution,),
        )
        writes.effects.append(effect)
        writes.payloads.append((before.task_id, number, statement.payload))
        writes.statements.append(Statement(effect_id, statement.slot, statement.payload))
        said.append(
            {"effect": effect_id, "number": number, "slot": statement.slot, "payload": statement.payload.digest}
        )
    return said


def _commit_act(c: Context, proof: Proof) -> Decision:
    task, command, now = c.task, c.command, c.now
    parents: tuple[str, ...] = ()
    if task.deps_total:
        found = (c.snapshot.results.get(p) for p in c.snapshot.parents.get(task.task_id, ()))
        parents = tuple(r.result_commit_id for r in found if r is not None)
    after = _replace(
        task,
        state=COMMITTED,
        state_version=task.state_version + 1,
        lease_expires_at=None,
        result_commit_id=command.result_commit_id,
        end=END_COMMITTED,
        effects=task.effects + len(command.statements),
    )
    result = ResultCommit(
        task.task_id,
        command.result_commit_id,
        task.revision,
        task.attempt_id or "",
        task.claim_generation,
        command.result_digest,
        commit_digest(command),
        parents,
        now,
        command.content,
    )
    writes = guarded(c, proof)
    reads = rules.end_reads(writes, effects_of(c, task), now) if task.effects else {}
    write_task(writes, task, after, "any" if command.statements or reads else "commit")
    writes.results.append(result)
    detail: dict[str, Any] = {
        "result": command.result_digest,
        "ready_us": now - task.ready_at if task.ready_at is not None else None,
        **reads,
    }
    if command.statements:
        detail["effects"] = _execute_statements(c, writes, task)
    writes.events.append(event_of(after, now, "commit", "result_committed", proof.compared, detail))
    writes.discard_rivals.append((task.task_id, task.claim_generation, command.result_digest))
    if task.successors:
        release_successors(c, writes, after)
    if command.spawn:
        problem = insert_tasks(c, writes, command.spawn, committing=after)
        if problem is not None:
            return Decision(problem)
    if command.usage:
        writes.log.append(usage_entry(c, task, command.usage))
    return Decision(Accepted(Outcome.COMMITTED, after, {"result": result}), writes)


def _guard(id: str, check: Any, says: str, compares: int = 0) -> Guard:
    return Guard(id, compares, check, says)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        k.Commit,
        "commit",
        (
            FOUND_TASK,
            _guard("commit:repeated:committed-again", _commit_replay, "this commit has not been made already"),
            *FENCE_HEAD[1:],
            *FENCE_TAIL,
            _guard(
                "commit:not-staged:not-staged", _commit_staged, "the result was staged by this attempt, or came along"
            ),
            _guard(
                "commit:effects-open:unsettled",
                _commit_settled,
                "no effect of the revision is AWAITING_APPROVAL, PREPARED or UNKNOWN",
            ),
            _guard("commit:slot-taken:payload-conflict", _commit_slots, "the slot of each statement is empty"),
        ),
        _commit_act,
    ),
)
