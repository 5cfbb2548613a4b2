"""Callers' own connections in tests: each driver with the few calls that a caller's business needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import psycopg

from fencepost import Claim, Client, NewTask, Refused
from fencepost.wire import PoolChanged, TaskView

DRIVERS = ("asyncpg", "psycopg", "plain psycopg")


class Business:
    """A connection of one's own, with a table `business` to write to. `con` is what is handed to fencepost."""

    con: Any

    async def open(self, url: str) -> None:
        raise NotImplementedError

    async def do(self, sql: str) -> None:
        raise NotImplementedError

    async def begin(self, isolation: str = "read committed") -> None:
        await self.do(f"BEGIN ISOLATION LEVEL {isolation}")

    async def write(self, row: str) -> None:
        await self.do(f"INSERT INTO public.business VALUES ('{row}')")

    async def close(self) -> None:
        await self.con.close()


class Asyncpg(Business):
    async def open(self, url: str) -> None:
        self.con = await asyncpg.connect(url)

    async def do(self, sql: str) -> None:
        await self.con.execute(sql)


class Psycopg(Business):
    async def open(self, url: str) -> None:
        self.con = await psycopg.AsyncConnection.connect(url, autocommit=True)

    async def do(self, sql: str) -> None:
        await self.con.execute(sql)


class PlainPsycopg(Business):
    async def open(self, url: str) -> None:
        self.con = await asyncio.to_thread(psycopg.Connection.connect, url, autocommit=True)

    async def do(self, sql: str) -> None:
        await asyncio.to_thread(self.con.execute, sql)

    async def close(self) -> None:
        await asyncio.to_thread(self.con.close)


MADE: dict[str, type[Business]] = dict(zip(DRIVERS, (Asyncpg, Psycopg, PlainPsycopg), strict=True))


Join = Callable[[], Awaitable[Business]]


async def rows(url: str) -> set[str]:
    con = await asyncpg.connect(url)
    try:
        return {row[0] for row in await con.fetch("SELECT row FROM public.business")}
    finally:
        await con.close()


async def state(client: Client, task_id: str) -> str | None:
    found = await client.task(task_id)
    return found.state if isinstance(found, TaskView) else None


async def claimed(client: Client, task_id: str, **task: Any) -> Claim:
    await client.submit(NewTask({"n": 1}, task_id=task_id, **task))
    found = await client.claim_next(owner="worker")
    assert not isinstance(found, Refused)
    [claim] = found
    assert claim.task_id == task_id
    return claim


async def clean(client: Client) -> None:
    report = await client.report("audit")
    assert report.violations == [], report.violations


async def raised(client: Client) -> PoolChanged | Refused:
    view = await client.pool("default")
    assert not isinstance(view, Refused)
    return await client.raise_epoch(expected_epoch=view.epoch, expected_state_version=view.state_version)
