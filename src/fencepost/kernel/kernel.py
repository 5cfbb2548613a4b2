"""`Kernel.decide(snapshot, command)`: the one place where a command meets its door.

Also `Kernel.need`: which records a decision reads. Both walk the operation tables; a kernel with one
guard less (`without`) is what the mutation tests and the coverage test run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel import commit, decisions, effects, people, pools, prepare, tasks
from fencepost.kernel.fence import DOORS, Context, Guard
from fencepost.kernel.graph import parents_of
from fencepost.kernel.operations import Granted, Operation, guarded, refusal_entry, remember
from fencepost.kernel.outcomes import Problem, Refusal
from fencepost.kernel.records import EffectState, Task
from fencepost.kernel.writes import Decision, Keys, Proof, Snapshot, WriteSet, _prove

OPERATIONS: tuple[Operation, ...] = (
    *tasks.OPERATIONS,
    *commit.OPERATIONS,
    *prepare.OPERATIONS,
    *effects.OPERATIONS,
    *decisions.OPERATIONS,
    *people.OPERATIONS,
    *pools.OPERATIONS,
)

POOL_COMMANDS = (k.PoolCommand, k.CreatePool)
# Their effects are loaded with their task, in one look.
EFFECT_COMMANDS = frozenset(
    {k.Prepare, k.Reserve, k.Settle, k.Reconcile, k.Withdraw, k.Evidence, k.Approve, k.Deny, k.Resolve}
)
# Commands that have a record of their own to be known again by: a result, an execution, a piece of evidence.
NO_REQUEST = frozenset({k.Commit, k.Prepare, k.Evidence})
# Commands that neither read nor move a task's effects.
LEAVES_EFFECTS = frozenset({k.Renew, k.SaveCheckpoint, k.Stage, k.Usage, k.Discard, k.Reopen, k.Submit})

_replace = msgspec.structs.replace


def mask_of(guards: Sequence[Guard]) -> int:
    mask = 0
    for guard in guards:
        mask |= int(guard.compares)
    return mask


def _check_table() -> None:
    """Every door's guards make the comparisons that the door declares (claim_next compares per candidate)."""
    for operation in OPERATIONS:
        door = DOORS.get(operation.door)
        if door is None or operation.command is k.CreatePool:
            continue
        made = mask_of(operation.guards) | mask_of(operation.each)
        if made & door.compares != door.compares:
            raise AssertionError(f"{operation.command.__name__} does not compare all that {door.name} declares")


_check_table()


