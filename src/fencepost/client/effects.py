"""The client's doors of effects: for a claim's holder, for people, and for reading.

`attempt.effect` is what a handler uses; these are its steps, one by one. No method calls a downstream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fencepost.client import requests as r
from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, Terms
from fencepost.wire import Backend, Claim, Done, EffectView, Outcome, Page, Prepared, Refused


def _receipt(receipt: Any, finding: str) -> Content | None:
    """What HAPPENED comes with. None is none: it is compared with no other receipt."""
    if finding != "HAPPENED" or receipt is None:
        return None
    return encode(receipt, "receipt", k.MAX_RECEIPT_BYTES)


class EffectDoors:
    """The part of `Client` that effects go through. `terms` are a downstream's: `downstream.declaration.terms`."""

    backend: Backend

    async def _present(self, pool: str, epoch: int | None = None) -> int | None:
        """The epoch that this client presents for `pool`."""
        raise NotImplementedError

    # by a claim's holder ------------------------------------------------------------------------

    async def prepare(
        self,
        claim: Claim,
        slot: str,
        payload: Any,
        terms: Terms,
        *,
        node_id: str | None = None,
        precondition: str | None = None,
        repeat: bool = False,
        request_id: str | None = None,
    ) -> Prepared | Refused:
        """May this be sent? `Prepared` with the row of the slot; EXECUTE alone allows one call, before `send_by_us`.

        Payload, downstream and guarantee are bound at the first prepare, for good. `repeat`: send again, under the
        same key, what is UNKNOWN, where REPEAT is open. Asked again with the same request id it is the same execution
        with its first `send_by`. Refused: the fence, in order. Raises InvalidRequest, Unavailable: nothing may be sent.
        """
        command = k.Prepare(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            slot=k.check_id(slot, "slot"),
            payload=encode(payload, "payload"),
            terms=terms,
            node_id=node_id,
            precondition=precondition,
            repeat=repeat,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def reserve(
        self, claim: Claim, effect_id: str, execution: int, reservation_id: str, *, request_id: str | None = None
    ) -> Done | Refused:
        """Keep the reservation that alone may be confirmed. Refused: the fence; NOT_FOUND; STALE_EXECUTION;
        CONFLICT (another one is kept for this execution)."""
        command = k.Reserve(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            effect_id=effect_id,
            execution=execution,
            reservation_id=k.check_id(reservation_id, "reservation_id"),
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def settle(
        self,
        claim: Claim,
        effect_id: str,
        execution: int,
        finding: str,
        *,
        why: str | None = None,
        receipt: Any = None,
        etag: str | None = None,
        note: str | None = None,
        request_id: str | None = None,
    ) -> Done | Refused:
        """What the sender knows: HAPPENED (with `receipt`), ABSENT (`why`: REFUSED, PRECONDITION,
        RESERVATION_CANCELLED) or UNKNOWN. `info["state"]` says how the effect then stands.

        Refused: the fence; NOT_FOUND; STALE_EXECUTION; CONFLICT; EVIDENCE. A refused HAPPENED from an attempt that
        once prepared this effect is kept as evidence all the same.
        """
        command = k.Settle(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            effect_id=effect_id,
            execution=execution,
            finding=finding,
            why=why,
            receipt=_receipt(receipt, finding),
            etag=etag,
            note=note,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def reconcile(
        self,
        claim: Claim,
        effect_id: str,
        execution: int,
        finding: str,
        *,
        asked_at: int,
        ground: str | None = None,
        receipt: Any = None,
        etag: str | None = None,
        note: str | None = None,
        request_id: str | None = None,
    ) -> Done | Refused:
        """What the downstream said of an UNKNOWN effect: HAPPENED, ABSENT (with its `ground`) or STILL_UNKNOWN.

        `asked_at` is the `now_us` of the RECONCILE that the look followed. Refused: the fence; NOT_FOUND;
        STALE_EXECUTION; CONFLICT; PERSON; EVIDENCE; TOO_EARLY (`current["not_before_us"]`).
        """
        command = k.Reconcile(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            effect_id=effect_id,
            execution=execution,
            asked_at=asked_at,
            finding=finding,
            ground=ground,
            receipt=_receipt(receipt, finding),
            etag=etag,
            note=note,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def withdraw(
        self, claim: Claim, effect_id: str, *, note: str | None = None, request_id: str | None = None
    ) -> Done | Refused:
        """Give up an effect that awaits approval: DENIED. Refused: the fence; NOT_FOUND; CONFLICT."""
        command = k.Withdraw(
            request_id=r.request(request_id),
            claim=r.presented(claim),
            epoch=await self._present(claim.pool),
            effect_id=effect_id,
            note=note,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    # by people ----------------------------------------------------------------------------------

    async def approve(
        self, effect: EffectView, *, who: str, epoch: int | None = None, request_id: str | None = None
    ) -> Done | Refused:
        """Allow exactly one execution of exactly the payload of `effect`, as it was read.

        Void after a cancel or an epoch raise. Refused: PROTOCOL; FENCED/EPOCH; NOT_FOUND; PAYLOAD_CONFLICT; CONFLICT
        (it has changed since it was read, or awaits no approval); CANCELLED.
        """
        command = k.Approve(
            request_id=r.request(request_id),
            task_id=effect.task_id,
            effect_id=effect.effect_id,
            expected_version=effect.version,
            payload_digest=effect.payload_digest,
            epoch=await self._present(effect.pool, epoch),
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def deny(
        self,
        effect: EffectView,
        *,
        who: str,
        note: str | None = None,
        epoch: int | None = None,
        request_id: str | None = None,
    ) -> Done | Refused:
        """Refuse it for good: nothing is ever sent under this slot. Refused: as `approve`, but for CANCELLED."""
        command = k.Deny(
            request_id=r.request(request_id),
            task_id=effect.task_id,
            effect_id=effect.effect_id,
            expected_version=effect.version,
            payload_digest=effect.payload_digest,
            epoch=await self._present(effect.pool, epoch),
            who=who,
            note=note,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def resolve(
        self,
        effect: EffectView,
        finding: str,
        *,
        who: str,
        evidence: str,
        reconciler: bool = False,
        ground: str | None = None,
        late_evidence: int = 0,
        asked_at: int | None = None,
        receipt: Any = None,
        etag: str | None = None,
        epoch: int | None = None,
        request_id: str | None = None,
    ) -> Done | Refused:
        """Decide an UNKNOWN effect without a claim: HAPPENED, ABSENT or ABANDONED, after looking at the downstream.

        The finding counts as of the read that gave `effect` (its `now_us`), or as of `asked_at`, the `now_us` of the
        read that the look at the downstream followed. `late_evidence`: how many late reports
        were seen and are overruled. `reconciler`: a loop that asked the downstream, which may record only what the
        guarantee allows. Refused: PROTOCOL; FENCED/EPOCH; NOT_FOUND; CONFLICT; HELD (a claim's holder decides);
        PERSON; EVIDENCE; TOO_EARLY (`current["not_before_us"]`).
        """
        command = k.Resolve(
            request_id=r.request(request_id),
            task_id=effect.task_id,
            effect_id=effect.effect_id,
            expected_version=effect.version,
            epoch=await self._present(effect.pool, epoch),
            who=who,
            finding=finding,
            asked_at=effect.now_us if asked_at is None else asked_at,
            evidence=evidence,
            reconciler=reconciler,
            ground=ground,
            late_evidence=late_evidence,
            receipt=_receipt(receipt, finding),
            etag=etag,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    # reading ------------------------------------------------------------------------------------

    async def effects(
        self,
        *,
        task_id: str | None = None,
        pool: str | None = None,
        state: str | Sequence[str] | None = None,
        guarantee: str | None = None,
        downstream: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """A page of EffectViews with their payloads, in order of task and first prepare; go on with
        `cursor=page.next_cursor`. `state`: one or more of AWAITING_APPROVAL, PREPARED, UNKNOWN, COMMITTED, ABSENT,
        DENIED, ABANDONED."""
        where = {
            "task_id": task_id,
            "pool": pool,
            "state": state,
            "guarantee": guarantee,
            "downstream": downstream,
        }
        return await self.backend.effects(
            {key: value for key, value in where.items() if value is not None}, cursor, limit
        )

    async def effect(self, effect_id: str, *, task_id: str | None = None) -> EffectView | Refused:
        """One effect by its id, or by the beginning of it. Without `task_id` it is looked for among those that are
        AWAITING_APPROVAL or UNKNOWN: they are the ones that somebody has to decide."""
        wanted = k.check_id(effect_id, "effect_id")
        states = None if task_id is not None else ("AWAITING_APPROVAL", "UNKNOWN")
        found: list[EffectView] = []
        cursor = None
        while True:
            page = await self.effects(task_id=task_id, state=states, cursor=cursor, limit=1000)
            found += [view for view in page.items if view.effect_id.startswith(wanted)]
            cursor = page.next_cursor
            if cursor is None:
                break
        if len(found) > 1:
            raise InvalidRequest("effect_id", f"{wanted!r} is the beginning of {len(found)} effects; give more of it")
        if found:
            return found[0]
        return Refused(Outcome.NOT_FOUND, "EFFECT", {"effect_id": wanted}, "effects", task_id)
