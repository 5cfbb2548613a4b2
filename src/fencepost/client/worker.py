"""`Worker`: claims what it can do, runs it, and goes on when it is refused.

Term of a lease: the worker claims with a ttl, and a thread of its own renews (see `renewal`). While the lease is
trusted, the handler may go on. Once it is not, the handler is cancelled, the attempt dropped, its usage reported, and
the worker claims the next task. Being fenced is a daily answer: no exception, no second try of what was refused, exit
code 0.

What this does not promise: that a handler runs once, or by one worker at a time. A worker that was paused beyond its
lease runs on for a moment while another has the task. It promises that only one of the two commits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fencepost import clock
from fencepost.app import App
from fencepost.client.attempt import LONGEST_PAUSE
from fencepost.client.client import Client
from fencepost.client.handling import AppWorks, Work, Works
from fencepost.client.reconciler import Reconciler
from fencepost.client.renewal import Loss, Terms
from fencepost.client.serving import DRAINED, INSIST_AT_END, Serving
from fencepost.config import MAX_CONCURRENCY, without_password
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.commands import check_id, check_integer, check_seconds
from fencepost.wire import Claim, Outcome, Reason, Refused, new_id

__all__ = ["Worker"]

log = logging.getLogger("fencepost.worker")

DONE, REFUSED, EPOCH_RAISED = 0, 1, 4
# The longest single wait for a task; also bounded by the ttl, because a lease is trusted from the request's send.
RECONCILE_INTERVAL = 10.0
LONGEST_WAIT = 5.0


class Worker:
    """Runs the handlers of `app`, or a `ProgramHandler`, on the tasks of `queues` in one pool.

    `concurrency`: how many claims it holds at once; it never claims more than it can start now. `owner`: who claims,
    for people to read (default: host, process id and a random start id). `drain_timeout`: seconds that running
    handlers get on SIGTERM, SIGINT or `stop()` before their tasks are given back, uncharged. A second signal ends the
    drain at once. `cancel_grace`: seconds that a cancelled handler gets to stop; past it, it is left behind.

    `on_epoch`, once the pool's epoch was raised: "stop" drops all attempts and ends with exit code 4; "adopt" drops
    them, waits until the intake is open, presents the new epoch and goes on. An epoch *below* the one presented (the
    store went back in time) always stops.

    `renew_interval` and `trust_window` default to a third and five sixths of each handler's ttl. Raises
    InvalidRequest for settings that cannot be safe; those against the pool's policy are checked by `run`. A max_ttl
    that is lowered while it runs shortens its leases from then on.

    With `downstreams` (or those of the app) it also asks them, every `reconcile_interval` seconds, about the pool's
    UNKNOWN effects that nobody holds; see `fencepost.client.reconciler`.
    """

    def __init__(
        self,
        client: Client,
        app: App | Works,
        *,
        queues: Sequence[str] = ("default",),
        concurrency: int = 8,
        owner: str | None = None,
        drain_timeout: float = 30.0,
        on_epoch: Literal["stop", "adopt"] = "stop",
        pool: str = "default",
        renew_interval: float | None = None,
        trust_window: float | None = None,
        cancel_grace: float = 5.0,
        handle_signals: bool = True,
        downstreams: Iterable[Any] = (),
        reconcile_interval: float = RECONCILE_INTERVAL,
    ) -> None:
        if isinstance(queues, str) or not queues:
            raise InvalidRequest("queues", "must be a list of at least one name")
        if on_epoch not in ("stop", "adopt"):
            raise InvalidRequest("on_epoch", f"must be 'stop' or 'adopt', got {on_epoch!r}")
        check_seconds(drain_timeout, "drain_timeout")
        check_seconds(cancel_grace, "cancel_grace")
        self.queues = [check_id(queue, "queues") for queue in queues]
        self.concurrency = check_integer(concurrency, "concurrency", 1, MAX_CONCURRENCY)
        self.owner = check_id(_own_name() if owner is None else owner, "owner")
        self.drain_timeout = drain_timeout
        self.cancel_grace = cancel_grace
        self.on_epoch = on_epoch
        self.pool = check_id(pool, "pool")
        self.handle_signals = handle_signals
        self._client = client
        self._works: Works = AppWorks(app) if isinstance(app, App) else app
        check_seconds(reconcile_interval, "reconcile_interval", above=True)
        self._reconcile_interval = reconcile_interval
        known = list({id(each): each for each in (*getattr(app, "downstreams", ()), *downstreams)}.values())
        self._reconciler = Reconciler(client, known) if known else None
        self._reconciling: asyncio.Task[None] | None = None
        self._timing = (renew_interval, trust_window)
        self._terms: dict[float, Terms] = {}
        self._settle_terms(max_ttl=None)
        self._servings: dict[Serving, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # something that the loop waits for: a free slot, a stop, a raised epoch
        self._stopping = False
        self._hurrying = asyncio.Event()
        self._raised: Refused | None = None
        self._loose: list[Serving] = []

    @property
    def leftovers(self) -> int:
        """Handlers that were cancelled and still run. A process that must end now may have to use os._exit."""
        return sum(serving.loose for serving in self._loose)

    def stop(self) -> None:
        """No new claims; drain, then end `run`. From another thread: `loop.call_soon_threadsafe(worker.stop)`."""
        if self._stopping:
            self._hurrying.set()
        self._stopping = True
        self._changed.set()

    async def run_until_idle(self) -> int:
        """As `run`, but ends with 0 once a claim finds nothing and nothing runs: for scripts and tests.

        Tasks that only become claimable later (a delay, a backoff, another worker's lease) are not waited for.
        """
        return await self.run(until_idle=True)

    async def run(self, *, until_idle: bool = False) -> int:
        """Work until stopped; the exit code: 0 done, 1 refused (no such pool, protocol too old), 4 epoch raised.

        Raises InvalidRequest where a ttl is above the pool's max_ttl. An unreachable store is waited for.
        """
        signals = self._catch_signals()
        try:
            code = await self._open()
            if code is None:
                code = await self._work(until_idle)
            return code
        except asyncio.CancelledError:
            self._hurrying.set()  # whoever cancels does not want to wait for a drain
            raise
        finally:
            try:
                await self._drain()
            finally:
                if self._reconciling is not None:
                    self._reconciling.cancel()
                    await asyncio.wait([self._reconciling])
                for number in signals:
                    asyncio.get_running_loop().remove_signal_handler(number)

    # start --------------------------------------------------------------------------------------

    def _settle_terms(self, max_ttl: float | None) -> None:
        for work in self._works.all():
            self._terms[work.ttl] = Terms.of(work.ttl, *self._timing, max_ttl=max_ttl)
        self._shortest()

    def _shortest(self) -> None:
        shortest = min(self._terms.values(), key=lambda terms: terms.ttl)
        self._ttl = shortest.ttl
        self._wait = min(LONGEST_WAIT, shortest.renew_interval / 2)

    async def _shorten(self, error: InvalidRequest) -> bool:
        """The pool's max_ttl was lowered under the running worker: it claims for less from now on."""
        pool = await self._client.pool(self.pool)
        if error.field != "ttl" or isinstance(pool, Refused):
            return False
        max_ttl = float(pool.policy["max_ttl"])
        log.warning(
            "the pool's max_ttl was lowered to %g s: the worker claims and renews within it",
            max_ttl,
            extra={"owner": self.owner, "pool": self.pool},
        )
        self._terms = {ttl: terms.within(max_ttl) for ttl, terms in self._terms.items()}
        self._shortest()
        return True

    async def _open(self) -> int | None:
        """The pool's policy is known and the renewal thread runs; or the exit code."""
        pause = _Pause()
        while not self._stopping:
            try:
                pool = await self._client.pool(self.pool)
                if isinstance(pool, Refused):
                    log.error("there is no pool %r", self.pool, extra={"pool": self.pool, "owner": self.owner})
                    return REFUSED
                self._settle_terms(float(pool.policy["max_ttl"]))
                self._keeper = await self._client.renewal()
                self._client.start_maintenance()
                if self._reconciler is not None and self._reconciling is None:
                    reconciling = self._reconciler.run(self.pool, self._reconcile_interval)
                    self._reconciling = asyncio.create_task(reconciling, name="fencepost-reconciler")
            except Unavailable as error:
                log.warning("the store does not answer (%s); the worker waits for it", error)
                await self._rest(pause.next())
            else:
                log.info(
                    "worker %s serves %s of %s",
                    self.owner,
                    self._works.kinds or "any kind",
                    self.queues,
                    extra={"owner": self.owner, "pool": self.pool, "queues": self.queues, "kinds": self._works.kinds},
                )
                return None
        return DONE

    def _catch_signals(self) -> list[int]:
        caught: list[int] = []
        if self.handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                try:
                    loop.add_signal_handler(number, self.stop)
                except (
                    ValueError,
                    RuntimeError,
                    NotImplementedError,
                ):  # not the main thread: whoever is there stops us
                    break
                caught.append(number)
        return caught

    # the loop -----------------------------------------------------------------------------------

    async def _work(self, until_idle: bool) -> int:
        question: _Question | None = None
        pause = _Pause()
        while True:
            self._changed.clear()
            if self._raised is not None or self._stopping:
                if question is not None:
                    await self._hand_back(question)
                    question = None
                if self._stopping:
                    return DONE
                code = await self._epoch_raised()
                if code is not None:
                    return code
                continue
            free = self.concurrency - len(self._servings)
            if free <= 0:
                await self._changed.wait()
                continue
            question = question or _Question(free)
            answer = await self._ask(question, 0.0 if until_idle else self._wait)
            if answer is None:
                continue  # interrupted: looked at above
            if isinstance(answer, Unavailable):
                log.log(
                    logging.WARNING if pause.count == 0 else logging.DEBUG,
                    "a claim was not answered (%s); asked again with the same request id",
                    answer,
                    extra={"owner": self.owner},
                )
                await self._rest(pause.next())
                continue  # the same question
            sent, question = question.sent, None
            if not isinstance(answer, Refused):
                pause = _Pause()
                for claim in answer:
                    self._serve(claim, sent)
                if not answer and until_idle:
                    if not self._servings:
                        return DONE
                    await self._changed.wait()
                continue
            if answer.outcome == Outcome.INTAKE_CLOSED:
                if until_idle and not self._servings:
                    return DONE
                await self._rest(pause.next(least=0.2))
            elif answer.outcome == Outcome.FENCED:
                self._raised = answer
            elif answer.outcome != Outcome.ENDED:  # ENDED: what the lost answer granted is over; ask anew
                log.error(
                    "claiming was refused: %s/%s",
                    answer.outcome.value,
                    answer.reason,
                    extra={"owner": self.owner, "outcome": answer.outcome.value, "reason": answer.reason},
                )
                return REFUSED

    async def _ask(self, question: _Question, wait: float) -> list[Claim] | Refused | Unavailable | None:
        """None: something else needs looking at first. The question stays open then: it may have been granted."""
        call = asyncio.ensure_future(self._claim_next(question, self.queues, wait))
        changed = asyncio.ensure_future(self._interruption())
        try:
            await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return None
            try:
                return call.result()
            except Unavailable as error:
                return error
            except InvalidRequest as error:
                try:
                    if not await self._shorten(error):
                        raise error
                except Unavailable as unreachable:
                    return unreachable
                return None  # the same question, for less
        finally:
            waits: set[asyncio.Future[Any]] = {call, changed}
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _interruption(self, raised: bool = True) -> None:
        """Returns once the worker is to stop, or (where `raised` counts) the epoch was raised."""
        while not self._stopping and not (raised and self._raised is not None):
            self._changed.clear()
            await self._changed.wait()

    async def _claim_next(self, question: _Question, queues: list[str], wait: float) -> list[Claim] | Refused:
        fresh, question.fresh = question.fresh, False
        return await self._client._claim_next(
            self.owner,
            queues,
            self._works.kinds,
            self.pool,
            self._ttl,
            question.limit,
            wait,
            None,
            question.request_id,
            fresh,
        )

    async def _hand_back(self, question: _Question) -> None:
        """What an interrupted question was granted all the same goes back at once, rather than after a lease.

        The same request id brings out what it granted; asked of a queue that nobody uses, it grants nothing new.
        """
        try:
            async with asyncio.timeout(INSIST_AT_END):
                claims = await self._claim_next(question, [f"nobody-{question.request_id}"], 0.0)
                for claim in claims if not isinstance(claims, Refused) else ():
                    await self._client.release(claim)
                    log.info("task %s was granted while the worker stopped; released", claim.task_id)
        except (Unavailable, InvalidRequest, TimeoutError) as error:
            log.warning("what the last claim was granted, if anything, is left to its lease (%r)", error)

    def _serve(self, claim: Claim, sent: float) -> None:
        work: Work = self._works.of(claim.kind)
        serving = Serving(
            self._client,
            self._keeper,
            claim,
            work,
            self._terms[work.ttl],
            sent,
            cancel_grace=self.cancel_grace,
            store_url=without_password(self._client.url),
            on_refused=self._note,
        )
        self._servings[serving] = asyncio.create_task(self._slot(serving), name=f"fencepost-{claim.task_id}")

    async def _slot(self, serving: Serving) -> None:
        try:
            await serving.run()
            await serving.free.wait()  # a thread cannot be interrupted: its slot is taken until it ends
        finally:
            del self._servings[serving]
            self._loose = [each for each in (*self._loose, serving) if each.loose]
            self._changed.set()

    async def _rest(self, seconds: float, raised: bool = True) -> None:
        """A pause that a stop ends, and a raise of the epoch where `raised` counts."""
        try:
            async with asyncio.timeout(seconds):
                await self._interruption(raised)
        except TimeoutError:
            return

    # epochs -------------------------------------------------------------------------------------

    def _note(self, refused: Refused) -> None:
        """Every refusal passes here; one that says that this client's epoch is over concerns the whole worker."""
        if refused.outcome != Outcome.FENCED or refused.reason not in (Reason.EPOCH, Reason.REWOUND):
            return
        if "epoch" not in refused.current or "pool" in refused.current:
            return  # about one task: it has moved, or its generation is unknown here
        if self._raised is None:
            self._raised = refused
            self._changed.set()

    async def _epoch_raised(self) -> int | None:
        """Drop every attempt; the exit code, or None once a new epoch is presented."""
        assert self._raised is not None
        refused = self._raised
        presented, current = await self._client.epoch(self.pool), refused.current.get("epoch")
        if presented == current:  # adopted meanwhile by another user of this client; only old attempts are over
            self._raised = None
            return None
        extra = {"owner": self.owner, "pool": self.pool, "epoch": current, "presented": presented}
        log.warning(
            "pool %s stands at epoch %s, this worker presents %s: it drops what it runs", self.pool, current, presented,
            extra=extra,
        )  # fmt: skip
        await self._interrupt_all(Loss("FENCED/EPOCH", refused))
        if refused.reason == Reason.REWOUND:
            log.error("the store is behind this worker: it may have gone back in time; the worker ends", extra=extra)
            return EPOCH_RAISED
        if self.on_epoch == "stop":
            return EPOCH_RAISED
        pause = _Pause()
        while not self._stopping:
            try:
                pool = await self._client.pool(self.pool)
                if not isinstance(pool, Refused) and pool.intake == "OPEN":
                    await self._client.adopt_epoch(self.pool, pool.epoch)
                    log.warning("epoch %d of pool %s is adopted", pool.epoch, self.pool, extra=extra)
                    self._raised = None
                    return None
            except Unavailable as error:
                log.debug("the store does not answer (%s)", error)
            await self._rest(pause.next(least=0.1), raised=False)
        return DONE

    # the end ------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Running handlers get the drain time, then their tasks are released."""
        running = [serving for serving in self._servings if not serving.settled.is_set()]
        if running:
            log.info("worker %s ends: %d handlers have %g s", self.owner, len(running), self.drain_timeout)
            await self._settled(running, self.drain_timeout, self._hurrying)
            await self._interrupt_all(DRAINED)
        for serving, slot in list(self._servings.items()):
            log.warning("the handler of task %s is left behind", serving.claim.task_id)
            slot.cancel()
        if self._servings:
            await asyncio.wait(set(self._servings.values()), timeout=1.0)

    async def _interrupt_all(self, loss: Loss) -> None:
        running = [serving for serving in self._servings if not serving.settled.is_set()]
        for serving in running:
            serving.interrupt(loss)
            serving.hurry()
        await self._settled(running, self.cancel_grace + 2 * INSIST_AT_END, None)

    async def _settled(self, servings: Sequence[Serving], timeout: float, sooner: asyncio.Event | None) -> None:
        """Wait until all have told the store their end, or for `timeout`, or until `sooner`."""
        if not servings:
            return

        async def all_settled() -> None:
            for serving in servings:
                await serving.settled.wait()

        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(all_settled())}
        if sooner is not None:
            waits.add(asyncio.ensure_future(sooner.wait()))
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


class _Question:
    """One claim call: the same request id until it is answered, and when it was first sent."""

    def __init__(self, limit: int) -> None:
        self.request_id = new_id()
        self.limit = limit
        self.fresh = True
        self.sent = clock.elapsed()


class _Pause:
    """Back-off with jitter."""

    def __init__(self) -> None:
        self.count = 0

    def next(self, least: float = 0.05) -> float:
        seconds: float = min(least * 2.0**self.count, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        self.count = min(self.count + 1, 16)
        return seconds


def _own_name() -> str:
    return f"{socket.gethostname()[:100] or 'host'}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
