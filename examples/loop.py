"""A loop of one's own: claim a task, hold it while working, commit the result."""

import asyncio

import fencepost


async def main() -> None:
    async with fencepost.connect("sqlite:///loop.db") as client:
        await client.submit(fencepost.NewTask({"text": "hold the claim"}, task_id="page-4"))

        while claims := await client.claim_next(owner="my loop", ttl=30.0):
            [claim] = claims
            # Renewed in the background. If the claim is lost, the body is cancelled; if it raises, it is released.
            async with client.hold(claim) as attempt:
                answer = {"words": len(attempt.input["text"].split())}
                committed = await client.commit(claim, answer)
                print(claim.task_id, committed.outcome)


asyncio.run(main())
