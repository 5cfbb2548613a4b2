"""A port that answers from a script and remembers what it was asked, and a downstream that does the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fencepost.effects.base import Call, Declaration, Guarantee

NOW = 1_700_000_000_000_000


@dataclass(frozen=True)
class Answer:
    """What a prepare answers."""

    outcome: str
    effect_id: str = "e" * 64
    state: str = "PREPARED"
    execution: int = 1
    send_by_us: int | None = NOW + 10_000_000
    now_us: int = NOW
    open: tuple[str, ...] = ()
    payload: Any = None
    downstream: str = "mail"
    guarantee: str = "IDEMPOTENT"
    receipt: Any = None
    precondition: str | None = None
    reservation_id: str | None = None
    busy: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Said:
    """What any other door answers."""

    outcome: str
    info: dict[str, Any] = field(default_factory=dict)
    current: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


def settled(state: str) -> Said:
    return Said("SETTLED", {"state": state})


class GivenBack(BaseException):
    pass


class ScriptedPort:
    """Each line of the script is the door that must be asked next, and its answer, or an exception to raise."""

    task_id, generation, epoch = "task", 3, 7

    def __init__(self, *script: tuple[str, Any]) -> None:
        self.script = list(script)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.lease: Callable[[], float] = lambda: 60.0
        self.hold: asyncio.Event | None = None  # the settle waits for it

    def trusted(self) -> float:
        return self.lease()

    def _next(self, door: str, **arguments: Any) -> Any:
        self.asked.append((door, arguments))
        assert self.script, f"{door} was asked, and nothing more was expected: {arguments}"
        expected, answer = self.script.pop(0)
        assert door == expected, f"{door} was asked, {expected} was expected: {arguments}"
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def of(self, door: str) -> list[dict[str, Any]]:
        return [arguments for asked, arguments in self.asked if asked == door]

    @property
    def doors(self) -> list[str]:
        return [door for door, _ in self.asked]

    async def prepare(self, slot: str, payload: Any, terms: Any, **arguments: Any) -> Any:
        return self._next("prepare", slot=slot, payload=payload, terms=terms, **arguments)

    async def reserve(self, effect_id: str, execution: int, reservation_id: str, **arguments: Any) -> Any:
        return self._next("reserve", execution=execution, reservation_id=reservation_id, **arguments)

    async def settle(self, effect_id: str, execution: int, finding: str, **arguments: Any) -> Any:
        if self.hold is not None:
            await self.hold.wait()
        return self._next("settle", execution=execution, finding=finding, **arguments)

    async def reconcile(self, effect_id: str, execution: int, finding: str, **arguments: Any) -> Any:
        return self._next("reconcile", execution=execution, finding=finding, **arguments)

    async def defer(self, slot: str, payload: Any, downstream: str, **arguments: Any) -> Any:
        return self._next("defer", slot=slot, payload=payload, downstream=downstream, **arguments)

    async def give_back(self, why: str, effect_id: str) -> Any:
        self.asked.append(("give_back", {"why": why, "effect_id": effect_id}))
        raise GivenBack(why)


Deed = Callable[[Call], Awaitable[Any]]


class Scripted:
    """A downstream whose every method takes the next thing from its list: a finding, an exception, or a coroutine."""

    def __init__(self, guarantee: Guarantee = Guarantee.IDEMPOTENT, **lists: list[Any]) -> None:
        retention = 3600.0 if guarantee == Guarantee.IDEMPOTENT else None
        self.declaration = Declaration(name="mail", guarantee=guarantee, retention=retention)
        self.lists = lists
        self.calls: list[tuple[str, Call]] = []

    async def _next(self, method: str, call: Any) -> Any:
        self.calls.append((method, call))
        found = self.lists[method].pop(0)
        if isinstance(found, BaseException):
            raise found
        return await found(call) if callable(found) else found

    def of(self, method: str) -> list[Call]:
        return [call for called, call in self.calls if called == method]

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    async def execute(self, call: Call) -> Any:
        return await self._next("execute", call)


class Asked(Scripted):
    async def query(self, call: Call) -> Any:
        return await self._next("query", call)


class Versioned(Asked):
    def __init__(self, **lists: list[Any]) -> None:
        super().__init__(Guarantee.CONDITIONAL, **lists)

    async def precondition(self, payload: Any) -> Any:
        return await self._next("precondition", payload)


class Reserving(Asked):
    def __init__(self, **lists: list[Any]) -> None:
        super().__init__(Guarantee.RESERVATION, **lists)

    async def reserve(self, call: Call) -> Any:
        return await self._next("reserve", call)

    async def confirm(self, call: Call) -> Any:
        return await self._next("confirm", call)

    async def cancel(self, call: Call) -> Any:
        return await self._next("cancel", call)
