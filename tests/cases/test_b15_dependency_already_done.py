"""B15: a dependency is added after its parent already committed."""

from __future__ import annotations

import asyncio

import pytest

from fencepost import Committed, InvalidRequest, NewTask, Refused, TaskView
from tests.faults.stage import Stage

ROUNDS = 500


async def test_b15_a_child_submitted_while_its_parent_commits_in_another_process_is_never_stuck(stage: Stage) -> None:
    client = await stage.client()
    worker = await stage.hand()
    await client.submit_many([NewTask(n, task_id=f"p{n:03}", queue="parents") for n in range(ROUNDS)])
    claims = await worker.call("claim_next", owner="A", queues=["parents"], limit=ROUNDS)
    ready_at_birth = 0
    for n, claim in enumerate(claims):
        commit = worker.start("commit", claim, n)
        # From before the commit to after it.
        await asyncio.sleep(n % 8 * 0.0003)
        submitted, committed = await asyncio.gather(
            client.submit(NewTask(n, task_id=f"c{n:03}", depends_on=[claim.task_id], queue="children")), commit
        )
        assert isinstance(committed, Committed) and not isinstance(submitted, Refused)
        ready_at_birth += submitted.task.state == "READY"
        view = await client.task(f"c{n:03}")
        assert isinstance(view, TaskView) and (view.state, view.deps_remaining) == ("READY", 0)
    assert 0 < ready_at_birth < ROUNDS, f"no race: {ready_at_birth} of {ROUNDS} were ready when they were submitted"
    children = await client.claim_next(owner="B", queues=["children"], limit=ROUNDS)
    assert isinstance(children, list)
    assert sorted(claim.task_id for claim in children) == [f"c{n:03}" for n in range(ROUNDS)]
    assert all(claim.generation == 1 and list(claim.parents) == [f"p{claim.task_id[1:]}"] for claim in children)
    await stage.audit()


async def test_b15_one_parent_done_and_one_open_waits_for_the_open_one_alone(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(1, task_id="p"), NewTask(2, task_id="q", priority=9)])
    [p] = await client.claim_next(owner="A")  # type: ignore[misc]
    await client.commit(p, "of p")
    await client.submit(NewTask(3, task_id="c", depends_on=["p", "q"], queue="later"))
    view = await client.task("c")
    assert isinstance(view, TaskView) and (view.state, view.deps_remaining) == ("BLOCKED", 1)
    [q] = await client.claim_next(owner="A")  # type: ignore[misc]
    await client.commit(q, "of q")
    [c] = await client.claim_next(owner="A", queues=["later"])  # type: ignore[misc]
    assert c.parents == {"p": "of p", "q": "of q"}


async def test_b15_a_graph_submitted_again_after_it_was_done_stands_as_it_was(stage: Stage) -> None:
    client = await stage.client()
    graph = [
        NewTask(1, task_id="p"),
        NewTask(2, task_id="c", depends_on=["p"]),
        NewTask(3, task_id="d", depends_on=["c"]),
    ]
    await client.submit_many(graph)
    for _ in range(2):
        [claim] = await client.claim_next(owner="A")  # type: ignore[misc]
        await client.commit(claim, claim.input)
    again = await client.submit_many(graph)
    assert isinstance(again, list)
    assert [(each.created, each.task.state) for each in again] == [
        (False, "COMMITTED"),
        (False, "COMMITTED"),
        (False, "READY"),
    ]
    # And what is new in it, below what is done, can start at once.
    more = await client.submit_many([*graph, NewTask(4, task_id="e", depends_on=["p", "c"])])
    assert isinstance(more, list) and (more[3].created, more[3].task.state) == (True, "READY")
    await stage.audit()


async def test_b15_missing_parents_cycles_and_oneself_are_refused_and_nothing_is_written(stage: Stage) -> None:
    client = await stage.client()
    for tasks in (
        [NewTask(1, task_id="good"), NewTask(1, task_id="c", depends_on=["nobody"])],
        [NewTask(1, task_id="good"), NewTask(1, task_id="c", depends_on=["c"])],
        [
            NewTask(1, task_id="good"),
            NewTask(1, task_id="c", depends_on=["d"]),
            NewTask(1, task_id="d", depends_on=["c"]),
        ],
    ):
        with pytest.raises(InvalidRequest, match="depends_on"):
            await client.submit_many(tasks)
    assert (await client.tasks()).items == []
