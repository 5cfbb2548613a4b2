"""What the cases about effects share: a task on every store, attempts in a row, and a tool that counts its calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fencepost import Claim, NewTask
from fencepost.client.client import Client
from fencepost.client.effect_port import AttemptPort
from fencepost.effects.base import Call, Declaration, Guarantee, Happened, Outcome
from fencepost.effects.performing import perform
from tests.conformance.worlds import WORLDS, World

PATIENCE = 20.0
STORES = [name for name in ("memory", "sqlite", "postgres") if name in WORLDS]


class Tool:
    """A service that keeps every call that reached it; `lose` answers are lost after it has acted.

    Undeclared, and so NON_REPLAYABLE, unless told otherwise. It cannot be asked.
    """

    def __init__(self, name: str = "tool", *, lose: int = 0, **declared: Any) -> None:
        self.declaration = Declaration(name=name, **{"send_window": 5.0, "settle_time": 0.0, **declared})
        self.calls: list[Call] = []
        self.lose = lose

    async def execute(self, call: Call) -> Outcome:
        self.calls.append(call)
        if self.lose:
            self.lose -= 1
            raise ConnectionResetError("the transport dropped")
        return Happened({"call": len(self.calls)})


def keyed(name: str = "keyed", **more: Any) -> Tool:
    """Declared to answer from its idempotency keys. That this one does not is what shows a second call."""
    return Tool(name, guarantee=Guarantee.IDEMPOTENT, retention=3600.0, **more)


class Job:
    """One task, and who works on it.

    Its id is new each time: emptied databases are used again, and servers shared, and the same slot of the same task in
    the same store would be the same effect there.
    """

    def __init__(self, world: World, client: Client) -> None:
        self.task_id = f"t-{uuid.uuid4()}"
        self.world = world
        self.client = client

    async def claim(self, owner: str = "A") -> Claim:
        [claim] = await self.client.claim_next(owner=owner)  # type: ignore[misc]
        return claim  # type: ignore[no-any-return]

    async def next(self, before: Claim, owner: str = "B") -> Claim:
        """The lease of `before` runs out, and `owner` claims the task."""
        await self.world.advance(before.ttl + 1)
        return await self.claim(owner)

    async def send(self, claim: Claim, payload: Any, using: Any, slot: str = "send", **how: Any) -> Any:
        """What `attempt.effect` does, without an attempt's renewals."""
        how = {"on_approval": "raise", "patience": 0.0, **how}
        port = AttemptPort(self.client, claim, lambda: PATIENCE)
        return await asyncio.wait_for(perform(port, using, slot, payload, **how), 2 * PATIENCE)

    async def effect(self, slot: str = "send") -> Any:
        [view] = [one for one in (await self.client.effects(task_id=self.task_id)).items if one.slot == slot]
        return view

    async def audit(self) -> None:
        report = await self.client.report("audit")
        assert report.clean, report.violations


@pytest.fixture(params=STORES)
async def job(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Job]:
    world = WORLDS[request.param](tmp_path)
    client = await world.client()
    made = Job(world, client)
    await client.submit(NewTask({"n": 1}, task_id=made.task_id, max_attempts=10))
    yield made
    await world.close()
