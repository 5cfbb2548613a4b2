"""What a handler sees of its claim: `Attempt`, its twin for threads `SyncAttempt`, and `hold`, the block around one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from fencepost import clock
from fencepost.client.effect_port import AttemptPort
from fencepost.client.renewal import Lease, Loss, Terms
from fencepost.client.requests import presented
from fencepost.effects.performing import APPROVAL_WAIT, PATIENCE, TIMEOUT, OnApproval, OnConflict, perform
from fencepost.errors import Fenced, GiveBack, InvalidRequest, Unavailable
from fencepost.kernel.commands import MAX_USAGE_KEYS, check_usage
from fencepost.wire import Claim, Done, Outcome, Refused, new_id

if TYPE_CHECKING:
    from fencepost.client.client import Client

__all__ = ["Attempt", "SyncAttempt", "call_from_thread", "hold", "insist"]

log = logging.getLogger("fencepost.attempt")

T = TypeVar("T")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0
# How long leaving a `hold` may take to give the task back before its lease is left to run out.
LEAVING = 5.0


async def insist(ask: Callable[[], Awaitable[T]], seconds: Callable[[], float]) -> T:
    """Ask again after Unavailable, with back-off and jitter, while `seconds()` is above 0; then raise it.

    `ask` must carry the same request id each time: nothing is known about the calls before.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return await ask()
        except Unavailable:
            left = seconds()
            if left <= 0:
                raise
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, LONGEST_PAUSE)


