"""Columns of a batch as one text each, which the server takes apart again: cheaper to send than arrays of values, each
of which the driver looks at from all sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fencepost.stores.postgres_rows import Arrays, type_of

# Control characters that no id contains, and no JSON text unescaped. Where one stands in a value all the same, the
# column travels as an array.
_BETWEEN, _NULL = "\x1f", "\x1e"
_NUMBERS = {"int2", "int4", "int8"}


class Texts(Arrays):
    def unnest(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], types: Sequence[str] | None = None) -> str:
        kinds = [type_of(name) for name in columns] if types is None else types
        values = self.values
        parts: list[str] = []
        for kind, column in zip(kinds, zip(*rows, strict=True), strict=True):
            place = len(values) + 1
            if kind in _NUMBERS:
                values.append(_numbers(column))
                parts.append(f"${place}::text::{kind}[]")
                continue
            text = _joined(column) if kind == "text" else None
            if text is None:
                values.append(list(column))
                parts.append(f"${place}::{kind}[]")
            else:
                values.append(text)
                parts.append(f"string_to_array(${place}::text, '{_BETWEEN}', '{_NULL}')")
        return f"unnest({', '.join(parts)})"


def _numbers(column: Sequence[int | None]) -> str:
    if None in column:
        return f"{{{','.join('NULL' if value is None else str(value) for value in column)}}}"
    return f"{{{','.join(map(str, column))}}}"


def _joined(column: Sequence[str | None]) -> str | None:
    """None where it would not come apart as it was."""
    nulls = column.count(None)
    if nulls:
        column = [_NULL if value is None else value for value in column]
    text = _BETWEEN.join(column)  # type: ignore[arg-type]
    if not text or text.count(_BETWEEN) != len(column) - 1 or text.count(_NULL) != nulls:
        return None
    return text
