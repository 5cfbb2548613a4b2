"""Breadth-first search over the shipped kernel: one task, several workers, every interleaving of calls.

A state is what decisions read: the pool's epoch and intake, the task's record, what the latest attempt has staged,
every claim that was ever granted (its owner, epoch, cancel generation and revision), and which request ids were used.
At every state *any* of these claims may present itself at any door, under any epoch that ever was, with its own name,
another's or none, as a new call or as a copy of an earlier one; and people and loops may call with what they see or
with what they saw before. So no client needs to be modelled: whatever it has adopted or missed is among the calls.

Bounded: claims, cancels, reopens, revisions, raises. Unbounded: renewals, staging, intake toggles, the passing of time,
take-overs, refused calls.

Abstracted, because decisions only compare: the state versions start again at one number after each step ("seen before"
is one older number); a time is past or to come; a lease runs, ran out, or has used up the claim's age; what an ended
attempt has staged is dropped once it was seen to be decided (no decision reads it). Request ids are remembered for
ever, but those of checkpoints only until the next claim, unless `remember` says otherwise. Owners are symmetric: a
state names them in the order in which they came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel.commit import commit_digest
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.records import End, Event, Pool, Request, ResultCommit, Staged, StagedState, State, Task
from fencepost.kernel.writes import Snapshot, WriteSet
from tests.model.calls import (
    AGE,
    AGED,
    CI,
    LEASE,
    NOW,
    OWNERS,
    RAN_OUT,
    RESULTS,
    RUNS,
    SECOND,
    VERSION,
    Bounds,
    Calls,
    Core,
    Token,
    digest_of,
)
from tests.model.oracle import Asked, Violation, judge, judge_staged
from tests.model.rows import Rows

DISCARDED = StagedState.DISCARDED


class Found(NamedTuple):
    states: int
    transitions: int
    changes: int
    depth: int
    decisions: int
    seconds: float
    rows: frozenset[Any]


class Search:
    """One search. Decisions are made once for each distinct (record, call) and kept: they depend on nothing else."""

    def __init__(self, bounds: Bounds = CI, kernel: Kernel | None = None, *, coverage: bool = True) -> None:
        self.bounds = bounds
        self.coverage = coverage
        self.kernel = kernel or Kernel()
        self.rows = Rows()
        self.decisions = 0
        self.calls = Calls(bounds)
        self._cores: dict[Core, int] = {}
        self._core_list: list[Core] = []
        self._of_people: dict[tuple[int, int], tuple[int, tuple[tuple[int, Token | None], ...]]] = {}
        self._of_token: dict[tuple[int, Token], tuple[int, tuple[int, ...]]] = {}
        self._alike: dict[tuple[Core, Token], tuple[int, tuple[Core, ...]]] = {}

    # records from a core ------------------------------------------------------------------------

    def _pool(self, core: Core) -> Pool:
        return Pool("pool", state_version=VERSION, epoch=core.epoch, intake_open=bool(core.intake))

    def _task(self, core: Core) -> Task:
        g = core.generation
        lease = {0: None, RUNS: NOW + LEASE, RAN_OUT: NOW - 1, AGED: NOW - 1}[core.lease]
        return Task(
            task_id="t",
            pool="pool",
            queue="q",
            kind="k",
            graph_id=None,
            node_id="main",
            revision=core.revision,
            input_digest=digest_of(core.revision),
            submitted_digest="sha256:submitted",
            state=core.state,
            state_version=VERSION,
            scheduler_epoch=core.granted,
            claim_generation=g,
            attempt_id=f"attempt-{g}" if g else None,
            owner_id=OWNERS[core.owner] if g else None,
            claimed_at=(NOW - AGE if core.lease == AGED else NOW) if g else None,
            lease_expires_at=lease,
            cancel_generation=core.cancel,
            result_commit_id="commit" if core.result else None,
            priority=0,
            available_at=NOW if core.available else NOW + SECOND,
            ready_at=NOW,
            charged_attempts=core.charged,
            max_attempts=self.bounds.max_attempts,
            deps_total=0,
            deps_remaining=0,
            successors=0,
            checkpoint_number=core.number,
            checkpoint_generation=0,
            end=core.end,
            cancel_with_parent=False,
            park_reason=None,
            created_at=NOW,
        )

    def _snapshot(self, core: Core, token: Token | None = None) -> Snapshot:
        g, attempt = core.generation, f"attempt-{core.generation}"
        requests: dict[str, Request] = {}

        def used(request_id: str, owner: str, door: str, answer: Any) -> None:
            requests[request_id] = Request(request_id, owner, door, NOW, answer)

        if token is not None:
            # Only the calls of this claim carry these ids.
            said, saved, held = token.said, token.number, f"attempt-{token.generation}"
            if token.generation == g:
                said, saved = core.end, core.number
                if core.renewed:
                    used(f"renew-{g}", held, "renew", {"outcome": "RENEWED", "info": {"lease_us": NOW + LEASE}})
            if said == End.RELEASED:
                used(f"release-{token.generation}", held, "release", {"outcome": "RELEASED", "info": {}})
            if said == End.FAILED:
                used(f"fail-{token.generation}", held, "fail", {"outcome": "FAILED", "info": {}})
            for number in range(1, saved + 1):
                answer = {"outcome": "CHECKPOINTED", "info": {}}
                used(f"checkpoint-{token.generation}-{number}", held, "checkpoint", answer)
            claims = [["t", token.generation, held]]
            used(f"claim-{token.generation}", OWNERS[token.owner], "claim", {"claims": claims})
        snapshot = Snapshot(now=NOW, pools={"pool": self._pool(core)}, tasks={"t": self._task(core)}, requests=requests)
        if core.staged:
            state = int(StagedState.STAGED if core.staged == 1 else StagedState.DISCARDED)
            snapshot.staged = {"t": [Staged("t", g, attempt, RESULTS[0], state, NOW)]}
        if core.result:
            content = RESULTS[core.result - 1]
            asked = self.calls.commit(
                Token(g, core.owner, core.granted, core.cancel, core.revision), content, core.epoch
            )
            snapshot.results = {
                "t": ResultCommit(
                    "t", "commit", core.revision, attempt, g, content.digest, commit_digest(asked), (), NOW, content
                )
            }
        return snapshot

    def _time(self, core: Core) -> Iterator[Core]:
        """Time passes: the lease runs out, the claim's age is used up, the wait is over."""
        if core.lease == RUNS:
            yield core._replace(lease=RAN_OUT)
        if core.lease == RAN_OUT:
            yield core._replace(lease=AGED)
        if not core.available:
            yield core._replace(available=1)

    # deciding -----------------------------------------------------------------------------------

    def _decide(self, core: Core, snapshot: Snapshot, asked: Asked, command: Any) -> tuple[Core, Token | None] | None:
        """The core after this call, and the claim that it granted; None where nothing changed."""
        self.decisions += 1
        pool, task = snapshot.pools["pool"], snapshot.tasks["t"]
        decision = self.kernel.decide(snapshot, command, (task,) if type(command) is k.ClaimNext else ())
        writes, answer = decision.writes, decision.answer
        if writes is None:
            if type(answer) is Accepted and answer.changed:
                raise Violation("refusal", f"{asked.door} said that it changed something, and wrote nothing")
            return None
        accepted = type(answer) is Accepted or (type(answer) is Granted and bool(answer.tasks))
        judged = accepted or type(answer) is Granted  # claim_next that only parked what it met
        results = ("t",) if core.result else ()
        judge(asked, NOW, pool, snapshot.tasks, results, {}, judged, writes, coverage=self.coverage)
        self.rows.check(asked.door, snapshot.tasks, writes)
        return self._fold(core, snapshot, writes)

    def _fold(self, core: Core, snapshot: Snapshot, writes: WriteSet) -> tuple[Core, Token | None]:
        token = None
        if writes.pool_write is not None:
            pool = writes.pool_write[1]
            core = core._replace(epoch=pool.epoch, intake=int(pool.intake_open))
        task = snapshot.tasks["t"]
        rows = list(snapshot.staged.get("t", ()))
        for write in writes.tasks:
            task = write.task
        for row in writes.staged:
            if not any((r.generation, r.content.digest) == (row.generation, row.content.digest) for r in rows):
                rows.append(row)
        for _, generation in writes.discard_attempts:
            rows = [settled(r, DISCARDED) if r.generation == generation else r for r in rows]
        for _, generation, digest in writes.discard_rivals:
            canonical = (generation, digest)
            rows = [
                settled(r, StagedState.COMMITTED if (r.generation, r.content.digest) == canonical else DISCARDED)
                for r in rows
            ]
        judge_staged(task, rows)
        for new in writes.results:
            kept = [r for r in rows if r.generation == new.generation and r.content.digest == new.result_digest]
            if new.content is None and not any(r.state == StagedState.COMMITTED for r in kept):
                raise Violation("staged", "committed a digest that nobody staged")
        own = [r for r in rows if r.generation == task.claim_generation and task.state == State.CLAIMED]
        result = core.result
        if writes.results:
            result = 1 + [content.digest for content in RESULTS].index(writes.results[0].result_digest)
        if task.claim_generation > core.generation:
            owner = OWNERS.index(task.owner_id or "")
            token = Token(task.claim_generation, owner, task.scheduler_epoch, task.cancel_generation, task.revision)
        live = task.state == State.CLAIMED
        lease = 0
        if live:
            assert task.lease_expires_at is not None
            lease = RUNS if task.lease_expires_at > NOW else core.lease
        reopened = core.reopened + any(event.name == "task_reopened" for event in writes.events)
        return (
            Core(
                core.epoch,
                core.intake,
                task.state,
                task.scheduler_epoch,
                task.claim_generation,
                task.cancel_generation,
                task.revision,
                task.charged_attempts,
                int(task.available_at <= NOW),
                lease,
                task.end,
                task.checkpoint_number,
                own[0].state if own and own[0].state == StagedState.STAGED else (2 if own else 0),
                result,
                reopened,
                OWNERS.index(task.owner_id) if task.owner_id else -1,
                int(
                    live
                    and token is None
                    and (core.renewed or any(r.request_id[:6] == "renew-" for r in writes.requests))
                ),
            ),
            token,
        )

    def _number(self, core: Core) -> int:
        found = self._cores.get(core)
        if found is None:
            found = self._cores[core] = len(self._core_list)
            self._core_list.append(core)
        return found

    def _people(self, number: int, owners: int) -> tuple[int, tuple[tuple[int, Token | None], ...]]:
        core = self._core_list[number]
        snapshot = self._snapshot(core)
        found: set[tuple[int, Token | None]] = {(self._number(later), None) for later in self._time(core)}
        count = len(found)
        for asked, command in self.calls.people_calls(core, owners):
            count += 1
            moved = self._decide(core, snapshot, asked, command)
            if moved is not None:
                found.add((self._number(moved[0]), moved[1]))
        return count, tuple(found)

    def _of_claim(self, number: int, token: Token) -> tuple[int, tuple[int, ...]]:
        """Calls of one claim's holder. They know owners as "mine" and "others", and nothing of the bounds: so they are
        decided once for all cores that differ in names and in what is left to do."""
        core = self._core_list[number]
        alike = core._replace(owner=int(core.owner != token.owner), reopened=0)
        key = (alike, token._replace(owner=0))
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = self._of_claim_alike(*key)
        return found[0], tuple(self._number(c._replace(owner=core.owner, reopened=core.reopened)) for c in found[1])

    def _of_claim_alike(self, core: Core, token: Token) -> tuple[int, tuple[Core, ...]]:
        snapshot = self._snapshot(core, token)
        if token.generation != core.generation:
            snapshot.starts = {("t", token.generation): _start(token)}
        found: set[Core] = set()
        calls = self.calls.token_calls(token)
        for asked, command in calls:
            moved = self._decide(core, snapshot, asked, command)
            if moved is not None:
                if moved[1] is not None:
                    raise Violation("repeats", "a used request id was granted another claim")
                found.add(moved[0])
        found.discard(core)
        return len(calls), tuple(found)

    def _told(self, tokens: tuple[Token, ...], number: int) -> tuple[Token, ...]:
        """The claims so far, the last with what it had reported when the next one was granted."""
        if not tokens:
            return tokens
        core = self._core_list[number]
        said = core.end if core.end in (End.RELEASED, End.FAILED) else 0
        return (*tokens[:-1], tokens[-1]._replace(said=said, number=core.number if self.bounds.remember else 0))

    # searching ----------------------------------------------------------------------------------

    def run(self, progress: Callable[[int, int, int], None] | None = None) -> Found:
        """Until no new state. Raises Violation at the first change that breaks the contract."""
        began = time.monotonic()
        histories: dict[tuple[Token, ...], int] = {(): 0}
        history_list: list[tuple[Token, ...]] = [()]
        owners_of = [0]
        start = self._number(Core()) << 24
        visited = {start}
        frontier = [start]
        depth = transitions = changes = 0
        of_people, of_token = self._of_people, self._of_token
        while frontier:
            following: list[int] = []
            for state in frontier:
                number, history = state >> 24, state & 0xFFFFFF
                tokens = history_list[history]
                people_key = (number, owners_of[history])
                reached = of_people.get(people_key)
                if reached is None:
                    reached = of_people[people_key] = self._people(*people_key)
                transitions += reached[0]
                changes += len(reached[1])
                for next_number, token in reached[1]:
                    next_history = history
                    if token is not None:
                        longer = (*self._told(tokens, number), token)
                        found = histories.get(longer)
                        if found is None:
                            found = histories[longer] = len(history_list)
                            history_list.append(longer)
                            owners_of.append(len({t.owner for t in longer}))
                        next_history = found
                    after = next_number << 24 | next_history
                    if after not in visited:
                        visited.add(after)
                        following.append(after)
                for token in tokens:
                    token_key = (number, token)
                    called = of_token.get(token_key)
                    if called is None:
                        called = of_token[token_key] = self._of_claim(*token_key)
                    transitions += called[0]
                    changes += len(called[1])
                    for next_number in called[1]:
                        after = next_number << 24 | history
                        if after not in visited:
                            visited.add(after)
                            following.append(after)
            if progress is not None:
                progress(depth, len(visited), transitions)
            frontier = following
            depth += bool(frontier)
        seconds = time.monotonic() - began
        return Found(len(visited), transitions, changes, depth, self.decisions, seconds, frozenset(self.rows.seen))


def settled(row: Staged, state: StagedState) -> Staged:
    return row if row.state != StagedState.STAGED else msgspec.structs.replace(row, state=int(state))


def _start(token: Token) -> Any:
    return Event(
        "t",
        1,
        NOW,
        "claim",
        "attempt_started",
        token.epoch,
        token.generation,
        token.cancel,
        token.revision,
        f"attempt-{token.generation}",
        0,
        int(State.CLAIMED),
    )
