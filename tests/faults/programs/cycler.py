"""Claims and commits until there is nothing left: `python -m tests.faults.programs.cycler URL OWNER CALLERS SHARE`.

SHARE is how many tasks this process does at most. Halfway it closes its client and connects again. It says at the end
how many it committed, whatever went wrong, and how long claims took. `go` starts it.
"""

from __future__ import annotations

import asyncio
import sys
import time

import fencepost
from fencepost.wire import Committed
from tests.faults.programs.speech import die_with_parent, listen, say


async def main(url: str, owner: str, callers: str, share: str) -> None:
    loop = asyncio.get_running_loop()
    go = asyncio.Event()
    listen(lambda order: loop.call_soon_threadsafe(go.set))
    left = int(share)
    waits: list[float] = []
    wrong: list[str] = []
    committed = 0
    swaps = [0, 0]  # won and lost, on a store that loses any

    def count(client: fencepost.Client) -> None:
        store = client.backend.store  # type: ignore[attr-defined]
        for place, name in enumerate(("swaps_won", "swaps_lost")):
            swaps[place] += getattr(store, name, 0)

    async def cycle(client: fencepost.Client, until: int) -> None:
        nonlocal left, committed
        while left > until:
            left -= 1
            sent = time.monotonic()
            try:
                found = await client.claim_next(owner=owner, ttl=60.0)
                waits.append(time.monotonic() - sent)
                if not isinstance(found, list):
                    wrong.append(f"claim: {found}")
                    return
                for claim in found:
                    answer = await client.commit(claim, {"by": owner, "n": claim.input})
                    if isinstance(answer, Committed):
                        committed += 1
                    else:
                        wrong.append(f"commit: {answer}")
            except fencepost.FencepostError as error:
                wrong.append(repr(error))
                return

    client = await fencepost.connect(url)
    say("connected")
    await go.wait()
    async with client:
        await asyncio.gather(*(cycle(client, int(share) // 2) for _ in range(int(callers))))
        count(client)
    async with await fencepost.connect(url) as client:
        await asyncio.gather(*(cycle(client, 0) for _ in range(int(callers))))
        count(client)
    waits.sort()
    p95 = waits[int(len(waits) * 0.95)] if waits else 0.0
    longest = round(max(waits, default=0.0), 3)
    say("done", committed=committed, wrong=wrong[:20], p95=round(p95, 4), longest=longest, swaps=swaps)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
