"""The reconciler: asks downstreams about UNKNOWN effects that nobody holds, and records what the guarantee allows.

It asks exactly what a successor would ask, and never executes, repeats or confirms; a stored reservation that nobody
will confirm it may cancel. A closed intake does not stop it (claim.v1, section 5). Safe in any number of processes:
whoever decides first moves the effect's version, and the others are told CONFLICT.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from fencepost import clock
from fencepost.effects.asking import ask, cancel
from fencepost.effects.base import (
    Call,
    Deadline,
    Found,
    Gone,
    Happened,
    NotFound,
    Standing,
    StillUnknown,
    check_downstream,
)
from fencepost.effects.receipts import id_kept, storable
from fencepost.errors import FencepostError, InvalidRequest
from fencepost.wire import EffectView, Outcome, Refused

if TYPE_CHECKING:
    from fencepost.client.client import Client

__all__ = ["Reconciled", "Reconciler"]

log = logging.getLogger("fencepost.reconciler")

TIMEOUT = 10.0  # for one look at a downstream
TOGETHER = 8  # looks under way at once
WHO = "reconciler"
# Whom an effect waits for that a refusal kept UNKNOWN; everything else passes with time.
NEEDS = {Outcome.PERSON: "person", Outcome.EVIDENCE: "person", Outcome.HELD: "holder"}
# A look that cannot tell is taken again after this long, doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0


class Reconciled(msgspec.Struct, frozen=True):
    """What one round made of one effect. `became`: COMMITTED, ABSENT, or UNKNOWN still; `why` is for people.

    `needs`: what it waits for, where it is UNKNOWN still: "time" (asked too early, or no answer), "holder" (a claim's
    holder decides), "person", "repeat" (it may be sent again under its key, which takes a worker), "downstream" (this
    process does not know it).
    """

    effect: EffectView
    became: str
    needs: str | None = None
    why: str = ""


class Reconciler:
    """`round()` looks once at everything that is UNKNOWN; `run()` does it for ever.

    `downstreams` are found by their declaration's `downstream` (name and account), which is what an effect is bound to.
    """

    def __init__(self, client: Client, downstreams: Iterable[Any], *, timeout: float = TIMEOUT) -> None:
        self._client = client
        self._timeout = timeout
        self._downstreams: dict[str, Any] = {}
        for downstream in downstreams:
            name = check_downstream(downstream).downstream
            if self._downstreams.setdefault(name, downstream) is not downstream:
                raise InvalidRequest("downstreams", f"{name!r} stands twice")
        self._pauses: dict[str, tuple[float, float]] = {}  # effect id → (not before, the pause after that)

    async def run(self, pool: str, interval: float = 5.0) -> None:
        """Rounds, `interval` seconds apart, until cancelled. What cannot be told is asked ever more rarely."""
        while True:
            try:
                await self.round(pool, patient=True)
            except FencepostError as error:
                log.warning("pool %s was not reconciled, and is looked at again: %s", pool, error)
            await asyncio.sleep(interval * random.uniform(0.8, 1.2))

    async def round(self, pool: str | None = None, *, patient: bool = False) -> list[Reconciled]:
        """One look at each UNKNOWN effect (of `pool`). What became of each, in order of task and first prepare.

        `patient`: leave out those that a look of this process could not tell a short while ago.
        """
        done: list[Reconciled] = []
        cursor = None
        unknown: set[str] = set()
        while True:
            page = await self._client.effects(pool=pool, state="UNKNOWN", cursor=cursor, limit=100)
            unknown |= {effect.effect_id for effect in page.items}
            waiting = [effect for effect in page.items if not (patient and self._too_soon(effect))]
            for start in range(0, len(waiting), TOGETHER):
                done += await asyncio.gather(*(self._one(each) for each in waiting[start : start + TOGETHER]))
            cursor = page.next_cursor
            if cursor is None:
                break
        if pool is None or not patient:
            self._pauses = {key: pause for key, pause in self._pauses.items() if key in unknown}
        return done

    def _too_soon(self, effect: EffectView) -> bool:
        pause = self._pauses.get(effect.effect_id)
        return pause is not None and clock.elapsed() < pause[0]

    async def _one(self, effect: EffectView) -> Reconciled:
        try:
            result = await self._reconcile(effect)
        except FencepostError as error:
            result = Reconciled(effect, "UNKNOWN", "time", str(error))
        if result.became == "UNKNOWN":
            pause = self._pauses.get(effect.effect_id, (0.0, FIRST_PAUSE))[1]
            self._pauses[effect.effect_id] = (clock.elapsed() + pause, min(2 * pause, LONGEST_PAUSE))
        else:
            self._pauses.pop(effect.effect_id, None)
            log.info("effect %s (%s) is %s: %s", effect.effect_id[:12], effect.slot, result.became, result.why)
        return result

    async def _reconcile(self, effect: EffectView) -> Reconciled:
        if "ASK" not in effect.open:
            if "REPEAT" in effect.open:
                return Reconciled(effect, "UNKNOWN", "repeat", "nothing to ask: it has no side effect")
            return Reconciled(effect, "UNKNOWN", "person", f"{effect.guarantee} leaves nothing to ask any more")
        record = await self._client.backend.record(effect.task_id)
        if record is not None and record.state == "CLAIMED" and record.epoch == await self._client.epoch(record.pool):
            return Reconciled(effect, "UNKNOWN", "holder", f"{record.owner_id} holds the task")
        downstream = self._downstreams.get(effect.downstream)
        if downstream is None:
            return Reconciled(effect, "UNKNOWN", "downstream", f"{effect.downstream!r} is not configured here")
        # Anew, so that the look is later than the read, and whatever was decided meanwhile is not asked about.
        fresh = await self._client.effect(effect.effect_id, task_id=effect.task_id)
        if isinstance(fresh, Refused) or fresh.state != "UNKNOWN":
            return Reconciled(
                effect, "DECIDED" if isinstance(fresh, Refused) else fresh.state, None, "by somebody else"
            )
        found = await self._ask(downstream, fresh)
        return await self._record(fresh, found)

    async def _ask(self, downstream: Any, effect: EffectView) -> Found:
        last = effect.executions[-1]
        call = Call(
            effect_id=effect.effect_id,
            task_id=effect.task_id,
            slot=effect.slot,
            execution=last.execution,
            epoch=last.epoch,
            generation=last.generation,
            payload=effect.payload,
            precondition=last.precondition,
            reservation_id=last.reservation_id,
            send_by=Deadline.none(),
        )
        if effect.guarantee != "RESERVATION":
            return await ask(downstream, call, self._timeout)
        if last.reservation_id is None:
            return Gone("NO_RESERVATION")
        found = await ask(downstream, call, self._timeout)
        if isinstance(found, Happened | Gone) or (isinstance(found, StillUnknown) and found.in_progress):
            return found
        return await cancel(downstream, call, self._timeout)

    async def _record(self, effect: EffectView, found: Found) -> Reconciled:
        if isinstance(found, Standing):
            return Reconciled(effect, "UNKNOWN", "repeat", "the resource still stands at the bound precondition")
        if isinstance(found, StillUnknown):
            person = effect.guarantee == "CONDITIONAL" and found.moved_on
            return Reconciled(effect, "UNKNOWN", "person" if person else "time", found.why)
        if isinstance(found, Happened):
            answer = await self._client.resolve(
                effect,
                "HAPPENED",
                who=WHO,
                evidence="the downstream says that it happened",
                reconciler=True,
                receipt=storable(found.receipt),
                etag=id_kept(found.etag),
            )
            why = "the downstream says that it happened"
        else:
            ground = "NOT_FOUND" if isinstance(found, NotFound) else found.ground
            why = "the downstream does not know it" if ground == "NOT_FOUND" else ground
            answer = await self._client.resolve(effect, "ABSENT", who=WHO, evidence=why, reconciler=True, ground=ground)
        if not isinstance(answer, Refused):
            return Reconciled(effect, str(answer.info["state"]), None, why)
        needs = NEEDS.get(answer.outcome, "time")
        said = f"{answer.outcome.value}/{answer.reason}" if answer.reason else answer.outcome.value
        return Reconciled(effect, "UNKNOWN", needs, f"{why}; {said}")
