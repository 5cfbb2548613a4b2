"""What columns are on PostgreSQL, and rows as arrays: a batch travels as one array a column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_SMALL = {
    "state", "end", "is_binary", "priority", "intake_open", "repeat_closed", "person_only", "receipt_is_binary",
}  # fmt: skip
_INT4 = {"compared", "deps_total", "deps_remaining", "position", "min_protocol"}
_BIG = {
    "revision", "state_version", "scheduler_epoch", "claim_generation", "claimed_at", "lease_expires_at",
    "cancel_generation", "available_at", "ready_at", "charged_attempts", "max_attempts", "successors",
    "checkpoint_number", "checkpoint_generation", "created_at", "pruned_to_version", "at", "epoch", "generation",
    "number", "staged_at", "committed_at", "bucket", "count", "expected", "pool_version", "effects", "version",
    "first_prepared_at", "changed_at", "evidence_settled",
}  # fmt: skip


def type_of(column: str) -> str:
    """The type of a column; a name means the same in every table."""
    if column in _BIG:
        return "int8"
    if column in _SMALL:
        return "int2"
    if column in _INT4:
        return "int4"
    if column in ("data", "receipt"):
        return "bytea"
    if column == "cancel_with_parent":
        return "bool"
    return "text"


def listed(columns: Iterable[str], of: str = "") -> str:
    return ", ".join(f'{of}"{name}"' for name in columns)


class Arrays:
    """The parameters of a statement, numbered as they are asked for."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def one(self, value: Any, kind: str) -> str:
        self.values.append(value)
        return f"${len(self.values)}::{kind}"

    def unnest(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], types: Sequence[str] | None = None) -> str:
        """`unnest($n::type[], …)` over `rows`."""
        first = len(self.values) + 1
        self.values.extend(map(list, zip(*rows, strict=True)))
        kinds = [type_of(name) for name in columns] if types is None else types
        return f"unnest({', '.join(f'${first + i}::{kind}[]' for i, kind in enumerate(kinds))})"
