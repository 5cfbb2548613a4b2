"""Callers that claim batches and commit or release them: `… claimers URL OWNER CALLERS LIMIT`.

From `go` until they are told to end; then it says what went wrong (too much claimed, anything raised), what was
committed, and the longest time without a commit.
"""

from __future__ import annotations

import asyncio
import sys
import time

import fencepost
from fencepost.wire import Committed, Refused
from tests.faults.programs.speech import die_with_parent, listen, say

# What a cancel, a lapsed lease or a raise may do to somebody's claim; anything else is wrong.
EXPECTED = {"CANCELLED", "FENCED", "NOT_FOUND"}


async def main(url: str, owner: str, callers: str, limit: str) -> None:
    loop = asyncio.get_running_loop()
    go, over = asyncio.Event(), asyncio.Event()
    listen(lambda order: loop.call_soon_threadsafe((go if order["do"] == "go" else over).set))
    wrong: list[str] = []
    committed: list[str] = []
    last = longest = 0.0

    async def claimer(client: fencepost.Client, name: str) -> None:
        nonlocal last, longest
        while not over.is_set():
            try:
                found = await client.claim_next(owner=name, limit=int(limit), ttl=30.0)
                if isinstance(found, Refused) or len(found) > int(limit):
                    wrong.append(f"claim: {found}")
                    return
                for claim in found:
                    answer = await client.commit(claim, {"by": name})
                    if isinstance(answer, Committed):
                        committed.append(claim.task_id)
                        now = time.monotonic()
                        longest, last = max(longest, now - last), now
                    elif str(answer.outcome) not in EXPECTED:
                        wrong.append(f"commit: {answer}")
                if not found:
                    await asyncio.sleep(0.02)
            except fencepost.FencepostError as error:
                wrong.append(repr(error))

    async with await fencepost.connect(url) as client:
        say("connected")
        await go.wait()
        last = time.monotonic()
        await asyncio.gather(*(claimer(client, f"{owner}-{n}") for n in range(int(callers))))
        say("done", committed=committed, wrong=wrong[:20], longest=round(longest, 2))


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
