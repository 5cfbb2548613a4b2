"""Two sides at once: whichever order the store takes them in, exactly one wins and nothing is half-done."""

from __future__ import annotations

import asyncio
from collections import Counter

from fencepost.client.client import Client
from fencepost.errors import Unavailable
from fencepost.wire import Committed, Done, NewTask, Refused, Renewed, Result, TaskView
from tests.conformance.actions import claimed, given, refusal, state_of
from tests.conformance.worlds import World

ROUNDS = 40


async def test_cancel_races_commit_and_exactly_one_of_the_two_stands(client: Client, world: World) -> None:  # B08
    other = await world.client()
    for n in range(ROUNDS):
        await given(client, f"t{n}")
        claim = await claimed(client)
        order = (
            (other.cancel(f"t{n}"), client.commit(claim, n))
            if n % 2
            else (client.commit(claim, n), other.cancel(f"t{n}"))
        )
        answers = await asyncio.gather(*order)
        kinds = Counter(type(answer).__name__ for answer in answers)
        state = await state_of(client, f"t{n}")
        if state == "COMMITTED":
            assert kinds == {"Committed": 1, "Refused": 1}
            refused = next(a for a in answers if isinstance(a, Refused))
            assert refused.outcome == "ALREADY_COMMITTED"
        else:
            assert state == "CANCELLED" and kinds == {"Done": 1, "Refused": 1}
            refused = next(a for a in answers if isinstance(a, Refused))
            assert refused.outcome == "CANCELLED"


async def test_twenty_claimers_of_one_task_and_one_winner(client: Client, world: World) -> None:  # B44
    clients = [client, *[await world.client() for _ in range(3)]]
    view = await given(client)
    answers = await asyncio.gather(
        *(clients[n % 4].claim("t", expected_state_version=view.state_version, owner=f"w{n}") for n in range(20))
    )
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert len(refused) == 19
    winner = next(answer for answer in answers if not isinstance(answer, Refused))
    for answer in refused:
        assert answer.outcome == "CONFLICT"
        assert answer.current["owner"] == winner.owner_id


async def test_who_waits_while_the_client_closes_is_told_at_once(client: Client, world: World) -> None:
    await given(client, "t", queue="elsewhere")
    waiting = [
        asyncio.ensure_future(client.claim_next(owner="A", wait=60.0)),
        asyncio.ensure_future(client.claim_next(owner="B", wait=60.0)),
        asyncio.ensure_future(client.result("t", wait=60.0)),
    ]
    await asyncio.sleep(0.05)
    await client.close()
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(answer) for answer in answers] == [Unavailable] * 3


async def test_many_workers_empty_a_queue_and_every_task_is_committed_once(client: Client, world: World) -> None:
    clients = [client, await world.client(), await world.client()]
    await client.submit_many([NewTask(n, task_id=f"t{n:03}") for n in range(120)])
    seen: Counter[str] = Counter()

    async def work(n: int) -> None:
        mine = clients[n % 3]
        while True:
            answer = await mine.claim_next(owner=f"w{n}", limit=2)
            assert not isinstance(answer, Refused)
            if not answer:
                return
            for claim in answer:
                seen[claim.task_id] += 1
                assert isinstance(await mine.commit(claim, claim.input), Committed)

    await asyncio.gather(*(work(n) for n in range(9)))
    assert len(seen) == 120 and set(seen.values()) == {1}


async def test_five_sweepers_take_a_lapsed_claim_back_once(client: Client, world: World) -> None:  # B32
    clients = [client, *[await world.client() for _ in range(4)]]
    for n in range(10):
        await given(client, f"t{n}")
        await claimed(client, ttl=5.0)
    await world.advance(6)
    rounds = await asyncio.gather(*(c.report("maintain") for c in clients))
    assert sum(found["expired"] for found in rounds) == 10
    for n in range(10):
        view = await client.task(f"t{n}")
        assert isinstance(view, TaskView) and (view.state, view.charged_attempts) == ("READY", 1)


