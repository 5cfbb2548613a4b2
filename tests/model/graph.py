"""Breadth-first search over a small graph: two parents and a child, with every race between submit, commit and cancel.

A call may be *decided* at one state and *applied* at a later one, as a store without locks does it: applied only if
every record that it was decided on still stands at its version, lost otherwise. So a submit races the commit of its
parents, and two parents that commit race each other. Bounded: one cancel and one reopen, and one claim more, for each
of the tasks in `cancelled`; one claim for each of the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.records import Pool, ResultCommit, State, Task
from fencepost.kernel.writes import Snapshot, WriteSet
from tests.model.calls import LEASE, NOW, RESULTS
from tests.model.oracle import Asked, Violation, judge
from tests.model.rows import Rows
from tests.model.world import new_task, presented

astuple = msgspec.structs.astuple
POOL = Pool("pool")


class Found(NamedTuple):
    states: int
    transitions: int
    changes: int
    depth: int
    seconds: float
    lost: int
    stuck: int
    rows: frozenset[Any]


class Graph(NamedTuple):
    """Records, edges and results; and what was decided and is still under way, by name of the call."""

    tasks: dict[str, Task]
    parents: dict[str, tuple[str, ...]]
    results: dict[str, ResultCommit]
    under_way: dict[str, tuple[Asked, WriteSet]]

    def key(self) -> Any:
        # Versions stay as they are: a write that is under way is compared with them.
        decided = tuple(
            (name, tuple((w.expected_version, astuple(w.task)) for w in writes.tasks))
            for name, (_, writes) in sorted(self.under_way.items())
        )
        return tuple((name, astuple(task)) for name, task in sorted(self.tasks.items())), decided


def stands(writes: WriteSet, tasks: dict[str, Task]) -> bool:
    """Every record is at the version that this was decided on: the store's compare-and-swap."""
    return all(
        write.expected_version == (tasks[write.task.task_id].state_version if write.task.task_id in tasks else 0)
        for write in writes.tasks
    )


