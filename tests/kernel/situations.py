"""For every operation a situation in which it is accepted, and for every guard the ways to make it refuse.

The pair test, the row test and the mutation test combine them. A breaker changes what its guard looks at and as
little else as it can; several breakers for one guard are several ways to break it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel.commit import commit_digest
from fencepost.kernel.digests import encode
from fencepost.kernel.records import End, Pool, Request, ResultCommit, Staged, StagedState, State
from tests.kernel import effect_situations as effects
from tests.kernel.situation import (
    CANCELLED,
    FRESH,
    HELD_TOKEN,
    READY,
    RESULT,
    Breaker,
    Situation,
    drop_pool,
    drop_task,
    ended,
    held,
    moved,
    old_protocol,
    said,
    sets,
    shows,
    tasks,
    used,
)
from tests.model.world import POOL, SECOND, START, new_task

# operations that are accepted ---------------------------------------------------------------------


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
    k.Renew: held(k.Renew, ttl_us=30 * SECOND),
    k.SaveCheckpoint: held(k.SaveCheckpoint, number=4, content=encode(4)),
    k.Commit: _commit,
    k.Release: held(k.Release),
    k.Fail: held(k.Fail, error="it broke"),
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
    **effects.ACCEPTED,
}


# ways to make one guard refuse ----------------------------------------------------------------------


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

    return older, newer, moved


BREAKERS: dict[str, tuple[Breaker, ...]] = {
    "any:unknown-task:not-found": (drop_task,),
    "any:unknown-pool:not-found": (drop_pool,),
    "any:old-protocol:protocol": (old_protocol,),
    "any:ttl-over-policy:invalid": (_long_ttl,),
    "fence:no-epoch-or-old-protocol:protocol": (old_protocol, sets(epoch=None)),
    "fence:other-epoch:fenced": _epochs(),
    "fence:other-generation-or-attempt:fenced": (
        shows(generation=1),
        shows(generation=3),
        shows(attempt_id="attempt-2b"),
    ),
    "fence:other-owner:fenced": (shows(owner_id="B"),),
    "fence:other-or-no-owner:fenced": (shows(owner_id="B"), shows(owner_id=None)),
    "fence:granted-under-older-epoch:fenced": (tasks(scheduler_epoch=2),),
    "fence:other-cancel-generation:cancelled": (shows(cancel_generation=0), shows(cancel_generation=2)),
    "fence:other-input:stale-input": (shows(input_digest="sha256:input-1"),),
    "fence:not-claimed:fenced-or-ended": (
        ended(State.READY, End.EXPIRED),
        ended(State.READY, End.RELEASED),
        ended(State.PARKED, End.FAILED),
        ended(State.COMMITTED, End.COMMITTED),
    ),
    "claim:request-used:as-they-stand": (_claim_used, used("claim", "C", {"claims": []})),
    "claim:intake-closed:intake-closed": (lambda s: s.set_pool(intake_open=False),),
    "claim:other-version:conflict": (sets(expected_state_version=39),),
    "claim:other-state:not-claimable": (
        ended(State.CANCELLED, End.RELEASED),
        ended(State.BLOCKED, End.NONE),
        ended(State.PARKED, End.FAILED),
        ended(State.COMMITTED, End.COMMITTED),
    ),
    "claim:not-yet:not-claimable": (tasks(available_at=START + 3_600 * SECOND),),
    "claim:lease-runs:held": (
        tasks(state=int(State.CLAIMED), lease_expires_at=START + 30 * SECOND, end=int(End.NONE)),
    ),
    "renew:repeated:first-times-again": (*said("renew", "RENEWED"),),
    "renew:age-used-up:exhausted": (_too_old,),
    "checkpoint:repeated:said-again": (*said("checkpoint", "CHECKPOINTED"),),
    "checkpoint:not-above-newest:conflict": (sets(number=3), sets(number=1)),
    "commit:repeated:committed-again": (_committed_already,),
    "commit:not-staged:not-staged": (_digest_only,),
    "release:repeated:said-again": (*said("release", "RELEASED"),),
    "fail:repeated:said-again": (*said("fail", "FAILED"),),
    "people:committed:already-committed": (ended(State.COMMITTED, End.COMMITTED),),
    "people:other-version:conflict": (sets(expected_state_version=39),),
    "submit:unknown-pool:not-found": (_pool_gone_for_submit,),
    "submit:old-protocol:protocol": (old_protocol,),
    "expire:not-lapsed:conflict-or-held": (
        lambda s: setattr(s, "now", START + SECOND),
        ended(State.READY, End.RELEASED),
    ),
    "cancel:cancelled-since:said-so": (
        sets(expected_cancel_generation=0),
        sets(expected_cancel_generation=2),
        ended(State.CANCELLED, End.CANCELLED),
    ),
    "reopen:repeated:said-again": (*said("reopen", "REOPENED"),),
    "reopen:not-cancelled-or-parked:conflict": (
        ended(State.READY, End.RELEASED),
        ended(State.BLOCKED, End.NONE),
        ended(State.COMMITTED, End.COMMITTED),
    ),
    "revise:repeated:said-again": (*said("revise", "REVISED"),),
    "revise:other-revision:conflict": (sets(expected_revision=1), sets(expected_revision=3)),
    "revise:cancelled:conflict": (ended(State.CANCELLED, End.CANCELLED),),
    "take_over:repeated:said-again": (*said("take_over", "TAKEN_OVER"),),
    "take_over:other-generation:conflict": (sets(expected_generation=1), sets(expected_generation=3)),
    "take_over:none-live:conflict": (ended(State.READY, End.EXPIRED), ended(State.COMMITTED, End.COMMITTED)),
    "discard:repeated:said-again": (*said("discard", "DISCARDED"),),
    "discard:unknown-generation:not-found": (sets(generation=3), sets(generation=0)),
    "discard:nothing-staged:conflict": (lambda s: setattr(s, "staged", []),),
    "stage:unknown-attempt:not-found": (_stranger,),
    "stage:repeated:said-again": (*said("stage", "STAGED"),),
    "usage:repeated:said-again": (*said("usage", "RECORDED"),),
    "pool:no-epoch-or-old-protocol:protocol": (old_protocol, sets(expected_epoch=None)),
    "pool:repeated:said-again": (*said("pool", "INTAKE_CLOSED"),),
    "pool:other-epoch:fenced": (sets(expected_epoch=2), sets(expected_epoch=4)),
    "pool:other-version:conflict": (sets(expected_state_version=6), sets(expected_state_version=8)),
    "pool:raise-not-above:invalid": (sets(to=3), sets(to=1)),
    **effects.BREAKERS,
}

__all__ = ["ACCEPTED", "BREAKERS", "Breaker", "Situation"]