class Attempt:
    """One claim while it is being worked on.

    `claim` is a plain value (hand `claim.to_json()` to another process, and it works there); `input` the task's input,
    converted to the handler's annotation; `checkpoint_data` the newest accepted checkpoint of this revision, from this
    attempt or one before it, or None; `parents` the results of the tasks that it depended on, by task id.
    """

    def __init__(self, client: Client, claim: Claim, lease: Lease, input: Any = None) -> None:
        self.claim = claim
        self.input = claim.input if input is None else input
        self.checkpoint_data = claim.checkpoint_data
        self.parents: dict[str, Any] = claim.parents
        self._client = client
        self._lease = lease
        self._number = claim.checkpoint_number
        self._in_order = asyncio.Lock()
        self._usage: dict[str, float] = {}
        self._counting = threading.Lock()
        self._port: AttemptPort | None = None

    def __repr__(self) -> str:
        return f"<Attempt {self.claim.generation} of task {self.claim.task_id!r}, {self.remaining():.1f} s trusted>"

    def remaining(self) -> float:
        """Seconds for which the lease is still trusted without a further renewal; 0 once it is lost.

        Looking at it before an expensive step saves work and proves nothing.
        """
        return self._lease.remaining()

    def check(self) -> None:
        """Raise Fenced once the lease is not trusted any more, was refused, or has ended."""
        doubt = self._lease.doubt()
        if doubt is not None:
            raise Fenced(*doubt)

    def alive(self) -> None:
        """Say that the handler is alive: for handlers that declare `silence`."""
        self._lease.alive()

    def usage(self, **numbers: float) -> None:
        """Add to what this attempt has cost (tokens=…, usd=…); reported with its end, also when it lost.

        Raises InvalidRequest for what is no number, is negative, or makes more than 20 keys ("seconds" is one).
        """
        self._lease.alive()
        check_usage(numbers)
        with self._counting:
            total = {key: self._usage.get(key, 0) + numbers.get(key, 0) for key in {**self._usage, **numbers}}
            if len(total.keys() | {"seconds"}) > MAX_USAGE_KEYS:
                raise InvalidRequest("usage", f"at most {MAX_USAGE_KEYS} keys, with seconds")
            self._usage = check_usage(total)

    def spent(self) -> dict[str, float]:
        """What `usage` has added up so far."""
        with self._counting:
            return dict(self._usage)

    async def checkpoint(self, data: Any) -> None:
        """Keep `data` (JSON or bytes, at most 1 MiB) for whoever works on this revision next; the newest counts.

        Raises Fenced where the fence refused it, InvalidRequest for what cannot be kept, Unavailable once the store
        has not answered for as long as the lease was trusted.
        """
        self._lease.alive()
        async with self._in_order:
            self.check()
            answer = await self._save(data)
            if isinstance(answer, Refused) and answer.outcome == Outcome.CONFLICT:
                # Another process that held this very claim has numbered further; this is a new call, above it.
                self._number = int(answer.current.get("checkpoint_number", self._number))
                answer = await self._save(data)
            if isinstance(answer, Refused):
                self._refused(answer)
            self.checkpoint_data = data

    async def _save(self, data: Any) -> Done | Refused:
        self._number += 1
        number, request_id = self._number, new_id()
        return await insist(
            lambda: self._client.checkpoint(self.claim, data, number=number, request_id=request_id), self.remaining
        )

    async def stage(self, content: Any) -> str:
        """Keep a result in the isolated area; its digest, for `client.commit(claim, result_digest=…)`.

        No fence: staging changes nothing else. Raises Fenced where this attempt never existed in the store.
        """
        self._lease.alive()
        request_id = new_id()
        answer = await insist(
            lambda: self._client.stage(self.claim, content, request_id=request_id), self._lease.remaining
        )
        if isinstance(answer, Refused):
            self._refused(answer)
        return answer

    async def effect(
        self,
        slot: str,
        payload: Any,
        *,
        using: Any,
        node_id: str | None = None,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        on_conflict: OnConflict = "raise",
        on_approval: OnApproval = "release",
        approval_wait: float = APPROVAL_WAIT,
    ) -> Any:
        """One side effect on the outside world, in `slot`: prepare, call, settle. The receipt of the call made now, or
        the kept one of a call that an earlier attempt made.

        `using` is the downstream. `timeout` bounds one call, `patience` all waiting besides, both in seconds. Where an
        earlier attempt's outcome is unknown it is asked for first, under the same key. `on_conflict`: the slot is bound
        to another payload; "raise" PayloadConflict, or "adopt": finish what was bound and return its receipt.
        `on_approval`: only a person can lead on; "release" gives the task back until one has decided, "wait" waits
        `approval_wait` seconds, "raise" raises ApprovalRequired or PersonRequired.

        With `fencepost.effects.sql` it returns Deferred at once: the statement is executed inside the commit.
        See `fencepost.effects.performing.perform` for what is raised, in order. A second effect needs a second slot.
        """
        self.check()
        if self._port is None:
            self._port = AttemptPort(self._client, self.claim, self.remaining)
        try:
            return await perform(
                self._port,
                using,
                slot,
                payload,
                node_id=node_id,
                timeout=timeout,
                patience=patience,
                on_conflict=on_conflict,
                on_approval=on_approval,
                approval_wait=approval_wait,
            )
        except Fenced as error:
            if isinstance(error.refused, Refused):
                self._lose(error.refused)
            raise

    def _refused(self, answer: Refused) -> NoReturn:
        raise Fenced(self._lose(answer), answer)

    def _lose(self, answer: Refused) -> str:
        """A door refused this claim: so will every other. Why, in short."""
        reason = f"{answer.outcome.value}/{answer.reason}" if answer.reason else answer.outcome.value
        if self._lease.lost is None and answer.outcome != Outcome.ENDED:
            self._lease.lost = Loss(reason, answer)
        return reason


class SyncAttempt:
    """An `Attempt` for a thread: the same names, all of them plain calls. They may be called from that thread only.

    A thread cannot be interrupted. Once the claim is lost, what the handler returns is dropped; call `check()`
    now and then so that it stops early.
    """

    def __init__(self, attempt: Attempt, loop: asyncio.AbstractEventLoop) -> None:
        self._attempt = attempt
        self._loop = loop
        self.claim = attempt.claim
        self.input = attempt.input
        self.parents = attempt.parents
        self.remaining = attempt.remaining
        self.check = attempt.check
        self.alive = attempt.alive
        self.usage = attempt.usage
        self.spent = attempt.spent

    def __repr__(self) -> str:
        return f"<Sync{repr(self._attempt)[1:]}"

    @property
    def checkpoint_data(self) -> Any:
        return self._attempt.checkpoint_data

    def checkpoint(self, data: Any) -> None:
        """As `Attempt.checkpoint`."""
        self._wait(self._attempt.checkpoint(data))

    def stage(self, content: Any) -> str:
        """As `Attempt.stage`."""
        return self._wait(self._attempt.stage(content))

    def effect(self, slot: str, payload: Any, *, using: Any, **how: Any) -> Any:
        """As `Attempt.effect`."""
        return self._wait(self._attempt.effect(slot, payload, using=using, **how))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return call_from_thread(coroutine, self._loop)


