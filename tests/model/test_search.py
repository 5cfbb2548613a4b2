"""The search over the shipped kernel, within CI's bounds, and proof that its judges can find fault."""

from __future__ import annotations

import resource
import sys

import pytest

from fencepost.kernel import commands as k
from fencepost.kernel import fence
from fencepost.kernel.kernel import OPERATIONS, Kernel
from fencepost.kernel.records import End, StagedState, State, Task
from fencepost.kernel.writes import WriteSet
from tests.model import graph, oracle, stuck
from tests.model.calls import CI
from tests.model.rows import ROWS, unseen
from tests.model.single import Search

GRAPHS = [{}, {"cancel_with_parent": True}, {"spawn": True}]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_order_of_calls_on_one_task_breaks_an_invariant_or_leaves_the_transition_table() -> None:
    """3 workers, 3 claims, 1 cancel, 1 reopen, 1 revision, 1 raise, intake toggles, stale calls; until no new state."""
    assert CI[:6] == (3, 3, 1, 1, 1, 1)
    found = Search(CI).run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 30 if sys.platform == "darwin" else 1 << 20)
    print(
        f"\nmodel: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}, "
        f"{found.seconds:.0f} s, peak {peak:.2f} GB"
    )
    assert found.states > 500_000, "the search has become smaller: what does it leave out?"
    assert peak < 2.0
    left = {row[0] for row in unseen(found.rows)} - {"submit", "commit", "cancel", "reopen", "revise"}
    assert not left, "rows that need no graph and that the search did not reach"


@pytest.mark.parametrize("options", GRAPHS, ids=lambda options: "-".join(options) or "plain")
def test_a_child_becomes_ready_exactly_once_whatever_races_its_parents_commits(options: dict[str, bool]) -> None:
    found = graph.GraphSearch(**options).run()
    print(f"\ngraph: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}")
    assert found.lost > 0, "nothing raced"
    assert found.stuck == 0


def test_from_every_reachable_state_of_a_task_some_operation_leads_on() -> None:
    found = stuck.search()
    assert found.states > 300
    assert found.stuck == []


def test_the_search_for_stuck_states_finds_them_where_nobody_may_reopen() -> None:
    never = fence.Guard("test:never", 0, lambda c: fence.refuse_epoch(0, 1), "never")
    operations = [
        type(o)(o.command, o.door, (never, *o.guards), o.act, o.each) if o.command is k.Reopen else o
        for o in OPERATIONS
    ]
    found = stuck.search(Kernel(operations))
    assert {node[0].state for node in found.stuck} == {State.CANCELLED}


def test_a_child_that_a_commit_forgets_is_found() -> None:
    class Forgetful(Kernel):
        """Releases no successor: as if the commit had missed that it has one."""

        def decide(self, snapshot, command, candidates=()):  # type: ignore[no-untyped-def]
            if type(command) is k.Commit:
                snapshot.children = {}
            return super().decide(snapshot, command, candidates)

    with pytest.raises(oracle.Violation, match="open parents"):
        graph.GraphSearch(Forgetful()).run()


def test_two_commits_that_do_not_compare_the_child_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that compares only the first record of a write set, and writes the others blindly."""

    def first_stands(writes: WriteSet, tasks: dict[str, Task]) -> bool:
        first = writes.tasks[0]
        there = tasks.get(first.task.task_id)
        return first.expected_version == (there.state_version if there else 0)

    monkeypatch.setattr(graph, "stands", first_stands)
    with pytest.raises(oracle.Violation):
        graph.GraphSearch().run()


def test_the_oracle_spells_the_same_numbers_as_the_kernel() -> None:
    for state in State:
        assert getattr(oracle, state.name) == state
    assert oracle.STAGED == StagedState.STAGED
    for end in (End.COMMITTED, End.EXPIRED, End.RELEASED, End.FAILED):
        assert getattr(oracle, f"END_{end.name}") == end
    names = {"GRANT_EPOCH": "GRANT"}
    for bit in fence.Compare:
        assert getattr(oracle, names.get(bit.name or "", bit.name or "")) == bit
    declared = {door.name: door.compares for door in fence.DOORS.values() if door.name in oracle.MASKS}
    assert declared == oracle.MASKS
    assert set(fence.DOORS) - set(oracle.MASKS) == {"pool"}


def test_every_row_of_the_table_is_there_to_be_checked() -> None:
    assert len(ROWS) > 40
