"""The client's doors for people: cancel, reopen, revise, take over, discard, expire, and a pool's commands."""

from __future__ import annotations

from typing import Any

from fencepost.client import requests as r
from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.wire import Backend, Done, Outcome, PoolChanged, PoolView, Refused, new_id


class PeopleDoors:
    """The part of `Client` that people and their tools use. Where an `expected_…` is left out, it is read once
    for the call."""

    backend: Backend

    async def _present(self, pool: str, epoch: int | None = None) -> int | None:
        """The epoch that this client presents for `pool`."""
        raise NotImplementedError

    async def _pool_of(self, task_id: str) -> str:
        view = await self.backend.record(task_id)
        return view.pool if view is not None else "default"

    # people -------------------------------------------------------------------------------------

    async def cancel(
        self,
        task_id: str,
        *,
        expected_cancel_generation: int | None = None,
        who: str = "",
        request_id: str | None = None,
    ) -> Done | Refused:
        """Cancel: cancel generation + 1, a live attempt is over at once. `changed` False: it was cancelled already,
        or since the expected generation. Refused: NOT_FOUND, PROTOCOL, ALREADY_COMMITTED."""
        if expected_cancel_generation is None:
            view = await self.backend.record(k.check_id(task_id, "task_id"))
            expected_cancel_generation = view.cancel_generation if view is not None else 0
        command = k.Cancel(
            request_id=r.request(request_id),
            task_id=task_id,
            expected_cancel_generation=expected_cancel_generation,
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def reopen(
        self, task_id: str, *, expected_state_version: int | None = None, who: str = "", request_id: str | None = None
    ) -> Done | Refused:
        """CANCELLED or PARKED → READY, or BLOCKED while a parent is open; the charge starts again at 0."""
        view = await self.backend.record(k.check_id(task_id, "task_id"))
        if expected_state_version is None:
            expected_state_version = view.state_version if view is not None else 0
        command = k.Reopen(
            request_id=r.request(request_id),
            task_id=task_id,
            expected_state_version=expected_state_version,
            epoch=await self._present(view.pool if view is not None else "default"),
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def revise(
        self,
        task_id: str,
        input: Any,
        *,
        expected_revision: int | None = None,
        accept_effects: bool = False,
        who: str = "",
        request_id: str | None = None,
    ) -> Done | Refused:
        """Replace the input: revision + 1; a live attempt ends SUPERSEDED and its writes become STALE_INPUT.

        CONFLICT/EFFECTS while an effect of the revision is AWAITING_APPROVAL, PREPARED or UNKNOWN, and where one
        happened or may have, unless `accept_effects` says that those are done with: a new revision has new effect
        ids, and would do them again.
        """
        view = await self.backend.record(k.check_id(task_id, "task_id"))
        if expected_revision is None:
            expected_revision = view.revision if view is not None else 0
        command = k.Revise(
            request_id=r.request(request_id),
            task_id=task_id,
            input=encode(input, "input"),
            expected_revision=expected_revision,
            epoch=await self._present(view.pool if view is not None else "default"),
            who=who,
            accept_effects=accept_effects,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def take_over(
        self, task_id: str, *, expected_generation: int | None = None, who: str = "", request_id: str | None = None
    ) -> Done | Refused:
        """End a live attempt as EXPIRED now, nothing charged. Refused CONFLICT: none is live, or another one."""
        view = await self.backend.record(k.check_id(task_id, "task_id"))
        if expected_generation is None:
            expected_generation = view.generation if view is not None else 0
        command = k.TakeOver(
            request_id=r.request(request_id),
            task_id=task_id,
            expected_generation=expected_generation,
            epoch=await self._present(view.pool if view is not None else "default"),
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def discard(
        self, task_id: str, *, generation: int, who: str = "", request_id: str | None = None
    ) -> Done | Refused:
        """Discard what the attempt of this generation has staged and not committed."""
        pool = await self._pool_of(k.check_id(task_id, "task_id"))
        command = k.Discard(
            request_id=r.request(request_id),
            task_id=task_id,
            generation=generation,
            epoch=await self._present(pool),
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def expire(
        self, task_id: str, *, expected_state_version: int | None = None, request_id: str | None = None
    ) -> Done | Refused:
        """Take back a claim whose lease ran out. Refused: CONFLICT (moved on, or not claimed), HELD (it runs)."""
        if expected_state_version is None:
            view = await self.backend.record(k.check_id(task_id, "task_id"))
            expected_state_version = view.state_version if view is not None else 0
        command = k.Expire(
            request_id=r.request(request_id), task_id=task_id, expected_state_version=expected_state_version
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    # pools --------------------------------------------------------------------------------------

    async def pools(self) -> list[PoolView]:
        return await self.backend.pools()

    async def pool(self, name: str = "default") -> PoolView | Refused:
        for view in await self.backend.pools():
            if view.name == name:
                return view
        return Refused(Outcome.NOT_FOUND, "POOL", {"pool": name}, "pool")

    async def create_pool(self, name: str, *, who: str = "", **policy: Any) -> PoolChanged | Refused:
        """A new fencing domain with epoch 1 and an open intake. `changed` False: it stood already."""
        command = k.CreatePool(request_id=new_id(), pool=name, policy=r.policy(policy, {}), who=who)
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def set_policy(self, pool: str = "default", *, who: str = "", **changes: Any) -> PoolChanged | Refused:
        """Change parts of a pool's policy (see `Policy`); the rest stays."""
        view = await self.pool(pool)
        if isinstance(view, Refused):
            return view
        command = k.SetPolicy(
            request_id=new_id(),
            pool=pool,
            expected_epoch=await self._present(pool),
            expected_state_version=view.state_version,
            policy=r.policy(changes, view.policy),
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def close_intake(
        self,
        pool: str = "default",
        *,
        expected_epoch: int | None = None,
        expected_state_version: int | None = None,
        who: str = "",
        request_id: str | None = None,
    ) -> PoolChanged | Refused:
        """No claim is granted from now on; running ones finish, and submits are still taken."""
        command = k.CloseIntake(
            request_id=r.request(request_id),
            pool=pool,
            expected_epoch=await self._present(pool, expected_epoch),
            expected_state_version=expected_state_version,
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def open_intake(
        self,
        pool: str = "default",
        *,
        expected_state_version: int,
        expected_epoch: int | None = None,
        who: str = "",
        request_id: str | None = None,
    ) -> PoolChanged | Refused:
        """Grant claims again. Refused CONFLICT where the pool moved since `expected_state_version` (an alarm, say)."""
        command = k.OpenIntake(
            request_id=r.request(request_id),
            pool=pool,
            expected_epoch=await self._present(pool, expected_epoch),
            expected_state_version=expected_state_version,
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def raise_epoch(
        self,
        pool: str = "default",
        *,
        expected_epoch: int,
        expected_state_version: int,
        to: int | None = None,
        who: str = "",
        request_id: str | None = None,
    ) -> PoolChanged | Refused:
        """After this returns EPOCH_RAISED, nothing that presents an older epoch, or was granted under one, is
        accepted on any connection. This client too goes on presenting the old one until `adopt_epoch`."""
        command = k.RaiseEpoch(
            request_id=r.request(request_id),
            pool=pool,
            expected_epoch=expected_epoch,
            expected_state_version=expected_state_version,
            to=to,
            who=who,
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]
