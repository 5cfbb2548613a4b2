"""A client in a process of its own that does what it is told: `python -m tests.faults.programs.hand URL [EPOCH]`.

An order names one of the client's methods; it is answered by a line with the order's id. Orders run side by side, so
that one may be under way while the next comes. `together` asks for several in one go. `die_at` kills the process (as
`kill -9` does) at the next COMMIT of the store: "before" it is applied, or "after" it, before anybody hears.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from typing import Any

import msgspec

import fencepost
from fencepost.stores import sqlite_file
from fencepost.wire import Claim, NewTask
from tests.faults.programs.speech import die, die_with_parent, listen, say

_deadly: list[str] = []


def _arm(url: str) -> None:
    """Put the two points of death around every COMMIT of this process's writer."""
    if url.startswith("sqlite:"):
        _arm_sqlite()
    else:
        _arm_postgres()


def _arm_sqlite() -> None:
    connect = sqlite_file.connect

    def armed(*how: Any, **more: Any) -> Any:
        con = connect(*how, **more)

        def before() -> bool:
            if "before" in _deadly:
                die()
            return False

        def after(*_: Any) -> int:
            if "after" in _deadly:
                die()
            return 0

        con.set_commit_hook(before)
        con.set_wal_hook(after)
        return con

    sqlite_file.connect = armed


def _arm_postgres() -> None:
    """A batch of one statement is its own transaction; a transaction of several ends with COMMIT."""
    import asyncpg

    from fencepost.stores import postgres

    swift, new = postgres.apply_swift, postgres.apply_new
    leave = asyncpg.transaction.Transaction.__aexit__

    async def armed_swift(*arguments: Any) -> Any:
        return await _dying(swift(*arguments))

    async def armed_new(*arguments: Any) -> Any:
        return await _dying(new(*arguments))

    async def armed_leave(transaction: Any, *how: Any) -> Any:
        return await _dying(leave(transaction, *how))

    postgres.apply_swift = armed_swift  # type: ignore[assignment]
    postgres.apply_new = armed_new  # type: ignore[assignment]
    asyncpg.transaction.Transaction.__aexit__ = armed_leave


async def _dying(writing: Any) -> Any:
    if "before" in _deadly:
        die()
    answer = await writing
    if "after" in _deadly:
        die()
    return answer


def plain(value: Any) -> Any:
    if isinstance(value, Claim):
        return {"kind": "Claim", "value": value.to_json()}
    if isinstance(value, list):
        return {"kind": "list", "value": [plain(item) for item in value]}
    if isinstance(value, BaseException):
        return {"kind": "raised", "value": {"name": type(value).__name__, "says": str(value)}}
    if isinstance(value, msgspec.Struct):
        return {"kind": type(value).__name__, "value": msgspec.to_builtins(value)}
    return {"kind": "plain", "value": msgspec.to_builtins(value)}


def understand(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"$claim"}:
        return Claim.from_json(value["$claim"])
    if isinstance(value, dict) and value.keys() == {"$task"}:
        return NewTask(**value["$task"])
    if isinstance(value, list):
        return [understand(item) for item in value]
    return value


async def obey(client: Any, order: dict[str, Any]) -> Any:
    if order["do"] == "together":
        calls = [obey(client, each) for each in order["calls"]]
        return await asyncio.gather(*calls)
    arguments = [understand(item) for item in order.get("args", [])]
    named = {key: understand(item) for key, item in order.get("with", {}).items()}
    try:
        return await getattr(client, order["do"])(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
        traceback.print_exc()
        return error


async def main(url: str, epoch: str | None = None) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    listen(lambda order: loop.call_soon_threadsafe(orders.put_nowait, order))
    _arm(url)
    running: set[asyncio.Task[None]] = set()
    async with await fencepost.connect(url, epoch=int(epoch) if epoch else None) as client:
        say("connected")

        async def answer(order: dict[str, Any]) -> None:
            say("answered", id=order["id"], answer=plain(await obey(client, order)))

        while (order := await orders.get())["do"] != "end":
            if order["do"] == "die_at":
                _deadly.append(order["point"])
                say("answered", id=order["id"], answer=plain(None))
                continue
            task = asyncio.create_task(answer(order))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