async def test_a_sweeper_races_renew_and_commit_and_never_undoes_them(client: Client, world: World) -> None:  # B32
    other = await world.client()
    for n in range(ROUNDS):
        await given(client, f"t{n}")
        claim = await claimed(client, ttl=5.0)
        await world.advance(6)
        view = await client.task(f"t{n}")
        assert isinstance(view, TaskView)
        act = client.commit(claim, n) if n % 2 else client.renew(claim)
        answer, swept = await asyncio.gather(act, other.expire(f"t{n}", expected_state_version=view.state_version))
        if isinstance(answer, Committed | Renewed):
            assert refusal(swept) == ("CONFLICT", "VERSION")
            assert await state_of(client, f"t{n}") == ("COMMITTED" if n % 2 else "CLAIMED")
        else:
            assert isinstance(swept, Done)
            assert refusal(answer) == ("FENCED", "STATE")
        await client.cancel(f"t{n}")


async def test_two_operations_on_one_task_in_one_batch_are_decided_one_on_the_other(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    renewed, saved, first, second, cancelled = await asyncio.gather(
        client.renew(claim, 60.0),
        client.checkpoint(claim, "half", number=1),
        client.commit(claim, "right"),
        client.commit(claim, "wrong"),
        client.cancel("t", expected_cancel_generation=0),
    )
    assert isinstance(renewed, Renewed) and isinstance(saved, Done)
    assert isinstance(first, Committed)
    assert refusal(second) == ("ENDED", "COMMITTED")
    assert refusal(cancelled)[0] == "ALREADY_COMMITTED"
    view = await client.task("t")
    assert isinstance(view, TaskView)
    page = await client.events(task_id="t")
    assert [item.state_version for item in page.items if item.accepted] == list(range(1, view.state_version + 1))


async def test_a_revise_races_commit_and_the_late_input_never_becomes_canonical(client: Client, world: World) -> None:
    other = await world.client()
    for n in range(ROUNDS):
        await given(client, f"t{n}", {"n": n})
        claim = await claimed(client)
        answer, revised = await asyncio.gather(
            client.commit(claim, "of the first input"), other.revise(f"t{n}", {"n": -1}, expected_revision=1)
        )
        if isinstance(answer, Committed):
            assert refusal(revised)[0] == "ALREADY_COMMITTED"
        else:
            assert isinstance(revised, Done)
            assert refusal(answer)[0] == "STALE_INPUT"
            fresh = await claimed(client, "B")
            assert fresh.input == {"n": -1}
            await client.commit(fresh, "of the second input")
        result = await client.result(f"t{n}")
        assert isinstance(result, Result)


async def test_a_raise_races_sixteen_committers_and_nothing_of_the_old_epoch_follows_it(
    client: Client, world: World
) -> None:
    clients = [await world.client() for _ in range(4)]
    boss = await world.client()
    await client.submit_many([NewTask(n) for n in range(64)])
    answer = await client.claim_next(owner="A", limit=64)
    assert not isinstance(answer, Refused)
    waiting = [asyncio.create_task(clients[n % 4].commit(claim, 1)) for n, claim in enumerate(answer[:32])]
    raising = asyncio.create_task(boss.raise_epoch(expected_epoch=1, expected_state_version=1))
    waiting += [asyncio.create_task(clients[n % 4].commit(claim, 1)) for n, claim in enumerate(answer[32:])]
    raised = await raising
    assert not isinstance(raised, Refused)
    after = await asyncio.gather(*(clients[n % 4].commit(claim, 2) for n, claim in enumerate(answer)))
    for late in after:
        assert isinstance(late, Refused) and late.outcome in ("FENCED", "ENDED")
    for one in await asyncio.gather(*waiting):
        assert isinstance(one, Committed) or refusal(one) == ("FENCED", "EPOCH")


async def test_two_claims_with_one_request_id_at_the_same_moment_get_the_same_task(
    client: Client, world: World
) -> None:  # B07
    other = await world.client()
    for n in range(ROUNDS // 4):
        await client.submit_many([NewTask(n, task_id=f"t{n}-{i}") for i in range(3)])
        for clients in ((client, client), (client, other)):
            answers = await asyncio.gather(
                *(one.claim_next(owner="A", request_id=f"r{n}-{clients[1] is other}") for one in clients)
            )
            found = [[claim.attempt_id for claim in answer] for answer in answers if not isinstance(answer, Refused)]
            assert len(found) == 2 and len(found[0]) == 1 and found[0] == found[1]
