"""Canonical JSON (RFC 8785) and digests. Lossy input is refused, never silently changed.

`encode` gives the bytes to keep (as the caller spelled the value: key order and 1.0 stay) and the
digest of the value (spelling does not count). The canonical form comes from msgspec where it is
provably the same as RFC 8785 (no floats, ASCII keys), and from rfc8785 everywhere else; a property
test compares the two.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import rfc8785

from fencepost.errors import InvalidRequest
from fencepost.kernel.records import Content

MAX_CONTENT_BYTES = 1 << 20
MAX_NESTING = 100
MAX_INTEGER = 1 << 53

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_sha256 = hashlib.sha256
_INF = float("inf")
_BYTES = (bytes, bytearray, memoryview)


class _Shape:
    __slots__ = ("field", "plain")

    def __init__(self, field: str) -> None:
        self.field = field
        self.plain = True  # msgspec's sorted encoding is RFC 8785's

    def walk(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is str:
            self._text(value)
        elif kind is int:
            if not -MAX_INTEGER <= value <= MAX_INTEGER:
                raise InvalidRequest(self.field, "integers must lie within ±2^53; send larger ones as strings")
        elif value is None or kind is bool:
            return
        elif kind is dict:
            if depth >= MAX_NESTING:
                raise InvalidRequest(self.field, f"nested deeper than {MAX_NESTING}")
            for key, item in value.items():
                if type(key) is not str:
                    raise InvalidRequest(self.field, f"object keys must be strings, got {type(key).__name__}")
                self._text(key)
                if not key.isascii():
                    self.plain = False
                self.walk(item, depth + 1)
        elif kind is list or kind is tuple:
            if depth >= MAX_NESTING:
                raise InvalidRequest(self.field, f"nested deeper than {MAX_NESTING}")
            for item in value:
                self.walk(item, depth + 1)
        elif kind is float:
            if value != value or value in (_INF, -_INF):
                raise InvalidRequest(self.field, "NaN and infinities have no JSON form")
            self.plain = False
        else:
            raise InvalidRequest(self.field, f"{kind.__name__} has no JSON form")

    def _text(self, text: str) -> None:
        if "\0" in text:
            raise InvalidRequest(self.field, "U+0000 is not allowed in text")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest(self.field, "lone surrogates are not allowed in text") from None


def to_plain(value: Any, field: str) -> Any:
    """`value` as dicts, lists, strings, numbers, booleans and None; Structs and dataclasses are converted."""
    kind = type(value)
    if kind is dict or kind is list or kind is str or kind is int or value is None or kind is bool or kind is float:
        return value
    if isinstance(value, set | frozenset):
        raise InvalidRequest(field, "a set has no order, and so no JSON form; send a list")
    return flatten(value, field)


def flatten(value: Any, field: str) -> Any:
    """`value` with every Struct and dataclass in it as a dict, and every set as a list in order of its members."""
    try:
        # Bytes stay bytes, and so are refused inside JSON: base64 would be another value than the one that was given.
        return msgspec.to_builtins(value, str_keys=False, order="deterministic", builtin_types=_BYTES)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"has no JSON form ({error})") from None


def encode(value: Any, field: str = "value", max_bytes: int = MAX_CONTENT_BYTES) -> Content:
    """`value` as stored content with its digest; raises InvalidRequest naming `field` and the limit.

    `bytes` are taken as a binary: stored as they are, digest over the raw bytes.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if len(data) > max_bytes:
            raise InvalidRequest(field, f"{len(data)} bytes is over the limit of {max_bytes}")
        return Content(data, digest_bytes(data), True)
    plain = to_plain(value, field)
    shape = _Shape(field)
    shape.walk(plain, 0)
    data = _encode(plain)
    if len(data) > max_bytes:
        raise InvalidRequest(field, f"{len(data)} bytes is over the limit of {max_bytes}")
    canonical = _encode_sorted(plain) if shape.plain else _rfc8785(plain)
    return Content(data, "sha256:" + _sha256(canonical).hexdigest())


def canonical(value: Any, field: str = "value") -> bytes:
    """RFC 8785 canonical JSON of `value`."""
    plain = to_plain(value, field)
    shape = _Shape(field)
    shape.walk(plain, 0)
    return _encode_sorted(plain) if shape.plain else _rfc8785(plain)


def _rfc8785(plain: Any) -> bytes:
    try:
        return rfc8785.dumps(plain)
    except rfc8785.IntegerDomainError:
        # It stops at 2^53 - 1; ±2^53 itself is within the limits, and an exact double.
        return rfc8785.dumps(_widest_as_floats(plain))


def _widest_as_floats(value: Any) -> Any:
    if type(value) is int and (value == MAX_INTEGER or value == -MAX_INTEGER):
        return float(value)
    if type(value) is dict:
        return {key: _widest_as_floats(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return [_widest_as_floats(item) for item in value]
    return value


def digest(value: Any, field: str = "value") -> str:
    """`sha256:` + hex over the canonical JSON of `value`, or over the raw bytes of a binary."""
    if isinstance(value, bytes):
        return digest_bytes(value)
    return digest_bytes(canonical(value, field))


def digest_bytes(data: bytes) -> str:
    return "sha256:" + _sha256(data).hexdigest()


def parse(text: bytes | str, field: str = "value") -> Any:
    """JSON text as a value; unlike most parsers it refuses duplicate keys, NaN and infinities."""
    import json

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise InvalidRequest(field, "duplicate keys in an object")
        return found

    def constant(name: str) -> Any:
        raise InvalidRequest(field, f"{name} is not JSON")

    def number(text: str) -> float:
        found = float(text)
        if found in (_INF, -_INF):
            raise InvalidRequest(field, f"the number {text[:40]} is too large for JSON's double precision")
        return found

    def integer(text: str) -> int:
        if len(text) > 17:
            raise InvalidRequest(field, "integers must lie within ±2^53; send larger ones as strings")
        return int(text)

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number, parse_int=integer)
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise InvalidRequest(field, f"nested deeper than {MAX_NESTING}") from None
    except ValueError as error:
        raise InvalidRequest(field, f"not JSON ({error})") from None


def decode(content: Content) -> Any:
    """The value that `encode` was given, read back from what was stored."""
    return content.data if content.binary else msgspec.json.decode(content.data)


def short_hash(attempt_id: str | None) -> str | None:
    """What others may see of an attempt id: attempt ids are keys to the door."""
    return None if attempt_id is None else _sha256(attempt_id.encode()).hexdigest()[:12]
