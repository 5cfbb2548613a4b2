"""A pool is cut off in mid-work, with 21 effects in doubt: the reconciler drains what it may, and lists the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.client import Client
from fencepost.effects.base import Call, Deadline, Happened
from fencepost.effects.config import Downstreams
from fencepost.wire import Claim, Done, EffectView, NewTask, PoolChanged, PoolView, Prepared
from tests.cases.cli import answered
from tests.effects.processes import HttpServer, http_server
from tests.faults.stage import Stage, on_every_store, until

POOL = "cut"
# How far each sender came, and what its effect is to be then; None: it waits for a repeat.
STORIES: list[tuple[str, str, str | None]] = [
    *[("keyed", "acted", "COMMITTED")] * 4,
    *[("keyed", "prepared", "ABSENT")] * 3,
    *[("rooms", "confirmed", "COMMITTED")] * 3,
    *[("rooms", "reserved", "ABSENT")] * 2,  # stored and never confirmed: cancelled, for good
    *[("rooms", "prepared", "ABSENT")] * 2,
    *[("docs", "acted, then another", "COMMITTED")] * 3,
    *[("docs", "another", "ABSENT")] * 3,
    ("docs", "prepared", None),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    with http_server(tmp_path) as running:
        yield running


def tables(url: str) -> dict[str, dict[str, Any]]:
    common = {"type": "http", "send_window": 0.3, "settle_time": 0.2}
    return {
        "keyed": {
            **common,
            "guarantee": "IDEMPOTENT",
            "retention": 3600.0,
            "url": f"{url}/mail",
            "query": f"{url}/mail/by-key/{{key}}",
        },
        "rooms": {
            **common,
            "guarantee": "RESERVATION",
            "url": f"{url}/rooms",
            "confirm": f"{url}/rooms/{{reservation}}/confirm",
            "cancel": f"{url}/rooms/{{reservation}}/cancel",
            "query": f"{url}/rooms/{{reservation}}",
        },
        "docs": {
            **common,
            "guarantee": "CONDITIONAL",
            "method": "PUT",
            "url": f"{url}/docs/{{name}}",
            "history": f"{url}/docs/{{name}}/history",
        },
    }


def configuration(url: str) -> str:
    return "\n".join(
        f"[downstreams.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables(url).items()
    )


async def abandoned(client: Client, using: Any, claim: Claim, story: str, server: HttpServer) -> None:
    """Send as far as the story goes, and never settle."""
    payload = {"name": claim.task_id}
    docs = using.declaration.guarantee == "CONDITIONAL"
    precondition = await using.precondition(payload) if docs else None
    prepared = await client.prepare(claim, "send", payload, using.declaration.terms, precondition=precondition)
    assert isinstance(prepared, Prepared) and prepared.outcome == "EXECUTE", prepared
    call = Call(
        effect_id=prepared.effect_id, task_id=claim.task_id, slot="send", execution=1, epoch=claim.epoch,
        generation=claim.generation, payload=payload, precondition=precondition, send_by=Deadline.within(10.0),
    )  # fmt: skip
    if story.startswith("acted"):
        assert isinstance(await using.execute(call), Happened)
    if story.endswith("another"):
        await asyncio.to_thread(server.control, third=claim.task_id)
    if story in ("reserved", "confirmed"):
        reserved = await using.reserve(call)
        assert isinstance(await client.reserve(claim, call.effect_id, 1, reserved), Done)
        if story == "confirmed":
            assert isinstance(await using.confirm(replace(call, reservation_id=reserved)), Happened)


async def states(client: Client) -> dict[str, EffectView]:
    return {view.task_id: view for view in (await client.effects(pool=POOL)).items}


@on_every_store
async def test_twenty_unknown_effects_of_a_cut_pool_drain_with_its_intake_closed_and_one_is_listed_for_a_repeat(
    stage: Stage, server: HttpServer, tmp_path: Path
) -> None:
    client = await stage.client()
    assert isinstance(await client.create_pool(POOL), PoolChanged)
    tasks = {f"t{n:02}": story for n, story in enumerate(STORIES)}
    await client.submit_many([NewTask(1, task_id=task, pool=POOL) for task in tasks])
    claims = await client.claim_next(owner="A", pool=POOL, ttl=60.0, limit=len(tasks))
    assert isinstance(claims, list) and len(claims) == len(tasks)
    downstreams = Downstreams(tables(server.url))
    for claim in claims:
        name, story, _ = tasks[claim.task_id]
        await abandoned(client, downstreams[name], claim, story, server)
    await downstreams.close()
    await cut(client)
    client.start_maintenance(0.2)
    await until(lambda: everything_is_unknown(client))
    sent, requests = server.executed, len(server.world()["requests"])

    (tmp_path / "fencepost.toml").write_text(configuration(server.url))

    async def reconciled() -> Any:
        done = await asyncio.to_thread(
            answered, tmp_path, "effects", "reconcile", POOL, FENCEPOST_STORE=stage.url, NO_COLOR="1"
        )
        return done["items"] if all(one["needs"] != "time" for one in done["items"]) else None

    left: list[Any] = await until(reconciled)  # "not found" counts only once nothing can be under way
    found = await states(client)
    assert {task: view.state for task, view in found.items()} == {
        task: "UNKNOWN" if becomes is None else becomes for task, (_, _, becomes) in tasks.items()
    }
    # The one that still stands at its precondition: listed, each time anew.
    [standing] = [task for task, (_, _, becomes) in tasks.items() if becomes is None]
    still = [(one["effect"]["task_id"], one["became"], one["needs"]) for one in left if one["became"] == "UNKNOWN"]
    assert still == [(standing, "UNKNOWN", "repeat")]
    assert "REPEAT" in found[standing].open
    # Nothing was executed, repeated or confirmed for that: only the two reservations were cancelled.
    assert server.executed == sent
    acting = [each["line"].split()[1] for each in server.world()["requests"][requests:]]
    assert len(acting) == 2 and all(path.endswith("/cancel") for path in acting), acting
    pool = await client.pool(POOL)
    assert isinstance(pool, PoolView) and pool.intake == "CLOSED"
    await stage.audit()


async def cut(client: Client) -> None:
    """Nothing of the old epoch is accepted any more, and nothing new is claimed."""
    pool = await client.pool(POOL)
    assert isinstance(pool, PoolView)
    closed = await client.close_intake(POOL)
    assert isinstance(closed, PoolChanged), closed
    pool = await client.pool(POOL)
    assert isinstance(pool, PoolView)
    raised = await client.raise_epoch(POOL, expected_epoch=pool.epoch, expected_state_version=pool.state_version)
    assert isinstance(raised, PoolChanged), raised
    await client.adopt_epoch(POOL, pool.epoch + 1)


async def everything_is_unknown(client: Client) -> bool:
    """The sweep ends the attempts of the old epoch, and what they had prepared is UNKNOWN from then on."""
    return {view.state for view in (await states(client)).values()} == {"UNKNOWN"}