class GraphSearch:
    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        cancel_with_parent: bool = False,
        spawn: bool = False,
        cancelled: tuple[str, ...] = ("p1", "p2", "child"),
    ) -> None:
        self.cancelled = cancelled
        self.kernel = kernel or Kernel()
        self.rows = Rows()
        self.spawn = (new_task("spawned", depends_on=["child"]),) if spawn else ()
        self.child = new_task("child", depends_on=["p1", "p2"], cancel_with_parent=cancel_with_parent)
        self.lost = 0

    def _start(self) -> Graph:
        empty = Graph({}, {}, {}, {})
        asked, command = Asked("submit"), k.Submit(request_id="r", tasks=(new_task("p1"), new_task("p2")))
        writes = self._decided(empty, command)
        assert writes is not None
        return self._applied(empty, asked, writes)

    def _snapshot(self, graph: Graph) -> Snapshot:
        children: dict[str, list[str]] = {}
        for child, found in graph.parents.items():
            for parent in found:
                children.setdefault(parent, []).append(child)
        return Snapshot(
            now=NOW,
            pools={"pool": POOL},
            tasks=graph.tasks,
            results=graph.results,
            children=children,
            parents={child: list(found) for child, found in graph.parents.items()},
        )

    def _decided(self, graph: Graph, command: Any) -> WriteSet | None:
        decision = self.kernel.decide(self._snapshot(graph), command)
        if decision.writes is not None and type(decision.answer) not in (Accepted, Granted):
            raise Violation("refusal", "a refusal changed a record")
        return decision.writes

    def _applied(self, graph: Graph, asked: Asked, writes: WriteSet) -> Graph:
        judge(asked, NOW, POOL, graph.tasks, graph.results, graph.parents, True, writes)
        self.rows.check(asked.door, graph.tasks, writes)
        tasks = dict(graph.tasks)
        for write in writes.tasks:
            tasks[write.task.task_id] = write.task
        parents = dict(graph.parents)
        for edge in writes.dependencies:
            parents[edge.task_id] = (*parents.get(edge.task_id, ()), edge.parent_id)
        results = {**graph.results, **{result.task_id: result for result in writes.results}}
        # Versions never return: what lost now is lost for good, and its caller reads and decides again.
        standing = {name: call for name, call in graph.under_way.items() if stands(call[1], tasks)}
        self.lost += len(graph.under_way) - len(standing)
        return Graph(tasks, parents, results, standing)

    def _calls(self, graph: Graph) -> Iterator[tuple[str, Asked, Any, bool]]:
        """Name, what is shown, the command, and whether it may be decided now and applied later."""
        if "child" not in graph.tasks:
            yield "submit", Asked("submit"), k.Submit(request_id="r", tasks=(self.child,)), True
        for name, task in graph.tasks.items():
            version = task.state_version
            if task.claim_generation <= (name in self.cancelled) and name != "spawned":
                yield (
                    f"claim {name}",
                    Asked("claim", name, 1, version=version),
                    k.Claim(
                        request_id="r",
                        task_id=name,
                        expected_state_version=version,
                        epoch=1,
                        owner_id="A",
                        ttl_us=LEASE,
                        attempt_id=f"{name}-{task.claim_generation + 1}",
                    ),
                    False,
                )
            if task.state == State.CLAIMED:
                claim = presented(task)
                asked = Asked(
                    "commit",
                    name,
                    1,
                    claim.generation,
                    claim.attempt_id,
                    claim.cancel_generation,
                    claim.input_digest,
                    claim.owner_id,
                )
                yield f"commit {name}", asked, self._commit(claim, self.spawn if name == "p1" else ()), True
            if task.cancel_generation < 1 and name in self.cancelled:
                yield (
                    f"cancel {name}",
                    Asked("cancel", name, cancel=0),
                    k.Cancel(request_id="r", task_id=name, expected_cancel_generation=0),
                    True,
                )
            if task.state == State.CANCELLED:
                yield (
                    f"reopen {name}",
                    Asked("reopen", name, 1, version=version),
                    k.Reopen(request_id="r", task_id=name, expected_state_version=version, epoch=1),
                    True,
                )

    def _commit(self, claim: k.Presented, spawn: tuple[k.NewTask, ...]) -> k.Commit:
        return k.Commit(
            request_id="r",
            epoch=1,
            claim=claim,
            result_digest=RESULTS[0].digest,
            content=RESULTS[0],
            result_commit_id=f"commit-{claim.task_id}",
            spawn=spawn,
        )

    def _following(self, graph: Graph) -> Iterator[Graph | None]:
        """Every graph that one step leads to; None for a call that changes nothing."""
        for name, asked, command, may_wait in self._calls(graph):
            writes = self._decided(graph, command)
            if writes is None:
                yield None
                continue
            yield self._applied(graph, asked, writes)
            if may_wait and name not in graph.under_way:
                yield graph._replace(under_way={**graph.under_way, name: (asked, writes)})
        for name, (asked, writes) in graph.under_way.items():
            rest = {other: call for other, call in graph.under_way.items() if other != name}
            yield self._applied(graph._replace(under_way=rest), asked, writes)

    def run(self) -> Found:
        began = time.monotonic()
        start = self._start()
        numbers: dict[int, int] = {hash(start.key()): 0}
        before: list[list[int]] = [[]]
        done: list[int] = []
        frontier = [(0, start)]
        depth = transitions = changes = 0
        while frontier:
            following: list[tuple[int, Graph]] = []
            for number, graph in frontier:
                if all(name in graph.results for name in ("p1", "p2", "child")):
                    done.append(number)
                for after in self._following(graph):
                    transitions += 1
                    if after is None:
                        continue
                    changes += 1
                    key = hash(after.key())
                    found = numbers.get(key)
                    if found is None:
                        found = numbers[key] = len(before)
                        before.append([])
                        following.append((found, after))
                    before[found].append(number)
            frontier = following
            depth += bool(frontier)
        leads_on = set(done)
        waiting = list(leads_on)
        while waiting:
            for number in before[waiting.pop()]:
                if number not in leads_on:
                    leads_on.add(number)
                    waiting.append(number)
        return Found(
            len(before),
            transitions,
            changes,
            depth,
            time.monotonic() - began,
            self.lost,
            len(before) - len(leads_on),
            frozenset(self.rows.seen),
        )
