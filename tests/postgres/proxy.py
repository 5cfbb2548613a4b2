"""A TCP proxy before PostgreSQL that reads along: it counts statements, and cuts a connection where it is told to.

It cuts at what makes a write final: a statement that writes tasks by itself, or the COMMIT of a transaction.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

WRITES_TASKS = re.compile(rb"(UPDATE|INSERT INTO) fencepost\.task\b")


class Proxy:
    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self.cut: str | None = None  # "before" or "after" the server makes the next write final
        self.cuts = 0
        self.statements: Counter[str] = Counter()  # executed, by what they are
        self.name: Callable[[bytes], str] = _name  # what a statement is
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        link = _Link(self, writer, far_writer)
        ways = [asyncio.ensure_future(link.up(reader)), asyncio.ensure_future(link.down(far_reader))]
        me = asyncio.current_task()
        assert me is not None
        self._open[me] = writer
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.transport.abort()
            far_writer.transport.abort()
            del self._open[me]

    async def close(self) -> None:
        for writer in self._open.values():
            writer.transport.abort()
        if self._open:
            await asyncio.wait(self._open)


class _Link:
    """One connection: messages of a type byte and a length, once the start-up message is through."""

    def __init__(self, proxy: Proxy, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._near = near
        self._far = far
        self._sql: dict[bytes, bytes] = {}  # by the prepared statement's name
        self._inside = False  # a transaction
        self._withheld = False  # the server's answer is for nobody

    async def up(self, reader: asyncio.StreamReader) -> None:
        size = await reader.readexactly(4)
        self._far.write(size + await reader.readexactly(int.from_bytes(size) - 4))
        while True:
            kind, message = await _message(reader)
            if kind == b"P":
                name, sql, _ = message[5:].split(b"\0", 2)
                self._sql[name] = sql
            elif kind in (b"B", b"Q") and not self._passes(self._statement(kind, message)):
                return
            self._far.write(message)
            await self._far.drain()

    def _statement(self, kind: bytes, message: bytes) -> bytes:
        if kind == b"Q":
            return message[5:-1]
        _portal, name, _ = message[5:].split(b"\0", 2)
        return self._sql.get(name, b"")

    def _passes(self, sql: bytes) -> bool:
        writes = WRITES_TASKS.search(sql) is not None
        self._proxy.statements[self._proxy.name(sql)] += 1
        final = sql.startswith(b"COMMIT") if self._inside else writes
        if not final or self._proxy.cut is None:
            return True
        self._withheld = self._proxy.cut == "after"
        self._proxy.cut = None
        self._proxy.cuts += 1
        return self._withheld

    async def down(self, reader: asyncio.StreamReader) -> None:
        while True:
            kind, message = await _message(reader)
            if kind == b"Z":  # ready for the next statement
                self._inside = message[5:] != b"I"
                if self._withheld and not self._inside:
                    return
            if not self._withheld:
                self._near.write(message)
                await self._near.drain()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(int.from_bytes(head[1:]) - 4)


def _name(sql: bytes) -> str:
    if WRITES_TASKS.search(sql) is not None:
        return "writes"
    return sql.lstrip().partition(b" ")[0].decode().rstrip(";")


@asynccontextmanager
async def proxy_before(port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
