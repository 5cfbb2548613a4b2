"""The negative test of the contract, on every store and for every downstream.

A sends X, and its answer is lost. B has another text for the same slot: PAYLOAD_CONFLICT. B reconciles X and returns
its receipt, and the downstream's server counts what came of it: one effect, and no second call that acts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost.client.client import Client
from fencepost.client.effect_port import AttemptPort
from fencepost.effects.base import Guarantee, offers
from fencepost.effects.failures import EffectUnknown, PayloadConflict, PersonRequired
from fencepost.effects.performing import declared, perform
from fencepost.effects.sql import sql
from fencepost.testing import DownstreamWorld
from fencepost.wire import Claim, Committed
from tests.conformance.actions import claimed, committed, given, refusal, taken_over
from tests.conformance.worlds import WORLDS, PostgresWorld, SQLiteWorld, World
from tests.effects import worlds
from tests.effects.processes import http_server, mail_server
from tests.effects.test_suite_providers import Ec2World, EfsWorld, GitWorld, IgnoringWorld, S3World, VersionsWorld

PATIENCE = 30.0
SLOT = "send-invoice"
STORES = [name for name in ("memory", "sqlite", "postgres") if name in WORLDS]


def http_calls(world: Any) -> int:
    """Requests that may act; reservations are among them."""
    return len([one for one in world.server.world()["requests"] if not one["line"].startswith("GET")])


# The downstream's world, and how many calls that may act have reached its server until now.
DOWNSTREAMS: dict[type[DownstreamWorld], Callable[[Any], int]] = {
    worlds.KeyedWorld: http_calls,
    worlds.DocumentWorld: http_calls,
    worlds.RoomWorld: http_calls,
    worlds.PlainWorld: http_calls,
    worlds.SmtpWorld: lambda world: len(world.server.mails),
    GitWorld: lambda world: int(world._proxy.pushes),
    VersionsWorld: lambda world: int(world._proxy.requests),
    Ec2World: lambda world: len(world._server.tokens),
    S3World: lambda world: int(world._proxy.requests),
    IgnoringWorld: lambda world: int(world._proxy.requests),
    EfsWorld: lambda world: int(world._proxy.requests),
    worlds.KeyedUnaskedWorld: http_calls,
}
# Other forms of what is there already, or servers that take their time to start.
LONG = {S3World, IgnoringWorld, EfsWorld, worlds.KeyedUnaskedWorld}


@pytest.fixture(scope="module", autouse=True)
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("worlds")
    with http_server(folder) as http, mail_server(folder) as mail:
        before = worlds.HttpWorld.__dict__.get("server"), worlds.SmtpWorld.__dict__.get("server")
        worlds.HttpWorld.server, worlds.SmtpWorld.server = http, mail
        yield
        worlds.HttpWorld.server, worlds.SmtpWorld.server = before  # type: ignore[assignment]


def combinations() -> list[Any]:
    """Every store before every downstream. The long ones, and servers that would have to be started once more beside
    PostgreSQL's tests, are for `make soak`."""
    found = []
    for name in STORES:
        for kind in DOWNSTREAMS:
            long = kind in LONG or (name == "postgres" and kind in (VersionsWorld, Ec2World))
            marks = pytest.mark.soak if long else ()
            found.append(pytest.param(name, kind, marks=marks, id=f"{name}-{kind.__name__}"))
    return found


@pytest.fixture
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    made = WORLDS[request.param](tmp_path)
    yield made
    await made.close()


class Stage:
    """One task's attempts before one downstream; a new object of it for each, as another process would have."""

    def __init__(self, client: Client, world: DownstreamWorld) -> None:
        self.client = client
        self.world = world
        # Servers and emptied databases are shared: the same id in the same store would be the same effect there.
        self.task_id = f"t-{uuid.uuid4()}"
        self._opened: list[Any] = []

    async def using(self) -> Any:
        made = await self.world.downstream()
        self._opened.append(made)
        return made

    async def send(self, claim: Claim, number: int, **how: Any) -> Any:
        port = AttemptPort(self.client, claim, lambda: PATIENCE)
        how = {"on_approval": "raise", "timeout": 10.0, "patience": PATIENCE, **how}
        payload = self.world.payload(number)
        return await asyncio.wait_for(perform(port, await self.using(), SLOT, payload, **how), 2 * PATIENCE)

    async def effect(self) -> Any:
        [view] = (await self.client.effects(task_id=self.task_id)).items
        return view

    async def close(self) -> None:
        for downstream in self._opened:
            if offers(downstream, "close"):
                await downstream.close()


@pytest.mark.parametrize(("store", "kind"), combinations(), indirect=["store"])
async def test_another_text_after_a_lost_answer_is_a_conflict_and_nothing_is_sent_for_it(
    store: World, kind: type[DownstreamWorld]
) -> None:
    client, calls = await store.client(), DOWNSTREAMS[kind]
    async with kind() as world:
        stage = Stage(client, world)
        try:
            await sent_once(store, stage, lambda: calls(world))
        finally:
            await stage.close()
    report = await client.report("audit")
    assert report.clean, report.violations


