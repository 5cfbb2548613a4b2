"""Many processes on one store: the two long stories, with numbers that make them short or long."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from fencepost.client.client import Client
from fencepost.wire import NewTask, Result
from tests.faults.stage import Program, Stage, until

# many writers -------------------------------------------------------------------------------------


async def everybody_writes(
    stage: Stage, *, processes: int, share: int, callers: int, lock: float, within: float
) -> dict[str, Any]:
    """`processes` claim and commit `share` tasks each, beside a reader with an open snapshot, a poller, a writer that
    takes its time, and a lock that somebody else holds for `lock` seconds."""
    client = await stage.client()
    total = processes * share
    for first in range(0, total, 5_000):
        await client.submit_many([NewTask(n, task_id=f"t{n:06}") for n in range(first, min(first + 5_000, total))])
    crowd = [await stage.program("cycler", stage.url, f"w{n}", str(callers), str(share)) for n in range(processes)]
    for program in crowd:
        await program.reaches("connected", within=300.0)
    others = asyncio.Event()
    async with stage.snapshot():
        started = time.monotonic()
        for program in crowd:
            program.tell("go")
        beside = [
            asyncio.create_task(asyncio.to_thread(hold_the_lock, stage, lock)),
            asyncio.create_task(slow_writer(stage, others)),
            asyncio.create_task(poll(stage, others)),
        ]
        try:
            ends = [await program.reaches("done", within=within) for program in crowd]
        finally:
            others.set()
            await asyncio.gather(*beside)
        seconds = time.monotonic() - started
    for program in crowd:
        assert await program.ended() == 0, program.stderr()
    wrong = [text for end in ends for text in end["wrong"]]
    assert wrong == [], wrong[:5]
    assert sum(end["committed"] for end in ends) == total
    await committed_once(stage, client, total)
    return {
        "cycles_per_s": round(total / seconds),
        "p95_of_claims": max(end["p95"] for end in ends),
        "longest_claim": max(end["longest"] for end in ends),
    }


def hold_the_lock(stage: Stage, seconds: float) -> None:
    time.sleep(0.3)  # not before everybody is at work
    stage.hold_the_lock(seconds)


async def slow_writer(stage: Stage, over: asyncio.Event) -> None:
    """A maintenance script of somebody's own: 200 ms in one transaction, again and again."""
    while not over.is_set():
        await asyncio.to_thread(stage.hold_the_lock, 0.2)
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 2.0)


async def poll(stage: Stage, over: asyncio.Event) -> None:
    """A dashboard: pages of tasks and the journal's end, through the client. What it raises fails the test."""
    client = await stage.client()
    while not over.is_set():
        await client.tasks(limit=200)
        await client.pools()
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), 0.2)


async def committed_once(stage: Stage, client: Client, total: int) -> None:
    states = dict(stage.rows("SELECT state, count(*) FROM task GROUP BY state"))
    [results] = stage.rows("SELECT count(*), count(DISTINCT task_id) FROM result")
    [commits] = stage.rows("SELECT count(*), count(DISTINCT task_id) FROM event WHERE name = 'result_committed'")
    assert list(states.values()) == [total], states
    assert results == commits == (total, total)
    await stage.audit()
    assert stage.integrity() == "ok"


# a killer among workers ---------------------------------------------------------------------------


async def a_killer_among_workers(
    stage: Stage,
    *,
    workers: int,
    tasks: int,
    seconds: float,
    seed: int,
    ttl: float,
    chunk: float,
    within: float,
    server: float = 0.0,
    blows: int = 0,
    outages: int = 0,
) -> dict[str, Any]:
    """`workers` do `tasks`; for `seconds` somebody SIGKILLs (and replaces), SIGSTOPs and SIGCONTs them at random,
    and about every `server` seconds (0.0: never) kills or pauses the store's server; on a slow machine longer, until
    the workers have had so many `blows` and the server so many `outages`."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    client = await stage.client()
    texts = {f"t{n:05}": f"text {n} of {seed}" for n in range(tasks)}
    await client.submit_many(
        [
            NewTask(
                {"text": text, "chunks": dice.randint(1, 6), "seconds": chunk},
                task_id=task_id,
                kind="text",
                max_attempts=10_000,
            )
            for task_id, text in texts.items()
        ]
    )
    # A failed attempt would wait for its backoff; none is expected, only lost ones.
    names = iter(range(100_000))
    options = {"ttl": ttl, "concurrency": 4, "drain_timeout": 10.0, "kinds": ["text"]}

    async def hire() -> Program:
        return await stage.program("worker", stage.url, f"w{next(names)}", options)

    alive = [await hire() for _ in range(workers)]
    for program in alive:
        await program.reaches("connected")
    stopped: dict[int, float] = {}
    did: Counter[str] = Counter()
    codes: Counter[int] = Counter()
    end = time.monotonic() + seconds
    pauses = itertools.cycle([None, 0.2, None, 2 * ttl])  # None: killed
    next_outage = time.monotonic() + (server or float("inf"))

    def enough() -> bool:
        had = did["server killed"] + did["server paused"]
        return did["SIGSTOP"] + did["SIGKILL"] >= blows and had >= outages

    while (now := time.monotonic()) < end or not enough():
        assert now < end + within, f"only {dict(did)} in {seconds + within} s"
        for place, program in enumerate(alive):
            if stopped.get(place, now + 1) <= now:
                del stopped[place]
                program.wake()
                did["SIGCONT"] += 1
        if now >= next_outage:
            # Who is not connected yet may give up; who stands still does not notice.
            moving = [program for place, program in enumerate(alive) if place not in stopped]
            await until(lambda moving=moving: all(program.count("connected") for program in moving))  # type: ignore[misc]
            pause = next(pauses)
            await asyncio.to_thread(stage.outage, pause)
            did["server killed" if pause is None else "server paused"] += 1
            next_outage = time.monotonic() + dice.uniform(0.5, 1.5) * server
        place = dice.randrange(workers)
        roll = dice.random()
        if roll < 0.2:
            stopped.pop(place, None)
            codes[await alive[place].kill()] += 1
            alive[place] = await hire()
            did["SIGKILL"] += 1
        elif roll < 0.7 and place not in stopped:
            alive[place].signal(signal.SIGSTOP)
            stopped[place] = now + dice.choice([0.05, 0.3, ttl, 2 * ttl])
            did["SIGSTOP"] += 1
        await asyncio.sleep(dice.uniform(0.02, 0.25))
    for place in list(stopped):
        alive[place].wake()
    all_done = await until(lambda: none_open(stage), within=within, look_every=0.1)
    assert all_done
    for program in alive:
        program.signal(signal.SIGTERM)
    for program in alive:
        codes[await program.ended()] += 1
    print(f"did {dict(did)}, exit codes {dict(codes)}")
    assert codes == {0: workers, -9: did["SIGKILL"]}, f"a worker ended by something else: {codes}"
    for task_id, text in texts.items():
        result = await client.result(task_id)
        assert isinstance(result, Result) and result.value == hashlib.sha256(text.encode()).hexdigest()
    await committed_once(stage, client, tasks)
    status = await client.report("status")
    return {**did, "seed": seed, "discarded": status["discarded_compute"]}


def none_open(stage: Stage) -> bool:
    [(open_,)] = stage.rows(
        "SELECT count(*) FROM task t WHERE NOT EXISTS (SELECT 1 FROM result r WHERE r.task_id = t.task_id)"
    )
    return bool(open_ == 0)
