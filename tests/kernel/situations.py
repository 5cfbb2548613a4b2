"""For every operation a situation in which it is accepted, and for every guard the ways to make it refuse.

The pair test, the row test and the mutation test combine them. A breaker changes what its guard looks at and as
little else as it can; several breakers for one guard are several ways to break it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.fence import Context
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.records import (
    PROTOCOL,
    Content,
    End,
    Pool,
    Request,
    ResultCommit,
    Staged,
    StagedState,
    State,
    Task,
)
from fencepost.kernel.commit import commit_digest
from fencepost.kernel.writes import Decision, Snapshot
from tests.model.world import POOL, SECOND, START, new_task

replace = msgspec.structs.replace

RESULT = encode({"result": 1})
FRESH = "request-of-this-call"

# The task of the situations: claimed for the second time, by A, after a cancel, a revise and two raises.
CLAIMED = Task(
    task_id="t",
    pool=POOL,
    queue="default",
    kind="default",
    graph_id=None,
    node_id="main",
    revision=2,
    input_digest="sha256:input-2",
    submitted_digest="sha256:submitted",
    state=int(State.CLAIMED),
    state_version=40,
    scheduler_epoch=3,
    claim_generation=2,
    attempt_id="attempt-2",
    owner_id="A",
    claimed_at=START,
    lease_expires_at=START + 30 * SECOND,
    cancel_generation=1,
    result_commit_id=None,
    priority=0,
    available_at=START - SECOND,
    ready_at=START - SECOND,
    charged_attempts=0,
    max_attempts=5,
    deps_total=0,
    deps_remaining=0,
    successors=0,
    checkpoint_number=3,
    checkpoint_generation=2,
    end=int(End.NONE),
    cancel_with_parent=False,
    park_reason=None,
    created_at=START - SECOND,
)
READY = replace(CLAIMED, state=int(State.READY), lease_expires_at=None, end=int(End.RELEASED))
CANCELLED = replace(READY, state=int(State.CANCELLED))
HELD_TOKEN = k.Presented(
    store_id="store",
    pool=POOL,
    task_id="t",
    attempt_id="attempt-2",
    generation=2,
    cancel_generation=1,
    input_digest="sha256:input-2",
    owner_id="A",
)


class Situation:
    """Records, a command, and what the kernel says to it."""

    def __init__(self, command: Any, task: Task | None = CLAIMED) -> None:
        self.command = command
        self.pool: Pool | None = Pool(POOL, state_version=7, epoch=3)
        self.task = task
        self.candidate: Task | None = None
        self.requests: dict[str, Request] = {}
        self.results: dict[str, ResultCommit] = {}
        self.staged: list[Staged] = []
        self.now = START + SECOND

    def set_command(self, **fields: Any) -> None:
        self.command = replace(self.command, **fields)

    def set_claim(self, **fields: Any) -> None:
        self.set_command(claim=replace(self.command.claim, **fields))

    def set_task(self, **fields: Any) -> None:
        if self.candidate is not None:
            self.candidate = replace(self.candidate, **fields)
        else:
            assert self.task is not None
            self.task = replace(self.task, **fields)

    def set_pool(self, **fields: Any) -> None:
        assert self.pool is not None
        self.pool = replace(self.pool, **fields)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            now=self.now,
            pools={POOL: self.pool} if self.pool is not None else {},
            tasks={"t": self.task} if self.task is not None else {},
            requests=self.requests,
            results=self.results,
            staged={"t": self.staged},
        )

    def decide(self, kernel: Kernel) -> Decision:
        return kernel.decide(self.snapshot(), self.command, (self.candidate,) if self.candidate is not None else ())

    def context(self) -> Context:
        """What the guards see."""
        task = self.candidate if self.candidate is not None else self.task
        if type(self.command) is k.Submit:
            task = None
        pool = self.pool if task is not None or hasattr(self.command, "pool") else None
        return Context(self.snapshot(), self.command, pool, task)


# operations that are accepted ---------------------------------------------------------------------


def _held(kind: type, **fields: Any) -> Callable[[], Situation]:
    return lambda: Situation(kind(request_id=FRESH, epoch=3, claim=HELD_TOKEN, **fields))


def _claim_next() -> Situation:
    situation = Situation(
        k.ClaimNext(
            request_id=FRESH,
            pool=POOL,
            queues=("default",),
            kinds=None,
            epoch=3,
            owner_id="B",
            ttl_us=30 * SECOND,
            attempt_ids=("attempt-3",),
        ),
        None,
    )
    situation.candidate = READY
    return situation


def _discard() -> Situation:
    situation = Situation(k.Discard(request_id=FRESH, task_id="t", generation=2, epoch=3, who="P"))
    situation.staged = [Staged("t", 2, "attempt-2", RESULT, int(StagedState.STAGED), START)]
    return situation


def _of_pool(kind: type, **fields: Any) -> Callable[[], Situation]:
    def make() -> Situation:
        situation = Situation(
            kind(request_id=FRESH, pool=POOL, expected_epoch=3, expected_state_version=7, who="P", **fields), None
        )
        situation.set_pool(intake_open=kind is not k.OpenIntake)
        return situation

    return make


def _commit() -> Situation:
    return Situation(
        k.Commit(
            request_id=FRESH,
            epoch=3,
            claim=HELD_TOKEN,
            result_digest=RESULT.digest,
            content=RESULT,
            result_commit_id="commit-1",
        )
    )


def _claim() -> Situation:
    return Situation(
        k.Claim(
            request_id=FRESH,
            task_id="t",
            expected_state_version=40,
            epoch=3,
            owner_id="B",
            ttl_us=30 * SECOND,
            attempt_id="attempt-3",
        ),
        READY,
    )


def _expire() -> Situation:
    situation = Situation(k.Expire(request_id=FRESH, task_id="t", expected_state_version=40))
    situation.now = START + 31 * SECOND
    return situation


ACCEPTED: dict[type, Callable[[], Situation]] = {
    k.Claim: _claim,
    k.ClaimNext: _claim_next,
    k.Renew: _held(k.Renew, ttl_us=30 * SECOND),
    k.SaveCheckpoint: _held(k.SaveCheckpoint, number=4, content=encode(4)),
    k.Commit: _commit,
    k.Release: _held(k.Release),
    k.Fail: _held(k.Fail, error="it broke"),
    k.Submit: lambda: Situation(k.Submit(request_id=FRESH, tasks=(new_task("new"),)), None),
    k.Expire: _expire,
    k.Cancel: lambda: Situation(k.Cancel(request_id=FRESH, task_id="t", expected_cancel_generation=1, who="P")),
    k.Reopen: lambda: Situation(
        k.Reopen(request_id=FRESH, task_id="t", expected_state_version=40, epoch=3, who="P"), CANCELLED
    ),
    k.Revise: lambda: Situation(
        k.Revise(request_id=FRESH, task_id="t", input=encode("new input"), expected_revision=2, epoch=3, who="P")
    ),
    k.TakeOver: lambda: Situation(
        k.TakeOver(request_id=FRESH, task_id="t", expected_generation=2, epoch=3, who="P"),
    ),
    k.Discard: _discard,
    k.Stage: lambda: Situation(k.Stage(request_id=FRESH, claim=HELD_TOKEN, content=RESULT)),
    k.Usage: lambda: Situation(k.Usage(request_id=FRESH, claim=HELD_TOKEN, usage={"tokens": 1.0})),
    k.CloseIntake: _of_pool(k.CloseIntake),
    k.OpenIntake: _of_pool(k.OpenIntake),
    k.RaiseEpoch: _of_pool(k.RaiseEpoch),
    k.SetPolicy: _of_pool(k.SetPolicy, policy=Pool(POOL).policy),
    k.CreatePool: lambda: Situation(k.CreatePool(request_id=FRESH, pool=POOL), None),
}


# ways to make one guard refuse ----------------------------------------------------------------------

Breaker = Callable[[Situation], None]


def _set(**fields: Any) -> Breaker:
    return lambda s: s.set_command(**fields)


def _claims(**fields: Any) -> Breaker:
    return lambda s: s.set_claim(**fields)


def _tasks(**fields: Any) -> Breaker:
    return lambda s: s.set_task(**fields)


def _drop_task(s: Situation) -> None:
    s.task = None


def _drop_pool(s: Situation) -> None:
    s.pool = None


def _old_protocol(s: Situation) -> None:
    s.set_pool(min_protocol=PROTOCOL + 1)


def _moved(s: Situation) -> None:
    if hasattr(s.command, "claim"):
        s.set_claim(pool="the-pool-it-left")


def _ended(state: State, end: End) -> Breaker:
    return _tasks(state=int(state), lease_expires_at=None, end=int(end))


def _used(door: str, owner: str | None, answer: Any) -> Breaker:
    """The request id was used: for this very call (owner None), or by somebody else, or at another door."""

    def break_it(s: Situation) -> None:
        s.requests = {FRESH: Request(FRESH, owner or speaker(s), door, START, answer)}

    return break_it


def speaker(s: Situation) -> str:
    """Who asks, as the kernel remembers it: an attempt, or a person for one call about one thing."""
    if hasattr(s.command, "claim"):
        return str(s.command.claim.attempt_id)
    return f"{type(s.command).__name__} {getattr(s.command, 'task_id', POOL)} {s.command.who}"


def _said(door: str, outcome: str) -> tuple[Breaker, ...]:
    answer = {"outcome": outcome, "info": {"lease_us": START}}
    return _used(door, None, answer), _used(door, "somebody else", answer), _used("another door", None, answer)


def _claim_used(s: Situation) -> None:
    s.requests = {FRESH: Request(FRESH, "B", "claim", START, {"claims": [["t", 1, "attempt-1"]]})}
    if type(s.command) is k.ClaimNext:
        s.task = s.candidate


def _committed_already(s: Situation) -> None:
    digest = commit_digest(s.command)
    s.set_task(state=int(State.COMMITTED), end=int(End.COMMITTED), lease_expires_at=None, result_commit_id="commit-0")
    s.results = {
        "t": ResultCommit("t", "commit-0", 2, "attempt-2", 2, s.command.result_digest, digest, (), START, RESULT)
    }


def _too_old(s: Situation) -> None:
    """The lease already reaches to max_claim_age, the most that a renewal could give."""
    s.set_task(claimed_at=START - 86_400 * SECOND)


def _long_ttl(s: Situation) -> None:
    s.set_command(ttl_us=3_601 * SECOND)


def _digest_only(s: Situation) -> None:
    s.set_command(content=None)


def _pool_gone_for_submit(s: Situation) -> None:
    s.set_command(tasks=(*s.command.tasks, new_task("other", pool="nowhere")))


def _stranger(s: Situation) -> None:
    s.set_claim(attempt_id="attempt-of-nobody")


def _epochs() -> tuple[Breaker, ...]:
    def older(s: Situation) -> None:
        s.set_command(epoch=2)

    def newer(s: Situation) -> None:
        s.set_command(epoch=4)

    return older, newer, _moved


BREAKERS: dict[str, tuple[Breaker, ...]] = {
    "any:unknown-task:not-found": (_drop_task,),
    "any:unknown-pool:not-found": (_drop_pool,),
    "any:old-protocol:protocol": (_old_protocol,),
    "any:ttl-over-policy:invalid": (_long_ttl,),
    "fence:no-epoch-or-old-protocol:protocol": (_old_protocol, _set(epoch=None)),
    "fence:other-epoch:fenced": _epochs(),
    "fence:other-generation-or-attempt:fenced": (
        _claims(generation=1),
        _claims(generation=3),
        _claims(attempt_id="attempt-2b"),
    ),
    "fence:other-owner:fenced": (_claims(owner_id="B"),),
    "fence:other-or-no-owner:fenced": (_claims(owner_id="B"), _claims(owner_id=None)),
    "fence:granted-under-older-epoch:fenced": (_tasks(scheduler_epoch=2),),
    "fence:other-cancel-generation:cancelled": (_claims(cancel_generation=0), _claims(cancel_generation=2)),
    "fence:other-input:stale-input": (_claims(input_digest="sha256:input-1"),),
    "fence:not-claimed:fenced-or-ended": (
        _ended(State.READY, End.EXPIRED),
        _ended(State.READY, End.RELEASED),
        _ended(State.PARKED, End.FAILED),
        _ended(State.COMMITTED, End.COMMITTED),
    ),
    "claim:request-used:as-they-stand": (_claim_used, _used("claim", "C", {"claims": []})),
    "claim:intake-closed:intake-closed": (lambda s: s.set_pool(intake_open=False),),
    "claim:other-version:conflict": (_set(expected_state_version=39),),
    "claim:other-state:not-claimable": (
        _ended(State.CANCELLED, End.RELEASED),
        _ended(State.BLOCKED, End.NONE),
        _ended(State.PARKED, End.FAILED),
        _ended(State.COMMITTED, End.COMMITTED),
    ),
    "claim:not-yet:not-claimable": (_tasks(available_at=START + 3_600 * SECOND),),
    "claim:lease-runs:held": (
        _tasks(state=int(State.CLAIMED), lease_expires_at=START + 30 * SECOND, end=int(End.NONE)),
    ),
    "renew:repeated:first-times-again": (*_said("renew", "RENEWED"),),
    "renew:age-used-up:exhausted": (_too_old,),
    "checkpoint:repeated:said-again": (*_said("checkpoint", "CHECKPOINTED"),),
    "checkpoint:not-above-newest:conflict": (_set(number=3), _set(number=1)),
    "commit:repeated:committed-again": (_committed_already,),
    "commit:not-staged:not-staged": (_digest_only,),
    "release:repeated:said-again": (*_said("release", "RELEASED"),),
    "fail:repeated:said-again": (*_said("fail", "FAILED"),),
    "people:committed:already-committed": (_ended(State.COMMITTED, End.COMMITTED),),
    "people:other-version:conflict": (_set(expected_state_version=39),),
    "submit:unknown-pool:not-found": (_pool_gone_for_submit,),
    "submit:old-protocol:protocol": (_old_protocol,),
    "expire:not-lapsed:conflict-or-held": (
        lambda s: setattr(s, "now", START + SECOND),
        _ended(State.READY, End.RELEASED),
    ),
    "cancel:cancelled-since:said-so": (
        _set(expected_cancel_generation=0),
        _set(expected_cancel_generation=2),
        _ended(State.CANCELLED, End.CANCELLED),
    ),
    "reopen:repeated:said-again": (*_said("reopen", "REOPENED"),),
    "reopen:not-cancelled-or-parked:conflict": (
        _ended(State.READY, End.RELEASED),
        _ended(State.BLOCKED, End.NONE),
        _ended(State.COMMITTED, End.COMMITTED),
    ),
    "revise:repeated:said-again": (*_said("revise", "REVISED"),),
    "revise:other-revision:conflict": (_set(expected_revision=1), _set(expected_revision=3)),
    "revise:cancelled:conflict": (_ended(State.CANCELLED, End.CANCELLED),),
    "take_over:repeated:said-again": (*_said("take_over", "TAKEN_OVER"),),
    "take_over:other-generation:conflict": (_set(expected_generation=1), _set(expected_generation=3)),
    "take_over:none-live:conflict": (_ended(State.READY, End.EXPIRED), _ended(State.COMMITTED, End.COMMITTED)),
    "discard:repeated:said-again": (*_said("discard", "DISCARDED"),),
    "discard:unknown-generation:not-found": (_set(generation=3), _set(generation=0)),
    "discard:nothing-staged:conflict": (lambda s: setattr(s, "staged", []),),
    "stage:unknown-attempt:not-found": (_stranger,),
    "stage:repeated:said-again": (*_said("stage", "STAGED"),),
    "usage:repeated:said-again": (*_said("usage", "RECORDED"),),
    "pool:no-epoch-or-old-protocol:protocol": (_old_protocol, _set(expected_epoch=None)),
    "pool:repeated:said-again": (*_said("pool", "INTAKE_CLOSED"),),
    "pool:other-epoch:fenced": (_set(expected_epoch=2), _set(expected_epoch=4)),
    "pool:other-version:conflict": (_set(expected_state_version=6), _set(expected_state_version=8)),
    "pool:raise-not-above:invalid": (_set(to=3), _set(to=1)),
}

CONTENT: Content = RESULT
