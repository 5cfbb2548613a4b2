"""What an effect costs: prepare + settle of a downstream that does nothing, in cycles of claim + commit.

Callers claim and commit tasks, in turns without an effect and with one between claim and commit; the difference is the
effect. `ratio_to_cycle` is that difference in cycles without. Each run has a fresh copy of one database, as shipped.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cycle import drive, durable, fill, fresh, remove, warm_up_for
from measuring import RESULT, at_least_one, machine, median, parser, progress, scratch, show

import fencepost
from fencepost.client.client import Client
from fencepost.kernel.records import Terms

CYCLES = {1: 500, 16: 3000, 128: 8000}
GOAL = 1.5
TERMS = Terms("nothing", "IDEMPOTENT", retention_us=86_400_000_000, margin_us=60_000_000)
PAYLOAD = {"to": "x" * 89}
RECEIPT = {"id": "y" * 20}

Open = Callable[[], Awaitable[Client]]


async def drive_with_effect(client: Client, callers: int, cycles: int) -> None:
    left = cycles

    async def caller(number: int) -> None:
        nonlocal left
        while left:
            left -= 1
            [claim] = await client.claim_next(owner=f"caller-{number}")  # type: ignore[misc]
            prepared: Any = await client.prepare(claim, "send", PAYLOAD, TERMS)
            if prepared.outcome != "EXECUTE":
                raise AssertionError(f"nobody else is here, and yet: {prepared}")
            settled: Any = await client.settle(
                claim, prepared.effect_id, prepared.execution, "HAPPENED", receipt=RECEIPT
            )
            answer: Any = await client.commit(claim, RESULT)
            if (settled.outcome, answer.outcome) != ("SETTLED", "COMMITTED"):
                raise AssertionError(f"nobody else is here, and yet: {settled}, {answer}")

    await asyncio.gather(*(caller(number) for number in range(callers)))


async def seconds(client: Client, callers: int, cycles: int, effect: bool) -> float:
    """Of one cycle, after the warm-up."""
    work = drive_with_effect if effect else drive
    await work(client, callers, warm_up_for(callers))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work(client, callers, cycles)
    return (loop.time() - began) / cycles


@contextmanager
def places(store: str, folder: Path, tasks: int) -> Iterator[Callable[[int, bool, int], float]]:
    """Something that measures (callers, with an effect, turn) on a fresh copy of a database with so many tasks."""
    if store == "sqlite":
        source = folder / f"template-{tasks}.db"

        async def make() -> None:
            async with await fencepost.connect(f"sqlite:///{source}") as client:
                await fill(client, tasks)
                await durable(client)

        async def once(copy: Path, callers: int, effect: bool) -> float:
            async with await fencepost.connect(f"sqlite:///{copy}") as client:
                return await seconds(client, callers, tasks - warm_up_for(callers), effect)

        def measure(callers: int, effect: bool, turn: int) -> float:
            copy = fresh(source, f"{callers}-{effect}-{turn}.db")
            try:
                return asyncio.run(once(copy, callers, effect))
            finally:
                remove(copy)

        asyncio.run(make())
        yield measure
        remove(source)
        return

    import on_postgres  # which asks for a server, and for asyncpg

    with on_postgres.server(folder) as made:

        async def on_a_copy(callers: int, effect: bool) -> float:
            database = await made.new_database(await on_postgres.filled(made, f"ready_{tasks}", tasks))
            try:
                async with await fencepost.connect(made.url(database)) as client:
                    return await seconds(client, callers, tasks - warm_up_for(callers), effect)
            finally:
                await made.drop_database(database)

        yield lambda callers, effect, turn: asyncio.run(on_a_copy(callers, effect))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    options.add_argument("--callers", default="1,16,128", help="numbers of callers, separated by commas")
    options.add_argument("--cycles", type=at_least_one, help="of a repetition (default: by the number of callers)")
    chosen: argparse.Namespace = options.parse_args()
    found: dict[str, Any] = {"benchmark": "effects", "store": chosen.store, "repetitions": chosen.repeat, "goal": GOAL}
    found |= {"cycle_us": {}, "effect_us": {}, "ratio_to_cycle": {}}
    with scratch(chosen.folder) as folder:
        found["machine"] = machine(folder)
        for callers in (at_least_one(text) for text in chosen.callers.split(",")):
            cycles = chosen.cycles or max(count for least, count in CYCLES.items() if callers >= least)
            times: list[tuple[float, float]] = []
            with places(chosen.store, folder, cycles + warm_up_for(callers)) as measure:
                for turn in range(chosen.repeat):
                    progress(chosen.json, f"{callers} callers: {turn + 1} of {chosen.repeat}")
                    order = (False, True) if turn % 2 == 0 else (True, False)
                    took = {effect: measure(callers, effect, turn) for effect in order}
                    times.append((took[False], took[True]))
            name = str(callers)
            found["cycle_us"][name] = median([plain * 1e6 for plain, _ in times], 1)
            found["effect_us"][name] = median([(full - plain) * 1e6 for plain, full in times], 1)
            found["ratio_to_cycle"][name] = median([(full - plain) / plain for plain, full in times], 2)
    shown = ("cycle_us", "effect_us", "ratio_to_cycle")
    rows = [(name, *(found[kind][name] for kind in shown)) for name in found["cycle_us"]]
    title = f"prepare + settle through Client, {chosen.store}; goal: at most {GOAL} cycles"
    show(found, chosen.json, title, ["callers", "claim + commit µs", "prepare + settle µs", "in cycles"], rows)


if __name__ == "__main__":
    main()
