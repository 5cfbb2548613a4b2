"""Something between a client and its store: answers that get lost, beats that are held up, calls that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fencepost.client.client import Client
from fencepost.connect import open_store
from fencepost.service.coordinator import Coordinator

# Is given a command and how to send it; gives the answer, raises Unavailable, or takes its time.
Rule = Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class Between:
    """A `Backend` that passes every changing call through a rule; reading passes as it is."""

    def __init__(self, inner: Coordinator, rule: Rule) -> None:
        self._inner = inner
        self._rule = rule
        self.store_id = inner.store_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def ask(self, command: Any) -> Any:
        return await self._rule(command, lambda: self._inner.ask(command))

    async def ask_many(self, commands: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*map(self.ask, commands), return_exceptions=True)

    async def submit(self, command: Any) -> Any:
        return await self._rule(command, lambda: self._inner.submit(command))

    async def claim_next(self, command: Any, wait: float = 0.0, *, fresh: bool = False) -> Any:
        return await self._rule(command, lambda: self._inner.claim_next(command, wait, fresh=fresh))


async def client_behind(url: str, rule: Rule) -> Client:
    """A client on the store at `url`, its renewal thread's connection included, whose calls pass `rule`."""

    async def reopen() -> Any:
        return Between(Coordinator(await open_store(url)), rule)

    client = Client(await reopen(), url=url, reopen=reopen, epochs={})
    await client.epoch()
    return client