async def sent_once(store: World, stage: Stage, calls: Callable[[], int]) -> None:
    client = stage.client
    guarantee = (await declared(await stage.using())).guarantee
    await given(client, stage.task_id)
    a = await claimed(client)
    await stage.world.lose_answer()
    with pytest.raises((EffectUnknown, PersonRequired)):
        await stage.send(a, 1, patience=0.0)
    bound = await stage.effect()
    assert (bound.state, await stage.world.count(bound.effect_id, bound.payload)) == ("UNKNOWN", 1)
    reached = calls()
    assert reached

    b = await taken_over(store, client, a)
    with pytest.raises(PayloadConflict) as conflict:
        await stage.send(b, 2)
    assert (conflict.value.payload, conflict.value.effect_id) == (bound.payload, bound.effect_id)
    assert calls() == reached, "something was sent for another text"

    if guarantee == Guarantee.NON_REPLAYABLE:
        with pytest.raises(PersonRequired):
            await stage.send(b, 2, on_conflict="adopt")
        view = await stage.effect()
        answer = await client.resolve(view, "HAPPENED", who="eve", evidence="it is there", receipt="seen")
        assert str(getattr(answer, "outcome", answer)) == "RESOLVED", answer
    receipt = await stage.send(b, 2, on_conflict="adopt")
    repeated = isinstance(stage.world, worlds.KeyedUnaskedWorld)  # nobody to ask: repeated, under the same key
    assert calls() == reached + repeated, "B called again"
    after = await stage.effect()
    assert (after.state, after.receipt, after.payload) == ("COMMITTED", receipt, bound.payload)
    assert len(after.executions) == 1 + repeated
    assert await stage.world.count(bound.effect_id, bound.payload) == 1

    with pytest.raises(PayloadConflict):  # nor may it be sent now that X is done
        await stage.send(b, 2)
    assert calls() == reached + repeated
    await committed(client, b, receipt)


# TRANSACTIONAL: there is no call whose answer could be lost, but there is the commit's -------------


class Ledger:
    """A table beside the store's own, in the same database."""

    def __init__(self, store: World) -> None:
        self._store = store
        self._parameter = "?" if isinstance(store, SQLiteWorld) else "$1"

    async def run(self, statement: str) -> list[Any]:
        if isinstance(self._store, SQLiteWorld):
            connection = apsw.Connection(str(self._store.path))
            try:
                return [row[0] for row in connection.execute(statement)]
            finally:
                connection.close()
        import asyncpg

        assert isinstance(self._store, PostgresWorld) and self._store._database is not None
        con = await asyncpg.connect(self._store._url(self._store._database))
        try:
            return [row[0] for row in await con.fetch(statement)]
        finally:
            await con.close()

    def entry(self, text: str) -> dict[str, Any]:
        return {"sql": f"INSERT INTO ledger (entry) VALUES ({self._parameter})", "parameters": [text]}

    async def entries(self) -> list[Any]:
        return await self.run("SELECT entry FROM ledger ORDER BY entry")


@pytest.fixture(params=[name for name in STORES if name != "memory"])
async def books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    made = WORLDS[request.param](tmp_path)
    yield made
    await made.close()


async def bring(client: Client, claim: Claim, statement: Any) -> None:
    await perform(AttemptPort(client, claim, lambda: PATIENCE), sql, SLOT, statement)


async def test_another_statement_after_a_lost_commit_is_refused_and_nothing_is_executed_twice(books: World) -> None:
    client = await books.client()
    ledger = Ledger(books)
    await ledger.run("CREATE TABLE ledger (entry text)")
    await given(client)
    a = await claimed(client)
    await bring(client, a, ledger.entry("X"))
    await client.commit(a, "done")  # the answer is lost
    again = await books.client()
    await bring(again, a, ledger.entry("Y"))
    assert refusal(await again.commit(a, "done"))[0] == "ENDED"
    repeated = await books.client()
    await bring(repeated, a, ledger.entry("X"))
    answer = await repeated.commit(a, "done")
    assert isinstance(answer, Committed)
    assert await ledger.entries() == ["X"]
    assert (await client.report("audit")).clean


async def test_a_statement_that_was_never_committed_leaves_its_slot_to_the_successors(books: World) -> None:
    """What did not happen is bound to nothing: the successor's own statement is the effect."""
    client = await books.client()
    ledger = Ledger(books)
    await ledger.run("CREATE TABLE ledger (entry text)")
    await given(client)
    a = await claimed(client)
    await bring(client, a, ledger.entry("X"))
    b = await taken_over(books, client, a)
    await bring(client, b, ledger.entry("Y"))
    await committed(client, b)
    assert refusal(await client.commit(a, "late"))[0] in ("FENCED", "ENDED")
    assert await ledger.entries() == ["Y"]
    assert (await client.report("audit")).clean
