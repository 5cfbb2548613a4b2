"""Invariant 9: nothing is stuck. From every reachable state of one task some order of calls leads to COMMITTED.

A finite abstraction of the same search, without any bound: counters are forgotten, and only how they stand to each
other is kept (the latest claim was granted under this epoch or an older one; its cancel generation and its input are
the task's or not). So there are as many claims, cancels, reopens, revisions and raises as anybody likes. Then
backwards, over every call that changes something, from the committed states.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.kernel.kernel import Kernel
from fencepost.kernel.records import State
from tests.model.calls import Bounds, Core, Token
from tests.model.single import Search

UNBOUNDED = Bounds(workers=1, claims=9, cancels=9, reopens=9, revisions=9, raises=9)
Node = tuple[Core, Token | None]


class Stuck(NamedTuple):
    states: int
    changes: int
    stuck: list[Node]


class Forgetful(Search):
    def __init__(self, kernel: Kernel | None = None) -> None:
        super().__init__(UNBOUNDED, kernel)
        self.calls.epochs = range(1, 3)

    def forget(self, core: Core, token: Token | None) -> Node:
        """The same situation in the smallest numbers: the pool at epoch 2, the task at cancel 1 and revision 2."""
        if token is not None:
            token = token._replace(
                generation=1,
                epoch=1 + (token.epoch == core.epoch),
                cancel=int(token.cancel == core.cancel),
                revision=1 + (token.revision == core.revision),
            )
        granted = 0 if core.granted == 0 else 1 + (core.granted == core.epoch)
        alike = core._replace(
            epoch=2, granted=granted, generation=min(core.generation, 1), cancel=1, revision=2, reopened=0
        )
        return alike, token

    def following(self, node: Node) -> set[Node]:
        core, token = node
        number = self._number(core)
        found: set[Node] = set()
        for later, granted in self._people(number, 0)[1]:
            found.add(self.forget(self._core_list[later], granted or token))
        if token is not None:
            for later in self._of_claim(number, token)[1]:
                found.add(self.forget(self._core_list[later], token))
        return found


def search(kernel: Kernel | None = None) -> Stuck:
    model = Forgetful(kernel)
    start = model.forget(Core(), None)
    seen = {start}
    waiting = [start]
    before: dict[Node, set[Node]] = {}
    while waiting:
        node = waiting.pop()
        for after in model.following(node):
            before.setdefault(after, set()).add(node)
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    leads_on = {node for node in seen if node[0].state == State.COMMITTED}
    waiting = list(leads_on)
    while waiting:
        for node in before.get(waiting.pop(), ()):
            if node not in leads_on:
                leads_on.add(node)
                waiting.append(node)
    return Stuck(len(seen), sum(map(len, before.values())), sorted(seen - leads_on))
