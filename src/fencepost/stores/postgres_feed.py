"""The journal in order of its numbers: events and log entries, read on and on, none missed and none twice.

A number begins with its transaction's id. It is shown once every transaction up to that id has ended, so that a reader
who pages on by number misses none that commits late. One long writing transaction, anywhere on the server, therefore
holds the feed up; never claims, and never what is asked about one task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fencepost.clock import elapsed
from fencepost.stores import codec
from fencepost.stores.base import Numbered
from fencepost.stores.postgres_apply import NUMBER_BITS
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import listed

_EVENT = listed(codec.EVENT_COLUMNS, "e.")
_LOG = listed(codec.LOG_COLUMNS, "l.")

# Events have no index that is in order of numbers (it would be written with each of them), only a coarse one: a page
# is looked for in a window of transactions, each try in a larger one.
_WINDOW = 64 << NUMBER_BITS
# How long a page waits for transactions that were under way, so that a reader finds what it wrote itself.
_SETTLE = 0.5
_NAP = 0.002


class Where:
    """Conditions and their values, in step; a value's place is written `{}`."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.values: list[Any] = []

    def add(self, part: str, *values: Any) -> None:
        places = []
        for value in values:
            self.values.append(value)
            places.append(f"${len(self.values)}")
        self.parts.append(part.format(*places))

    def one_of(self, column: str, values: Sequence[Any]) -> None:
        if values:
            self.add(f"{column} = ANY({{}})", list(values))

    def __str__(self) -> str:
        return " AND ".join(self.parts) if self.parts else "TRUE"


class Feed:
    """Events and log entries by number, in a store whose numbers start at `base`."""

    def __init__(self, base: int) -> None:
        self.base = base
        self._ended = f"{base} + (pg_snapshot_xmin(pg_current_snapshot())::text::bigint << {NUMBER_BITS})"
        self._begun = f"{base} + (pg_snapshot_xmax(pg_current_snapshot())::text::bigint << {NUMBER_BITS})"

    async def _settled(self, con: Connection, begun: int) -> int:
        """The number below which nothing can come any more. Waits a moment for transactions begun before `begun`."""
        until = elapsed() + _SETTLE
        while True:
            ended: int = await con.fetchval(f"SELECT {self._ended}")
            if ended >= begun or elapsed() >= until:
                return ended
            await asyncio.sleep(_NAP)

    async def last_numbers(self, con: Connection) -> tuple[int, int]:
        last = await con.fetchval(f"SELECT {self._ended}") - 1
        return last, last

    async def events(
        self, con: Connection, after: int, limit: int, task_id: str | None, pool: str | None, names: Sequence[str]
    ) -> list[Numbered]:
        where = Where()
        if task_id is not None:
            where.add("e.task_id = {}", task_id)
        if pool is not None:
            where.add("(SELECT t.pool FROM fencepost.task t WHERE t.task_id = e.task_id) = {}", pool)
        where.one_of("e.name", names)
        if task_id is not None:
            # One task's events follow each other: where one is seen, all older ones are.
            where.add("e.number > {}", after)
            return _events(await con.fetch(_page("event e", _EVENT, "e", where, limit), *where.values))
        where.add("e.number > {} AND e.number <= {}", 0, 0)
        sql = _page("event e", _EVENT, "e", where, limit)
        rows = await self._windows(con, sql, where.values[:-2], after, limit)
        return _events(rows)

    async def oldest(self, con: Connection, after: int, limit: int) -> list[Any]:
        """(number, task id, at) of the events beyond `after`."""
        sql = (
            "SELECT e.number, e.task_id, e.at FROM fencepost.event e WHERE e.number > $1 AND e.number <= $2 "
            f"ORDER BY e.number LIMIT {limit:d}"
        )
        return await self._windows(con, sql, [], after, limit)

    async def _windows(self, con: Connection, sql: str, values: list[Any], after: int, limit: int) -> list[Any]:
        """`sql` takes, last, the numbers between which to look."""
        low, ended, begun = await con.fetchrow(
            f"SELECT number_from, {self._ended}, {self._begun} FROM fencepost.meta WHERE id = 1"
        )
        low, window = max(after, low), _WINDOW
        found: list[Any] = []
        while len(found) < limit:
            if low >= ended - 1:
                if ended >= begun:
                    break
                ended = begun = await self._settled(con, begun)  # once
                continue
            high = min(low + window, ended - 1)
            found += (await con.fetch(sql, *values, low, high))[: limit - len(found)]
            low, window = high, window * 4
        return found

    async def log(
        self, con: Connection, after: int, limit: int, task_id: str | None, pool: str | None, kinds: Sequence[str]
    ) -> list[Numbered]:
        where = Where()
        if task_id is not None:
            where.add("l.task_id = {}", task_id)
        if pool is not None:
            where.add("l.pool = {}", pool)
        where.one_of("l.kind", kinds)
        ended = await self._settled(con, await con.fetchval(f"SELECT {self._begun}"))
        where.add("l.number > {} AND l.number < {}", after, ended)
        rows = await con.fetch(_page("log l", _LOG, "l", where, limit), *where.values)
        return [Numbered(row[0], codec.log_entry(row[1:])) for row in rows]


def _page(source: str, columns: str, of: str, where: Where, limit: int) -> str:
    return f"SELECT {of}.number, {columns} FROM fencepost.{source} WHERE {where} ORDER BY {of}.number LIMIT {limit:d}"


def _events(rows: Sequence[Any]) -> list[Numbered]:
    return [Numbered(row[0], codec.event(row[1:])) for row in rows]
