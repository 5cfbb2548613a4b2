"""Busy clients that meet a raised epoch: `python -m tests.faults.programs.busy URL HOW_MANY SEED`.

Each client (a connection of its own) claims, renews, checkpoints, releases and commits as fast as it can, until it is
told FENCED/EPOCH. When all are, the process says so with what was accepted in that epoch, and waits for `adopt`. One
more client, the veteran, never adopts: after every raise it tries every door, with a claim of its own.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import fencepost
from fencepost.client.client import Client
from fencepost.wire import Claim, NewTask, Refused
from tests.faults.programs.speech import die_with_parent, listen, say


async def busy(client: Client, owner: str, dice: random.Random, accepted: list[int]) -> Claim | None:
    """Returns once it is told that its epoch is over, with the claim that it held at that moment."""
    while True:
        found = await client.claim_next(owner=owner, ttl=30.0)
        if isinstance(found, Refused):
            expect_epoch(found)
            return None
        for claim in found:
            accepted[0] += 1
            steps = ["renew", "checkpoint", dice.choice(["release", "commit", "fail"])]
            for step in steps:
                answer = await one(client, step, claim)
                if isinstance(answer, Refused):
                    expect_epoch(answer)
                    return claim
                accepted[0] += 1


async def one(client: Client, door: str, claim: Claim) -> Any:
    if door == "renew":
        return await client.renew(claim)
    if door == "checkpoint":
        return await client.checkpoint(claim, {"by": claim.owner_id})
    if door == "release":
        return await client.release(claim)
    if door == "fail":
        return await client.fail(claim, "on purpose", retry=True)
    # The queue never runs dry: each commit brings the next task.
    return await client.commit(claim, {"by": claim.owner_id}, spawn=[NewTask({"of": claim.task_id}, max_attempts=999)])


def expect_epoch(answer: Refused) -> None:
    assert (answer.outcome, answer.reason) == ("FENCED", "EPOCH"), answer


async def stay_refused(veteran: Client, claim: Claim) -> list[str]:
    """Every door of a client that connected before the raise: those that were not refused by the epoch."""
    view = await veteran.task(claim.task_id)
    assert not isinstance(view, Refused)
    pool = await veteran.pool()
    assert not isinstance(pool, Refused)
    version = view.state_version
    calls = {
        "claim": veteran.claim(claim.task_id, expected_state_version=version, owner="veteran"),
        "claim_next": veteran.claim_next(owner="veteran"),
        "renew": veteran.renew(claim),
        "checkpoint": veteran.checkpoint(claim, "late", number=9),
        "commit": veteran.commit(claim, "late"),
        "release": veteran.release(claim),
        "fail": veteran.fail(claim, "late"),
        "reopen": veteran.reopen(claim.task_id, expected_state_version=version),
        "revise": veteran.revise(claim.task_id, {"late": True}, expected_revision=claim.revision),
        "take_over": veteran.take_over(claim.task_id, expected_generation=claim.generation),
        "discard": veteran.discard(claim.task_id, generation=claim.generation),
        "close_intake": veteran.close_intake(expected_state_version=pool.state_version),
        "open_intake": veteran.open_intake(expected_state_version=pool.state_version),
        "set_policy": veteran.set_policy(max_attempts=9),
    }
    through = []
    for door, call in calls.items():
        answer = await call
        if not (isinstance(answer, Refused) and (answer.outcome, answer.reason) == ("FENCED", "EPOCH")):
            through.append(f"{door}: {answer}")
    return through


async def main(url: str, how_many: str, seed: str) -> None:
    loop = asyncio.get_running_loop()
    adopt = asyncio.Event()
    listen(lambda order: loop.call_soon_threadsafe(adopt.set))
    dice = random.Random(int(seed))
    clients = [await fencepost.connect(url) for _ in range(int(how_many))]
    veteran = await fencepost.connect(url)
    found = await veteran.claim_next(owner="veteran", queues=["veterans"], ttl=3600.0)
    assert not isinstance(found, Refused)
    owners = [f"{seed}-{n}" for n in range(len(clients))]
    say("connected")
    while True:
        accepted = [0]
        round_ = [
            asyncio.create_task(busy(client, owner, dice, accepted))
            for client, owner in zip(clients, owners, strict=True)
        ]
        # Said once everybody is at work, so that the next raise comes in the middle of it.
        while accepted[0] < 2 * len(clients) and not all(task.done() for task in round_):
            await asyncio.sleep(0.001)
        say("at work", accepted=accepted[0])
        held = await asyncio.gather(*round_)
        say("refused", accepted=accepted[0], through=await stay_refused(veteran, found[0]))
        await adopt.wait()
        adopt.clear()
        epochs = [await client.adopt_epoch() for client in clients]
        # What the old epoch granted is over, whatever number is presented now.
        late = [await client.commit(claim, "late") for client, claim in zip(clients, held, strict=True) if claim]
        through = [str(answer) for answer in late if not (isinstance(answer, Refused) and answer.outcome == "FENCED")]
        say("adopted", epochs=sorted(set(epochs)), held=len(late), through=through)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
