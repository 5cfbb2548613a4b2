"""Keeps leases, from a thread of its own with a connection of its own.

A blocked event loop, a busy handler or an exhausted pool in the rest of the process does not starve it:
it shares nothing with them but the interpreter. Every `renew_interval` it renews what is due, in one call.

The terms, in the order in which they must stand: `renew_interval` < `trust_window` < `ttl` ≤ the pool's `max_ttl`.
A lease is *trusted* for `trust_window` seconds after the **send** of the last renewal that was granted, by a clock
that counts suspended time; what is left up to the ttl is the margin. One failed beat is no loss: it is asked again,
with the same request ids, while the window lasts. Past the window, or once a renewal is refused, the holder is told:
it starts no further tool calls, and its handler is cancelled.

What this does not do: it proves nothing. A lease that is trusted here may be over in the store (clocks differ, a
person took the task over). The fence inside each write decides; trust only saves work that would be refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import random
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from fencepost import clock
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.commands import check_seconds
from fencepost.wire import Claim, Outcome, Refused, Renewed

__all__ = ["Lease", "Loss", "Renewal", "Terms"]

log = logging.getLogger("fencepost.renewal")

# The longest sleep between two looks at the clock: the loop's own timers do not count suspended time.
LONGEST_SLEEP = 1.0
FIRST_RETRY = 0.05


class Terms(msgspec.Struct, frozen=True):
    """How one lease is kept: renew_interval < trust_window < ttl ≤ the pool's max_ttl. All in seconds."""

    ttl: float
    renew_interval: float
    trust_window: float

    @classmethod
    def of(
        cls,
        ttl: float,
        renew_interval: float | None = None,
        trust_window: float | None = None,
        max_ttl: float | None = None,
    ) -> Terms:
        """Terms for `ttl`. None (or 0): a beat every third of it, trusted for five sixths of it.

        Raises InvalidRequest, naming the field, where the order above does not hold.
        """
        check_seconds(ttl, "ttl", above=True)
        if max_ttl is not None and ttl > max_ttl:
            raise InvalidRequest("ttl", f"must be at most the pool's max_ttl of {max_ttl:g} seconds, got {ttl:g}")
        check_seconds(renew_interval or 0.0, "renew_interval")
        check_seconds(trust_window or 0.0, "trust_window")
        window = trust_window or ttl * 5 / 6
        interval = renew_interval or min(ttl / 3, window / 2)
        if window >= ttl:
            raise InvalidRequest("trust_window", f"must be below the ttl of {ttl:g} seconds, got {window:g}")
        if interval >= window:
            raise InvalidRequest(
                "renew_interval", f"must be below the trust window of {window:g} seconds, got {interval:g}"
            )
        return cls(float(ttl), float(interval), float(window))

    def within(self, max_ttl: float) -> Terms:
        """These terms, or where their ttl is above `max_ttl` all of them shortened in proportion."""
        if self.ttl <= max_ttl:
            return self
        share = max_ttl / self.ttl
        return Terms(max_ttl, self.renew_interval * share, self.trust_window * share)


class Loss(msgspec.Struct, frozen=True):
    """Why a lease is over for its holder. `refused` is the door's answer; None where only the local window ended."""

    reason: str
    refused: Refused | None = None


class Lease:
    """One claim that is being kept. Written by the renewal thread, read by any; every field is replaced whole."""

    def __init__(
        self,
        claim: Claim,
        terms: Terms,
        sent: float,
        on_lost: Callable[[Loss], None],
        silence: float | None = None,
        now: Callable[[], float] = clock.elapsed,
    ) -> None:
        self.claim = claim if claim.ttl == terms.ttl else msgspec.structs.replace(claim, ttl=terms.ttl)
        self.terms = terms
        self.silence = silence
        self.on_lost = on_lost
        self.now = now
        self.active = True  # False once it is given up: no further beat goes out, late replies are ignored
        self.lost: Loss | None = None
        self.ended: Any = None  # the answer to its own commit, release or fail: no loss
        self.exhausted = False
        # The grant itself may be for a shorter ttl than the one that it is renewed with.
        self.granted_sent = sent
        self.granted_at = claim.lease_expires_at.timestamp() - claim.ttl
        first = Terms.of(claim.ttl) if claim.ttl != terms.ttl else terms
        self.trusted_until = sent + first.trust_window
        self.next_beat = sent + min(first.renew_interval, terms.renew_interval)
        self.sign_of_life = now()
        self.pending: _Beat | None = None

    def remaining(self) -> float:
        """Seconds for which the lease is still trusted; 0 once it is lost or the attempt has ended."""
        if self.lost is not None or self.ended is not None:
            return 0.0
        return max(0.0, self.trusted_until - self.now())

    def doubt(self) -> tuple[str, Refused | None] | None:
        """Why nothing may be started under this lease any more; None while it is trusted."""
        if self.lost is not None:
            return self.lost.reason, self.lost.refused
        if self.ended is not None:
            word = self.ended.reason or self.ended.outcome
            return f"the attempt has ended ({word})", self.ended if isinstance(self.ended, Refused) else None
        if self.now() >= self.trusted_until:
            return f"no renewal was granted within {self.terms.trust_window:g} s", None
        return None

    def alive(self) -> None:
        """The handler shows that it is alive."""
        self.sign_of_life = self.now()

    def silent(self, now: float) -> bool:
        return self.silence is not None and now - self.sign_of_life > self.silence


