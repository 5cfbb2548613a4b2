"""The yardstick is honest: table by table, the bare loop leaves the rows that fencepost leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import apsw
import bare
import cycle
import pytest
from measuring import INPUT, RESULT

import fencepost

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[47][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_CALLER = re.compile(r"^caller-\d+$")
_A_TIME = 10**14  # microseconds since 1970 lie above, every other number below
CYCLES = 32


def plain(value: Any) -> Any:
    """What is new in each run under one name: ids, times, durations."""
    if isinstance(value, int) and value > _A_TIME:
        return "a time"
    if isinstance(value, str) and value.startswith("{"):
        found = json.loads(value)
        if "ready_us" in found:
            found["ready_us"] = type(found["ready_us"]).__name__
        if "owner" in found:
            found["owner"] = _CALLER.sub("a caller", found["owner"])
        return json.dumps({key: plain(item) for key, item in found.items()})
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def rows_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every table's rows in order of their content, so that only the content is compared."""
    con = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    tables = [row[0] for row in con.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    kept = {row[0] for row in con.execute("SELECT task_id FROM task")}

    def shown(column: str, value: Any) -> Any:
        # Task ids are the same in both files; every other id is random. Buckets and numbers follow from the moment.
        if column == "bucket":
            return "a bucket"
        if column in ("owner", "owner_id"):
            return _CALLER.sub("a caller", str(value))
        if isinstance(value, str):
            return _ID.sub(lambda found: found[0] if found[0] in kept else "an id", str(plain(value)))
        return plain(value)

    found: dict[str, list[tuple[Any, ...]]] = {}
    for table in tables:
        columns = [row[1] for row in con.execute(f"PRAGMA table_info({table})")]
        rows = [
            tuple(shown(name, value) for name, value in zip(columns, row, strict=True))
            for row in con.execute(f"SELECT * FROM {table}")
        ]
        found[table] = sorted(rows, key=repr)
    con.close()
    return found


@pytest.mark.parametrize("ahead", [True, False], ids=["values made ahead", "values made on the way"])
@pytest.mark.parametrize("callers", [1, 16])
async def test_the_bare_loop_leaves_the_rows_that_fencepost_leaves(tmp_path: Path, callers: int, ahead: bool) -> None:
    source = tmp_path / "template.db"
    settings = await cycle.template(source, CYCLES + 5)
    ours, theirs = cycle.fresh(source, "fencepost.db"), cycle.fresh(source, "bare.db")
    async with await fencepost.connect(f"sqlite:///{ours}") as client:
        await cycle.drive(client, callers, CYCLES)
    bare.run(str(theirs), settings, CYCLES, callers, RESULT, ahead=ahead)

    expected, written = rows_of(ours), rows_of(theirs)

    assert set(expected) == set(written)
    for table, rows in expected.items():
        assert written[table] == rows, table
    assert len(expected["result"]) == len(expected["request"]) == CYCLES
    assert len(expected["event"]) == (CYCLES + 5) + 2 * CYCLES


async def test_what_is_measured_is_durable(tmp_path: Path) -> None:
    settings = await cycle.template(tmp_path / "a.db", 1)

    assert settings["journal_mode"] == "wal"
    assert settings["synchronous"] == cycle.FULL


async def test_a_store_that_is_not_durable_is_not_measured(tmp_path: Path) -> None:
    async with await fencepost.connect(f"sqlite:///{tmp_path / 'a.db'}") as client:
        store: Any = client.backend.store  # type: ignore[attr-defined]
        await store._on(store._writer, lambda con: con.pragma("synchronous", 1))
        with pytest.raises(AssertionError, match="not durable"):
            await cycle.durable(client)


def test_input_and_result_have_100_bytes() -> None:
    assert len(json.dumps(INPUT, separators=(",", ":"))) == len(json.dumps(RESULT, separators=(",", ":"))) == 100
