"""Handlers in Python: `fencepost work --app handlers:app`, or `python handlers.py`, which brings its own worker."""

import asyncio
from dataclasses import dataclass

import fencepost

app = fencepost.App()


@dataclass
class Page:
    text: str


@app.task("count", ttl=30.0)
async def count(attempt: fencepost.Attempt, page: Page) -> dict[str, int]:
    words = 0
    for line in page.text.splitlines():
        words += len(line.split())
        await attempt.checkpoint({"words": words})  # for a successor, should this attempt die
    return {"words": words}


async def main() -> None:
    async with fencepost.connect("sqlite:///pages.db") as client:
        await client.submit(count.task(Page("a fence\nfor late workers"), task_id="page-3"))
        await fencepost.Worker(client, app).run_until_idle()  # or run(): until SIGTERM
        result = await client.result("page-3")
        print(result.value)


if __name__ == "__main__":
    asyncio.run(main())
