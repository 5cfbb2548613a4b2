"""The same client for scripts and plain functions.

    with fencepost.sync.connect("sqlite:///tasks.db") as client:
        client.submit(NewTask({"url": "…"}))

Every method of `Client` that is awaited there is a plain call here, with the same arguments, answers and exceptions.
A thread of its own runs the event loop, so a `SyncClient` may be used from several threads at once.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fencepost.client.attempt import SyncAttempt, call_from_thread, hold
from fencepost.client.client import Client
from fencepost.connect import connect as _connect
from fencepost.errors import Unavailable
from fencepost.wire import Claim, EventView

__all__ = ["SyncClient", "connect"]

T = TypeVar("T")


def connect(url: str, *, epoch: int | Mapping[str, int] | None = None, create: bool = True) -> SyncClient:
    """As `fencepost.connect`, for plain functions. Close it, or use it in a `with` block."""

    async def opened() -> Client:
        return await _connect(url, epoch=epoch, create=create)

    return SyncClient(opened)


class SyncClient:
    """`Client` for plain functions. See `Client` for what each method promises."""

    def __init__(self, opener: Callable[[], Coroutine[Any, Any, Client]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fencepost-sync", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = call_from_thread(opener(), self._loop)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def store_id(self) -> str:
        return self._client.store_id

    def close(self) -> None:
        """Finish what was asked, and let go of the store. Closing twice changes nothing."""
        if self._closed:
            return
        try:
            self._call(self._client.close())
        finally:
            self._stop()

    def hold(self, claim: Claim, *, ttl: float | None = None) -> _SyncHold:
        """`with client.hold(claim) as attempt:` renews in the background; the attempt is a `SyncAttempt`.

        Plain code cannot be interrupted: call `attempt.check()` before what is expensive. Once the claim is lost,
        Fenced is raised out of the block at the latest; a block that ends without commit, release or fail releases.
        """
        return _SyncHold(self, claim, ttl)

    def watch(self, pool: str | None = None, *, cursor: str | None = None) -> Iterator[EventView]:
        """Events as they come, from now on or from `cursor`. Leave the loop to stop watching."""
        events = self._client.watch(pool, cursor=cursor)
        try:
            while True:
                try:
                    yield self._call(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(events, "aclose", None)
            if close is not None and not self._closed:
                self._call(close())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise Unavailable("this client is closed")
        return call_from_thread(coroutine, self._loop)

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _SyncHold:
    def __init__(self, client: SyncClient, claim: Claim, ttl: float | None) -> None:
        self._client = client
        self._hold = hold(client._client, claim, ttl=ttl, interrupts=False)

    def __enter__(self) -> SyncAttempt:
        attempt = self._client._call(self._hold.__aenter__())
        return SyncAttempt(attempt, self._client._loop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._call(self._hold.__aexit__(kind, error, trace))


async def _next(events: AsyncIterator[EventView]) -> EventView:
    return await events.__anext__()


def _plain(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: SyncClient, *args: Any, **kwargs: Any) -> Any:
        return self._call(getattr(self._client, name)(*args, **kwargs))

    return method


# One twin for each coroutine method, so that the two cannot drift apart.
_ASYNC_ONLY = {"clone", "renewal"}
for _name, _function in inspect.getmembers(Client, inspect.iscoroutinefunction):
    if not _name.startswith("_") and _name not in _ASYNC_ONLY and not hasattr(SyncClient, _name):
        setattr(SyncClient, _name, _plain(_name, _function))
