"""A store in which something of everything happened, through the doors; what audit and the readers are shown."""

from __future__ import annotations

import asyncio
from typing import Any

from fencepost.client.client import Client
from fencepost.kernel.kernel import Kernel
from fencepost.service.coordinator import Coordinator
from fencepost.stores.base import Store
from fencepost.wire import Claim, NewTask, Outcome
from tests.service.effect_lives import live_with_effects


async def client_of(store: Store, kernel: Kernel | None = None) -> Client:
    """A client whose coordinator runs `kernel` on `store`."""
    backend = Coordinator(store, kernel=kernel)

    async def reopen() -> Any:
        return backend

    return Client(backend, url=store.url, reopen=reopen, epochs={})


async def claim(client: Client, task_id: str, ttl: float = 30.0, owner: str = "ann") -> Claim:
    view = await client.task(task_id)
    found = await client.claim(task_id, expected_state_version=view.state_version, owner=owner, ttl=ttl)
    assert isinstance(found, Claim), found
    return found


async def expire(client: Client, task_id: str) -> None:
    """Have the expiry loop's door take the task back, as soon as its lease has run out."""
    async with asyncio.timeout(10):
        while (await client.expire(task_id)).outcome is Outcome.HELD:
            await asyncio.sleep(0)


async def raise_epoch(client: Client) -> None:
    pool = await client.pool()
    await client.raise_epoch(expected_epoch=pool.epoch, expected_state_version=pool.state_version)
    await client.adopt_epoch()


async def live(client: Client, *, effects: bool = False) -> list[str]:
    """Pass every door (with `effects`, theirs too), by way of every kind of end. The attempt ids that were granted."""
    keys: list[str] = []

    async def take(task_id: str, ttl: float = 30.0, owner: str = "ann") -> Claim:
        found = await claim(client, task_id, ttl, owner)
        keys.append(found.attempt_id)
        return found

    names = ["lost", "failed", "released", "revised", "taken", "cancelled", "final", "mother", "father"]
    await client.submit_many([NewTask({"n": name}, task_id=name) for name in names])
    await client.submit_many(
        [
            NewTask("of both", task_id="child", depends_on=["mother", "father"]),
            NewTask("waits", task_id="orphaned", depends_on=["final"]),
            NewTask("falls too", task_id="fallen", depends_on=["cancelled"], on_failure="cancel"),
        ]
    )
    # One is late: somebody else commits, the first one's writes are refused and kept aside.
    late = await take("lost", ttl=0.001)
    await client.checkpoint(late, {"page": 1})
    await expire(client, "lost")
    second = await take("lost", owner="bob")
    await client.renew(second)
    await client.checkpoint(second, {"page": 2})
    await client.stage(second, {"r": "rival"})
    digest = await client.stage(second, {"r": "right"})
    await client.commit(second, result_digest=digest, usage={"tokens": 7})
    await client.stage(late, {"r": "late"})
    await client.renew(late)
    await client.commit(late, {"r": "late"})
    await client.usage(late, tokens=4)
    # Every other end.
    await client.fail(await take("failed"), "the model answered nonsense", usage={"tokens": 5})
    await client.release(await take("released"))
    revised = await take("revised")
    await client.stage(revised, {"r": "of the old input"})
    await client.revise("revised", {"n": "new"}, who="eve")
    await client.renew(revised)
    await take("taken")
    await client.take_over("taken", who="eve")
    gone = await take("cancelled")
    await client.cancel("cancelled", who="eve")
    await client.commit(gone, 1)
    await client.reopen("cancelled", who="eve")
    await client.fail(await take("final"), "cannot be done", retry=False)
    # A graph, and tasks spawned by a commit.
    mother = await take("mother")
    await client.commit(mother, "m", spawn=[NewTask("spawned", task_id="spawned", depends_on=["mother"])])
    await client.commit(await take("father"), b"raw bytes", spawn=[NewTask(1, task_id="later", depends_on=["child"])])
    child = await take("child")
    held = await client.claim("child", expected_state_version=(await client.task("child")).state_version, owner="bob")
    assert held.outcome is Outcome.HELD
    await client.stage(child, "thrown away")
    await client.discard("child", generation=1, who="eve")
    await client.commit(child, {"c": 1.5})
    if effects:
        await live_with_effects(client, take)
    # A claim that outlives its epoch, and one that takes it over.
    old = await take("spawned")
    await client.close_intake()
    await client.open_intake(expected_state_version=(await client.pool()).state_version)
    await raise_epoch(client)
    await client.renew(old)
    new = await take("spawned", owner="bob")
    await client.commit(new, "s")
    await client.set_policy(retention=86400.0)
    await client.create_pool("other")
    await take("taken")
    return keys
