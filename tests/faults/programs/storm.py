"""Commits as fast as it can and says each one *after* it was answered: `… storm URL OWNER [until empty]`."""

from __future__ import annotations

import asyncio
import sys

import fencepost
from fencepost.wire import Claim, Committed, NewTask
from tests.faults.programs.speech import die_with_parent, listen, say

CALLERS = 16


async def main(url: str, owner: str, until_empty: str = "") -> None:
    listen(lambda order: None)
    async with await fencepost.connect(url) as client:

        def more(claim: Claim) -> list[NewTask]:
            """A storm never runs dry: each commit brings the next task."""
            return [] if until_empty else [NewTask(claim.input)]

        async def cycle() -> None:
            while True:
                found = await client.claim_next(owner=owner, ttl=60.0)
                assert isinstance(found, list), found
                if not found:
                    return
                for claim in found:
                    answer = await client.commit(claim, {"by": owner}, spawn=more(claim))
                    assert isinstance(answer, Committed), answer
                    say("committed", task=claim.task_id, id=answer.result_commit_id)

        await asyncio.gather(*(cycle() for _ in range(CALLERS)))
        say("empty")
        if not until_empty:
            await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
