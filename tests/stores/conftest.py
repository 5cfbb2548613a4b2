"""SQLite stores in a folder of their own, closed whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fencepost.stores.sqlite import SQLiteStore

Open = Callable[..., Awaitable[SQLiteStore]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.db"


@pytest_asyncio.fixture
async def opened(path: Path) -> AsyncIterator[Open]:
    """`await opened()` opens the test's file, or another, with `SQLiteStore.open`'s arguments."""
    stores: list[SQLiteStore] = []

    async def open_one(where: Path | str | None = None, **arguments: Any) -> SQLiteStore:
        store = await SQLiteStore.open(where if where is not None else path, **arguments)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        await store.close()


@pytest_asyncio.fixture
async def store(opened: Open) -> SQLiteStore:
    return await opened()
