"""`using=sql`: a statement on the store's own database, executed inside commit's transaction (TRANSACTIONAL).

There is no prepare, no PREPARED and no UNKNOWN: a refused commit takes the statement along.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.effects.base import Declaration, Guarantee
from fencepost.errors import InvalidRequest

__all__ = ["Deferred", "Sql", "sql"]


class Deferred(msgspec.Struct, frozen=True):
    """Not executed yet: it happens together with the commit, or not at all."""

    slot: str


class Sql:
    """The store's own database. The payload is a statement, or `{"sql": …, "parameters": […]}`; placeholders are the
    database's own (`?` on SQLite, `$1` on PostgreSQL). One statement each; it cannot touch fencepost's own tables."""

    declaration = Declaration(name="sql", guarantee=Guarantee.TRANSACTIONAL)

    async def bind(self, payload: Any) -> Any:
        if isinstance(payload, str):
            payload = {"sql": payload}
        if not isinstance(payload, dict):
            raise InvalidRequest("payload", f"must be a statement or an object, got {type(payload).__name__}")
        unknown = payload.keys() - {"sql", "parameters"}
        if unknown:
            raise InvalidRequest(f"payload.{min(map(str, unknown))}", "is unknown; there are sql and parameters")
        text, parameters = payload.get("sql"), payload.get("parameters", [])
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest("payload.sql", "must be the text of one statement")
        if not isinstance(parameters, (list, tuple)):
            raise InvalidRequest("payload.parameters", f"must be a list, got {type(parameters).__name__}")
        for position, value in enumerate(parameters):
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise InvalidRequest(f"payload.parameters[{position}]", "must be text, a number, true, false or null")
        return {"sql": text, "parameters": list(parameters)}

    async def same(self, bound: Any, payload: Any) -> bool:
        return bool(bound == await self.bind(payload))


sql = Sql()
