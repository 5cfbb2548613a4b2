"""Graphs (claim.v1, section 6): inserting tasks with dependencies, releasing and cancelling successors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fencepost.kernel.commands import NewTask
from fencepost.kernel.fence import Context
from fencepost.kernel.operations import changed, end_attempt, event_of, write_task
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import Dependency, End, State, Task
from fencepost.kernel.writes import TaskWrite, WriteSet


def _find_cycle(new: dict[str, NewTask]) -> str | None:
    """A task of the batch that depends on itself, in however many steps. Stored tasks cannot close a cycle:
    they were there before their new successors."""
    remaining = {task_id: {p for p in task.depends_on if p in new} for task_id, task in new.items()}
    followers: dict[str, list[str]] = {}
    for task_id, parents in remaining.items():
        for parent in parents:
            followers.setdefault(parent, []).append(task_id)
    open_now = [task_id for task_id, parents in remaining.items() if not parents]
    seen = 0
    while open_now:
        done = open_now.pop()
        seen += 1
        for follower in followers.get(done, ()):
            remaining[follower].discard(done)
            if not remaining[follower]:
                open_now.append(follower)
    if seen == len(new):
        return None
    return next(task_id for task_id, parents in remaining.items() if parents)


def _same_submission(standing: Task, task: NewTask) -> bool:
    return standing.submitted_digest == task.submitted_digest


def insert_tasks(c: Context, writes: WriteSet, tasks: Sequence[NewTask], committing: Task | None = None) -> Any:
    """Plan the insertion of `tasks`, all or nothing. None, or the Refusal/Problem that stops all of them.

    With `committing`, a commit's spawned tasks: the committing task counts as COMMITTED, and an id
    that stands otherwise is SPAWN_CONFLICT.
    """
    field = "tasks" if committing is None else "spawn"
    new: dict[str, NewTask] = {}
    for position, task in enumerate(tasks):
        if task.task_id in new:
            return Problem("INVALID", f"{field}[{position}].task_id", f"{task.task_id!r} appears twice in the batch")
        new[task.task_id] = task
    standing = c.snapshot.tasks
    for task in tasks:
        there = standing.get(task.task_id)
        if committing is not None and task.task_id == committing.task_id:
            return Problem("SPAWN_CONFLICT", task.task_id, "is the committing task itself")
        if there is not None and not _same_submission(there, task):
            if committing is not None:
                return Problem("SPAWN_CONFLICT", task.task_id, "stands with another input, pool, node or dependencies")
            return Refusal(
                Outcome.CONFLICT,
                Reason.DIFFERENT_TASK,
                {
                    "task_id": task.task_id,
                    "submitted_digest": there.submitted_digest,
                    "presented": task.submitted_digest,
                },
            )
    fresh = {task_id: task for task_id, task in new.items() if task_id not in standing}
    cycle = _find_cycle(fresh)
    if cycle is not None:
        return Problem("INVALID", "depends_on", f"task {cycle!r} depends on itself through the batch")
    successors: dict[str, int] = {}
    for position, task in enumerate(tasks):
        if task.task_id not in fresh:
            continue
        if len(set(task.depends_on)) != len(task.depends_on):
            return Problem("INVALID", f"{field}[{position}].depends_on", "names a task twice")
        for parent_id in task.depends_on:
            in_batch = fresh.get(parent_id)
            parent = standing.get(parent_id)
            if in_batch is None and parent is None:
                return Problem(
                    "INVALID", f"{field}[{position}].depends_on", f"no task {parent_id!r} in the batch or the store"
                )
            pool = in_batch.pool if in_batch is not None else parent.pool  # type: ignore[union-attr]
            if pool != task.pool:
                return Problem(
                    "INVALID",
                    f"{field}[{position}].depends_on",
                    f"{parent_id!r} lives in pool {pool!r}, not {task.pool!r}",
                )
            if parent is not None and parent.state == State.CANCELLED and task.cancel_with_parent:
                return Problem("INVALID", f"{field}[{position}].depends_on", f"{parent_id!r} is cancelled")
            if in_batch is not None or not _counts_as_committed(parent, committing):
                successors[parent_id] = successors.get(parent_id, 0) + 1
    for task in tasks:
        if task.task_id in fresh:
            _insert(c, writes, task, fresh, successors, committing)
    for parent_id, count in successors.items():
        if parent_id not in fresh:
            _add_successors(c, writes, standing[parent_id], count)
    return None


def _counts_as_committed(parent: Task | None, committing: Task | None) -> bool:
    assert parent is not None
    return parent.state == State.COMMITTED or (committing is not None and parent.task_id == committing.task_id)


def _insert(
    c: Context,
    writes: WriteSet,
    task: NewTask,
    fresh: dict[str, NewTask],
    successors: dict[str, int],
    committing: Task | None,
) -> None:
    now = c.now
    pool = c.snapshot.pools[task.pool]
    left = sum(
        1 for p in task.depends_on if p in fresh or not _counts_as_committed(c.snapshot.tasks.get(p), committing)
    )
    available_at = task.available_at if task.available_at is not None else now + task.delay_us
    record = Task(
        task.task_id,
        task.pool,
        task.queue,
        task.kind,
        task.graph_id,
        task.node_id,
        1,
        task.input.digest,
        task.submitted_digest,
        int(State.BLOCKED if left else State.READY),
        1,
        0,
        0,
        None,
        None,
        None,
        None,
        0,
        None,
        task.priority,
        available_at,
        None if left else now,
        0,
        task.max_attempts if task.max_attempts is not None else pool.policy.max_attempts,
        len(task.depends_on),
        left,
        successors.get(task.task_id, 0),
        0,
        0,
        0,
        task.cancel_with_parent,
        None,
        now,
        0,
        task.trace_context,
    )
    writes.inputs.append((task.task_id, 1, task.input))
    for parent_id in task.depends_on:
        writes.dependencies.append(Dependency(task.task_id, parent_id))
    proof = writes.proof
    writes.events.append(event_of(record, now, proof.door, "submitted", proof.compared))
    writes.tasks.append(TaskWrite(0, record, "insert"))


def _add_successors(c: Context, writes: WriteSet, parent: Task, count: int) -> None:
    # A commit may release a task and spawn a successor of it at once: one record, one write, one change on the other.
    for position, written in enumerate(writes.tasks):
        if written.task.task_id == parent.task_id:
            after = changed(written.task, successors=written.task.successors + count)
            writes.tasks[position] = TaskWrite(written.expected_version, after, "any")
            break
    else:
        after = changed(parent, successors=parent.successors + count)
        write_task(writes, parent, after)
    proof = writes.proof
    writes.events.append(
        event_of(after, c.now, proof.door, "successor_added", proof.compared, {"successors": after.successors})
    )


def release_successors(c: Context, writes: WriteSet, parent: Task) -> None:
    """Count down every successor once, in whatever state it is; BLOCKED ones with nothing left become READY."""
    for child_id in c.snapshot.children.get(parent.task_id, ()):
        child = c.snapshot.tasks[child_id]
        left = child.deps_remaining - 1
        fields: dict[str, Any] = {"deps_remaining": left}
        if left == 0 and child.state == State.BLOCKED:
            fields["state"] = int(State.READY)
            fields["ready_at"] = c.now
        after = changed(child, **fields)
        writes.events.append(
            event_of(
                after,
                c.now,
                "commit",
                "parent_committed",
                writes.proof.compared,
                {"parent": parent.task_id, "left": left},
            )
        )
        write_task(writes, child, after)


def cancel_tree(c: Context, writes: WriteSet, task: Task, who: str) -> list[Task]:
    """Cancel `task`, and every successor whose graph says so. Each: its live attempt ends, cancel generation + 1."""
    done: list[Task] = []
    waiting = [task]
    seen = {task.task_id}
    while waiting:
        before = waiting.pop()
        after = before
        if after.state == State.CLAIMED:
            after = end_attempt(c, writes, after, End.CANCELLED, state=State.CANCELLED, charge=False)
        after = changed(
            after, state=int(State.CANCELLED), cancel_generation=after.cancel_generation + 1, park_reason=None
        )
        detail: dict[str, Any] = {"who": who} if not done else {"who": who, "parent": task.task_id}
        writes.events.append(event_of(after, c.now, writes.proof.door, "task_cancelled", writes.proof.compared, detail))
        write_task(writes, before, after)
        done.append(after)
        for child_id in c.snapshot.children.get(before.task_id, ()):
            child = c.snapshot.tasks.get(child_id)
            if child is None or child_id in seen or not child.cancel_with_parent:
                continue
            if child.state in (State.BLOCKED, State.PARKED):
                seen.add(child_id)
                waiting.append(child)
    return done


def parents_of(tasks: Iterable[NewTask]) -> set[str]:
    return {parent for task in tasks for parent in task.depends_on}
