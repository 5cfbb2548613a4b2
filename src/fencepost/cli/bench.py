"""A short benchmark of this machine: claim + commit through `Client` on a database of its own, durable.

`benchmarks/cycle.py` measures longer, and beside a bare loop; this one tells in seconds what to expect here.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

from fencepost.clock import elapsed
from fencepost.errors import Inconsistent
from fencepost.wire import NewTask, Refused

CALLERS = (1, 16, 128)
INPUT = {"text": "x" * 89}  # 100 bytes as JSON
RESULT = {"text": "y" * 89}
BATCH = 1000


async def measure(seconds: float, folder: str | None = None) -> dict[str, Any]:
    """`{"cycles_per_s": {"1", "16", "128"}, "submits_per_s", "seconds", "store"}`; each number over `seconds`.

    `folder`: where the temporary database is made, and removed again; on the disk that is to be measured.
    """
    from fencepost.connect import connect

    with tempfile.TemporaryDirectory(prefix="fencepost-bench-", dir=folder) as scratch:
        client = await connect(f"sqlite:///{os.path.join(scratch, 'bench.db')}")
        try:
            submitted, taken = await _fill(client, 2 * BATCH)
            cycles = {}
            for callers in CALLERS:
                done = 0
                spent = 0.0
                while spent < seconds:  # refilled between rounds, outside the measured time
                    began = elapsed()
                    count = await _round(client, callers, began + (seconds - spent))
                    spent += elapsed() - began
                    done += count
                    more, took = await _fill(client, max(count, BATCH))
                    submitted, taken = submitted + more, taken + took
                cycles[str(callers)] = done / spent
            return {
                "cycles_per_s": cycles,
                "submits_per_s": submitted / taken,
                "seconds": seconds,
                "store": "sqlite, WAL, synchronous=FULL",
            }
        finally:
            await client.close()


async def _fill(client: Any, count: int) -> tuple[int, float]:
    began = elapsed()
    for _ in range(0, count, BATCH):
        await client.submit_many([NewTask(INPUT) for _ in range(BATCH)])
    return -(-count // BATCH) * BATCH, elapsed() - began


async def _round(client: Any, callers: int, ends: float) -> int:
    """Cycles until the time is up or the tasks are."""

    async def caller(number: int) -> int:
        done = 0
        while elapsed() < ends:
            claims = await client.claim_next(owner=f"bench-{number}")
            if isinstance(claims, Refused):
                raise Inconsistent(f"a claim in a database of our own was refused: {claims.outcome}")
            if not claims:
                return done
            answer = await client.commit(claims[0], RESULT)
            if isinstance(answer, Refused):
                raise Inconsistent(f"a commit in a database of our own was refused: {answer.outcome}")
            done += 1
        return done

    return sum(await asyncio.gather(*(caller(number) for number in range(callers))))
