"""Breadth-first search over the shipped kernel: one task, several workers, every interleaving of calls.

A state is what decisions read: the pool's epoch and intake, the task's record, what the latest attempt has staged, every
claim that was ever granted (its owner, epoch, cancel generation and revision), and which request ids were used. At every
state
*any* of these claims may present itself at any door, under any epoch that ever was, with its own name, another's or
none, as a new call or as a copy of an earlier one; and people and loops may call with what they see or with what they
saw before. So no client needs to be modelled: whatever it has adopted or missed is among the calls.

Bounded: claims, cancels, reopens, revisions, raises. Unbounded: renewals, staging, intake toggles, the passing of time,
take-overs, refused calls.

Abstracted, because decisions only compare: the state versions start again at one number after each step ("seen before"
is one older number); a time is past or to come; a lease runs, ran out, or has used up the claim's age; what an ended
attempt has staged is dropped once it was seen to be decided (no decision reads it). Request ids are remembered for ever,
but those of checkpoints only until the next claim, unless `remember` says otherwise. Owners are symmetric: a state names them in the order in which they came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.records import Content, End, Pool, Request, ResultCommit, Staged, StagedState, State, Task
from fencepost.kernel.tasks import commit_digest
from fencepost.kernel.writes import Snapshot, WriteSet
from tests.model.oracle import Asked, Violation, judge, judge_staged
from tests.model.rows import Rows

SECOND = 1_000_000
NOW = 10_000_000 * SECOND
VERSION = 1_000  # of task and pool at every step
LEASE, AGE = 30 * SECOND, 86_400 * SECOND
OWNERS = ("A", "B", "C", "D")
RESULTS = (encode("one result"), encode("another result"))
CHECKPOINT = encode("checkpoint")
ERROR = "it broke"

RUNS, RAN_OUT, AGED = 1, 2, 3  # a lease, besides 0: none


class Bounds(NamedTuple):
    workers: int = 3
    claims: int = 3
    cancels: int = 1
    reopens: int = 1
    revisions: int = 1
    raises: int = 1
    max_attempts: int = 2
    checkpoints: int = 1  # numbers that an attempt may save
    staging: bool = True
    remember: bool = False  # checkpoints of earlier attempts too; else a late copy of those finds its id forgotten


class Core(NamedTuple):
    """What a decision reads, counters included."""

    epoch: int = 1
    intake: int = 1
    state: int = int(State.READY)
    granted: int = 0  # epoch of the latest claim
    generation: int = 0
    cancel: int = 0
    revision: int = 1
    charged: int = 0
    available: int = 1
    lease: int = 0
    end: int = 0
    number: int = 0
    staged: int = 0
    result: int = 0
    reopened: int = 0
    owner: int = -1
    renewed: int = 0  # the latest attempt's renewal with the request id of its own was accepted


class Token(NamedTuple):
    """A claim as it was granted. Its attempt id follows from the generation; nothing in the kernel uses that."""

    generation: int
    owner: int
    epoch: int
    cancel: int
    revision: int
    said: int = 0  # End that it reported itself (release, fail); known of the latest one from the record
    number: int = 0  # checkpoints that it saved; likewise


class Found(NamedTuple):
    states: int
    transitions: int
    changes: int
    depth: int
    decisions: int
    seconds: float
    rows: frozenset[Any]


def digest_of(revision: int) -> str:
    return f"sha256:input-{revision}"


class Search:
    """One search. Decisions are made once for each distinct (record, call) and kept: they depend on nothing else."""

    def __init__(self, bounds: Bounds = Bounds(), kernel: Kernel | None = None) -> None:
        self.bounds = bounds
        self.kernel = kernel or Kernel()
        self.rows = Rows()
        self.decisions = 0
        self._commands: dict[Any, Any] = {}
        self._cores: dict[Core, int] = {}
        self._core_list: list[Core] = []
        self._of_people: dict[tuple[int, int], tuple[int, tuple[tuple[int, Token | None], ...]]] = {}
        self._of_token: dict[tuple[int, Token], tuple[int, tuple[int, ...]]] = {}
        self._alike: dict[tuple[Core, Token], tuple[int, tuple[Core, ...]]] = {}
        self.epochs = range(1, bounds.raises + 2)

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
            asked = self._commit(Token(g, core.owner, core.granted, core.cancel, core.revision), content, core.epoch)
            snapshot.results = {
                "t": ResultCommit(
                    "t", "commit", core.revision, attempt, g, content.digest, commit_digest(asked), (), NOW, content
                )
            }
        return snapshot

    # calls --------------------------------------------------------------------------------------

    def _made(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self._commands.get(key)
        if found is None:
            found = self._commands[key] = make()
        return found

    def _presented(self, token: Token, owner: str | None) -> k.Presented:
        return k.Presented(
            store_id="store",
            pool="pool",
            task_id="t",
            attempt_id=f"attempt-{token.generation}",
            generation=token.generation,
            cancel_generation=token.cancel,
            input_digest=digest_of(token.revision),
            owner_id=owner,
        )

    def _commit(self, token: Token, content: Content, epoch: int, owner: str | None = "", sent: bool = True) -> Any:
        return k.Commit(
            request_id="new",
            epoch=epoch,
            claim=self._presented(token, OWNERS[token.owner] if owner == "" else owner),
            result_digest=content.digest,
            content=content if sent else None,
            result_commit_id="commit",
        )

    def _token_calls(self, token: Token) -> list[tuple[Asked, Any]]:
        return self._made(("token", token), lambda: list(self._make_token_calls(token)))  # type: ignore[no-any-return]

    def _make_token_calls(self, token: Token) -> Iterator[tuple[Asked, Any]]:
        """Whatever the holder of this claim, a copy of its calls in the network, or a thief may present."""
        g, own = token.generation, OWNERS[token.owner]
        others = [OWNERS[n] for n in range(self.bounds.workers) if n != token.owner]
        for epoch in self.epochs:

            def call(door: str, kind: type, owner: str | None = own, request: str = "new", **fields: Any) -> Any:
                claim = self._presented(token, owner)
                asked = Asked(
                    door, "t", epoch, g, claim.attempt_id, token.cancel, claim.input_digest, owner, request=request
                )
                return asked, kind(request_id=request, epoch=epoch, claim=claim, **fields)

            for owner in (own, *others, None):
                yield call("renew", k.Renew, owner, ttl_us=LEASE)
                for content in RESULTS:
                    yield call(
                        "commit",
                        k.Commit,
                        owner,
                        result_digest=content.digest,
                        content=content,
                        result_commit_id="commit",
                    )
                yield call("release", k.Release, owner, f"release-{g}")
            yield call("release", k.Release)
            yield call("renew", k.Renew, own, f"renew-{g}", ttl_us=LEASE)
            for retry in (True, False):
                yield call("fail", k.Fail, own, f"fail-{g}", error=ERROR, retry=retry)
                yield call("fail", k.Fail, error=ERROR, retry=retry)
            for number in range(1, self.bounds.checkpoints + 1):
                for request in ("new", f"checkpoint-{g}-{number}"):
                    yield call("checkpoint", k.SaveCheckpoint, own, request, number=number, content=CHECKPOINT)
            if self.bounds.staging:
                yield call("commit", k.Commit, result_digest=RESULTS[0].digest, content=None, result_commit_id="commit")
            for owner in (own, *others):
                yield (
                    Asked("claim", "t", epoch, version=VERSION, request=f"claim-{g}"),
                    k.Claim(
                        request_id=f"claim-{g}",
                        task_id="t",
                        expected_state_version=VERSION,
                        epoch=epoch,
                        owner_id=owner,
                        ttl_us=LEASE,
                        attempt_id="attempt-of-a-copy",
                    ),
                )
        if self.bounds.staging:
            claim = self._presented(token, own)
            yield Asked("stage", "t"), k.Stage(request_id="new", claim=claim, content=RESULTS[0])

    def _people_calls(self, core: Core, owners: int) -> Iterator[tuple[Asked, Any]]:
        bounds = self.bounds
        for epoch in self.epochs:
            for version in (VERSION, VERSION - 1):
                if core.generation < bounds.claims:
                    for owner in range(min(owners + 1, bounds.workers)):
                        yield (
                            Asked("claim", "t", epoch, version=version),
                            k.Claim(
                                request_id="new",
                                task_id="t",
                                expected_state_version=version,
                                epoch=epoch,
                                owner_id=OWNERS[owner],
                                ttl_us=LEASE,
                                attempt_id=f"attempt-{core.generation + 1}",
                            ),
                        )
                if core.reopened < bounds.reopens:
                    yield (
                        Asked("reopen", "t", epoch, version=version),
                        k.Reopen(request_id="new", task_id="t", expected_state_version=version, epoch=epoch),
                    )
                for kind in (k.OpenIntake, k.CloseIntake, k.RaiseEpoch):
                    if kind is not k.RaiseEpoch or core.epoch <= bounds.raises:
                        yield (
                            Asked("pool", None, epoch, version=version),
                            kind(request_id="new", pool="pool", expected_epoch=epoch, expected_state_version=version),
                        )
            if core.generation < bounds.claims:
                for owner in range(min(owners + 1, bounds.workers)):
                    yield (
                        Asked("claim", "t", epoch),
                        k.ClaimNext(
                            request_id="new",
                            pool="pool",
                            queues=("q",),
                            kinds=None,
                            epoch=epoch,
                            owner_id=OWNERS[owner],
                            ttl_us=LEASE,
                            attempt_ids=(f"attempt-{core.generation + 1}",),
                        ),
                    )
            for revision in range(1, core.revision + 1):
                if core.revision <= bounds.revisions or revision < core.revision:
                    yield (
                        Asked("revise", "t", epoch, revision=revision),
                        k.Revise(
                            request_id="new",
                            task_id="t",
                            input=Content(b"", digest_of(core.revision + 1)),
                            expected_revision=revision,
                            epoch=epoch,
                        ),
                    )
            for generation in range(core.generation + 1):
                yield (
                    Asked("take_over", "t", epoch, generation=generation),
                    k.TakeOver(request_id="new", task_id="t", expected_generation=generation, epoch=epoch),
                )
                if bounds.staging:
                    yield (
                        Asked("discard", "t", epoch, generation=generation),
                        k.Discard(request_id="new", task_id="t", generation=generation, epoch=epoch),
                    )
        for version in (VERSION, VERSION - 1):
            yield (
                Asked("expire", "t", version=version),
                k.Expire(request_id="new", task_id="t", expected_state_version=version),
            )
        for cancel in (*range(core.cancel + 1), None):
            if core.cancel < bounds.cancels or core.state == State.CANCELLED or (cancel or 0) < core.cancel:
                if cancel is None and core.cancel >= bounds.cancels and core.state != State.CANCELLED:
                    continue
                yield (
                    Asked("cancel", "t", cancel=cancel),
                    k.Cancel(request_id="new", task_id="t", expected_cancel_generation=cancel),
                )

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
        judge(asked, NOW, pool, snapshot.tasks, results, {}, judged, writes)
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
            rows = [discarded(r) if r.generation == generation else r for r in rows]
        if writes.discard_rivals:
            rows = [discarded(r) for r in rows]
        judge_staged(task, rows)
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
        for asked, command in self._people_calls(core, owners):
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
        calls = self._token_calls(token)
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


def discarded(row: Staged) -> Staged:
    if row.state != StagedState.STAGED:
        return row
    return msgspec.structs.replace(row, state=int(StagedState.DISCARDED))


def _start(token: Token) -> Any:
    from fencepost.kernel.records import Event

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
