"""A kit for testing your own handlers: a store in memory whose clock you move.

    async with memory_client() as client:                 # or: client = await memory_client()
        await client.submit(summarise.task(Doc(...)))
        await Worker(client, app).run_until_idle()

        client.advance(60)                                # leases run out, delays end
        newer = await client.reclaim(claim)               # the lease runs out, and somebody else takes the task

`advance(seconds)` and `await reclaim(claim)` do the same without naming the client: `reclaim` finds it by the
claim's store, `advance` takes the one that was opened last and is not closed yet.

Moving the store's clock does not move a worker's: how long a lease is *trusted* is measured by the machine's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any

from fencepost.client.client import Client
from fencepost.errors import FencepostError
from fencepost.service.coordinator import Coordinator
from fencepost.stores.memory import MemoryStore
from fencepost.wire import Backend, Claim, Refused

__all__ = ["MemoryClient", "advance", "memory_client", "reclaim"]

_open: list[MemoryClient] = []


class MemoryClient(Client):
    """A `Client` on a store in memory, with a hand on its clock."""

    def __init__(self, store: MemoryStore, backend: Backend, *, reopen: Callable[[], Awaitable[Backend]]) -> None:
        super().__init__(backend, url="memory://", reopen=reopen, epochs={})
        self.store = store

    def advance(self, seconds: float) -> None:
        """Move the store's clock on by `seconds`."""
        self.store.advance(seconds)

    async def reclaim(self, claim: Claim, *, owner: str = "somebody-else") -> Claim:
        """Let the lease of `claim` run out and have `owner` claim the task: its new claim.

        From here on every door refuses the old one. Raises FencepostError where the task is not claimed any more, or
        where its attempts are used up (it is PARKED then).
        """
        answer: Any = None
        for _ in range(100):  # whoever renews in the background may get in between
            view = await self.task(claim.task_id)
            if isinstance(view, Refused) or view.lease_expires_at is None:
                raise FencepostError(f"task {claim.task_id!r} is not claimed: there is nothing to reclaim")
            pool = await self.pool(view.pool)
            grace = 0.0 if isinstance(pool, Refused) else float(pool.policy["reclaim_grace"])
            left = view.lease_expires_at.timestamp() + grace - (await self.store.clock()) / 1_000_000
            self.store.advance(max(0.0, left) + 0.001)
            answer = await self.claim(
                claim.task_id, expected_state_version=view.state_version, owner=owner, ttl=claim.ttl
            )
            if isinstance(answer, Claim):
                return answer
            if answer.outcome not in ("HELD", "CONFLICT"):
                break
        raise FencepostError(f"task {claim.task_id!r} could not be reclaimed: {answer.outcome}/{answer.reason}")

    async def close(self) -> None:
        if self in _open:
            _open.remove(self)
        await super().close()


class memory_client:  # noqa: N801 - reads as a call: `await memory_client()`, `async with memory_client()`
    """A client on a new, empty store in memory."""

    def __init__(self) -> None:
        self._client: MemoryClient | None = None

    def __await__(self) -> Generator[Any, None, MemoryClient]:
        return self._connect().__await__()

    async def _connect(self) -> MemoryClient:
        store = MemoryStore()

        async def reopen() -> Backend:
            return Coordinator(store)

        client = MemoryClient(store, await reopen(), reopen=reopen)
        await client.epoch()
        _open.append(client)
        return client

    async def __aenter__(self) -> MemoryClient:
        self._client = await self._connect()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


def advance(seconds: float) -> None:
    """Move the clock of the memory store that was opened last. Raises FencepostError where none is open."""
    if not _open:
        raise FencepostError("no memory_client() is open")
    _open[-1].advance(seconds)


async def reclaim(claim: Claim, *, owner: str = "somebody-else") -> Claim:
    """`MemoryClient.reclaim`, on the open memory store that granted `claim`."""
    for client in reversed(_open):
        if client.store_id == claim.store_id:
            return await client.reclaim(claim, owner=owner)
    raise FencepostError("no open memory_client() granted this claim")
