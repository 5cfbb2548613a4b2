"""What may be asked in the search of one task: whatever the holder of any claim, a copy of a call, a thief, a person or
a loop may present. Also the states that the search goes through, and its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, State
from tests.model.oracle import Asked

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


CI = Bounds()
# Each takes minutes. All counters raised at once would take days, so each search raises some of them.
LARGE = (
    CI._replace(claims=4),
    CI._replace(cancels=2, reopens=2, raises=2),
    CI._replace(revisions=2, checkpoints=2),
    CI._replace(max_attempts=3, remember=True),
)


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


def digest_of(revision: int) -> str:
    return f"sha256:input-{revision}"


class Calls:
    """Every call of every caller. A command is made once; what it presents never changes."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.epochs = range(1, bounds.raises + 2)
        self._commands: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
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

    def commit(self, token: Token, content: Content, epoch: int, owner: str | None = "", sent: bool = True) -> Any:
        return k.Commit(
            request_id="new",
            epoch=epoch,
            claim=self._presented(token, OWNERS[token.owner] if owner == "" else owner),
            result_digest=content.digest,
            content=content if sent else None,
            result_commit_id="commit",
        )

    def token_calls(self, token: Token) -> list[tuple[Asked, Any]]:
        return self._once(("token", token), lambda: list(self._of_token(token)))  # type: ignore[no-any-return]

    def _call(
        self,
        token: Token,
        epoch: int,
        door: str,
        kind: type,
        owner: str | None = "",
        request: str = "new",
        **fields: Any,
    ) -> tuple[Asked, Any]:
        claim = self._presented(token, OWNERS[token.owner] if owner == "" else owner)
        asked = Asked(
            door,
            "t",
            epoch,
            token.generation,
            claim.attempt_id,
            token.cancel,
            claim.input_digest,
            claim.owner_id,
            request=request,
        )
        return asked, kind(request_id=request, epoch=epoch, claim=claim, **fields)

    def _of_token(self, token: Token) -> Iterator[tuple[Asked, Any]]:
        """Whatever the holder of this claim, a copy of its calls in the network, or a thief may present."""
        g, own = token.generation, OWNERS[token.owner]
        others = [OWNERS[n] for n in range(self.bounds.workers) if n != token.owner]
        for epoch in self.epochs:
            call = partial(self._call, token, epoch)

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
                yield call("fail", k.Fail, owner, error=ERROR, retry=True)
                yield call("checkpoint", k.SaveCheckpoint, owner, number=1, content=CHECKPOINT)
            yield call("release", k.Release)
            yield call("renew", k.Renew, own, f"renew-{g}", ttl_us=LEASE)
            for retry in (True, False):
                yield call("fail", k.Fail, own, f"fail-{g}", error=ERROR, retry=retry)
            yield call("fail", k.Fail, own, error=ERROR, retry=False)
            for number in range(1, self.bounds.checkpoints + 1):
                yield call(
                    "checkpoint", k.SaveCheckpoint, own, f"checkpoint-{g}-{number}", number=number, content=CHECKPOINT
                )
                if number > 1:
                    yield call("checkpoint", k.SaveCheckpoint, own, number=number, content=CHECKPOINT)
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

    def people_calls(self, core: Core, owners: int) -> Iterator[tuple[Asked, Any]]:
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
            yield (
                Asked("pool", None, epoch, version=VERSION),
                k.RaiseEpoch(
                    request_id="new",
                    pool="pool",
                    expected_epoch=epoch,
                    expected_state_version=VERSION,
                    to=core.epoch - 1,
                ),
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
        for cancel in range(core.cancel + 1):
            if core.cancel < bounds.cancels or core.state == State.CANCELLED or cancel < core.cancel:
                yield (
                    Asked("cancel", "t", cancel=cancel),
                    k.Cancel(request_id="new", task_id="t", expected_cancel_generation=cancel),
                )