class Kernel:
    """The rules. Stateless; `Kernel()` is the shipped one."""

    def __init__(self, operations: Sequence[Operation] = OPERATIONS) -> None:
        self.operations = tuple(operations)
        # A door's proof is the same whoever passes: minted once, handed out by `decide` when every guard has passed.
        self._by_command: dict[type, tuple[Operation, Proof]] = {
            operation.command: (
                operation,
                _prove(operation.door, mask_of(operation.guards) | mask_of(operation.each)),
            )
            for operation in self.operations
        }

    def without(self, command: type, guard_id: str) -> Kernel:
        """A copy that lacks one guard of one operation: only for tests that must see it missed."""
        found = False
        changed: list[Operation] = []
        for operation in self.operations:
            if operation.command is command:
                kept = tuple(g for g in operation.guards if g.id != guard_id)
                each = tuple(g for g in operation.each if g.id != guard_id)
                found = (kept, each) != (operation.guards, operation.each)
                operation = _replace(operation, guards=kept, each=each)
            changed.append(operation)
        if not found:
            raise LookupError(f"{command.__name__} has no guard {guard_id}")
        return Kernel(changed)

    def guards(self) -> Iterator[tuple[type, Guard]]:
        """Every guard of every operation, in order: what the mutation tests remove one by one."""
        for operation in self.operations:
            for guard in (*operation.guards, *operation.each):
                yield operation.command, guard

    def decide(self, snapshot: Snapshot, command: Any, candidates: Iterable[Task] = ()) -> Decision:
        """The answer, what to write, and what to journal beside it.

        `candidates` are what the store's scan offered to claim_next, best first; each meets the
        guards of a claim, and is passed over in silence where one refuses it. No more is drawn from them than
        was looked at.
        """
        operation, proof = self._by_command[type(command)]
        context = _context(snapshot, command)
        for guard in operation.guards:
            answer = guard.check(context)
            if answer is not None:
                decision = _answered(context, operation, answer)
                if operation.report is not None and type(decision.answer) is Refusal:
                    return self._reported(snapshot, operation, command, decision)
                return decision
        if operation.each:
            return _claim_next(context, operation, guarded(context, proof), candidates)
        decision = operation.act(context, proof)
        answer = decision.answer
        if type(answer) is Refusal or type(answer) is Problem:
            return Decision(answer, decision.writes, (*decision.log, *_journal(context, operation, answer)))
        return decision

    def _reported(self, snapshot: Snapshot, operation: Operation, command: Any, refused: Decision) -> Decision:
        """The refusal, and beside it what it is still a report of: an accepted change of its own."""
        assert operation.report is not None
        report = operation.report(command)
        if report is None:
            return refused
        kept = self.decide(snapshot, report)
        if type(kept.answer) is Refusal:
            return refused
        return Decision(refused.answer, kept.writes, (*refused.log, *kept.log))

    def need(self, command: Any, snapshot: Snapshot, keys: Keys) -> None:
        """Add to `keys` what deciding `command` reads, as far as the records seen so far show it.

        Call again after each load until nothing new comes: a commit's successors, say, are known only
        once the task is.
        """
        kind = type(command)
        if kind is k.ClaimNext:
            keys.pools.add(command.pool)
            keys.requests.add(command.request_id)
            request = snapshot.requests.get(command.request_id) if snapshot.requests else None
            if request is not None:
                keys.tasks.update(entry[0] for entry in request.answer.get("claims", ()))
            return
        claim: Any = getattr(command, "claim", None)
        if claim is None:
            if isinstance(command, POOL_COMMANDS):
                keys.pools.add(command.pool)
                keys.requests.add(command.request_id)
                return
            if kind is k.Submit:
                _need_tasks(command.tasks, keys)
                return
        task_id: str = claim.task_id if claim is not None else command.task_id
        keys.tasks.add(task_id)
        if kind in EFFECT_COMMANDS:
            keys.effects.add(task_id)
        if kind not in NO_REQUEST:
            keys.requests.add(command.request_id)
        task = snapshot.tasks.get(task_id)
        if task is None:
            if claim is not None:
                keys.pools.add(claim.pool)  # most likely the task's: saves a look later, and decides nothing
            return
        keys.pools.add(task.pool)
        if task.effects and kind not in LEAVES_EFFECTS:
            keys.effects.add(task_id)
        if kind is k.Prepare:
            _need_payload(command, task, snapshot, keys)
        elif kind is k.Commit:
            _need_commit(command, task, snapshot, keys)
        elif kind is k.Cancel:
            _need_tree(task_id, snapshot, keys)
        elif kind is k.Claim:
            request = snapshot.requests.get(command.request_id)
            if request is not None:
                keys.tasks.update(entry[0] for entry in request.answer.get("claims", ()))
        elif kind is k.Discard:
            keys.staged.add(task_id)
        elif kind is k.Stage or kind is k.Usage:
            if claim.generation != task.claim_generation or claim.attempt_id != task.attempt_id:
                keys.starts.add((task_id, claim.generation))


