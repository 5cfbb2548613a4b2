"""Callers' own connections in tests: each driver with the few calls that a caller's business needs."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import psycopg

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
