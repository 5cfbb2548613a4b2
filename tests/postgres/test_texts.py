"""Columns that travel as one text come out of the server as they went in."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from fencepost.stores.postgres_texts import Texts

NASTY = ["", " ", "a,b", '"', "\\", "{", "}", "NULL", "null", "'", "ä€😀", "\x1f", "\x1e", "a\x1fb", "\n", "x" * 5000]


async def back(url: str, columns: list[str], rows: list[tuple[Any, ...]]) -> tuple[str, list[tuple[Any, ...]]]:
    texts = Texts()
    source = texts.unnest(columns, rows)
    con = await asyncpg.connect(url)
    try:
        found = await con.fetch(f"SELECT * FROM {source} WITH ORDINALITY x ORDER BY ordinality", *texts.values)
    finally:
        await con.close()
    return source, [tuple(row)[:-1] for row in found]


@pytest.mark.parametrize("value", [None, *NASTY])
async def test_a_text_alone_and_among_others(url: str, value: str | None) -> None:
    for rows in ([(value,)], [("a",), (value,), (None,), ("b",)], [(value,), (value,)]):
        assert (await back(url, ["detail"], rows))[1] == rows


async def test_columns_of_every_type(url: str) -> None:
    rows = [
        ("t1", 1, 2, 3, b"\x00\xff", True, None, None),
        ("t2", -1, None, 1 << 30, None, False, 1 << 60, "\x1f"),
        ("t3", 0, -(1 << 15), None, b"", None, -(1 << 62), "x"),
    ]
    columns = ["task_id", "expected", "state", "compared", "data", "cancel_with_parent", "at", "detail"]
    source, found = await back(url, columns, rows)
    assert found == rows
    assert source.count("string_to_array") == 1 and "$5::bytea[]" in source and "$8::text[]" in source


async def test_nothing_but_nulls(url: str) -> None:
    rows: list[tuple[Any, ...]] = [(None, None)] * 3
    assert (await back(url, ["detail", "at"], rows))[1] == rows
