"""`connect(url)`: a composition root. Finds a store by the URL's scheme, and imports it only then."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_integer
from fencepost.stores.base import Store
from fencepost.wire import Backend


class Connecting:
    """`client = await connect(url)`, or `async with connect(url) as client:`. Once."""

    def __init__(self, making: Coroutine[Any, Any, Client]) -> None:
        self._making = making
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, Any, Client]:
        return self._making.__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._making
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()


def connect(url: str, *, epoch: int | Mapping[str, int] | None = None, create: bool = True) -> Connecting:
    """A client for the store at `url`: `sqlite:///relative.db`, `sqlite:////absolute.db`, `memory://`, or
    `postgresql://user@host/database` (which takes libpq's parameters, and `pool_size`, `pgbouncer` and time-outs).

    The client presents, per pool, the epoch that it learns now, or `epoch` where it is given (a number for
    every pool, or one by name), until `adopt_epoch`. `create=False` refuses to make a database.
    Raises InvalidRequest (the URL), Unavailable and StoreRefused (the store, saying why).
    """
    return Connecting(_connect(url, epoch, create))


async def _connect(url: str, epoch: int | Mapping[str, int] | None, create: bool) -> Client:
    url = absolute(url)
    for number in epoch.values() if isinstance(epoch, Mapping) else () if epoch is None else (epoch,):
        check_integer(number, "epoch", 0)
    opener = await _opener(url, create)
    backend = await opener()
    client = Client(backend, url=url, reopen=opener, epochs={}, given=epoch)
    try:
        await client._learn()
    except BaseException:
        await client.close()
        raise
    return client


async def open_store(url: str, *, create: bool = True) -> Store:
    """The bare store behind a URL, for tools that look after it (migrate, doctor)."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        from fencepost.stores.sqlite import SQLiteStore

        return await SQLiteStore.open(sqlite_path(url), url=url, create=create)
    if parts.scheme in ("postgresql", "postgres"):
        try:
            import asyncpg  # noqa: F401 - an extra: said here, not as a failed import somewhere inside
        except ImportError:
            raise InvalidRequest("url", "PostgreSQL needs asyncpg: pip install 'fencepost[postgres]'") from None
        from fencepost.stores.postgres import PostgresStore

        return await PostgresStore.open(url, create=create)
    if parts.scheme == "memory":
        if parts.netloc or parts.path or parts.query or parts.fragment:
            raise InvalidRequest("url", "a store in memory has no name: memory:// makes a new one each time")
        from fencepost.stores.memory import MemoryStore

        return MemoryStore()
    raise InvalidRequest(
        "url", f"no store for {parts.scheme or 'a missing scheme'!r}; there are sqlite:///, postgresql:// and memory://"
    )


def sqlite_path(url: str) -> str:
    """`sqlite:///a.db` is relative to the current folder, `sqlite:////a.db` absolute."""
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/") or len(parts.path) < 2:
        raise InvalidRequest("url", "a SQLite URL has three slashes: sqlite:///file.db, or four for an absolute path")
    if parts.query or parts.fragment:
        raise InvalidRequest("url", "a SQLite URL takes no parameters")
    return unquote(parts.path[1:])


def absolute(url: str) -> str:
    """The same store wherever the process goes later: a relative SQLite path is taken from the current folder now."""
    if not isinstance(url, str):
        raise InvalidRequest("url", f"must be text, got {type(url).__name__}")
    if urlsplit(url).scheme != "sqlite":
        return url
    return "sqlite:///" + quote(os.path.abspath(sqlite_path(url)), safe="/ :@!$&'()*+,;=~")


async def _opener(url: str, create: bool) -> Callable[[], Awaitable[Backend]]:
    from fencepost.service.coordinator import Coordinator

    if urlsplit(url).scheme == "memory":
        store = await open_store(url)  # one store: threads and loops of this process share it

        async def share() -> Backend:
            return Coordinator(store)

        return share

    async def reopen() -> Backend:
        return Coordinator(await open_store(url, create=create))

    return reopen
