"""Breadth-first search over the shipped kernel: one effect, several attempts, late senders, a modelled downstream.

A state is what decisions read (the pool's epoch, the task's record and its effects, every claim that was granted) and
what is true outside (`effect_downstreams`). At every state the holder of any claim, people and the reconciler may ask
whatever they may truly say (`effect_calls`), as a new call or as a late copy; calls arrive at the downstream as late as
the scenario allows; a third party, a query that lags and a memory that forgets do what they may.

Judged: every change by the contract's invariants (`oracle`, `effect_oracle`), and every state by the truth: the effect
takes place at most once, and the record never says ABSENT of what took place or COMMITTED of what did not.

Bounded: attempts, executions, cancels and raises together, revisions, writes of the third party. Unbounded: the passing
of time, hand-overs, refused calls, looks, late reports. Abstracted, because decisions only compare: versions start
again at one number after each step; all times are relative to now, and what is long past is just past; request ids are
named by the execution that they started. An answer that is lost is one that its caller never uses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.outcomes import Outcome, Refusal
from fencepost.kernel.records import Effect, LateEvidence, Pool, Request, State, Task
from fencepost.kernel.writes import Snapshot
from tests.model import effect_downstreams as outside
from tests.model.calls import LEASE, NOW, VERSION
from tests.model.effect_calls import ASK, EFFECT_ID, EFFECT_VERSION, FRESH, SLOT, TICK, Call, Calls, Core, new_task
from tests.model.effect_downstreams import SETTLE, WINDOW, Outside, Scenario, View
from tests.model.effect_oracle import (
    E_ABSENT,
    E_AWAITING,
    E_COMMITTED,
    E_DENIED,
    OPEN,
    judge_effects,
    judge_told,
)
from tests.model.oracle import COMMITTED, Asked, Violation, judge
from tests.model.rows import Rows

replace = msgspec.structs.replace

# The bounded search: every guarantee under the assumptions that the contract states.
CI = (
    Scenario("IDEMPOTENT", failures=True),
    Scenario("CONDITIONAL"),
    Scenario("CONDITIONAL", complete=False),
    Scenario("RESERVATION"),
    Scenario("NON_REPLAYABLE"),
    Scenario("READ_ONLY"),
    Scenario("TRANSACTIONAL"),
    Scenario("NON_REPLAYABLE", approval=True),
    Scenario("READ_ONLY", approval=True, executions=1),
    Scenario("NON_REPLAYABLE", approval=True, second="NON_REPLAYABLE", attempts=1, executions=1, revisions=0),
    Scenario("NON_REPLAYABLE", second="IDEMPOTENT", attempts=1, executions=1),
    Scenario("IDEMPOTENT", second="NON_REPLAYABLE", attempts=1, executions=1),
)

# A sender that is paused without bound: what survives it. Whoever says ABSENT here is right about what is under way.
LATE = tuple(
    Scenario(guarantee, in_time=False, person="right")
    for guarantee in ("RESERVATION", "CONDITIONAL", "TRANSACTIONAL", "NON_REPLAYABLE")
)
# Where every assumption has failed, records may be untrue. The rules hold all the same: what late evidence speaks
# against is neither executed nor ABSENT, and nothing is stuck.
UNTRUE = (
    Scenario("NON_REPLAYABLE", in_time=False, person="wrong"),
    Scenario("IDEMPOTENT", in_time=False, person="wrong", lags=True, retention=3, executions=1),
)
# Three attempts and three executions, and every call that the fence refuses: minutes.
LARGE = (
    *(scenario._replace(attempts=3 - bool(scenario.second)) for scenario in (*CI, *LATE)),
    Scenario("CONDITIONAL", complete=False, in_time=False, person="right"),
    *(
        Scenario(guarantee, every=True)
        for guarantee in ("IDEMPOTENT", "CONDITIONAL", "RESERVATION", "NON_REPLAYABLE", "READ_ONLY")
    ),
    *(
        Scenario(guarantee, attempts=3, executions=3, revisions=0, retention=3)
        for guarantee in ("NON_REPLAYABLE", "READ_ONLY", "RESERVATION", "CONDITIONAL", "IDEMPOTENT")
    ),
)


def says(scenario: Scenario) -> str:
    """The guarantee, and in what the scenario differs from the plain one."""
    plain = Scenario(scenario.guarantee)._asdict()
    other = [f"{name}={value}" for name, value in scenario._asdict().items() if value != plain[name]]
    return ",".join((scenario.guarantee, *other))


class Step(NamedTuple):
    core: int
    reserved: int  # the execution whose reservation was accepted
    executed: bool  # a statement, by the store itself
    leads: bool  # counts as leading on: no report that only the sender could give


class Found(NamedTuple):
    states: int
    transitions: int
    depth: int
    cores: int
    decisions: int
    seconds: float
    moves: frozenset[Any]  # door, state before and state after, of effects
    rows: frozenset[Any]  # of the tasks' transition table
    stuck: tuple[Any, ...]


class Search:
    def __init__(
        self, scenario: Scenario, kernel: Kernel | None = None, *, coverage: bool = True, truth: bool = True
    ) -> None:
        self.s = scenario
        # Whether the records must be true, or what takes place is only counted; None: or not even that.
        self.truth = truth
        self.pass_over: tuple[str, ...] = ()  # a change that breaks the contract in one of these ways counts as refused
        self.kernel = kernel or Kernel()
        self.coverage = coverage
        self.calls = Calls(scenario)
        self.decisions = 0
        self.moves: set[Any] = set()
        self.rows = Rows()
        self._cores: dict[Core, int] = {}
        self._core_list: list[Core] = []
        self._views: list[View] = []
        self._snapshots: dict[int, Snapshot] = {}
        self._free: dict[int, tuple[Step, ...]] = {}
        self._told: dict[tuple[int, tuple[Any, ...]], tuple[Step, ...]] = {}
        self._ticks: dict[int, int] = {}
        self._worlds: dict[Outside, int] = {}
        self._world_list: list[Outside] = []
        self._outside: dict[tuple[View, int], tuple[tuple[int, ...], list[tuple[Any, ...]]]] = {}
        self._passes: list[int] = []

    # records --------------------------------------------------------------------------------------

    def _core(self, core: Core) -> int:
        found = self._cores.get(core)
        if found is None:
            found = self._cores[core] = len(self._core_list)
            self._core_list.append(core)
            self._views.append(view(core))
        return found

    def _snapshot(self, number: int) -> Snapshot:
        found = self._snapshots.get(number)
        if found is None:
            core = self._core_list[number]
            pool = Pool("pool", state_version=VERSION, epoch=core.epoch)
            requests = {}
            if core.asked:
                answer = {"outcome": "APPROVAL_REQUIRED", "effect": EFFECT_ID}
                requests[ASK] = Request(ASK, f"attempt-{core.asked}", "effect.prepare", NOW, answer)
            found = self._snapshots[number] = Snapshot(
                NOW, {"pool": pool}, {"t": core.task}, requests, effects={"t": list(core.effects)}
            )
        return found

    def _decide(self, number: int, asked: Asked, command: Any) -> Step | None:
        """What this call makes of the records; None where nothing changed."""
        self.decisions += 1
        core, snapshot = self._core_list[number], self._snapshot(number)
        pool, task = snapshot.pools["pool"], core.task
        assert task is not None
        decision = self.kernel.decide(snapshot, command)
        answer, writes = decision.answer, decision.writes
        if type(answer).__name__ == "Prepared" and answer.outcome is Outcome.EXECUTE:
            judge_told(command, task, core.effects, answer, writes is None)
        if writes is None:
            return None
        if type(answer) is Refusal:
            # A refused report is kept as evidence, by a door of its own.
            asked = Asked("evidence", "t", request=asked.request)
            if writes.proof.door != "evidence":
                raise Violation("refusal", "a refusal changed a record")
        door = asked.door
        after = writes.tasks[-1].task if writes.tasks else task
        effects = list(core.effects)
        for effect in writes.effects:
            effects[effect.number - 1 : effect.number] = [effect]
        results = ("t",) if task.state == COMMITTED else ()
        judge(asked, NOW, pool, snapshot.tasks, results, {}, True, writes, coverage=self.coverage)
        self.rows.check(door, snapshot.tasks, writes)
        judge_effects(door, command, NOW, pool, task, after, core.effects, effects)
        for effect in writes.effects:
            was = core.effects[effect.number - 1].state if effect.number <= len(core.effects) else None
            self.moves.add((door, was, effect.state))
        return self._fold(core, asked, command, answer, writes, after, effects)

    def _fold(
        self, core: Core, asked: Asked, command: Any, answer: Any, writes: Any, task: Task, effects: list[Effect]
    ) -> Step:
        claims = core.claims
        if type(answer) is Granted:
            claims = (*claims, (task.scheduler_epoch, task.cancel_generation))
        epoch = writes.pool_write[1].epoch if writes.pool_write is not None else core.epoch
        said = getattr(answer, "outcome", None)
        awaits = any(effect.state == E_AWAITING for effect in effects)
        revised = core.revised
        if asked.door == "revise":
            revised = 2 if command.accept_effects else 1
        asking = (asked.generation or 0) if said is Outcome.APPROVAL_REQUIRED else (core.asked if awaits else 0)
        plain = [plain_effect(effect) for effect in effects]
        if revised == 2:
            plain = []  # what is done from now on is another effect
        after = Core(epoch, plain_task(task), tuple(plain), claims, asking, revised)
        if not self.s.every:
            after = forget(after)
        reserved = 0
        if asked.door == "effect.reserve" and type(answer) is Accepted:
            reserved = int(command.reservation_id[1:]) if command.reservation_id[0] == "r" else 0
        executed = any(statement.effect_id == EFFECT_ID for statement in writes.statements)
        leads = asked.door != "effect.settle" and getattr(command, "finding", None) != "ABANDONED"
        return Step(self._core(after), reserved, executed, leads)

    def _steps(self, number: int, calls: Iterator[Call]) -> tuple[Step, ...]:
        found = {}
        for asked, command in calls:
            try:
                step = self._decide(number, asked, command)
            except Violation as violation:
                if not str(violation).endswith(self.pass_over):
                    raise
                continue
            if step is not None and (step.core != number or step.reserved or step.executed):
                found[step] = None
        return tuple(found)

    def free(self, number: int) -> tuple[Step, ...]:
        found = self._free.get(number)
        if found is None:
            found = self._free[number] = self._steps(number, self.calls.free(self._core_list[number]))
        return found

    def told(self, number: int, fact: tuple[Any, ...]) -> tuple[Step, ...]:
        found = self._told.get((number, fact))
        if found is None:
            steps = self._steps(number, self.calls.told(self._core_list[number], fact))
            found = self._told[number, fact] = steps
        return found

    def _tick(self, number: int) -> int:
        found = self._ticks.get(number)
        if found is None:
            core = self._core_list[number]
            effects = tuple([plain_effect(effect, passed=TICK) for effect in core.effects])
            found = self._ticks[number] = self._core(core._replace(effects=effects))
        return found

    # outside --------------------------------------------------------------------------------------

    def _world(self, world: Outside) -> int:
        found = self._worlds.get(world)
        if found is None:
            found = self._worlds[world] = len(self._world_list)
            self._world_list.append(world)
            self._passes.append(-1)
        return found

    def _around(self, view: View, world: int) -> tuple[tuple[int, ...], list[tuple[Any, ...]]]:
        """Where the world may go within this tick, and what may truly be said."""
        found = self._outside.get((view, world))
        if found is None:
            there = self._world_list[world]
            moved = dict.fromkeys(self._world(after) for after in outside.moves(self.s, view, there))
            moved.pop(world, None)
            found = self._outside[view, world] = (tuple(moved), outside.facts(self.s, view, there))
        return found

    def _later(self, world: int) -> int:
        found = self._passes[world]
        if found < 0:
            found = self._passes[world] = self._world(outside.tick(self.s, self._world_list[world]))
        return found

    def _after(self, step: Step, world: int) -> int:
        executions = len(self._views[step.core].preconditions)
        there = self._world_list[world]
        if len(there.calls) == executions and not step.reserved and not step.executed:
            return world
        there = outside.extended(self.s, there, executions)
        if step.reserved and there.more[step.reserved - 1] == outside.NONE:
            there = there._replace(more=outside.put(there.more, step.reserved - 1, outside.HELD))
        if step.executed:
            there = there._replace(took=there.took + 1)
        return self._world(there)

    def _judge(self, core: int, world: int) -> None:
        """Whether what took place is what the records say."""
        there, records = self._world_list[world], self._core_list[core]
        took = there.took
        if self.s.guarantee == "READ_ONLY" or self.truth is None:
            return
        if took > 1:
            raise Violation("4", f"took place {took} times")
        effects = records.effects
        if effects and self.truth:
            state = effects[0].state
            if state == E_COMMITTED and not took:
                raise Violation("record", "COMMITTED, and it never took place")
            if took and state in (E_ABSENT, E_AWAITING, E_DENIED):
                raise Violation("record", f"it took place, and its state is {state}")
        if took and records.revised == 1 and self.truth:
            raise Violation("revise", "revised as if nothing had happened, and it took place")

    # searching ------------------------------------------------------------------------------------

    def run(self, *, stuck: bool = False, limit: int = 0) -> Found:
        """Until no new state. Raises Violation at the first change that breaks the contract."""
        began = time.process_time()
        first = self._core(Core(task=new_task())) << 24 | self._world(outside.start(self.s))
        seen: dict[int, int] = {first: -1}
        self.seen = seen
        before: dict[int, list[int]] = {}
        frontier = [first]
        depth = transitions = 0
        while frontier:
            following: list[int] = []
            for state in frontier:
                core, world = state >> 24, state & 0xFFFFFF
                if self._core_list[core].revised == 2:
                    continue
                view = self._views[core]
                moved, facts = self._around(view, world)
                reached = [(self._tick(core) << 24 | self._later(world), True)]
                reached += [(core << 24 | after, self._helps(world, after)) for after in moved]
                steps = self.free(core)
                for fact in facts:
                    steps += self.told(core, fact)
                reached += [(step.core << 24 | self._after(step, world), step.leads) for step in steps]
                transitions += len(reached)
                for after, leads in reached:
                    if after not in seen:
                        seen[after] = state
                        self._judge(after >> 24, after & 0xFFFFFF)
                        following.append(after)
                    if stuck and leads and after != state:
                        before.setdefault(after, []).append(state)
            frontier = following
            depth += bool(frontier)
            if limit and len(seen) > limit:
                break
        return Found(
            len(seen),
            transitions,
            depth,
            len(self._core_list),
            self.decisions,
            time.process_time() - began,
            frozenset(self.moves),
            frozenset(self.rows.seen),
            self._stuck(before) if stuck else (),
        )

    def _helps(self, before: int, after: int) -> bool:
        """Senders that are gone help nobody: only a reservation that is cancelled or confirmed leads on."""
        return self._world_list[before].calls == self._world_list[after].calls

    def _stuck(self, before: dict[int, list[int]]) -> tuple[Any, ...]:
        """States with an open effect from which neither its owner, the loops nor people lead on: no sender that is gone
        comes back, and nobody gives up."""

        def is_open(state: int) -> bool:
            return any(effect.state in OPEN for effect in self._core_list[state >> 24].effects)

        leads_on = {state for state in self.seen if not is_open(state)}
        waiting = list(leads_on)
        while waiting:
            for state in before.get(waiting.pop(), ()):
                if state not in leads_on:
                    leads_on.add(state)
                    waiting.append(state)
        return tuple((self._core_list[s >> 24], self._world_list[s & 0xFFFFFF]) for s in self.seen if s not in leads_on)

    def story(self, state: int) -> list[tuple[Core, Outside]]:
        """How the search came to this state."""
        found = []
        while state >= 0:
            found.append((self._core_list[state >> 24], self._world_list[state & 0xFFFFFF]))
            state = self.seen[state]
        return found[::-1]


# the same situation in the smallest numbers ---------------------------------------------------------


def plain_task(task: Task) -> Task:
    claimed = task.state == State.CLAIMED
    return replace(
        task,
        state_version=VERSION,
        claimed_at=NOW if task.claim_generation else None,
        lease_expires_at=NOW + LEASE if claimed else None,
        available_at=NOW,
        ready_at=NOW,
        charged_attempts=0,
        end=0,
        result_commit_id="commit" if task.state == COMMITTED else None,
    )


def plain_effect(effect: Effect, passed: int = 0) -> Effect:
    """Without what no decision reads, `passed` later; what is long past is just past."""
    newest, past = len(effect.executions), NOW - SETTLE * TICK
    executions = tuple(
        [
            replace(
                execution,
                request_id=execution.request_id if execution.request_id != FRESH else f"x{execution.execution}",
                prepared_at=NOW,
                # Decisions compare with the latest alone, which is the latest execution's.
                send_by=max(execution.send_by - passed, past) if execution.execution == newest else past,
                approved_by=None,
                epoch=1,
            )
            for execution in effect.executions
        ]
    )
    terms, done = effect.terms, effect.state == E_COMMITTED
    prepared = NOW
    if terms.guarantee == "IDEMPOTENT" and not done:
        past = NOW - terms.retention_us + WINDOW * TICK - TICK
        prepared = max(effect.first_prepared_at - passed, past)
    if done:
        # No decision reads more of it.
        effect = replace(effect, evidence=(), evidence_settled=0, person_only=False, repeat_closed=False)
        executions = tuple([replace(execution, send_by=NOW - SETTLE * TICK) for execution in executions])
    return replace(
        effect,
        version=EFFECT_VERSION,
        first_prepared_at=prepared,
        changed_at=NOW,
        executions=executions,
        receipt=None,
        etag=None,
        approval=replace(effect.approval, who="P", at=NOW) if effect.approval is not None else None,
        evidence=tuple([LateEvidence(NOW, e.execution, 0, None) for e in sorted(effect.evidence, key=_number)]),
        absent_ground="NOT_FOUND" if effect.absent_ground == "PERSON" else effect.absent_ground,
        decided_by=None,
        note=None,
    )


def forget(core: Core) -> Core:
    """The same situation in the smallest counters: only how they stand to each other decides, and ended attempts are
    fenced by their generation alone. So there are as many cancels and raises as anybody likes."""
    task = core.task
    assert task is not None
    live = task.state == State.CLAIMED
    epoch = 2 if live and task.scheduler_epoch < core.epoch else 1
    effects = []
    for effect in core.effects:
        approval = effect.approval
        if approval is not None:
            void = (approval.epoch, approval.cancel_generation) != (core.epoch, task.cancel_generation)
            approval = None if void else replace(approval, epoch=epoch, cancel_generation=0)
            effect = replace(effect, approval=approval)
        effects.append(effect)
    task = replace(task, scheduler_epoch=int(live), cancel_generation=0)
    return core._replace(epoch=epoch, task=task, effects=tuple(effects), claims=((1, 0),) * len(core.claims))


def _number(evidence: LateEvidence) -> int:
    return evidence.execution


def view(core: Core) -> View:
    effects = [effect for effect in core.effects if effect.slot == SLOT and effect.terms.guarantee != "TRANSACTIONAL"]
    if not effects:
        return View((), 0, False, False)
    effect = effects[0]
    stored = effect.executions[-1].reservation_id if effect.executions else None
    return View(
        tuple([int((e.precondition or "v0")[1:]) for e in effect.executions]),
        int(stored[1:]) if stored is not None and stored[0] == "r" else 0,
        effect.state == 2,
        all(e.send_by + SETTLE * TICK <= NOW for e in effect.executions),
    )


__all__ = ["CI", "LARGE", "LATE", "UNTRUE", "Found", "Scenario", "Search", "says"]
