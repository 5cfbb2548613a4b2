"""`Client`: the contract's operations for one caller, over any `Backend`.

Refusals are answers (`Refused`), wrong calls and unreachable stores are exceptions. No method sends a
changing call twice by itself: after `Unavailable`, ask again with the same `request_id`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from fencepost.client import requests as r
from fencepost.client.claims import ClaimDoors
from fencepost.client.effects import EffectDoors
from fencepost.client.people import PeopleDoors
from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.wire import (
    AttemptView,
    Backend,
    Claim,
    EventView,
    NewTask,
    Outcome,
    Page,
    Pending,
    Refused,
    Result,
    Submitted,
    TaskView,
    new_attempt_id,
    new_id,
)

if TYPE_CHECKING:
    from fencepost.client.attempt import Attempt
    from fencepost.client.renewal import Lease, Renewal


# Request ids under which a client has made up task ids.
REMEMBERED_REQUESTS = 10_000


class Client(ClaimDoors, EffectDoors, PeopleDoors):
    """Presents, per pool, the epoch that it learnt when it connected, until `adopt_epoch`.

    A raise therefore refuses a running client on every door that compares an epoch, whatever it does
    next; only an explicit `adopt_epoch` goes on. Reading stays open. One event loop owns a client.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        url: str,
        reopen: Callable[[], Awaitable[Backend]],
        epochs: dict[str, int],
        given: int | Mapping[str, int] | None = None,
    ) -> None:
        self.url = url
        self.backend = backend
        self._reopen = reopen
        self._epochs = epochs
        self._given = given
        self.leases: dict[str, Lease] = {}  # what this client keeps renewed (`hold`, `Worker`), by attempt id
        self.deferred: dict[str, list[k.NewStatement]] = {}
        self._keeper: Renewal | None = None
        self._checkpoints: dict[str, int] = {}  # attempt id → the number that this client gave last
        self._bases: dict[str, str] = {}  # request id → what the task ids are made from that it left out

    @property
    def store_id(self) -> str:
        return self.backend.store_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what was asked, then let go of the store. Further calls raise Unavailable."""
        if self._keeper is not None:
            await self._keeper.stop()
        await self.backend.close()

    async def clone(self) -> Client:
        """The same store opened again, for another thread or loop; presents the same epochs as this client."""
        return Client(await self._reopen(), url=self.url, reopen=self._reopen, epochs=self._epochs, given=self._given)

    async def renewal(self) -> Renewal:
        """The thread that keeps this client's leases; started at the first call."""
        if self._keeper is None:
            from fencepost.client.renewal import Renewal

            self._keeper = Renewal(self)
        await self._keeper.start()
        return self._keeper

    def _end(self, command: Any, connection: object = None) -> Awaitable[Any]:
        """Ask for the end of a claim; no beat goes out meanwhile, where this client keeps its lease."""
        asking = self.backend.ask(command) if connection is None else self.backend.ask_on(connection, command)
        lease = self.leases.get(command.claim.attempt_id)
        return asking if lease is None or self._keeper is None else self._keeper.ending(lease, asking)

    def start_maintenance(self, interval: float = 1.0) -> None:
        """Take back lapsed claims and prune, in the background, where the store lives in this process."""
        start = getattr(self.backend, "start_maintenance", None)
        if start is not None:
            start(interval)

    # epochs -------------------------------------------------------------------------------------

    async def epoch(self, pool: str = "default") -> int | None:
        """The epoch that this client presents for `pool`; learnt once, None for a pool that does not exist."""
        known = self._epochs.get(pool)
        if known is None:
            await self._learn()
            known = self._epochs.get(pool)
        return known

    async def _learn(self) -> None:
        for view in await self.backend.pools():
            if view.name not in self._epochs:
                self._epochs[view.name] = self._given_epoch(view.name, view.epoch)

    def _given_epoch(self, pool: str, current: int) -> int:
        if self._given is None:
            return current
        if isinstance(self._given, Mapping):
            return self._given.get(pool, current)
        return self._given

    async def adopt_epoch(self, pool: str = "default", epoch: int | None = None) -> int:
        """From now on present `epoch` (None: the pool's current one). Says which. Claims of before stay fenced."""
        if epoch is None:
            view = await self.pool(k.check_id(pool, "pool"))
            if isinstance(view, Refused):
                raise InvalidRequest("pool", f"there is no pool {pool!r}")
            epoch = view.epoch
        self._epochs[k.check_id(pool, "pool")] = k.check_integer(epoch, "epoch", 0)
        return epoch

    async def _present(self, pool: str, epoch: int | None = None) -> int | None:
        if epoch is not None:
            return epoch
        known = self._epochs.get(pool)
        return known if known is not None else await self.epoch(pool)

    # submit -------------------------------------------------------------------------------------

    @overload
    async def submit(self, task: NewTask, *, request_id: str | None = None) -> Submitted | Refused: ...
    @overload
    async def submit(
        self, task: NewTask, *, connection: object, request_id: str | None = None
    ) -> Pending | Refused: ...
    async def submit(
        self, task: NewTask, *, connection: object = None, request_id: str | None = None
    ) -> Submitted | Pending | Refused:
        """Add one task. The same submission again gives the standing task (`created` False).

        With `connection` (asyncpg or psycopg, in a transaction, to the same PostgreSQL database) it is added inside
        the caller's own transaction: Pending, and there once that has committed. See docs/transactions.md.

        Refused: NOT_FOUND (pool), PROTOCOL, CONFLICT (the id stands for something else). Raises InvalidRequest.
        """
        if connection is not None:
            return await self.submit_many([task], connection=connection, request_id=request_id)
        found = await self.submit_many([task], request_id=request_id)
        return found if isinstance(found, Refused) else found[0]

    def _base(self, request_id: str | None) -> str | None:
        """A call that is asked again names the same tasks, also those whose ids it left to this client."""
        if request_id is None:
            return None
        base = self._bases.setdefault(k.check_id(request_id, "request_id"), new_id())
        while len(self._bases) > REMEMBERED_REQUESTS:
            del self._bases[next(iter(self._bases))]
        return base

    @overload
    async def submit_many(
        self, tasks: Sequence[NewTask], *, request_id: str | None = None
    ) -> list[Submitted] | Refused: ...
    @overload
    async def submit_many(
        self, tasks: Sequence[NewTask], *, connection: object, request_id: str | None = None
    ) -> Pending | Refused: ...
    async def submit_many(
        self, tasks: Sequence[NewTask], *, connection: object = None, request_id: str | None = None
    ) -> list[Submitted] | Pending | Refused:
        """Add up to 10 000 tasks, all or nothing; parents may stand in the same batch, in any order. `connection` as
        with `submit`: one Pending then answers for all."""
        made = r.new_tasks(tasks, "tasks", self._base(request_id))
        command = k.Submit(request_id=r.request(request_id), tasks=made)
        if connection is not None:
            return await self.backend.ask_on(connection, command)
        return await self.backend.submit(command)

    # claims -------------------------------------------------------------------------------------

    async def claim(
        self,
        task_id: str,
        *,
        expected_state_version: int,
        owner: str,
        ttl: float = k.DEFAULT_TTL,
        epoch: int | None = None,
        request_id: str | None = None,
    ) -> Claim | Refused:
        """Claim this very task, if it still stands at `expected_state_version`.

        Refused, in order: NOT_FOUND, PROTOCOL, FENCED/EPOCH, ENDED (this request id's claim is over),
        INTAKE_CLOSED, CONFLICT, CANCELLED or NOT_CLAIMABLE, HELD. `ttl` in seconds, at most the pool's max_ttl.
        """
        pool = await self._pool_of(k.check_id(task_id, "task_id")) if epoch is None else "default"
        command = k.Claim(
            request_id=r.request(request_id),
            task_id=task_id,
            expected_state_version=expected_state_version,
            epoch=await self._present(pool, epoch),
            owner_id=owner,
            ttl_us=r.ttl_us(ttl),
            attempt_id=new_attempt_id(),
        )
        return await self.backend.ask(command)  # type: ignore[no-any-return]

    async def claim_next(
        self,
        *,
        owner: str,
        queues: Sequence[str] = ("default",),
        kinds: Sequence[str] | None = None,
        pool: str = "default",
        ttl: float = k.DEFAULT_TTL,
        limit: int = 1,
        wait: float = 0.0,
        epoch: int | None = None,
        request_id: str | None = None,
    ) -> list[Claim] | Refused:
        """Claim up to `limit` of the best tasks of these queues (and kinds; None: any). Empty: there is none.

        Waits up to `wait` seconds for one. Order: priority (smaller first), available_at, task id. Tasks whose
        lease ran out are taken back in passing. Refused, in order: NOT_FOUND (pool), PROTOCOL, FENCED/EPOCH,
        ENDED, INTAKE_CLOSED.
        """
        fresh = request_id is None
        return await self._claim_next(owner, queues, kinds, pool, ttl, limit, wait, epoch, request_id, fresh)

    async def _claim_next(
        self,
        owner: str,
        queues: Sequence[str],
        kinds: Sequence[str] | None,
        pool: str,
        ttl: float,
        limit: int,
        wait: float,
        epoch: int | None,
        request_id: str | None,
        fresh: bool,
    ) -> list[Claim] | Refused:
        """`fresh`: nobody has asked with this request id before."""
        k.check_integer(limit, "limit", 1, k.MAX_BATCH)
        k.check_id(pool, "pool")
        if epoch is None:
            epoch = self._epochs.get(pool) or await self._present(pool)
        command = k.ClaimNext(
            request_id=r.request(request_id),
            pool=pool,
            queues=r.names(queues, "queues"),
            kinds=r.names(kinds, "kinds") if kinds is not None else None,
            epoch=epoch,
            owner_id=owner,
            ttl_us=r.ttl_us(ttl),
            attempt_ids=(new_attempt_id(),) if limit == 1 else tuple(new_attempt_id() for _ in range(limit)),
        )
        seconds = k.check_seconds(wait, "wait") / 1_000_000 if wait else 0.0
        return await self.backend.claim_next(command, seconds, fresh=fresh)

    def hold(self, claim: Claim, *, ttl: float | None = None) -> AbstractAsyncContextManager[Attempt]:
        """`async with client.hold(claim) as attempt:` renews in the background and cancels the body when fenced.

        The body commits, releases or fails through the client; if it raises, or ends without, the claim is released.
        """
        from fencepost.client.attempt import hold

        return hold(self, claim, ttl=ttl)

    # reading ------------------------------------------------------------------------------------

    async def result(self, task_id: str, wait: float | None = None) -> Result | Refused:
        """The canonical result. Waits up to `wait` seconds for it. Refused: NOT_FOUND, NOT_COMMITTED (reason: the
        task's state)."""
        seconds = k.check_seconds(wait, "wait") / 1_000_000 if wait is not None else None
        return await self.backend.result(task_id, seconds)

    async def task(self, task_id: str) -> TaskView | Refused:
        view = await self.backend.task(task_id)
        return view if view is not None else Refused(Outcome.NOT_FOUND, "TASK", {}, "task", task_id)

    async def tasks(
        self,
        *,
        pool: str | None = None,
        queue: str | None = None,
        kind: str | None = None,
        state: str | Sequence[str] | None = None,
        parent: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """A page of TaskViews in order of task id; go on with `cursor=page.next_cursor`."""
        where = {"pool": pool, "queue": queue, "kind": kind, "state": state, "parent": parent}
        return await self.backend.tasks(
            {key: value for key, value in where.items() if value is not None}, cursor, limit
        )

    async def attempts(self, task_id: str) -> list[AttemptView]:
        """Every attempt that the journal knows of this task, oldest first."""
        return await self.backend.attempts(task_id)

    async def events(
        self,
        *,
        task_id: str | None = None,
        pool: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        names: Sequence[str] = (),
    ) -> Page:
        """A page of EventViews, accepted changes and log entries, in order of time."""
        return await self.backend.events(task_id=task_id, pool=pool, cursor=cursor, limit=limit, names=names)

    def watch(self, pool: str | None = None, *, cursor: str | None = None) -> AsyncIterator[EventView]:
        """Events as they come, from now on or from `cursor`."""
        return self.backend.watch(pool, cursor)

    async def report(self, name: str, **arguments: Any) -> Any:
        """Reports by name: status, audit, doctor, history, prune, maintain."""
        return await self.backend.report(name, **arguments)
