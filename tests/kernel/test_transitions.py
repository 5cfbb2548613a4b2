"""The shipped kernel, driven through every row of its transition table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.fence import DOORS
from fencepost.kernel.records import EVENTS, End, Policy, State
from fencepost.kernel.table import OLDER, RAN_OUT, TRANSITIONS, USED_UP, Transition
from tests.kernel.effect_moves import TASK_STORIES
from tests.model.world import World, new_task

# How each row comes about: the world before it, whose record the row is about, and the call.
Story = Callable[[World], tuple[str, Callable[[], Any]]]
STORIES: dict[tuple[str, str, State | None, str], Story] = {}

READY, CLAIMED, BLOCKED = State.READY, State.CLAIMED, State.BLOCKED
PARKED, CANCELLED = State.PARKED, State.CANCELLED


def row(door: str, before: State | None, condition: str = "", subject: str = "task") -> Callable[[Story], Story]:
    def keep(story: Story) -> Story:
        STORIES[door, subject, before, condition] = story
        return story

    return keep


def bring_to(world: World, state: State, task_id: str = "t") -> None:
    """`task_id` in `state`; a BLOCKED one waits for the task `parent`."""
    if state is BLOCKED:
        world.submit(new_task("parent"), new_task(task_id, depends_on=["parent"]))
        return
    world.submit(new_task(task_id))
    if state is CLAIMED:
        world.claimed(task_id)
    if state is PARKED:
        world.ask(k.Fail, world.claimed(task_id), retry=False)
    if state is CANCELLED:
        world.person(k.Cancel, task_id)


for _state in (READY, CLAIMED, BLOCKED, PARKED, CANCELLED):

    @row("submit", _state, "it is named as a parent", "parent")
    def submit_names_a_parent(world: World, state: State = _state) -> Any:
        bring_to(world, state)
        return "t", lambda: world.submit(new_task("child", depends_on=["t"]))

    @row("commit", _state, "it is named as a parent", "parent")
    def spawn_names_a_parent(world: World, state: State = _state) -> Any:
        bring_to(world, state)
        world.submit(new_task("spawner"))
        claim = world.claimed("spawner")
        return "t", lambda: world.ask(k.Commit, claim, spawn=(new_task("spawned", depends_on=["t"]),))


for _state in (BLOCKED, READY, PARKED, CLAIMED):

    @row("cancel", _state)
    def cancel(world: World, state: State = _state) -> Any:
        bring_to(world, state)
        return "t", lambda: world.person(k.Cancel)

    @row("revise", _state)
    def revise(world: World, state: State = _state) -> Any:
        bring_to(world, state)
        return "t", lambda: world.person(k.Revise)


@row("submit", None, "every parent is COMMITTED, or it has none", "new task")
def submit_ready(world: World) -> Any:
    world.submit(new_task("done"))
    world.ask(k.Commit, world.claimed("done"))
    return "t", lambda: world.submit(new_task("t", depends_on=["done"]))


@row("submit", None, "a parent is open", "new task")
def submit_blocked(world: World) -> Any:
    return "t", lambda: world.submit(new_task("open"), new_task("t", depends_on=["open"]))


@row("commit", None, "every parent is COMMITTED, or it has none", "new task")
def spawn_ready(world: World) -> Any:
    world.submit(new_task("spawner"))
    claim = world.claimed("spawner")
    return "t", lambda: world.ask(k.Commit, claim, spawn=(new_task("t", depends_on=["spawner"]),))


@row("commit", None, "a parent is open", "new task")
def spawn_blocked(world: World) -> Any:
    world.submit(new_task("spawner"), new_task("open"))
    claim = world.claimed("spawner")
    return "t", lambda: world.ask(k.Commit, claim, spawn=(new_task("t", depends_on=["open", "spawner"]),))


@row("claim", READY, "its available_at has come")
def claim_ready(world: World) -> Any:
    world.submit()
    return "t", world.claim


def _lapsed(world: World, *, used_up: bool = False, older: bool = False) -> None:
    world.submit(new_task("t", max_attempts=1 if used_up else 2))
    world.claimed()
    if older:
        world.raise_epoch()
    else:
        world.run_out()


@row("claim", CLAIMED, RAN_OUT)
def claim_after_the_lease(world: World) -> Any:
    _lapsed(world)
    return "t", lambda: world.claim(owner="B")


@row("claim", CLAIMED, OLDER)
def claim_after_a_raise(world: World) -> Any:
    _lapsed(world, used_up=True, older=True)
    return "t", lambda: world.claim(owner="B")


@row("claim", CLAIMED, USED_UP)
def claim_parks(world: World) -> Any:
    _lapsed(world, used_up=True)
    return "t", lambda: world.claim(owner="B")


@row("expire", CLAIMED, RAN_OUT)
def expire_after_the_lease(world: World) -> Any:
    _lapsed(world)
    return "t", lambda: world.person(k.Expire)


@row("expire", CLAIMED, OLDER)
def expire_after_a_raise(world: World) -> Any:
    _lapsed(world, used_up=True, older=True)
    return "t", lambda: world.person(k.Expire)


@row("expire", CLAIMED, USED_UP)
def expire_parks(world: World) -> Any:
    _lapsed(world, used_up=True)
    return "t", lambda: world.person(k.Expire)


def _held(kind: type, **fields: Any) -> Story:
    def story(world: World) -> Any:
        world.submit(new_task("t", max_attempts=2))
        claim = world.claimed()
        return "t", lambda: world.ask(kind, claim, **fields)

    return story


row("renew", CLAIMED, "the lease runs")(_held(k.Renew))
row("checkpoint", CLAIMED, "the number is above the attempt's newest")(_held(k.SaveCheckpoint, number=1))
row("commit", CLAIMED, "the fence is passed")(_held(k.Commit))
row("release", CLAIMED, "the fence is passed")(_held(k.Release))
row("fail", CLAIMED, "it may be retried, attempts are left")(_held(k.Fail))
row("fail", CLAIMED, "the error is final")(_held(k.Fail, retry=False))


@row("renew", CLAIMED, "the lease ran out and nobody took it back")
def renew_late(world: World) -> Any:
    world.submit()
    claim = world.claimed()
    world.run_out()
    return "t", lambda: world.ask(k.Renew, claim)


@row("fail", CLAIMED, "it may be retried, attempts are used up")
def fail_parks(world: World) -> Any:
    world.submit(new_task("t", max_attempts=1))
    claim = world.claimed()
    return "t", lambda: world.ask(k.Fail, claim)


def _child(world: World, *, others: int, cancelled: bool) -> k.Presented:
    """`t` waits for `parent` and for `others` more; the parent is claimed."""
    names = ["parent", *(f"other-{n}" for n in range(others))]
    world.submit(*(new_task(name) for name in names), new_task("t", depends_on=names))
    if cancelled:
        world.person(k.Cancel, "t")
    return world.claimed("parent")


for _before, _others, _says, _spawning in (
    (BLOCKED, 0, "it was the last open parent", "it was the last open parent, and a spawned task names it"),
    (BLOCKED, 1, "another parent is open", "another parent is open, and a spawned task names it"),
    (CANCELLED, 0, "cancelled, and counted down", "cancelled, counted down, and a spawned task names it"),
):

    @row("commit", _before, _says, "successor")
    def parent_commits(world: World, others: int = _others, cancelled: bool = _before is CANCELLED) -> Any:
        claim = _child(world, others=others, cancelled=cancelled)
        return "t", lambda: world.ask(k.Commit, claim)

    @row("commit", _before, _spawning, "successor")
    def parent_commits_and_spawns(world: World, others: int = _others, cancelled: bool = _before is CANCELLED) -> Any:
        claim = _child(world, others=others, cancelled=cancelled)
        return "t", lambda: world.ask(k.Commit, claim, spawn=(new_task("spawned", depends_on=["t"]),))


@row("cancel", BLOCKED, "its graph says on_failure: cancel", "successor")
def cancel_with_parent(world: World) -> Any:
    world.submit(new_task("parent"), new_task("t", depends_on=["parent"], cancel_with_parent=True))
    return "t", lambda: world.person(k.Cancel, "parent")


@row("reopen", CANCELLED, "no parent is open")
def reopen_cancelled(world: World) -> Any:
    bring_to(world, CANCELLED)
    return "t", lambda: world.person(k.Reopen)


@row("reopen", CANCELLED, "a parent is open")
def reopen_blocked(world: World) -> Any:
    bring_to(world, BLOCKED)
    world.person(k.Cancel)
    return "t", lambda: world.person(k.Reopen)


@row("reopen", PARKED)
def reopen_parked(world: World) -> Any:
    bring_to(world, PARKED)
    return "t", lambda: world.person(k.Reopen)


@row("take_over", CLAIMED)
def take_over(world: World) -> Any:
    bring_to(world, CLAIMED)
    return "t", lambda: world.person(k.TakeOver)


@row("discard", CLAIMED, "the attempt has a staged result")
def discard(world: World) -> Any:
    world.submit()
    claim = world.claimed()
    world.ask(k.Stage, claim, content=new_task().input)
    return "t", lambda: world.person(k.Discard)


STORIES.update(TASK_STORIES)

# the tests ------------------------------------------------------------------------------------------


def key(transition: Transition) -> tuple[str, str, State | None, str]:
    return transition.door, transition.subject, transition.before, transition.condition


def name(transition: Transition) -> str:
    before = transition.before.name if transition.before else "none"
    return f"{transition.door}-{transition.subject}-{before}-{transition.after.name}-{transition.condition}"


@pytest.mark.parametrize("transition", TRANSITIONS, ids=name)
def test_the_kernel_goes_through_this_row_of_the_table(transition: Transition) -> None:
    world = World(policy=Policy(max_attempts=5))
    task_id, call = STORIES[key(transition)](world)
    before = world.tasks.get(task_id)
    journalled = len(world.events)
    call()
    after = world.tasks[task_id]
    new = [event for event in world.events[journalled:] if event.task_id == task_id]
    assert (before.state if before else None) == transition.before
    assert after.state == transition.after
    assert tuple(event.name for event in new) == transition.events
    assert {event.door for event in new} == {transition.door}
    assert after.state_version == (before.state_version if before else 0) + len(transition.events)
    if transition.end is not None:
        ends = [event.detail or {} for event in new if event.name == "attempt_ended"]
        assert [end["end"] for end in ends] == ([] if transition.end is End.COMMITTED else [transition.end.name])
        assert [end["charged"] for end in ends] == [transition.charged] * len(ends)
        if after.state != State.CLAIMED:
            assert after.end == transition.end
    if before is not None and transition.door not in ("reopen", "revise"):
        assert after.charged_attempts - before.charged_attempts == int(transition.charged)
    assert (after.lease_expires_at is not None) == (after.state == State.CLAIMED)


def test_every_row_has_its_story_and_every_story_its_row() -> None:
    rows = [key(transition) for transition in TRANSITIONS]
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(STORIES)


def test_the_table_speaks_of_doors_and_events_that_are_on_the_closed_lists() -> None:
    for transition in TRANSITIONS:
        door = DOORS[transition.door]
        assert set(transition.events) <= set(door.events), transition
        assert set(transition.events) <= set(EVENTS)


def test_every_event_that_a_door_declares_is_written_by_some_row() -> None:
    for door in DOORS.values():
        written = {event for transition in TRANSITIONS if transition.door == door.name for event in transition.events}
        assert set(door.events) == written, door.name
