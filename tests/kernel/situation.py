"""A situation: records, a call, and what the kernel says to it; and small changes that make guards refuse it."""

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
    Effect,
    End,
    Pool,
    Request,
    ResultCommit,
    Staged,
    State,
    Task,
)
from fencepost.kernel.writes import Decision, Snapshot
from tests.model.world import POOL, SECOND, START

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
        self.effects: list[Effect] = []
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

    def set_effect(self, number: int = 1, **fields: Any) -> None:
        self.effects[number - 1] = replace(self.effects[number - 1], **fields)

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
            effects={"t": self.effects},
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


def held(kind: type, **fields: Any) -> Callable[[], Situation]:
    return lambda: Situation(kind(request_id=FRESH, epoch=3, claim=HELD_TOKEN, **fields))


Breaker = Callable[[Situation], None]


def sets(**fields: Any) -> Breaker:
    return lambda s: s.set_command(**fields)


def shows(**fields: Any) -> Breaker:
    return lambda s: s.set_claim(**fields)


def tasks(**fields: Any) -> Breaker:
    return lambda s: s.set_task(**fields)


def drop_task(s: Situation) -> None:
    s.task = None


def drop_pool(s: Situation) -> None:
    s.pool = None


def old_protocol(s: Situation) -> None:
    s.set_pool(min_protocol=PROTOCOL + 1)


def moved(s: Situation) -> None:
    if hasattr(s.command, "claim"):
        s.set_claim(pool="the-pool-it-left")


def ended(state: State, end: End) -> Breaker:
    return tasks(state=int(state), lease_expires_at=None, end=int(end))


def used(door: str, owner: str | None, answer: Any) -> Breaker:
    """The request id was used: for this very call (owner None), or by somebody else, or at another door."""

    def break_it(s: Situation) -> None:
        said = answer
        if hasattr(s.command, "effect_id"):
            said = {**answer, "info": {"effect_id": s.command.effect_id}}
        s.requests = {FRESH: Request(FRESH, owner or speaker(s), door, START, said)}

    return break_it


def speaker(s: Situation) -> str:
    """Who asks, as the kernel remembers it: an attempt, or a person for one call about one thing."""
    if hasattr(s.command, "claim"):
        return str(s.command.claim.attempt_id)
    return f"{type(s.command).__name__} {getattr(s.command, 'task_id', POOL)} {s.command.who}"


def said(door: str, outcome: str) -> tuple[Breaker, ...]:
    answer = {"outcome": outcome, "info": {"lease_us": START}}
    return used(door, None, answer), used(door, "somebody else", answer), used("another door", None, answer)
