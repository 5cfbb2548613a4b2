"""The client's doors for a claim's holder: renew, checkpoint, stage, usage, commit, release, fail."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, overload

from fencepost.client import requests as r
from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.wire import Backend, Claim, Committed, Done, NewTask, Pending, Refused, Renewed, new_id

# Attempts whose checkpoint numbers a client remembers.
REMEMBERED_ATTEMPTS = 10_000


class ClaimDoors:
    """The part of `Client` that moves a claimed task forward. Each call presents the client's epoch, not the
    claim's."""

    backend: Backend
    deferred: dict[str, list[k.NewStatement]]  # attempt id → statements that its commit brings along
    _epochs: dict[str, int]
    _checkpoints: dict[str, int]  # attempt id → the number that this client gave last

    async def _present(self, pool: str, epoch: int | None = None) -> int | None:
        """The epoch that this client presents for `pool`."""
        raise NotImplementedError

    def _end(self, command: Any, connection: object = None) -> Awaitable[Any]:
        """Ask for the end of a claim."""
        raise NotImplementedError

    def _base(self, request_id: str | None) -> str | None:
        """What the ids of tasks without one are made from."""
        raise NotImplementedError

    async def renew(
        self, claim: Claim, ttl: float | None = None, *, request_id: str | None = None
    ) -> Renewed | Refused:
        """Move the lease's end to `ttl` seconds (default: the claim's own) from the store's now; never earlier
        than it stood, never beyond max_claim_age (then EXHAUSTED). Refused: the fence, in order."""
        return await self.backend.ask(await self._renewal(claim, ttl, request_id))  # type: ignore[no-any-return]

    async def renew_many(
        self, claims: Sequence[Claim], ttl: float | None = None, *, request_ids: Sequence[str] | None = None
    ) -> list[Renewed | Refused | BaseException]:
        """Renew each, in one call. An answer per claim, in order; a failure of one stands in its place."""
        ids = request_ids if request_ids is not None else [new_id() for _ in claims]
        if len(ids) != len(claims):
            raise InvalidRequest("request_ids", f"must be as many as the claims, {len(claims)}, got {len(ids)}")
        commands = [await self._renewal(claim, ttl, ids[position]) for position, claim in enumerate(claims)]
        return await self.backend.ask_many(commands)

    async def _renewal(self, claim: Claim, ttl: float | None, request_id: str | None) -> k.Renew:
        return k.Renew(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            ttl_us=r.ttl_us(claim.ttl if ttl is None else ttl),
        )

    async def checkpoint(
        self, claim: Claim, data: Any, *, number: int | None = None, request_id: str | None = None
    ) -> Done | Refused:
        """Keep `data` (JSON or bytes, at most 1 MiB) for a successor. Numbers start at 1 in each attempt and only
        grow: not above the newest is CONFLICT. Refused before that: the fence, in order.

        Without `number` this client counts on from the last one that it knows of. To ask again after Unavailable,
        give the number and the request id of the call whose answer was lost.
        """
        content, presented = encode(data, "checkpoint"), r.presented(claim)
        if number is None:
            number = self._checkpoints.get(claim.attempt_id, claim.checkpoint_number) + 1
        command = k.SaveCheckpoint(
            request_id=r.request(request_id),
            claim=presented,
            epoch=await self._present(claim.pool),
            number=number,
            content=content,
        )
        self._checkpoints[claim.attempt_id] = number
        while len(self._checkpoints) > REMEMBERED_ATTEMPTS:
            del self._checkpoints[next(iter(self._checkpoints))]
        answer = await self.backend.ask(command)
        if isinstance(answer, Refused) and "checkpoint_number" in answer.current:
            self._checkpoints[claim.attempt_id] = answer.current["checkpoint_number"]
        return answer  # type: ignore[no-any-return]

    async def stage(self, claim: Claim, content: Any, *, request_id: str | None = None) -> str | Refused:
        """Keep a result in the isolated area; gives its digest for `commit`. No fence: a late attempt may stage
        too (kept, DISCARDED at once), and nothing of it becomes canonical by that. Refused: NOT_FOUND."""
        made = encode(content, "content")
        answer = await self.backend.ask(
            k.Stage(request_id=r.request(request_id), claim=r.presented(claim), content=made)
        )
        return answer if isinstance(answer, Refused) else made.digest

    async def usage(self, claim: Claim, *, request_id: str | None = None, **numbers: float) -> Done | Refused:
        """Report what an attempt cost (seconds, tokens, usd, …); also for one that lost."""
        command = k.Usage(
            request_id=r.request(request_id), claim=r.presented(claim), usage=k.check_usage(dict(numbers))
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    @overload
    async def commit(
        self,
        claim: Claim,
        result: Any = None,
        *,
        result_digest: str | None = None,
        spawn: Sequence[NewTask] = (),
        statements: Sequence[k.NewStatement] = (),
        usage: Mapping[str, float] | None = None,
        request_id: str | None = None,
    ) -> Committed | Refused: ...
    @overload
    async def commit(
        self,
        claim: Claim,
        result: Any = None,
        *,
        connection: object,
        result_digest: str | None = None,
        spawn: Sequence[NewTask] = (),
        statements: Sequence[k.NewStatement] = (),
        usage: Mapping[str, float] | None = None,
        request_id: str | None = None,
    ) -> Pending | Refused: ...
    async def commit(
        self,
        claim: Claim,
        result: Any = None,
        *,
        connection: object = None,
        result_digest: str | None = None,
        spawn: Sequence[NewTask] = (),
        statements: Sequence[k.NewStatement] = (),
        usage: Mapping[str, float] | None = None,
        request_id: str | None = None,
    ) -> Committed | Pending | Refused:
        """Make `result` (or the staged result with `result_digest`) canonical, release the successors and insert
        `spawn`, in one transaction.

        With `connection` (as with `submit`) that is the caller's own: Pending, true together with the caller's rows
        once it has committed. On Refused roll it back. The claim is not renewed any more after Pending, and until the
        transaction has ended a raise of the epoch waits: commit it at once. See docs/transactions.md.

        `statements` (`sql.statement(…)`) are TRANSACTIONAL effects, executed by that very transaction; those that
        `attempt.effect` has deferred come along by themselves.

        Refused: NOT_FOUND, PROTOCOL, FENCED, CANCELLED, STALE_INPUT, ENDED, PAYLOAD_CONFLICT (a statement's slot is
        taken). The same commit by the same attempt again is COMMITTED with `replayed`. Raises NotStaged, Unsettled,
        StatementFailed, SpawnConflict, InvalidRequest, Unavailable.
        """
        content = None
        if result_digest is None:
            content = encode(result, "result")
            result_digest = content.digest
        elif result is not None:
            raise InvalidRequest("result_digest", "give the result or the digest of a staged one, not both")
        command = k.Commit(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=self._epochs.get(claim.pool) or await self._present(claim.pool),
            result_digest=result_digest,
            content=content,
            result_commit_id=new_id(),
            spawn=r.new_tasks(spawn, "spawn", self._base(request_id)) if spawn else (),
            statements=(*self.deferred.get(claim.attempt_id, ()), *statements),
            usage=k.check_usage(dict(usage)) if usage else None,
        )
        return await self._end(command, connection)  # type: ignore[no-any-return]

    async def release(
        self, claim: Claim, *, delay: float = 0.0, wait: bool = False, request_id: str | None = None
    ) -> Done | Refused:
        """Give the task back, claimable again after `delay` seconds; nothing is charged. Refused: the fence.

        With `wait` it is PARKED (WAITING) instead where an effect is left that only a person can decide, and READY
        again once the last of these is decided: no worker turns in circles meanwhile.
        """
        command = k.Release(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            delay_us=k.check_seconds(delay, "delay"),
            wait=wait,
        )
        return await self._end(command)  # type: ignore[no-any-return]

    async def fail(
        self,
        claim: Claim,
        error: str,
        *,
        retry: bool = True,
        usage: Mapping[str, float] | None = None,
        request_id: str | None = None,
    ) -> Done | Refused:
        """End the attempt as FAILED, charged. The task is READY again after a backoff, or PARKED when its attempts
        are used up or `retry` is False. `error` is kept up to 16 KiB. Refused: the fence."""
        if not isinstance(error, str):
            raise InvalidRequest("error", f"must be text, got {type(error).__name__}")
        command = k.Fail(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            error=k.cut_error(error),
            retry=retry,
            jitter=random.uniform(-1.0, 1.0),
            usage=k.check_usage(dict(usage)) if usage else None,
        )
        return await self._end(command)  # type: ignore[no-any-return]
