"""The refusals' journal: coalesced, and written in transactions of their own.

Equal refusals of one attempt at one door within a second are one entry with a count, so that a zombie
in a loop cannot fill the disk. The first refusal after a quiet second is written at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from typing import Any

import msgspec

from fencepost import clock
from fencepost.errors import Unavailable
from fencepost.kernel.records import LogEntry
from fencepost.stores.base import Apply, Load, Scan, Store

logger = logging.getLogger("fencepost.refusals")
WINDOW = 1.0
# Distinct refusals kept while the store cannot be reached; beyond it the newest are counted, not kept.
MAX_KEPT = 10_000


class RefusalLog:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[tuple[Any, ...], tuple[LogEntry, int]] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._written_at = -WINDOW
        self._lock = asyncio.Lock()

    def add(self, entry: LogEntry) -> None:
        key = (entry.pool, entry.task_id, entry.door, entry.outcome, entry.reason, entry.attempt, _owner(entry))
        kept = self._kept.get(key)
        if kept is not None:
            self._kept[key] = (kept[0], kept[1] + entry.count)
        elif len(self._kept) < MAX_KEPT:
            self._kept[key] = (entry, entry.count)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_soon(), name="fencepost-refusals")

    async def _flush_soon(self) -> None:
        try:
            wait = self._written_at + WINDOW - clock.elapsed()
            if wait > 0:
                await asyncio.sleep(wait)
            await self.flush()
        except Unavailable as error:
            logger.warning("refusals could not be journalled yet: %s", error)
        finally:
            self._flusher = None

    async def flush(self) -> None:
        """Write what is kept. What could not be written is kept for the next time.

        Whoever stops waiting does not stop the writing: what was sent would be written, and then once more.
        """
        await asyncio.shield(asyncio.ensure_future(self._flush()))

    async def _flush(self) -> None:
        async with self._lock:
            kept, self._kept = self._kept, {}
            if not kept:
                return
            entries = [
                entry if count == entry.count else msgspec.structs.replace(entry, count=count)
                for entry, count in kept.values()
            ]
            try:
                await self._store.run(_append(entries))
            except BaseException:
                for key, (entry, count) in kept.items():
                    newer = self._kept.get(key)
                    self._kept[key] = (entry, count + (newer[1] if newer is not None else 0))
                raise
            self._written_at = clock.elapsed()

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait([self._flusher])
        try:
            await self.flush()
        except Unavailable as error:
            logger.warning("%d refusals were not journalled: %s", len(self._kept), error)


def _append(entries: list[LogEntry]) -> Generator[Load | Scan | Apply, Any, None]:
    yield Apply((), entries)


def _owner(entry: LogEntry) -> Any:
    """Claims carry no attempt: there the owner tells callers apart."""
    return (entry.detail or {}).get("presented", {}).get("owner") if entry.attempt is None else None
