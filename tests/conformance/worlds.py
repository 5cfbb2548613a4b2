"""One store, as the conformance suite sees it: clients on it, and a hand on its clock."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fencepost.client.client import Client
from fencepost.connect import connect
from fencepost.kernel.commands import CreatePool, PoolCommand
from fencepost.kernel.kernel import Kernel
from fencepost.service.coordinator import Coordinator
from fencepost.stores.memory import MemoryStore
from tests.postgres.bouncer import bouncing, pgbouncer


class World(Protocol):
    name: str

    async def client(self, *, epoch: int | None = None, kernel: Kernel | None = None) -> Client:
        """Another client on the same store, with a coordinator of its own."""

    async def advance(self, seconds: float) -> None:
        """Move the store's clock on."""

    async def close(self) -> None: ...


class MemoryWorld:
    def __init__(self, optimistic: bool) -> None:
        self.name = "memory, losing swaps" if optimistic else "memory"
        self.store = MemoryStore(optimistic=optimistic)
        self._clients: list[Client] = []

    async def client(self, *, epoch: int | None = None, kernel: Kernel | None = None) -> Client:
        async def reopen() -> Any:
            return Coordinator(self.store, kernel=kernel)

        client = Client(await reopen(), url=self.store.url, reopen=reopen, epochs={}, given=epoch)
        await client.epoch()
        self._clients.append(client)
        return client

    async def advance(self, seconds: float) -> None:
        self.store.advance(seconds)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class SQLiteWorld:
    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "conformance.db"
        self.url = f"sqlite:///{self.path}"
        self._clients: list[Client] = []

    async def client(self, *, epoch: int | None = None, kernel: Kernel | None = None) -> Client:
        client = await connect(self.url, epoch=epoch)
        if kernel is not None:
            client.backend.kernel = kernel  # type: ignore[attr-defined]
        self._clients.append(client)
        return client

    async def advance(self, seconds: float) -> None:
        # The store's clock never goes below the highest time that it has stored.
        import apsw

        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(10_000)
        store = self._clients[-1].backend.store  # type: ignore[attr-defined]
        now = await store.clock()
        connection.execute("UPDATE clock SET at = max(at, ?)", (now + round(seconds * 1_000_000),))
        connection.close()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class PostgresWorld:
    """A database of the run's server with the schema and nothing in it, which tests like this one had before."""

    name = "postgres"
    roles = False

    def __init__(self, folder: Path) -> None:
        from tests.postgres.databases import running_or_skip

        self._server = running_or_skip()
        self._database: str | None = None
        self._clients: list[Client] = []

    def _url(self, database: str) -> str:
        return self._server.url(database)

    async def client(self, *, epoch: int | None = None, kernel: Kernel | None = None) -> Client:
        from fencepost.stores.postgres import PostgresStore
        from tests.postgres.databases import MOVABLE_CLOCK, borrow

        if self._database is None:
            self._database = await borrow(self._server, self.roles)
        url = self._url(self._database)

        async def reopen() -> Any:
            return Coordinator(await PostgresStore.open(url, create=False, clock=MOVABLE_CLOCK), kernel=kernel)

        backend = await reopen()
        client = Client(backend, url=url, reopen=reopen, epochs={}, given=epoch)
        self._dress(backend, client)
        await client.epoch()
        self._clients.append(client)
        return client

    def _dress(self, backend: Coordinator, client: Client) -> None:
        """For worlds whose clients differ from others in something."""

    async def advance(self, seconds: float) -> None:
        from tests.postgres.databases import advance

        assert self._database is not None
        await advance(self._server, self._database, seconds)
        for client in self._clients:  # which carry the clock on by themselves between two answers
            client.backend.store.forget()  # type: ignore[attr-defined]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._database is not None:
            from tests.postgres.databases import give_back

            await give_back(self._server, self._database, self.roles)


class PgbouncerWorld(PostgresWorld):
    """The same through a pooler in transaction mode, which has three connections for all."""

    name = "postgres, through pgbouncer"

    def _url(self, database: str) -> str:
        return bouncing().url(database)


class OperatorWorld(PostgresWorld):
    """The same, as a user who is a member of the operators' role."""

    name = "postgres, as an operator"
    roles = True

    def _url(self, database: str) -> str:
        return self._server.url(database).replace("tester@", "chief@")


class WorkerWorld(PostgresWorld):
    """As a user who is a member of the workers' role only; whatever changes a pool goes by an operator."""

    name = "postgres, as a worker"
    roles = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._chief: Coordinator | None = None

    def _url(self, database: str) -> str:
        return self._server.url(database).replace("tester@", "hand@")

    def _dress(self, backend: Coordinator, client: Client) -> None:
        ask = backend.ask

        async def by_whom(command: Any, **more: Any) -> Any:
            if not isinstance(command, PoolCommand | CreatePool):
                return await ask(command, **more)
            if self._chief is None:
                from fencepost.stores.postgres import PostgresStore
                from tests.postgres.databases import MOVABLE_CLOCK

                assert self._database is not None
                url = self._server.url(self._database).replace("tester@", "chief@")
                self._chief = Coordinator(await PostgresStore.open(url, create=False, clock=MOVABLE_CLOCK))
            return await self._chief.ask(command, **more)

        backend.ask = by_whom  # type: ignore[method-assign]

    async def close(self) -> None:
        if self._chief is not None:
            await self._chief.close()
        await super().close()


WORLDS: dict[str, Callable[[Path], World]] = {
    "memory": lambda folder: MemoryWorld(False),
    "memory-losing-swaps": lambda folder: MemoryWorld(True),
    "sqlite": SQLiteWorld,
}
_others = os.environ.get("FENCEPOST_TEST_WORLDS", "")  # your own store: name=module:World, separated by commas
for _entry in filter(None, _others.split(",")):
    _name, _, _place = _entry.partition("=")
    _module, _, _class = _place.partition(":")
    WORLDS[_name] = getattr(importlib.import_module(_module), _class)
if os.environ.get("FENCEPOST_TEST_POSTGRES"):  # `make test` says so where there is a real server to start
    WORLDS["postgres"] = PostgresWorld
    WORLDS["postgres-worker"] = WorkerWorld
    WORLDS["postgres-operator"] = OperatorWorld
    if pgbouncer() is not None:
        WORLDS["postgres-pgbouncer"] = PgbouncerWorld

__all__ = ["WORLDS", "World"]
