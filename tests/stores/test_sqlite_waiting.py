"""Whoever waited for the write lock looks at the file once more before it writes."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import apsw
import pytest

from fencepost.errors import Unavailable
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, insert, task
from tests.stores.conftest import Open

BOUND = 10.0


async def _is_waiting(store: SQLiteStore) -> None:
    async with asyncio.timeout(BOUND):
        while not store._patience.waited:
            await asyncio.sleep(0.001)


async def test_a_file_that_was_swapped_during_the_wait_is_not_written(opened: Open, path: Path) -> None:
    store = await opened()
    await store.run(applying(insert(task("before"))))
    shutil.copyfile(path, copy := path.with_suffix(".copy"))
    holder = apsw.Connection(str(path))
    holder.execute("BEGIN IMMEDIATE")
    store._patience.waited = False
    writing = asyncio.create_task(store.run(applying(insert(task("late")))))
    await _is_waiting(store)
    os.rename(path, old := path.with_suffix(".old"))
    os.rename(copy, path)
    holder.execute("ROLLBACK")
    holder.close()
    with pytest.raises(Unavailable, match="replaced"):
        await asyncio.wait_for(writing, BOUND)
    await store.close()
    for file in (path, old):
        con = apsw.Connection(str(file))
        assert con.execute("SELECT count(*) FROM task WHERE task_id = 'late'").get == 0
        con.close()
