"""The one flow of an effect: prepare → look at `send_by` → call → settle, and what to do where it did not end so.

Written against a small port, so that a handler's `attempt.effect`, `fencepost effect` and tests share it. It decides
nothing: each answer of the store names the row of the prepare table (claim.v1, section 5), and this module does what
that row allows.

Not promised: that a call is made at all (a kept receipt is returned without one), nor that it is made by this attempt.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal, NoReturn

from fencepost.clock import elapsed
from fencepost.effects.asking import says
from fencepost.effects.base import (
    Absent,
    Call,
    Deadline,
    Declaration,
    Guarantee,
    Happened,
    Unknown,
    check_downstream,
    offers,
)
from fencepost.effects.enduring import through, within_leaving
from fencepost.effects.failures import (
    ApprovalRequired,
    EffectAbandoned,
    EffectAbsent,
    EffectBusy,
    EffectDenied,
    EffectUnknown,
    PayloadConflict,
    PersonRequired,
)
from fencepost.effects.port import ROWS, Port, PreparedAnswer
from fencepost.effects.receipts import id_kept, note, storable
from fencepost.effects.reconciling import Again, Done, Reconciling, Step, new_id, refused
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.commands import check_id, check_seconds
from fencepost.kernel.digests import decode, encode

__all__ = ["OnApproval", "OnConflict", "declared", "perform"]

OnConflict = Literal["raise", "adopt"]
OnApproval = Literal["release", "wait", "raise"]

TIMEOUT = 30.0  # for one call of the downstream
PATIENCE = 30.0  # for everything that is waited for besides: a key in progress, a settle time, another effect
APPROVAL_WAIT = 600.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


async def declared(downstream: Any) -> Declaration:
    """The declaration that counts: the one earned from this server where that has to be tried. Checked."""
    declaration = check_downstream(downstream)
    return check_downstream(downstream, await downstream.earn()) if offers(downstream, "earn") else declaration


async def perform(
    port: Port,
    downstream: Any,
    slot: str,
    payload: Any,
    *,
    node_id: str | None = None,
    timeout: float = TIMEOUT,
    patience: float = PATIENCE,
    on_conflict: OnConflict = "raise",
    on_approval: OnApproval = "release",
    approval_wait: float = APPROVAL_WAIT,
) -> Any:
    """The receipt of the effect in `slot`: that of a call made now, or the kept one of a call made before.

    `timeout` bounds one call, `patience` all waiting together, `approval_wait` the waiting for a person with
    `on_approval="wait"`; all in seconds.

    `on_conflict`: where the slot is bound to another payload, "raise" PayloadConflict, or "adopt": finish what was
    bound, and return its receipt. `on_approval`: where only a person can lead on, "release" gives the task back until
    one has decided, "wait" waits and then raises, "raise" raises ApprovalRequired or PersonRequired.

    Raises, in order: InvalidRequest (the payload or the declaration; nothing was prepared); Fenced (a BaseException:
    the claim no longer counts); PayloadConflict; EffectDenied, EffectAbandoned (a person said so); ApprovalRequired,
    PersonRequired; EffectBusy (it goes alone); EffectAbsent (certain: the downstream did nothing; the same payload may
    be asked for again); EffectUnknown (nobody knows: do not do it another way; a later attempt reconciles it);
    Unavailable (the store: where the prepare could not be stored, nothing was sent).
    """
    check_id(slot, "slot")
    check_seconds(timeout, "timeout", above=True)
    check_seconds(patience, "patience")
    check_seconds(approval_wait, "approval_wait")
    for name, value, known in (
        ("on_conflict", on_conflict, ("raise", "adopt")),
        ("on_approval", on_approval, ("release", "wait", "raise")),
    ):
        if value not in known:
            raise InvalidRequest(name, f"must be one of {', '.join(known)}, got {value!r}")
    declaration = await declared(downstream)
    if offers(downstream, "bind_for"):
        bound = await downstream.bind_for(payload, port.generation)
    else:
        bound = await downstream.bind(payload) if offers(downstream, "bind") else payload
    # What is sent is what is bound, whatever the handler does with its own object meanwhile.
    bound = decode(encode(bound, "payload"))
    if declaration.guarantee == Guarantee.TRANSACTIONAL:
        return await port.defer(slot, bound, declaration.downstream, node_id=node_id)
    # Two calls for one slot in this process go one after the other: the second finds the first one's receipt.
    async with _lock(port, f"{node_id or ''}\0{slot}"):
        performance = _Performance(
            port, downstream, declaration, slot, payload, bound, node_id, timeout, patience, on_conflict, on_approval,
            approval_wait,
        )  # fmt: skip
        return await performance.run()


_locks: weakref.WeakKeyDictionary[Any, dict[str, asyncio.Lock]] = weakref.WeakKeyDictionary()


def _lock(port: Any, key: str) -> asyncio.Lock:
    return _locks.setdefault(port, {}).setdefault(key, asyncio.Lock())


class _Performance(Reconciling):
    def __init__(
        self,
        port: Port,
        downstream: Any,
        declaration: Declaration,
        slot: str,
        payload: Any,
        bound: Any,
        node_id: str | None,
        timeout: float,
        patience: float,
        on_conflict: OnConflict,
        on_approval: OnApproval,
        approval_wait: float,
    ) -> None:
        self.port = port
        self.downstream = downstream
        self.declaration = declaration
        self.slot = slot
        self.payload = payload
        self.bound = bound
        self.node_id = node_id
        self.timeout = timeout
        self.on_conflict = on_conflict
        self.on_approval = on_approval
        self.patience = elapsed() + patience
        self.approval = elapsed() + approval_wait
        self.pause = FIRST_PAUSE
        self.sent = 0
        self.adopted = False
        self.effect_id = ""
        self.rows: dict[str, Callable[[PreparedAnswer, float], Awaitable[Step]]] = {
            "EXECUTE": self._execute,
            "REPLAY": self._replay,
            "RECONCILE": self._reconcile,
            "IN_FLIGHT": self._in_flight,
            "APPROVAL_REQUIRED": self._approval,
            "BUSY": self._busy,
            "PAYLOAD_CONFLICT": self._conflict,
            "DENIED": self._decided,
            "ABANDONED": self._decided,
        }

    async def run(self) -> Any:
        repeat = False
        while True:
            asked, answer = await self._prepare(repeat)
            if answer.outcome not in ROWS:
                refused(answer)
            self.effect_id = answer.effect_id
            step = await self.rows[str(answer.outcome)](answer, asked)
            if isinstance(step, Done):
                return step.receipt
            repeat = step.repeat
            if step.pause is not None:
                await self._wait(step)

    async def _wait(self, step: Again) -> None:
        """Pause, within the patience and as long as the lease is trusted."""
        pause = step.pause or 0.0
        if pause <= 0:
            pause = self.pause * random.uniform(0.5, 1.0)
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        left = min(self.patience - elapsed(), self.port.trusted())
        if pause > left:
            raise EffectUnknown(self.effect_id, self.slot, step.why or "not known within the patience")
        await _pause(pause)

    # prepare --------------------------------------------------------------------------------------

    async def _prepare(self, repeat: bool) -> tuple[float, PreparedAnswer]:
        """The answer, and when it was asked for by the clock that counts suspended time."""
        precondition, failed = None, None
        if self.declaration.guarantee == Guarantee.CONDITIONAL and not repeat:
            precondition, failed = await self._precondition()
        request_id = new_id()
        asked = 0.0

        async def ask() -> Any:
            nonlocal asked
            asked = elapsed()
            return await self.port.prepare(
                self.slot,
                self.bound,
                self.declaration.terms,
                node_id=self.node_id,
                precondition=precondition,
                repeat=repeat,
                request_id=request_id,
            )

        try:
            answer = await self._insist(ask)
        except InvalidRequest as error:
            if error.field != "precondition":
                raise
            if failed is not None:
                # It would be sent, and the downstream could not be asked what it is to be conditional on.
                raise failed from None
            if precondition is None:
                raise
            # Bound as something else than CONDITIONAL, and that counts.
            precondition, request_id = None, new_id()
            answer = await self._insist(ask)
        return asked, answer

    async def _precondition(self) -> tuple[str | None, Exception | None]:
        """The downstream may be out of reach, and the effect's receipt kept all the same: the store says which."""
        try:
            async with asyncio.timeout(self.timeout):
                found: str = await self.downstream.precondition(self.bound)
                return found, None
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001 - raised by the caller, unless the store needs no precondition
            return None, error

    # the rows -------------------------------------------------------------------------------------

    async def _replay(self, answer: PreparedAnswer, asked: float) -> Step:
        return Done(answer.receipt)

    async def _decided(self, answer: PreparedAnswer, asked: float) -> NoReturn:
        failure = EffectDenied if answer.outcome == "DENIED" else EffectAbandoned
        raise failure(answer.effect_id, self.slot, answer.reason or "")

    async def _busy(self, answer: PreparedAnswer, asked: float) -> Step:
        left = min(self.patience - elapsed(), self.port.trusted())
        if left <= self.pause:
            raise EffectBusy(answer.effect_id, self.slot, answer.busy)
        return Again(pause=0)

    async def _approval(self, answer: PreparedAnswer, asked: float) -> Step:
        return await self._person(answer, ApprovalRequired, "waits for approval")

    async def _in_flight(self, answer: PreparedAnswer, asked: float) -> Step:
        """Prepared by this very attempt, and nobody here is sending it: whoever was has been cut off."""
        outcome, _ = await self._settle(self._call(answer, Deadline.none()), Unknown("its sender was cut off"))
        return Again(pause=None if outcome == "SETTLED" else 0, why="somebody else is sending it")

    async def _conflict(self, answer: PreparedAnswer, asked: float) -> Step:
        conflict = PayloadConflict(
            answer.effect_id, self.slot, answer.payload, state=answer.state, downstream=answer.downstream
        )
        if answer.downstream != self.declaration.downstream or answer.payload is None:
            raise conflict
        if self.adopted:
            raise conflict  # it changed under our hands, which a bound payload cannot
        if offers(self.downstream, "bind") and await self.downstream.same(answer.payload, self.payload):
            pass
        elif self.on_conflict != "adopt":
            raise conflict
        self.adopted = True
        self.bound = answer.payload
        return Again()

    async def _person(self, answer: PreparedAnswer, failure: type[PersonRequired], why: str) -> Step:
        if self.on_approval == "release":
            await self.port.give_back(f"{self.slot}: {why}", answer.effect_id)
        if self.on_approval == "wait":
            left = min(self.approval - elapsed(), self.port.trusted())
            pause = self.pause * random.uniform(0.5, 1.0)
            if pause <= left:
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
                await _pause(pause)
                return Again()
        raise failure(answer.effect_id, self.slot, why)

    async def _execute(self, answer: PreparedAnswer, asked: float) -> Step:
        assert answer.send_by_us is not None
        call = self._call(answer, Deadline.after(asked, answer.now_us, answer.send_by_us, elapsed))
        self.sent += 1
        downstream = self.downstream
        if answer.guarantee == Guarantee.RESERVATION and offers(downstream, "reserve"):
            return await self._reserve(call)
        if answer.guarantee != Guarantee.RESERVATION and offers(downstream, "execute"):
            return await self._settled(call, await self._send(downstream.execute, call))
        await self._settle(call, Absent("REFUSED", "the downstream no longer offers what the effect is bound to"))
        raise InvalidRequest("using", f"the effect is bound as {answer.guarantee}, which this downstream is not")

    async def _reserve(self, call: Call) -> Step:
        """Reserve, store, and only then confirm: only a stored reservation can be confirmed, by anybody."""
        reserved = await self._send(self.downstream.reserve, call, reserving=True)
        if not isinstance(reserved, str):
            return await self._settled(call, reserved)
        request_id = new_id()
        answer = await self._insist(
            lambda: self.port.reserve(call.effect_id, call.execution, reserved, request_id=request_id)
        )
        if answer.outcome in ("STALE_EXECUTION", "CONFLICT"):
            return Again(pause=0, why="another reservation was stored first")
        if answer.outcome != "RESERVED":
            refused(answer)
        call = replace(call, reservation_id=reserved)
        return await self._settled(call, await self._send(self.downstream.confirm, call))

    async def _send(self, method: Callable[[Call], Awaitable[Any]], call: Call, *, reserving: bool = False) -> Any:
        """One call, bounded. The look at `send_by` is the last thing before it."""
        try:
            async with asyncio.timeout(self.timeout):
                if self.port.trusted() <= 0:
                    return Unknown("not sent: the lease is no longer trusted")
                if call.send_by.expired:
                    return Unknown("not sent: its send_by was over")
                found = await method(call)
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody knows what the downstream did
            why = f"no answer within {self.timeout:g} s" if isinstance(error, TimeoutError) else says(error)
            # Nothing that was reserved and not stored can ever be confirmed.
            return Absent("REFUSED", f"not reserved: {why}") if reserving else Unknown(why)
        except BaseException as error:
            # Cancelled, or the process is to end: say so, as far as that is possible, and let it through.
            await self._leave(call, f"cut off: {type(error).__name__}")
            raise
        if reserving:
            if isinstance(found, Absent):
                return found
            if id_kept(found) is not None:
                return found
            return Absent("REFUSED", f"not reserved: answered with {type(found).__name__}")
        if not isinstance(found, Happened | Absent | Unknown):
            return Unknown(f"answered with {type(found).__name__}, which is no finding")
        if call.reservation_id is not None and isinstance(found, Absent) and found.why != "RESERVATION_CANCELLED":
            return Unknown(found.detail or "not confirmed, and still reserved")
        return found

    async def _settled(self, call: Call, found: Happened | Absent | Unknown) -> Step:
        """Settle, and what follows from what the record then says."""
        outcome, state = await self._settle(call, found)
        if outcome == "EVIDENCE":
            await self._settle(call, Unknown("late evidence says that it happened"))
            return Again()
        if outcome != "SETTLED":
            return Again(pause=0, why=f"{outcome}: decided elsewhere")
        if isinstance(found, Happened):
            return Done(storable(found.receipt))
        if isinstance(found, Absent):
            if state == "ABSENT":
                raise EffectAbsent(call.effect_id, self.slot, found.why, found.detail)
            return Again(pause=0, why=found.detail or found.why)
        return Again(pause=found.retry_after or 0, why=found.why)

    # settle ---------------------------------------------------------------------------------------

    async def _settle(self, call: Call, found: Happened | Absent | Unknown) -> tuple[str, str | None]:
        """The door's answer and the effect's state. Goes on when the caller is cancelled: the finding is worth it."""
        return await through(self._settle_now(call, found))

    async def _settle_now(self, call: Call, found: Happened | Absent | Unknown) -> tuple[str, str | None]:
        finding, why, receipt, etag, detail = "UNKNOWN", None, None, None, None
        if isinstance(found, Happened):
            finding, receipt, etag = "HAPPENED", storable(found.receipt), id_kept(found.etag)
        elif isinstance(found, Absent):
            finding, why, detail = "ABSENT", found.why, found.detail
        else:
            why, detail = "STORED_FAILURE" if found.stored else None, found.why
        request_id = new_id()
        answer = await self._insist(
            lambda: self.port.settle(
                call.effect_id,
                call.execution,
                finding,
                why=why,
                receipt=receipt,
                etag=etag,
                note=note(detail),
                request_id=request_id,
            )
        )
        if answer.outcome not in ("SETTLED", "STALE_EXECUTION", "CONFLICT", "EVIDENCE"):
            refused(answer)
        return str(answer.outcome), answer.info.get("state") if answer.outcome == "SETTLED" else None

    async def _leave(self, call: Call, why: str) -> None:
        """Say UNKNOWN within a few seconds; if that fails, the attempt's end says the same."""
        await within_leaving(self._settle_now(call, Unknown(why)))

    # small things ---------------------------------------------------------------------------------

    def _call(self, answer: PreparedAnswer, send_by: Deadline) -> Call:
        return Call(
            effect_id=answer.effect_id,
            task_id=self.port.task_id,
            slot=self.slot,
            execution=answer.execution,
            epoch=self.port.epoch,
            generation=self.port.generation,
            # As it was spelled when it was bound: a downstream that compares texts sees the same one.
            payload=self.bound if answer.payload is None else answer.payload,
            precondition=answer.precondition,
            reservation_id=answer.reservation_id,
            send_by=send_by,
        )

    async def _insist(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask again after Unavailable, with the same request id, while the lease is trusted; then raise it."""
        pause = FIRST_PAUSE / 2
        while True:
            try:
                return await ask()
            except Unavailable:
                left = self.port.trusted()
                if left <= 0:
                    raise
                await _pause(min(left, pause * random.uniform(0.5, 1.0)))
                pause = min(2 * pause, LONGEST_PAUSE)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)