def _need_payload(command: k.Prepare, task: Task, snapshot: Snapshot, keys: Keys) -> None:
    """The bound payload, where the slot holds one: whoever comes next can finish what it did not start. And what the
    request id was used for, where an approval may come of it or be used up."""
    held = None
    node = command.node_id if command.node_id is not None else task.node_id
    for effect in snapshot.effects.get(task.task_id, ()):
        if (effect.revision, effect.node_id, effect.slot) == (task.revision, node, command.slot):
            keys.payloads.add((task.task_id, effect.number))
            held = effect
    if prepare.asks_approval(held, command) or (held is not None and held.state == EffectState.AWAITING_APPROVAL):
        keys.requests.add(command.request_id)


def _need_tasks(new: Sequence[k.NewTask], keys: Keys) -> None:
    for task in new:
        keys.tasks.add(task.task_id)
        keys.pools.add(task.pool)
    keys.tasks.update(parents_of(new))


def _need_commit(command: k.Commit, task: Task, snapshot: Snapshot, keys: Keys) -> None:
    task_id = task.task_id
    if task.result_commit_id is not None:
        keys.results.add(task_id)
        return
    if command.content is None:
        keys.staged.add(task_id)
    if task.deps_total:
        keys.parents.add(task_id)
        keys.results.update(snapshot.parents.get(task_id, ()))
    if task.successors:
        keys.children.add(task_id)
        keys.tasks.update(snapshot.children.get(task_id, ()))
    if command.spawn:
        _need_tasks(command.spawn, keys)


def _need_tree(task_id: str, snapshot: Snapshot, keys: Keys) -> None:
    waiting = [task_id]
    seen = {task_id}
    while waiting:
        found = waiting.pop()
        task = snapshot.tasks.get(found)
        if task is None or not task.successors:
            continue
        keys.children.add(found)
        for child in snapshot.children.get(found, ()):
            keys.tasks.add(child)
            known = snapshot.tasks.get(child)
            if known is not None and known.effects:
                keys.effects.add(child)
            if known is not None and known.cancel_with_parent and child not in seen:
                seen.add(child)
                waiting.append(child)


def _context(snapshot: Snapshot, command: Any) -> Context:
    claim = getattr(command, "claim", None)
    if claim is not None:
        task = snapshot.tasks.get(claim.task_id)
    elif type(command) is k.ClaimNext or isinstance(command, POOL_COMMANDS):
        return Context(snapshot, command, snapshot.pools.get(command.pool), None)
    elif type(command) is k.Submit:
        return Context(snapshot, command, None, None)
    else:
        task = snapshot.tasks.get(command.task_id)
    return Context(snapshot, command, snapshot.pools.get(task.pool) if task is not None else None, task)


def _answered(context: Context, operation: Operation, answer: Any) -> Decision:
    if type(answer) is not Decision:
        return Decision(answer, None, _journal(context, operation, answer))
    if type(answer.answer) is Refusal:
        return Decision(answer.answer, answer.writes, (*answer.log, *_journal(context, operation, answer.answer)))
    return answer


def _journal(context: Context, operation: Operation, answer: Any) -> tuple[Any, ...]:
    if type(answer) is Problem:
        return ()  # a wrong call is the caller's to see; it is no event of the pool
    entry = refusal_entry(context, operation.door, answer)
    if answer.alarm:
        return (entry, _replace(entry, kind="alarm"))
    return (entry,)


def _claim_next(context: Context, operation: Operation, writes: WriteSet, candidates: Iterable[Task]) -> Decision:
    command = context.command
    each, limit = operation.each, len(command.attempt_ids)
    granted: list[Task] = []
    for task in candidates:
        context.task = task
        for guard in each:
            if guard.check(context) is not None:
                break
        else:
            after = tasks.grant(context, writes, command.attempt_ids[len(granted)])
            if after is not None:
                granted.append(after)
                if len(granted) == limit:
                    break
    if granted:
        claims = tuple([(task.task_id, task.claim_generation, task.attempt_id) for task in granted])
        remember(context, writes, "claim", command.owner_id, {"claims": claims})
    return Decision(Granted(tuple(granted)), writes if writes.tasks else None)


__all__ = ["OPERATIONS", "Granted", "Kernel", "mask_of"]
