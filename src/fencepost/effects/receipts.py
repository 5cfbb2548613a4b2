"""What a downstream says, as it can be kept: receipts, ids and texts. None of it keeps a finding from being recorded.

A receipt is JSON of at most 256 KiB; what cannot be kept is kept as text, visibly.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_NOTE_BYTES, MAX_RECEIPT_BYTES, check_id
from fencepost.kernel.digests import encode

__all__ = ["cut_text", "id_kept", "note", "storable"]

MARK = "… (cut)"


def cut_text(text: str, most: int) -> str:
    """`text` in at most `most` bytes, cut with a mark; what no store can keep is replaced visibly."""
    text = text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode("utf-8")
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: most - len(MARK.encode())].decode("utf-8", "ignore") + MARK


def note(text: Any) -> str | None:
    """For people, beside the effect: at most 4 KiB. Some say it with the error itself."""
    return None if text is None else cut_text(str(text), MAX_NOTE_BYTES)


def id_kept(name: Any) -> str | None:
    """An ETag or a reservation's id where it can be kept as it is, else None: a part of it would name another thing."""
    try:
        return None if name is None else check_id(name, "id")
    except InvalidRequest:
        return None


def storable(receipt: Any) -> Any:
    """`receipt` as it is where it can be kept, else what it reads like, with the reason.

    A receipt that cannot be stored must not turn an effect that happened into one that nobody knows about.
    """
    try:
        encode(receipt, "receipt", MAX_RECEIPT_BYTES)
        return receipt
    except InvalidRequest as error:
        limit = error.limit
    except (TypeError, ValueError, RecursionError) as error:
        limit = str(error)
    try:
        text = msgspec.json.encode(receipt).decode("utf-8", "backslashreplace")
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        text = _shown(receipt)
    # Escaped, a character of it may take six bytes.
    return {"cut": True, "why": cut_text(limit, 200), "text": cut_text(text, MAX_RECEIPT_BYTES // 8)}


def _shown(receipt: Any) -> str:
    try:
        return repr(receipt)
    except Exception as error:  # noqa: BLE001 - a foreign object's repr may raise anything
        return f"<{type(receipt).__name__}: {type(error).__name__}>"
