"""URLs and headers with `{fields}` of the payload in them.

`{order_id}` and `{customer.id}` are fields of the payload; `{key}`, `{slot}`, `{task}` and `{reservation}` come from
the call, and win over fields of the same name (which `{payload.key}` still reaches). `{{` and `}}` are braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from fencepost.errors import InvalidRequest

__all__ = ["HeaderTemplate", "UrlTemplate"]

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
OF_THE_CALL = ("key", "slot", "task", "reservation")


class _Template:
    def __init__(self, text: str, field: str) -> None:
        if type(text) is not str:
            raise InvalidRequest(field, f"must be text, got {type(text).__name__}")
        self.text = text
        self.field = field
        self.parts: list[tuple[str, str]] = []  # literal text, and the name that follows it, or ""
        start, literal = 0, ""
        for found in _PART.finditer(text):
            literal += text[start : found.start()]
            start = found.end()
            name = found[1]
            if found[0] in ("{{", "}}"):
                literal += found[0][0]
            elif name is None or not _NAME.fullmatch(name):
                raise InvalidRequest(field, f"{found[0]!r} is no field in braces; write {{{{ and }}}} for braces")
            else:
                self.parts.append((literal, name))
                literal = ""
        self.parts.append((literal + text[start:], ""))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.parts if name)

    def fill(self, payload: Any, call: Mapping[str, str]) -> str:
        """Raises InvalidRequest naming the payload's field where it is missing or cannot stand there."""
        filled = ""
        for literal, name in self.parts:
            filled += literal
            if name:
                filled += self.quoted(name, _look_up(name, payload, call))
        return filled

    def quoted(self, name: str, value: str) -> str:
        raise NotImplementedError


class UrlTemplate(_Template):
    """An absolute http(s) URL; fields stand in its path and query alone, and are percent-encoded whole."""

    def __init__(self, text: str, field: str = "url") -> None:
        super().__init__(text, field)
        fixed = self.parts[0][0]
        parts = urlsplit(fixed)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(field, f"must begin with http:// or https:// and a host, got {text[:80]!r}")
        if len(self.parts) > 1 and not re.match(r"https?://[^/?#]+[/?]", fixed):
            raise InvalidRequest(field, "a field must stand in the path or the query, not in the host or port")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest(field, "must not carry a user or password: give a header by `headers_env`")
        if "#" in text:
            raise InvalidRequest(field, "must not have a fragment: it is never sent")
        try:
            _ = parts.port
        except ValueError:
            raise InvalidRequest(field, "has a port that is no port") from None

    def quoted(self, name: str, value: str) -> str:
        if value in ("", ".", ".."):
            raise InvalidRequest(_shown(name), f"{value!r} cannot stand in a URL: it would name another resource")
        return quote(value, safe="")


class HeaderTemplate(_Template):
    """A header's value."""

    def __init__(self, name: str, text: str, field: str = "headers") -> None:
        if not _TOKEN.fullmatch(name):
            raise InvalidRequest(field, f"{name!r} is no name of a header")
        super().__init__(text, f"{field}.{name}")
        self._fits(self.field, text)

    def quoted(self, name: str, value: str) -> str:
        return self._fits(_shown(name), value)

    @staticmethod
    def _fits(field: str, value: str) -> str:
        if not value.isascii() or not value.isprintable():
            raise InvalidRequest(field, "a header holds printable ASCII alone")
        return value


def _shown(name: str) -> str:
    return f"payload.{name.removeprefix('payload.')}"


def _look_up(name: str, payload: Any, call: Mapping[str, str]) -> str:
    if name in OF_THE_CALL:
        if name not in call:
            raise InvalidRequest(name, "is not known where this template stands")
        return call[name]
    value = payload
    for step in name.removeprefix("payload.").split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise InvalidRequest(_shown(name), "is missing: a template needs it")
        value = value[step]
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    raise InvalidRequest(_shown(name), f"must be text or a whole number to stand there, got {type(value).__name__}")
