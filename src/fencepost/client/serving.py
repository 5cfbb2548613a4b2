"""One claim from its grant to its end: the lease is kept, the work is done, the end is told to the store."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from fencepost import clock
from fencepost.app import Final, Snooze
from fencepost.client.attempt import Attempt, insist
from fencepost.client.handling import PlainFailure, Work
from fencepost.client.renewal import Lease, Loss, Renewal, Terms
from fencepost.errors import Fenced, FencepostError, GiveBack, InvalidRequest, Unavailable, Unsettled
from fencepost.kernel.commands import MAX_ERROR_BYTES
from fencepost.kernel.digests import flatten
from fencepost.wire import Claim, Outcome, Refused, new_id

if TYPE_CHECKING:
    from fencepost.client.client import Client

__all__ = ["DRAINED", "Serving", "keep_tail"]

log = logging.getLogger("fencepost.worker")

# How long an end is asked for while the store does not answer: as long as the store remembers request ids.
INSIST = 600.0
INSIST_AT_END = 5.0

DRAINED = Loss("the worker is ending")


class _TimedOut(Exception):
    pass


def keep_tail(text: str, limit: int = MAX_ERROR_BYTES, before: int = 0) -> str:
    """`text` within `limit` bytes: of a traceback, or of what a program said last, the end is what matters.

    `before`: bytes that stood before it and were not kept; the mark counts them.
    """
    text = text.replace("\0", "\N{SYMBOL FOR NULL}")  # as the client will, and the room is counted after it
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit and not before:
        return text
    mark = f"… cut: {before + len(data)} bytes in all\n"
    return mark + data[max(0, len(data) - limit + len(mark.encode())) :].decode("utf-8", "ignore")


# Of what a claim was granted for, whatever the worker's own terms are.
_first_terms = functools.lru_cache(maxsize=64)(Terms.of)


class Serving:
    """Runs one claim. `run` never raises for what the work or the store did: it logs, and the worker goes on.

    Ends: the work's result is committed; an exception is `fail` with a retry, `Final` one without, `Snooze` a release;
    what was lost is dropped, with its usage reported; what is still running when the drain time is over is released.
    """

    def __init__(
        self,
        client: Client,
        renewal: Renewal,
        claim: Claim,
        work: Work,
        terms: Terms,
        sent: float,
        *,
        cancel_grace: float,
        store_url: str,
        on_refused: Callable[[Refused], None],
    ) -> None:
        self.claim = claim
        self.store_url = store_url
        self.thread: threading.Thread | None = None
        self.settled = asyncio.Event()  # the store has been told, or there is nothing to tell
        self.free = asyncio.Event()  # the slot is free: a thread that could not be interrupted has ended too
        self._client = client
        self._renewal = renewal
        self._work = work
        self._terms = terms
        self._sent = sent
        self._started = clock.elapsed()
        self._cancel_grace = cancel_grace
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._interrupted: asyncio.Future[Loss] = self._loop.create_future()
        self._insist_until = self._started + INSIST
        self._task: asyncio.Task[tuple[Any, BaseException | None]] | None = None
        self._seen: dict[str, Any] = {
            "task_id": claim.task_id,
            "kind": claim.kind,
            "generation": claim.generation,
            "owner": claim.owner_id,
        }

    @property
    def loose(self) -> bool:
        """The work still runs, although nobody waits for it."""
        return self.thread is not None or (self._task is not None and not self._task.done())

    # told from outside --------------------------------------------------------------------------

    def interrupt(self, loss: Loss) -> None:
        """Stop the work: its claim is lost, or (`DRAINED`) the worker ends. The first reason counts."""
        if not self._interrupted.done():
            self._interrupted.set_result(loss)

    def hurry(self) -> None:
        """The worker ends: do not ask a store that does not answer for long."""
        self._insist_until = min(self._insist_until, clock.elapsed() + INSIST_AT_END)

    def thread_ended(self) -> None:
        self.thread = None
        if self.settled.is_set():
            self.free.set()

    def _on_lost(self, loss: Loss) -> None:  # in the renewal thread
        try:
            self._loop.call_soon_threadsafe(self.interrupt, loss)
        except RuntimeError:  # the loop is closed: the worker is gone
            return

    # the way of one claim -----------------------------------------------------------------------

    async def run(self) -> None:
        try:
            if await self._still_ours():
                await self._serve()
        except Exception:
            log.exception("task %s: its claim is dropped, its lease runs out", self.claim.task_id, extra=self._seen)
        finally:
            self.settled.set()
            if self.thread is None:
                self.free.set()

    async def _still_ours(self) -> bool:
        """A grant whose answer was long in coming is confirmed before any work starts."""
        if clock.elapsed() - self._sent < _first_terms(self.claim.ttl).renew_interval:
            return True
        sent, request_id = clock.elapsed(), new_id()
        answer = await insist(
            lambda: self._client.renew(self.claim, self._terms.ttl, request_id=request_id),
            lambda: sent + self._terms.trust_window - clock.elapsed(),
        )
        if isinstance(answer, Refused):
            self._dropped("lost before any work started", answer)
            return False
        self._sent = sent
        self.claim = msgspec.structs.replace(self.claim, ttl=self._terms.ttl, lease_expires_at=answer.lease_expires_at)
        return True

    async def _serve(self) -> None:
        lease = self._renewal.register(self.claim, self._terms, self._sent, self._on_lost, self._work.silence)
        self._client.leases[self.claim.attempt_id] = lease
        self.attempt = Attempt(self._client, self.claim, lease)
        try:
            await self._settle(lease, *await self._do())
        finally:
            self._renewal.give_up(lease)
            self._client.leases.pop(self.claim.attempt_id, None)
            self._client.deferred.pop(self.claim.attempt_id, None)

    async def _do(self) -> tuple[Any, BaseException | None]:
        """The work's result, or why there is none. Waits no longer than it must for a work that ignores its end."""
        task = self._task = asyncio.ensure_future(self._guarded())
        await self._either(task, self._work.timeout)
        if task.done():
            return task.result()
        reason = self._interrupted.result() if self._interrupted.done() else None
        task.cancel(reason.reason if reason is not None else "its time limit is over")
        await asyncio.wait({task}, timeout=self._cancel_grace)
        if not task.done():
            log.error(
                "the handler of task %s does not stop when it is cancelled; whatever it returns is dropped",
                self.claim.task_id,
                extra=self._seen,
            )
            task.cancel()
        elif reason is DRAINED and (
            task.result()[1] is None or not isinstance(task.result()[1], asyncio.CancelledError)
        ):
            return task.result()  # it used its last moments to finish
        if reason is None:
            return None, _TimedOut()
        return None, asyncio.CancelledError(reason.reason)

    async def _either(self, task: asyncio.Future[Any], timeout: float | None) -> None:
        """Until `task` is done, or the work is interrupted, or the time is over."""
        # As asyncio.wait does it, at less cost: a short task's time is spent on things like this.
        woken = self._loop.create_future()

        def wake(_: Any = None) -> None:
            if not woken.done():
                woken.set_result(None)

        timer = None if timeout is None else self._loop.call_later(timeout, wake)
        task.add_done_callback(wake)
        self._interrupted.add_done_callback(wake)
        try:
            await woken
        finally:
            task.remove_done_callback(wake)
            self._interrupted.remove_done_callback(wake)
            if timer is not None:
                timer.cancel()

    async def _guarded(self) -> tuple[Any, BaseException | None]:
        """What a handler raises stays here: a sys.exit() in one must not end the worker."""
        try:
            return await self._work.run(self), None
        except BaseException as error:  # noqa: BLE001 - it is handed on as a value
            return None, error

    async def _settle(self, lease: Lease, result: Any, error: BaseException | None) -> None:
        if isinstance(error, Fenced) and lease.lost is None and lease.doubt() is not None and lease.ended is None:
            lease.lost = Loss(error.reason)
        lost = lease.lost
        if lost is None and self._interrupted.done() and self._interrupted.result() is not DRAINED:
            lost = self._interrupted.result()
        if lost is not None:
            self._dropped(lost.reason, lost.refused)
            await self._report_usage()
        elif lease.ended is not None:
            log.info("task %s: the handler ended its claim itself", self.claim.task_id, extra=self._seen)
        elif error is None:
            await self._commit(result)
        elif isinstance(error, Snooze):
            seconds = error.seconds
            await self._end("released", lambda rid: self._client.release(self.claim, delay=seconds, request_id=rid))
            await self._report_usage()
        elif isinstance(error, GiveBack):
            log.info("task %s waits for a person: %s", self.claim.task_id, error, extra=self._seen)
            await self._give_back()
        elif isinstance(error, Final):
            await self._fail(str(error) or "the handler raised Final", retry=False)
        elif isinstance(error, PlainFailure):
            await self._fail(str(error), retry=True)
        elif isinstance(error, _TimedOut):
            await self._fail(f"the handler took longer than its time limit of {self._work.timeout:g} s", retry=True)
        elif isinstance(error, asyncio.CancelledError) and self._interrupted.done():
            await self._end("released", lambda rid: self._client.release(self.claim, request_id=rid))
            await self._report_usage()
        else:
            await self._fail("".join(traceback.format_exception(error)), retry=True)

    async def _commit(self, result: Any) -> None:
        usage = self._usage()
        try:
            if not isinstance(result, (bytes, bytearray, memoryview)):
                result = flatten(result, "result")
            await self._end(
                "committed", lambda rid: self._client.commit(self.claim, result, usage=usage, request_id=rid)
            )
        except InvalidRequest as error:
            # The same handler would return the like of it again: no retry.
            await self._fail(f"the result cannot be kept: {error}", retry=False)
        except Unsettled as error:
            if await self._waits_for_people(error):
                await self._give_back()
            else:
                await self._fail(str(error), retry=True)
        except Unavailable:
            raise
        except FencepostError as error:
            await self._fail(f"the commit was not possible: {error}", retry=False)

    async def _give_back(self) -> None:
        await self._end("given back", lambda rid: self._client.release(self.claim, wait=True, request_id=rid))
        await self._report_usage()

    async def _waits_for_people(self, unsettled: Unsettled) -> bool:
        """The handler went on although only a person can lead its effects on: no retry would come any further."""
        page = await self._client.effects(task_id=self.claim.task_id, limit=1000)
        standing = {view.effect_id: view for view in page.items}
        return any(
            standing[each].state == "AWAITING_APPROVAL" or "PERSON" in standing[each].open
            for each in unsettled.effects
            if each in standing
        )

    async def _fail(self, text: str, *, retry: bool) -> None:
        usage = self._usage()
        text = keep_tail(text)
        point = text.strip().rsplit("\n", 1)[-1][-300:]
        log.warning("task %s failed: %s", self.claim.task_id, point, extra=self._seen)
        await self._end(
            "failed",
            lambda rid: self._client.fail(self.claim, text, retry=retry, usage=usage, request_id=rid),
        )

    async def _end(self, word: str, ask: Callable[[str], Awaitable[Any]]) -> None:
        request_id = new_id()
        answer = await insist(lambda: ask(request_id), lambda: self._insist_until - clock.elapsed())
        if isinstance(answer, Refused):
            self._dropped(f"could not be {word}", answer)
            await self._report_usage()
        else:
            log.info("task %s %s", self.claim.task_id, word, extra={**self._seen, "outcome": answer.outcome.value})

    def _usage(self) -> dict[str, float]:
        return {"seconds": round(clock.elapsed() - self._started, 6), **self.attempt.spent()}

    async def _report_usage(self) -> None:
        """Accepted from an attempt that lost, too: it is what the discarded work has cost."""
        usage, request_id, now = self._usage(), new_id(), clock.elapsed()
        try:
            await insist(
                lambda: self._client.usage(self.claim, request_id=request_id, **usage),
                lambda: min(self._insist_until, now + INSIST_AT_END) - clock.elapsed(),
            )
        except FencepostError as error:
            log.warning("task %s: its usage could not be reported (%s)", self.claim.task_id, error, extra=self._seen)

    def _dropped(self, why: str, refused: Refused | None) -> None:
        extra = {**self._seen, "why": why}
        if refused is not None:
            extra |= {"outcome": refused.outcome.value, "reason": refused.reason}
            why = f"{why}: {refused.outcome.value}" + (f"/{refused.reason}" if refused.reason else "")
        level = logging.INFO if refused is not None and refused.outcome == Outcome.ENDED else logging.WARNING
        log.log(level, "task %s is dropped (%s)", self.claim.task_id, why, extra=extra)
        if refused is not None:
            self._on_refused(refused)
