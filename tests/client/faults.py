"""A memory client whose backends lose answers, hang and wait on purpose, and small tools for worker tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fencepost.app import App
from fencepost.client.worker import Worker
from fencepost.errors import Unavailable
from fencepost.service.coordinator import Coordinator
from fencepost.stores.memory import MemoryStore
from fencepost.testing import MemoryClient
from fencepost.wire import Refused

BOUND = 15.0

# What a fault makes of one call: `act` asks the real backend.
Fault = Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class FaultyBackend:
    """A `Backend` before a real one, whose next answers to commands of one type are up to the test."""

    def __init__(self, backend: Coordinator, faults: Faults) -> None:
        self._backend = backend
        self._faults = faults

    async def ask(self, command: Any) -> Any:
        return await self._faults.meet(command, lambda: self._backend.ask(command))

    async def ask_many(self, commands: Any) -> list[Any]:
        return await asyncio.gather(*(self.ask(command) for command in commands), return_exceptions=True)

    async def claim_next(self, command: Any, wait: float = 0.0, *, fresh: bool = False) -> Any:
        return await self._faults.meet(command, lambda: self._backend.claim_next(command, wait, fresh=fresh))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Faults:
    """Faults by command type, used up in order; and every command that was asked, with its type."""

    def __init__(self) -> None:
        self.waiting: dict[type, list[Fault]] = {}
        self.always: dict[type, Fault] = {}
        self.asked: list[Any] = []

    def add(self, command: type, *faults: Fault) -> None:
        self.waiting.setdefault(command, []).extend(faults)

    async def meet(self, command: Any, act: Callable[[], Awaitable[Any]]) -> Any:
        self.asked.append(command)
        waiting = self.waiting.get(type(command))
        if waiting:
            return await waiting.pop(0)(command, act)
        if type(command) in self.always:
            return await self.always[type(command)](command, act)
        return await act()

    def request_ids(self, command: type) -> list[str]:
        return [each.request_id for each in self.asked if type(each) is command]


async def lost_answer(command: Any, act: Callable[[], Awaitable[Any]]) -> Any:
    """The store does it, and nobody hears of it."""
    await act()
    raise Unavailable("the answer was lost")


async def never_arrived(command: Any, act: Callable[[], Awaitable[Any]]) -> Any:
    raise Unavailable("the store could not be asked")


async def hangs(command: Any, act: Callable[[], Awaitable[Any]]) -> Any:
    await asyncio.Event().wait()


async def acts_then_hangs(command: Any, act: Callable[[], Awaitable[Any]]) -> Any:
    await act()
    await asyncio.Event().wait()


def faulty_client(faults: Faults, renewal_faults: Faults | None = None) -> MemoryClient:
    """A client with `faults`; the clone that its renewal thread uses has `renewal_faults`."""
    store = MemoryStore()

    async def reopen() -> Any:
        return FaultyBackend(Coordinator(store), renewal_faults if renewal_faults is not None else Faults())

    backend: Any = FaultyBackend(Coordinator(store), faults)
    return MemoryClient(store, backend, reopen=reopen)


class Working:
    """`async with Working(worker):` the worker runs beside the test; leaving stops it and takes its exit code."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.code: int | None = None

    async def __aenter__(self) -> Working:
        self.task = asyncio.ensure_future(self.worker.run())
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=BOUND)
            return
        self.worker.stop()
        self.code = await asyncio.wait_for(self.task, BOUND)


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Ask until it is so; for states of the store that no event announces."""
    async with asyncio.timeout(BOUND):
        while True:
            found = await condition()
            if found:
                return found
            await asyncio.sleep(0.01)
    raise AssertionError(what)


async def state_of(client: Any, task_id: str) -> str:
    view = await client.task(task_id)
    assert not isinstance(view, Refused), view
    return view.state


async def ends_of(client: Any, task_id: str) -> list[str | None]:
    return [attempt.end for attempt in await client.attempts(task_id)]


async def reported(client: Any, task_id: str) -> None:
    """Some attempt of the task has reported what it cost, the last thing that a worker does with one that lost."""

    async def look() -> bool:
        return any(attempt.usage for attempt in await client.attempts(task_id))

    await until(look, f"no attempt of {task_id} has reported its usage")


async def run(client: MemoryClient, app: App, **options: Any) -> int:
    """A worker until nothing is left to do; its exit code."""
    return await asyncio.wait_for(Worker(client, app, **options).run_until_idle(), BOUND)
