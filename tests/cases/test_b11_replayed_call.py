"""B11: a client or a gateway replays a call after its transport dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fencepost import InvalidRequest
from fencepost.effects.base import Declaration, Guarantee
from fencepost.effects.config import Downstreams
from fencepost.effects.failures import EffectUnknown, PayloadConflict, PersonRequired
from fencepost.effects.http import Http
from tests.cases.sending import Job, job
from tests.effects.processes import HttpServer, http_server

__all__ = ["job"]

WINDOWS: dict[str, Any] = {"send_window": 5.0, "settle_time": 0.0}
# How the transport dies after the call was executed, and how long the caller waits for its answer.
DEATHS = {"reset": ({"drop": True}, 10.0), "half an answer": ({"cut": True}, 10.0), "client's time-out": (None, 0.3)}
PATIENTLY = {"patience": 10.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with http_server(tmp_path_factory.mktemp("tools")) as running:
        yield running


def undeclared(server: HttpServer, name: str = "get_or_create") -> Http:
    """Its name and its method guess at being harmless; nobody declared it."""
    return Http(Declaration(name=name, **WINDOWS), f"{server.url}/plain")


def idempotent(server: HttpServer) -> Http:
    declaration = Declaration(name="order", guarantee=Guarantee.IDEMPOTENT, retention=3600.0, **WINDOWS)
    return Http(declaration, f"{server.url}/mail")


def reading(server: HttpServer) -> Http:
    declaration = Declaration(name="search", guarantee=Guarantee.READ_ONLY, **WINDOWS)
    return Http(declaration, f"{server.url}/plain", method="GET")


def executed(server: HttpServer, effect: Any) -> list[Any]:
    return [one for one in server.executed if one["effect"] == effect.effect_id]


def requests(server: HttpServer, effect: Any) -> list[Any]:
    return [one for one in server.world()["requests"] if one["headers"].get("Fencepost-Effect") == effect.effect_id]


@pytest.mark.parametrize("death", DEATHS)
async def test_b11_a_call_that_nobody_declared_is_unknown_and_no_retry_reaches_the_tool(
    job: Job, server: HttpServer, death: str
) -> None:
    fault, timeout = DEATHS[death]
    payload = {"order": death, "of": job.world.name}
    a = await job.claim()
    server.faults(fault or {"hold": 1.0})
    with pytest.raises(EffectUnknown, match="outcome unknown, do not do it another way") as said:
        await job.send(a, payload, undeclared(server), timeout=timeout)
    assert said.value.code == "UNKNOWN", "an agent must be able to tell it from a failure"
    for retry in range(2):  # the client's own, with the same arguments
        with pytest.raises(PersonRequired, match="only a person can say what became of it"):
            await job.send(a, payload, undeclared(server), **PATIENTLY if retry else {})
    b = await job.next(a)  # and a successor's
    with pytest.raises(PersonRequired) as later:
        await job.send(b, payload, undeclared(server))
    effect = await job.effect()
    assert said.value.effect_id == later.value.effect_id == effect.effect_id
    assert (effect.state, effect.open) == ("UNKNOWN", ("PERSON",))
    assert len(requests(server, effect)) == len(executed(server, effect)) == 1
    await job.audit()


@pytest.mark.parametrize("death", DEATHS)
async def test_b11_a_call_declared_idempotent_is_replayed_under_its_key_and_acts_once(
    job: Job, server: HttpServer, death: str
) -> None:
    fault, timeout = DEATHS[death]
    payload = {"order": death, "of": job.world.name}
    a = await job.claim()
    server.faults(fault or {"hold": 1.0})
    with pytest.raises(EffectUnknown, match="outcome unknown, do not do it another way"):
        await job.send(a, payload, idempotent(server), timeout=timeout)
    b = await job.next(a)
    receipt = await job.send(b, payload, idempotent(server), **PATIENTLY)
    effect = await job.effect()
    assert (effect.state, effect.receipt) == ("COMMITTED", receipt)
    assert len(executed(server, effect)) == 1
    calls = requests(server, effect)
    assert {call["headers"]["Idempotency-Key"] for call in calls} == {f'"{effect.effect_id}"'}
    assert [call["headers"]["Fencepost-Generation"] for call in calls] == [str(a.generation), str(b.generation)]
    await job.audit()


async def test_b11_what_only_reads_is_simply_asked_again(job: Job, server: HttpServer) -> None:
    claim = await job.claim()
    server.faults({"drop": True})
    assert await job.send(claim, {"q": 1}, reading(server), **PATIENTLY)
    effect = await job.effect()
    assert (effect.state, len(executed(server, effect))) == ("COMMITTED", 2)
    await job.audit()


async def test_b11_a_bound_guarantee_is_not_talked_down_by_another_declaration(job: Job, server: HttpServer) -> None:
    """Annotations lost on one transport, or hints that contradict: what it was bound as counts, for good."""
    a = await job.claim()
    server.faults({"drop": True})
    with pytest.raises(EffectUnknown):
        await job.send(a, {"of": job.world.name}, undeclared(server, "order"))
    b = await job.next(a)
    with pytest.raises(PersonRequired):
        await job.send(b, {"of": job.world.name}, idempotent(server), **PATIENTLY)
    with pytest.raises(PayloadConflict):  # another tool in the same slot
        await job.send(b, {"of": job.world.name}, reading(server))
    effect = await job.effect()
    assert (effect.guarantee, len(requests(server, effect))) == ("NON_REPLAYABLE", 1)
    await job.audit()


CONTRADICTORY: dict[str, dict[str, Any]] = {
    "reads, and deletes": {"guarantee": "READ_ONLY", "method": "DELETE"},
    "idempotent, and anybody may repeat it": {"guarantee": "IDEMPOTENT", "retention": 3600, "method": "GET"},
    "idempotent, and it forgets at once": {"guarantee": "IDEMPOTENT", "retention": 1},
    "idempotent, for nobody knows how long": {"guarantee": "IDEMPOTENT"},
    "a retention without keys": {"retention": 3600},
    "a hint that there is not": {"guarantee": "idempotentHint"},
}


@pytest.mark.parametrize("hints", CONTRADICTORY)
def test_b11_contradictory_declarations_are_refused_and_missing_ones_are_not_replayable(hints: str) -> None:
    table = {"type": "http", "url": "https://example.org/call"}
    with pytest.raises(InvalidRequest):
        Downstreams({"tool": table | CONTRADICTORY[hints]})["tool"]
    made = Downstreams({"tool": table})["tool"]
    assert made.declaration.guarantee == Guarantee.NON_REPLAYABLE