def call_from_thread(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run `coroutine` in `loop`, which runs in another thread, and wait. Raises Fenced once that loop is gone."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coroutine.close()
        raise RuntimeError("this is for plain functions in a thread; in the event loop, await the Attempt's own method")
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise Fenced("the worker has ended") from None
    while True:
        try:
            return future.result(timeout=1.0)
        except concurrent.futures.CancelledError:
            raise Fenced("the worker has ended") from None
        except TimeoutError:
            if future.done():
                raise  # the coroutine's own
            if loop.is_closed():
                raise Fenced("the worker has ended") from None
        except KeyboardInterrupt:
            future.cancel()
            raise


class hold:  # noqa: N801 - reads as a block: `async with hold(client, claim)`
    """`async with client.hold(claim) as attempt:` renews in the background and cancels the body when it is fenced.

    Entering renews once, so a claim that is over already raises Fenced before the body runs. Once the lease is lost,
    the body is cancelled, and Fenced is raised out of the block. A body that commits, releases or fails the claim
    through this client ends the keeping by that; one that raises, or ends without any of these, releases it.
    """

    def __init__(self, client: Client, claim: Claim, *, ttl: float | None = None, interrupts: bool = True) -> None:
        presented(claim)  # a refusal, say, is no claim
        self._client = client
        self._interrupts = interrupts  # False where the body is not this task's: `fencepost.sync`
        self._claim = claim
        self._terms = Terms.of(claim.ttl if ttl is None else ttl)
        self._cancelled = False
        self._left = False
        self._body: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Attempt:
        claim, request_id = self._claim, new_id()
        renewal = await self._client.renewal()
        sent = clock.elapsed()
        answer = await insist(
            lambda: self._client.renew(claim, self._terms.ttl, request_id=request_id),
            lambda: sent + self._terms.trust_window - clock.elapsed(),
        )
        if isinstance(answer, Refused) and answer.outcome != Outcome.EXHAUSTED:
            raise Fenced(f"{answer.outcome.value}/{answer.reason}" if answer.reason else answer.outcome.value, answer)
        if not isinstance(answer, Refused):
            claim = msgspec.structs.replace(claim, lease_expires_at=answer.lease_expires_at, ttl=self._terms.ttl)
        self._body = asyncio.current_task() if self._interrupts else None
        self._loop = asyncio.get_running_loop()
        self._renewal = renewal
        self._lease = renewal.register(claim, self._terms, sent, self._on_lost)
        self._lease.exhausted = isinstance(answer, Refused)
        self._client.leases[claim.attempt_id] = self._lease
        self._attempt = Attempt(self._client, self._claim, self._lease)
        return self._attempt

    def _on_lost(self, loss: Loss) -> None:
        try:
            self._loop.call_soon_threadsafe(self._cancel, loss)
        except RuntimeError:  # the loop is closed, and the body with it
            return

    def _cancel(self, loss: Loss) -> None:
        if not self._left and self._body is not None:
            self._cancelled = True
            self._body.cancel(f"fenced: {loss.reason}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        lease = self._lease
        self._renewal.give_up(lease)
        if self._client.leases.get(self._claim.attempt_id) is lease:
            del self._client.leases[self._claim.attempt_id]
        self._client.deferred.pop(self._claim.attempt_id, None)
        if lease.lost is None and lease.ended is None:
            wait = isinstance(error, GiveBack)
            await self._leave("release", lambda: self._client.release(self._claim, wait=wait))
        spent = self._attempt.spent()
        if spent:
            await self._leave("report the usage of", lambda: self._client.usage(self._claim, request_id=None, **spent))
        if self._cancelled and self._body is not None and self._body.uncancel() > 0:
            return  # cancelled from outside as well: that goes on
        if lease.lost is not None and (error is None or isinstance(error, asyncio.CancelledError)):
            raise Fenced(lease.lost.reason, lease.lost.refused) from error

    async def _leave(self, what: str, ask: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with asyncio.timeout(LEAVING):
                await ask()
        except (Unavailable, TimeoutError) as error:
            log.warning("could not %s task %s: %r; its lease runs out", what, self._claim.task_id, error)
