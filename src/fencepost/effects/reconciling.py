"""RECONCILE: what a successor does about an effect of which nobody knows whether it happened.

The downstream is asked first; nothing is sent before that, and what it says is the store's to accept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import uuid_utils

from fencepost.effects.asking import ask, confirm_stored
from fencepost.effects.base import (
    Call,
    Deadline,
    Gone,
    Guarantee,
    Happened,
    NotFound,
    Standing,
    StillUnknown,
    offers,
)
from fencepost.effects.enduring import through
from fencepost.effects.failures import EffectUnknown, PersonRequired
from fencepost.effects.port import Port, PreparedAnswer
from fencepost.effects.receipts import id_kept, note, storable
from fencepost.errors import Fenced

__all__ = ["REPEATS", "Again", "Done", "Reconciling", "Step", "new_id", "refused"]

REPEATS = 8  # executions that one `perform` may add to an effect that stays UNKNOWN


@dataclass(frozen=True, slots=True)
class Done:
    receipt: Any


@dataclass(frozen=True, slots=True)
class Again:
    """Look at the slot again: after a pause where there is nothing new to expect at once."""

    repeat: bool = False
    pause: float | None = None  # None: at once; 0: by back-off; above: these seconds
    why: str = ""


Step = Done | Again


class Reconciling:
    """The part of a performance that asks. What it needs of the rest is named here."""

    port: Port
    downstream: Any
    slot: str
    timeout: float
    sent: int
    effect_id: str

    def _call(self, answer: PreparedAnswer, send_by: Deadline) -> Call:
        raise NotImplementedError

    async def _person(self, answer: PreparedAnswer, failure: type[PersonRequired], why: str) -> Step:
        raise NotImplementedError

    async def _insist(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        raise NotImplementedError

    async def _reconcile(self, answer: PreparedAnswer, asked: float) -> Step:
        """The downstream is asked first; nothing is sent before that."""
        ways = answer.open
        if "ASK" not in ways:
            if "REPEAT" in ways:
                return self._repeat("unknown")
            return await self._person(answer, PersonRequired, "only a person can say what became of it")
        call = self._call(answer, Deadline.none())
        if answer.guarantee == Guarantee.RESERVATION:
            found = await confirm_stored(self.downstream, call, self.timeout)
        else:
            found = await ask(self.downstream, call, self.timeout)
        if isinstance(found, Happened):
            return await self._reconciled(answer, found)
        if "PERSON" in ways:
            return await self._person(answer, PersonRequired, "late evidence says that it happened")
        if isinstance(found, Gone | NotFound):
            return await self._reconciled(answer, found)
        if isinstance(found, Standing):
            return self._repeat("it still stands at the bound precondition") if "REPEAT" in ways else Again(pause=0)
        if found.moved_on and answer.guarantee == Guarantee.CONDITIONAL:
            return await self._reconciled(answer, found)
        asks = answer.guarantee == Guarantee.RESERVATION or offers(self.downstream, "query")
        if "REPEAT" not in ways and not asks:
            raise EffectUnknown(answer.effect_id, self.slot, "the downstream cannot be asked, nor may it be repeated")
        if found.in_progress or "REPEAT" not in ways:
            return Again(pause=found.retry_after or 0, why=found.why)
        if answer.guarantee == Guarantee.CONDITIONAL and offers(self.downstream, "query"):
            return Again(pause=found.retry_after or 0, why=found.why)
        return self._repeat(found.why)

    def _repeat(self, why: str) -> Again:
        """Send it again, under the same key, precondition and payload; not for ever."""
        if self.sent > REPEATS:
            raise EffectUnknown(self.effect_id, self.slot, f"repeated {REPEATS} times: {why}")
        return Again(repeat=True)

    async def _reconciled(self, answer: PreparedAnswer, found: Happened | NotFound | Gone | StillUnknown) -> Step:
        return await through(self._reconciled_now(answer, found))

    async def _reconciled_now(self, answer: PreparedAnswer, found: Happened | NotFound | Gone | StillUnknown) -> Step:
        finding, ground, receipt, etag, detail = "ABSENT", None, None, None, None
        if isinstance(found, Happened):
            finding, receipt, etag = "HAPPENED", storable(found.receipt), id_kept(found.etag)
        elif isinstance(found, Gone):
            ground, detail = found.ground, found.detail
        elif isinstance(found, NotFound):
            ground = "NOT_FOUND"
        else:
            finding, ground, detail = "STILL_UNKNOWN", "MOVED_ON", found.why
        request_id = new_id()
        said = await self._insist(
            lambda: self.port.reconcile(
                answer.effect_id,
                answer.execution,
                finding,
                asked_at=answer.now_us,
                ground=ground,
                receipt=receipt,
                etag=etag,
                note=note(detail),
                request_id=request_id,
            )
        )
        if said.outcome == "RECONCILED":
            if isinstance(found, Happened):
                return Done(receipt)
            return Again(pause=0 if isinstance(found, StillUnknown) else None, why="its history cannot tell")
        if said.outcome == "TOO_EARLY":
            if "REPEAT" in answer.open:
                return self._repeat("not found")
            wait = max(0.0, (int(said.current["not_before_us"]) - answer.now_us) / 1_000_000)
            return Again(pause=wait + 0.001, why="not found, and something may still be under way")
        if said.outcome == "PERSON" and "REPEAT" in answer.open:
            return self._repeat("not found")
        if said.outcome in ("PERSON", "EVIDENCE", "STALE_EXECUTION", "CONFLICT"):
            return Again(pause=0, why=f"{said.outcome}: decided elsewhere")
        return refused(said)


def refused(answer: Any) -> NoReturn:
    """The claim itself was refused: the handler is over."""
    outcome, reason = str(answer.outcome), answer.reason
    raise Fenced(f"{outcome}/{reason}" if reason else outcome, answer)


def new_id() -> str:
    """Of one call: the same when it is asked again, another for every other."""
    return str(uuid_utils.uuid7())
