"""Graphs: what a submit may name, when a child becomes READY, lineage, spawned tasks, cancelling with the parent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.operations import Accepted
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import Pool, State
from tests.model.world import World, new_task


def problem(answer: Any, code: str, field: str = "") -> Problem:
    assert type(answer) is Problem, answer
    assert answer.code == code
    assert field in answer.field
    return answer


def commit(world: World, task_id: str, **fields: Any) -> Any:
    return world.ask(k.Commit, world.claimed(task_id), **fields)


# submit -----------------------------------------------------------------------------------------


def test_a_batch_is_all_or_nothing() -> None:
    world = World()
    world.submit(new_task("a"))
    answer = world.submit(new_task("b"), new_task("a", value="another input"), new_task("c"))
    assert type(answer) is Refusal
    assert (answer.outcome, answer.reason) == (Outcome.CONFLICT, Reason.DIFFERENT_TASK)
    assert list(world.tasks) == ["a"]


def test_the_same_task_again_is_the_standing_one_beside_new_ones() -> None:
    world = World()
    world.submit(new_task("a"))
    answer = world.submit(new_task("a"), new_task("b", depends_on=["a"]))
    assert type(answer) is Accepted
    assert [(task.task_id, created) for task, created in answer.info["tasks"]] == [("a", False), ("b", True)]
    assert world.submit(new_task("a"), new_task("b", depends_on=["a"])).changed is False


@pytest.mark.parametrize(
    "changed",
    [{"value": "other"}, {"node_id": "other"}, {"depends_on": ["p"]}, {"pool": "other"}],
    ids=lambda changed: next(iter(changed)),
)
def test_the_same_id_with_another_input_node_pool_or_dependency_is_a_conflict(changed: dict[str, Any]) -> None:
    world = World()
    world.pools["other"] = Pool("other")
    world.submit(new_task("p"), new_task("a"))
    answer = world.submit(new_task("a", **changed))
    assert type(answer) is Refusal
    assert answer.outcome is Outcome.CONFLICT
    # What routes a task is no part of what it is.
    assert world.submit(new_task("a", queue="elsewhere", priority=5)).changed is False


@pytest.mark.parametrize(
    "tasks",
    [
        [new_task("a", depends_on=["a"])],
        [new_task("a", depends_on=["b"]), new_task("b", depends_on=["a"])],
        [new_task("a", depends_on=["c"]), new_task("b", depends_on=["a"]), new_task("c", depends_on=["b", "p"])],
        [new_task("a", depends_on=["nowhere"])],
        [new_task("a", depends_on=["p", "p"])],
        [new_task("a"), new_task("a")],
        [new_task("a", depends_on=["elsewhere"])],
    ],
    ids=["itself", "two", "three", "unknown", "twice", "same-id", "other-pool"],
)
def test_a_cycle_an_unknown_a_double_or_a_foreign_parent_is_invalid_and_writes_nothing(tasks: list[k.NewTask]) -> None:
    world = World()
    world.pools["other"] = Pool("other")
    world.submit(new_task("p"), new_task("elsewhere", pool="other"))
    problem(world.submit(new_task("fine"), *tasks), "INVALID")
    assert sorted(world.tasks) == ["elsewhere", "p"]


def test_a_batch_may_name_its_tasks_in_any_order() -> None:
    tasks = [new_task("a"), new_task("b", depends_on=["a"]), new_task("c", depends_on=["a", "b"])]
    for order in itertools.permutations(tasks):
        world = World()
        assert type(world.submit(*order)) is Accepted
        assert [world.tasks[n].state for n in "abc"] == [State.READY, State.BLOCKED, State.BLOCKED]
        assert [world.tasks[n].deps_remaining for n in "abc"] == [0, 1, 2]
        assert [world.tasks[n].successors for n in "abc"] == [2, 1, 0]


def test_a_parent_that_is_committed_counts_as_done_and_a_cancelled_one_leaves_its_child_blocked() -> None:
    world = World()
    world.submit(new_task("done"), new_task("cancelled"))
    commit(world, "done")
    world.person(k.Cancel, "cancelled")
    world.submit(new_task("a", depends_on=["done"]), new_task("b", depends_on=["done", "cancelled"]))
    assert (world.tasks["a"].state, world.tasks["b"].state) == (State.READY, State.BLOCKED)
    answer = world.submit(new_task("c", depends_on=["cancelled"], cancel_with_parent=True))
    problem(answer, "INVALID", "depends_on")


def test_a_closed_intake_does_not_stop_a_submit_nor_a_raised_epoch() -> None:
    world = World()
    world.pool_command(k.CloseIntake)
    world.raise_epoch()
    assert type(world.submit(new_task("a"))) is Accepted


# becoming READY ---------------------------------------------------------------------------------


def test_of_64_parents_the_last_to_commit_makes_the_child_ready_once() -> None:
    world = World()
    names = [f"p{n}" for n in range(64)]
    world.submit(*(new_task(name) for name in names), new_task("t", depends_on=names))
    for number, name in enumerate(names, 1):
        assert world.tasks["t"].state == State.BLOCKED
        commit(world, name)
        assert world.tasks["t"].deps_remaining == 64 - number
    assert world.tasks["t"].state == State.READY
    ready = [e for e in world.events_of("t") if e.name == "parent_committed" and e.state == State.READY]
    assert len(ready) == 1
    assert world.tasks["t"].state_version == 65


def test_the_lineage_names_the_result_commits_of_the_parents() -> None:
    world = World()
    world.submit(new_task("a"), new_task("b"), new_task("t", depends_on=["a", "b"]))
    for name in ("a", "b", "t"):
        commit(world, name, result_commit_id=f"commit-of-{name}")
    assert set(world.results["t"].parents) == {"commit-of-a", "commit-of-b"}
    assert world.results["a"].parents == ()


def test_parking_or_cancelling_a_parent_leaves_its_successor_blocked() -> None:
    world = World()
    world.submit(
        new_task("a"), new_task("t", depends_on=["a"]), new_task("u", depends_on=["a"], cancel_with_parent=True)
    )
    world.ask(k.Fail, world.claimed("a"), retry=False)
    assert [world.tasks[n].state for n in "atu"] == [State.PARKED, State.BLOCKED, State.BLOCKED]
    world.person(k.Cancel, "a")
    assert [world.tasks[n].state for n in "atu"] == [State.CANCELLED, State.BLOCKED, State.CANCELLED]


def test_cancel_goes_down_the_graph_as_far_as_it_says_on_failure_cancel() -> None:
    world = World()
    world.submit(
        new_task("a"),
        new_task("b", depends_on=["a"], cancel_with_parent=True),
        new_task("c", depends_on=["a", "b"], cancel_with_parent=True),
        new_task("d", depends_on=["c"]),
        new_task("e", depends_on=["d"], cancel_with_parent=True),
    )
    answer = world.person(k.Cancel, "a")
    assert sorted(answer.info["successors"]) == ["b", "c"]
    states = {name: task.state for name, task in world.tasks.items()}
    assert states == {
        "a": State.CANCELLED,
        "b": State.CANCELLED,
        "c": State.CANCELLED,
        "d": State.BLOCKED,
        "e": State.BLOCKED,
    }
    assert {task.cancel_generation for task in world.tasks.values() if task.state == State.CANCELLED} == {1}


# spawning ---------------------------------------------------------------------------------------


def test_a_commit_inserts_its_spawned_tasks_in_the_same_transaction() -> None:
    world = World()
    world.submit()
    spawn = (new_task("s1", depends_on=["t"]), new_task("s2", depends_on=["s1"]))
    assert type(commit(world, "t", spawn=spawn)) is Accepted
    assert [world.tasks[n].state for n in ("t", "s1", "s2")] == [State.COMMITTED, State.READY, State.BLOCKED]


@pytest.mark.parametrize(
    "taken", [new_task("s", value="another"), new_task("s", node_id="another")], ids=["input", "node"]
)
def test_a_spawned_task_whose_id_stands_otherwise_is_a_spawn_conflict_and_nothing_is_written(taken: k.NewTask) -> None:
    world = World()
    world.submit(new_task(), taken)
    answer = commit(world, "t", spawn=(new_task("fine"), new_task("s")))
    problem(answer, "SPAWN_CONFLICT", "s")
    assert world.tasks["t"].state == State.CLAIMED
    assert "fine" not in world.tasks
    assert world.results == {}


def test_a_commit_cannot_spawn_its_own_task_again() -> None:
    world = World()
    new = new_task()
    world.submit(new)
    problem(commit(world, "t", spawn=(new,)), "SPAWN_CONFLICT", "t")


def test_a_spawned_task_that_stands_already_is_left_as_it_is() -> None:
    world = World()
    world.submit(new_task(), new_task("s"))
    version = world.tasks["s"].state_version
    assert type(commit(world, "t", spawn=(new_task("s"),))) is Accepted
    assert world.tasks["s"].state_version == version


def test_a_commit_may_release_a_task_and_spawn_a_successor_of_it_at_once() -> None:
    world = World()
    world.submit(new_task(), new_task("child", depends_on=["t"]))
    assert type(commit(world, "t", spawn=(new_task("grandchild", depends_on=["child"]),))) is Accepted
    child = world.tasks["child"]
    assert (child.state, child.deps_remaining, child.successors) == (State.READY, 0, 1)
    assert [event.name for event in world.events_of("child")] == ["submitted", "parent_committed", "successor_added"]
    commit(world, "child")
    assert world.tasks["grandchild"].state == State.READY