class _Beat:
    """One renewal of several leases, asked again with the same request ids until it is answered or pointless."""

    def __init__(self, leases: list[Lease], sent: float) -> None:
        self.leases = leases
        self.sent = sent
        self.request_ids = [uuid.uuid4().hex for _ in leases]
        self.tries = 0


class Renewal:
    """The thread that keeps leases. `register` and `give_up` may be called from any thread.

    `client` is cloned: the clone belongs to this thread alone. `on_lost` of a lease is called in this thread.
    """

    def __init__(self, client: Any, *, now: Callable[[], float] = clock.elapsed) -> None:
        self._client = client
        self._now = now
        self._leases: set[Lease] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        # Handed to the thread, which takes them in at its next look. It is woken for those only that cannot wait so
        # long: waking it for each would cost more than a short task does.
        self._new: deque[Lease] = deque()
        self._next_look = math.inf
        self._stopping = False
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None
        self.beats = 0
        self.failed_beats = 0

    async def start(self) -> None:
        """Start the thread and open its connection; raises what opening raised. Starting twice changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="fencepost-renewal", daemon=True)
            self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._ready))

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop renewing and close the connection; waits for the thread at most `timeout` seconds."""
        if self._thread is None:
            return
        self._stopping = True
        self._nudge()
        done = asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(self._done)))
        await asyncio.wait({done}, timeout=timeout)
        if not done.done():
            done.cancel()
            log.warning("the renewal thread has not ended within %g s; it is left behind", timeout)

    def register(
        self, claim: Claim, terms: Terms, sent: float, on_lost: Callable[[Loss], None], silence: float | None = None
    ) -> Lease:
        """Keep `claim`'s lease from now on. `sent` is when the request that granted it was sent, by `clock.elapsed`."""
        lease = Lease(claim, terms, sent, on_lost, silence, self._now)
        if self._loop is None or self._done.done():
            raise Unavailable("the renewal thread does not run")
        self._keep(lease)
        return lease

    def _keep(self, lease: Lease) -> None:
        self._new.append(lease)
        if min(lease.next_beat, lease.trusted_until) < self._next_look:
            self._nudge()

    def give_up(self, lease: Lease) -> None:
        """No further beat for this lease: call it before commit, release or fail is sent.

        A beat that is in flight already finds an ended attempt (ENDED) or an unchanged one; its answer is ignored.
        """
        lease.active = False

    async def ending(self, lease: Lease, ask: Awaitable[Any]) -> Any:
        """Ask for the end of `lease` (commit, release, fail) while no beat for it goes out; its answer.

        Where nothing is known afterwards, because `ask` raised, the lease is kept on.
        """
        self.give_up(lease)
        try:
            answer = await ask
        except BaseException:
            if lease.lost is None and lease.ended is None:
                lease.active = True
                lease.pending = None
                self._keep(lease)
            raise
        lease.ended = answer
        return answer

    def _nudge(self) -> None:
        if self._loop is not None and self._wake is not None and not self._done.done():
            with suppress(RuntimeError):  # closed in between: nothing is renewed any more
                self._loop.call_soon_threadsafe(self._wake.set)

    # in the thread --------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.exception("the renewal thread failed; every lease is given up")
                for lease in [*self._leases, *self._new]:
                    self._lose(lease, Loss(f"the renewal thread failed ({error!r})"))
        finally:
            self._done.set_result(None)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        client = await self._client.clone()
        try:
            self._ready.set_result(None)
            while not self._stopping:
                self._wake.clear()
                self._next_look = math.inf  # whoever comes too late for this look asks for another
                while self._new:
                    self._leases.add(self._new.popleft())
                seconds = self._round(client)
                self._next_look = self._now() + seconds
                await self._sleep(seconds)
            for call in self._calls:
                call.cancel()
        finally:
            await client.close()

    async def _sleep(self, seconds: float) -> None:
        assert self._wake is not None
        waker = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait({waker}, timeout=max(0.0, min(seconds, LONGEST_SLEEP)))
        waker.cancel()

    def _round(self, client: Any) -> float:
        """Send what is due, give up what is over; the seconds until the next look."""
        now = self._now()
        due: list[Lease] = []
        nearest = now + LONGEST_SLEEP
        for lease in list(self._leases):
            if not lease.active:
                self._leases.discard(lease)
                continue
            if now >= lease.trusted_until:
                if lease.silent(now):
                    loss = Loss(f"the handler showed no sign of life for {now - lease.sign_of_life:.1f} s")
                elif lease.exhausted:
                    loss = Loss("the claim has reached the pool's max_claim_age")
                else:
                    loss = Loss(f"no renewal was granted within {lease.terms.trust_window:g} s")
                self._lose(lease, loss)
                continue
            nearest = min(nearest, lease.trusted_until)
            if lease.pending is not None or lease.exhausted:
                continue
            if lease.silent(now):
                nearest = min(nearest, now + lease.terms.renew_interval / 4)  # a sign of life takes it up again
                continue
            if now >= lease.next_beat:
                due.append(lease)
            else:
                nearest = min(nearest, lease.next_beat)
        # One call for all that share their terms: a lease that is nearly over must not hurry the others.
        for terms in {lease.terms for lease in due}:
            self._spawn(client, _Beat([lease for lease in due if lease.terms == terms], now))
        return nearest - now

    def _spawn(self, client: Any, beat: _Beat) -> None:
        for lease in beat.leases:
            lease.pending = beat
        call = asyncio.ensure_future(self._ask(client, beat))
        self._calls.add(call)
        call.add_done_callback(lambda done: self._called(beat, done))

    def _called(self, beat: _Beat, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.error("a beat failed; it is sent again", exc_info=error)
            self._free(beat)

    async def _ask(self, client: Any, beat: _Beat) -> None:
        """Ask until answered: a lost answer is asked for again with the same ids, as long as it can still help."""
        while True:
            kept = [
                (lease, request_id)
                for lease, request_id in zip(beat.leases, beat.request_ids, strict=True)
                if lease.active and lease.pending is beat
            ]
            if not kept:
                return
            beat.leases = [lease for lease, _ in kept]
            beat.request_ids = [request_id for _, request_id in kept]
            now = self._now()
            # A beat whose own window is nearly over buys no trust; a fresh one does.
            if now >= beat.sent + beat.leases[0].terms.renew_interval:
                self._free(beat)
                return
            beat.tries += 1
            self.beats += 1
            answers = await self._call(client, beat, self._patience(beat, now))
            retry = False
            if any(isinstance(answer, InvalidRequest) and answer.field == "ttl" for answer in answers):
                await self._shorten(client, beat)
            for lease, answer in zip(beat.leases, answers, strict=True):
                if lease.pending is not beat or not lease.active:
                    continue
                if isinstance(answer, BaseException):
                    retry = True
                    self._failed(lease, beat, answer)
                else:
                    lease.pending = None
                    self._answered(lease, beat.sent, answer)
            if not retry:
                return
            await asyncio.sleep(FIRST_RETRY * min(2 ** (beat.tries - 1), 16) * random.uniform(0.5, 1.0))

    async def _shorten(self, client: Any, beat: _Beat) -> None:
        """A pool's max_ttl was lowered below the ttl of leases that are kept: renew them for less from now on.

        What was granted stands, so they are trusted as long as before.
        """
        try:
            async with asyncio.timeout(self._patience(beat, self._now())):
                limits = {pool.name: float(pool.policy["max_ttl"]) for pool in await client.pools()}
        except (Unavailable, TimeoutError) as error:
            log.debug("the pools' policies could not be read (%s); the beat is asked again", error)
            return
        for lease in beat.leases:
            terms = lease.terms.within(limits.get(lease.claim.pool, lease.terms.ttl))
            if terms is not lease.terms and lease.pending is beat:
                log.warning(
                    "the pool's max_ttl was lowered: task %s is kept with a ttl of %g s from now on, not %g s",
                    lease.claim.task_id,
                    terms.ttl,
                    lease.terms.ttl,
                    extra={"task_id": lease.claim.task_id, "generation": lease.claim.generation},
                )
                lease.terms = terms
                lease.claim = msgspec.structs.replace(lease.claim, ttl=terms.ttl)
                lease.pending = None
                lease.next_beat = self._now()
        self._nudge()

    def _patience(self, beat: _Beat, now: float) -> float:
        """How long one call may take: below what is left of any window, so that one that hangs can be asked again.

        It grows with every try, or a store that is merely slow would never be heard.
        """
        left = min(lease.trusted_until for lease in beat.leases) - now
        return max(0.02, min(beat.leases[0].terms.ttl / 6 * beat.tries, left / 2))

    async def _call(self, client: Any, beat: _Beat, patience: float) -> list[Any]:
        call = asyncio.ensure_future(
            client.renew_many([lease.claim for lease in beat.leases], request_ids=beat.request_ids)
        )
        try:
            await asyncio.wait({call}, timeout=patience)
        finally:
            if not call.done():
                call.cancel()  # not awaited: a call that hangs may be deaf to this too
        if not call.done():
            return [TimeoutError(f"no answer within {patience:.2f} s")] * len(beat.leases)
        if call.cancelled():
            return [TimeoutError("the call was cancelled")] * len(beat.leases)
        error = call.exception()
        if error is not None:
            return [error] * len(beat.leases)
        answers: list[Any] = call.result()
        return answers

    def _free(self, beat: _Beat) -> None:
        for lease in beat.leases:
            if lease.pending is beat:
                lease.pending = None
                lease.next_beat = self._now()
        self._nudge()

    def _failed(self, lease: Lease, beat: _Beat, error: BaseException) -> None:
        self.failed_beats += 1
        log.log(
            logging.WARNING if beat.tries == 1 else logging.DEBUG,
            "a renewal of task %s was not answered (%s); %.2f s of trust are left",
            lease.claim.task_id,
            error,
            lease.remaining(),
            extra={"task_id": lease.claim.task_id, "generation": lease.claim.generation},
        )
        if isinstance(error, InvalidRequest) and error.field != "ttl":
            # The call itself is wrong: asking again says the same. (About a ttl: see `_shorten`.)
            self._lose(lease, Loss(f"renewing is not possible ({error})"))

    def _answered(self, lease: Lease, sent: float, answer: Any) -> None:
        if isinstance(answer, Renewed):
            lease.trusted_until = max(lease.trusted_until, sent + lease.terms.trust_window)
            lease.next_beat = sent + lease.terms.renew_interval
            self._nudge()
        elif not isinstance(answer, Refused):
            self._lose(lease, Loss(f"a renewal was answered by {type(answer).__name__}"))
        elif answer.outcome == Outcome.EXHAUSTED:
            self._exhausted(lease, answer)
        elif answer.outcome == Outcome.ENDED:
            # Its own doing, by another road than `give_up` (the claim was handed on, say): the handler is not stopped.
            lease.ended = answer
            lease.active = False
            self._leases.discard(lease)
        else:
            reason = f"{answer.outcome.value}/{answer.reason}" if answer.reason else answer.outcome.value
            self._lose(lease, Loss(reason, answer))

    def _exhausted(self, lease: Lease, answer: Refused) -> None:
        """The claim is as old as the pool lets one grow. The handler goes on to the lease's end; commit stays open."""
        lease.exhausted = True
        end = answer.current.get("lease_expires_at")
        seconds = _seconds(end)
        if seconds is not None:
            # The grant happened after its request was sent, so this errs to the early side.
            lease.trusted_until = lease.granted_sent + (seconds - lease.granted_at)
        log.warning(
            "task %s is not renewed any more: its claim has reached the pool's max_claim_age; %.1f s are left",
            lease.claim.task_id,
            lease.remaining(),
            extra={"task_id": lease.claim.task_id, "generation": lease.claim.generation, "outcome": "EXHAUSTED"},
        )
        self._nudge()

    def _lose(self, lease: Lease, loss: Loss) -> None:
        lease.active = False
        self._leases.discard(lease)
        self._tell(lease, loss)

    def _tell(self, lease: Lease, loss: Loss) -> None:
        if lease.lost is None:
            lease.lost = loss
            lease.on_lost(loss)


def _seconds(moment: Any) -> float | None:
    """A store's time out of a refusal, as seconds since 1970: a datetime, or the record's microseconds."""
    if moment is None:
        return None
    if isinstance(moment, int):
        return moment / clock.MICROSECOND
    stamp = getattr(moment, "timestamp", None)
    return float(stamp()) if stamp is not None else None
