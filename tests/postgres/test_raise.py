"""raise_epoch on PostgreSQL: once it has returned, nothing of the old epoch is accepted any more."""

from __future__ import annotations

import asyncio

import fencepost
from fencepost.stores.postgres import PostgresStore
from fencepost.wire import NewTask, Refused
from tests.postgres.conftest import Open

ROUNDS = 20
BETWEEN = 6  # commits before each raise: everybody is at work, however slow the machine


async def test_after_a_raise_no_event_of_the_old_epoch_though_all_are_busy(opened: Open, url: str) -> None:
    clients = [await fencepost.connect(url) for _ in range(4)]
    chief = await fencepost.connect(url)
    store: PostgresStore = await opened()
    stop = asyncio.Event()
    committed = asyncio.Semaphore(0)

    async def busy(number: int) -> None:
        client = clients[number % 4]
        while not stop.is_set():
            got = await client.claim_next(owner=f"w{number}")
            if isinstance(got, Refused):
                await client.adopt_epoch("default")
                continue
            for claim in got:
                await client.renew(claim)
                if not isinstance(await client.commit(claim, number), Refused):
                    committed.release()
            if not got:
                await client.submit_many([NewTask({"n": number}) for _ in range(20)])

    working = [asyncio.create_task(busy(number)) for number in range(16)]
    returned: list[tuple[int, int]] = []  # (epoch, the journal's end when the raise had returned)
    try:
        async with asyncio.timeout(60):
            for _ in range(ROUNDS):
                for _ in range(BETWEEN):
                    await committed.acquire()
                view = await chief.pool("default")
                assert not isinstance(view, Refused)
                answer = await chief.raise_epoch(
                    "default",
                    expected_epoch=view.epoch,
                    expected_state_version=view.state_version,
                    who="test",
                )
                assert not isinstance(answer, Refused), answer
                raised = [n for n in await store.log(0, 1000, kinds=("pool",)) if n.entry.outcome == "EPOCH_RAISED"]
                returned.append((view.epoch + 1, raised[-1].number))
        stop.set()
        await asyncio.gather(*working)
        events, after = [], 0
        while page := await store.events(after, 1000):
            events += page
            after = page[-1].number
        assert len(returned) == ROUNDS and len({epoch for epoch, _ in returned}) == ROUNDS
        fenced = ("attempt_started", "attempt_renewed", "result_committed")
        for epoch, number in returned:
            late = [n for n in events if n.number > number and n.entry.epoch < epoch and n.entry.name in fenced]
            assert late == []
        assert sum(n.entry.name == "result_committed" for n in events) > 100
    finally:
        stop.set()
        await asyncio.gather(*working, return_exceptions=True)
        for client in (*clients, chief):
            await client.close()
