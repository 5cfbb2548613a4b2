"""One attempt's doors, as `fencepost.effects.performing` needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from fencepost.effects.sql import Deferred
from fencepost.errors import GiveBack, InvalidRequest
from fencepost.kernel.commands import NewStatement
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Terms
from fencepost.wire import Claim

if TYPE_CHECKING:
    from fencepost.client.client import Client

__all__ = ["AttemptPort"]


class AttemptPort:
    """Answers are the client's; whether the claim is still trusted is the lease's to say."""

    def __init__(self, client: Client, claim: Claim, trusted: Callable[[], float]) -> None:
        self.task_id = claim.task_id
        self.generation = claim.generation
        self.epoch = claim.epoch
        self.trusted = trusted
        self._client = client
        self._claim = claim

    async def prepare(
        self,
        slot: str,
        payload: Any,
        terms: Terms,
        *,
        node_id: str | None,
        precondition: str | None,
        repeat: bool,
        request_id: str,
    ) -> Any:
        return await self._client.prepare(
            self._claim,
            slot,
            payload,
            terms,
            node_id=node_id,
            precondition=precondition,
            repeat=repeat,
            request_id=request_id,
        )

    async def reserve(self, effect_id: str, execution: int, reservation_id: str, *, request_id: str) -> Any:
        return await self._client.reserve(self._claim, effect_id, execution, reservation_id, request_id=request_id)

    async def settle(self, effect_id: str, execution: int, finding: str, **what: Any) -> Any:
        return await self._client.settle(self._claim, effect_id, execution, finding, **what)

    async def reconcile(self, effect_id: str, execution: int, finding: str, **what: Any) -> Any:
        return await self._client.reconcile(self._claim, effect_id, execution, finding, **what)

    async def defer(self, slot: str, payload: Any, downstream: str, *, node_id: str | None) -> Deferred:
        """The statement waits in this client for the commit of the attempt, which brings it along."""
        statement = NewStatement(slot, encode(payload, "payload"), downstream, node_id)
        waiting = self._client.deferred.setdefault(self._claim.attempt_id, [])
        for other in waiting:
            if (other.node_id, other.slot) == (node_id, slot):
                if other.payload.digest == statement.payload.digest and other.downstream == downstream:
                    return Deferred(slot)
                raise InvalidRequest("slot", f"{slot!r} is bound to another statement; an effect needs its own slot")
        waiting.append(statement)
        return Deferred(slot)

    async def give_back(self, why: str, effect_id: str) -> NoReturn:
        raise GiveBack(effect_id, why)
