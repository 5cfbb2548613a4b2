"""What an HTTP answer means for an effect. Pure functions of the answer and of what the downstream declares.

The line is drawn where certainty ends. A definite refusal (4xx) did nothing; a time-out, a dropped connection and a 5xx
say nothing at all. 409 and 422 follow the Idempotency-Key draft of the IETF's HTTPAPI group: 409 is "the first request
under this key is still in progress", 422 is "this key was used with another payload".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from fencepost.effects.base import Absent, Found, Gone, Happened, NotFound, StillUnknown, Unknown
from fencepost.effects.receipts import cut_text
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_RECEIPT_BYTES
from fencepost.kernel.digests import encode, parse
from fencepost.kernel.records import Guarantee

__all__ = ["Answer", "confirmed", "executed", "found_by_key", "reservation_state"]

# Refusals after which something may still happen, or has: never ABSENT.
AMBIGUOUS = frozenset({408, 409, 423, 424, 499})
# Nothing was acted on, and the same request is to be sent elsewhere, which nobody does behind our back.
MOVED = frozenset({307, 308})
KEPT_HEADERS = ("content-type", "etag", "last-modified", "location", "request-id", "x-request-id")
MAX_DETAIL = 2_000
_SECONDS = re.compile(r"\d{1,7}")
_ABOUT_THE_KEY = re.compile(r"idempoten", re.IGNORECASE)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, read up to a limit. `headers` have lower-case names. `cut`: the body went on."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    cut: bool = False

    @property
    def etag(self) -> str | None:
        return self.headers.get("etag") or None

    @property
    def retry_after(self) -> float | None:
        """In seconds, where it was given so; a date would need our clock to agree with theirs."""
        text = self.headers.get("retry-after", "").strip()
        return float(text) if _SECONDS.fullmatch(text) else None

    def value(self) -> Any:
        """The body as JSON where it is that, else as text. A cut body, or one that JSON cannot carry, is text."""
        if not self.body:
            return None
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not self.cut and (kind == "application/json" or kind.endswith("+json")):
            try:
                return parse(self.body, "body")
            except InvalidRequest:
                pass  # kept as it reads: digits beyond 2^53 and NaN stay visible
        return self.body.decode("utf-8", "backslashreplace")

    def receipt(self) -> dict[str, Any]:
        """What is kept: the status, the headers that name things, and the body."""
        kept: dict[str, Any] = {"status": self.status}
        named = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
        if named:
            kept["headers"] = named
        if self.body:
            kept["body"] = self.value()
        if self.cut:
            kept["cut"] = True
        return _fitting(kept)

    def detail(self) -> str:
        """For people: the status, and what a problem document (RFC 9457) or the body says."""
        value = self.value()
        if isinstance(value, dict):
            told = [str(value[name]) for name in ("type", "title", "detail") if isinstance(value.get(name), str)]
            text = ": ".join(told) if told else msgspec.json.encode(value).decode()
        else:
            text = "" if value is None else str(value)
        return f"HTTP {self.status}" + (f": {text[:MAX_DETAIL]}" if text else "")

    @property
    def about_the_key(self) -> bool:
        """It speaks of the key itself: as the draft's problem documents do, by type, title, detail or code."""
        return _ABOUT_THE_KEY.search(self.body[:65536].decode("utf-8", "replace")) is not None


def _fitting(receipt: dict[str, Any]) -> dict[str, Any]:
    """Its body as text, cut with a mark, where it would be too long to keep."""
    most = MAX_RECEIPT_BYTES
    while most > 256:
        try:
            encode(receipt, "receipt", MAX_RECEIPT_BYTES)
            return receipt
        except InvalidRequest:
            most //= 2
            body = receipt["body"]
            text = body if isinstance(body, str) else msgspec.json.encode(body).decode()
            receipt = {**receipt, "body": cut_text(text, most), "cut": True}
    return {"status": receipt["status"], "cut": True}


def executed(
    answer: Answer,
    guarantee: Guarantee,
    *,
    conflict: str = "in_progress",
    stored: bool = False,
    precondition: bool = False,
    unsure: Collection[int] = (),
) -> Happened | Absent | Unknown:
    """What an answer to the effect's own request means.

    `conflict`: what 409 means, "in_progress" or "refused". `stored`: the answer was kept under the key. `precondition`:
    the request carried one. `unsure`: refusals after which this downstream may still have acted.
    """
    status = answer.status
    if 200 <= status < 300 or status == 303:
        # 303 answers a request that was acted on: "see the result over there".
        return Happened(answer.receipt(), answer.etag)
    if status in MOVED:
        return Absent("REFUSED", f"{answer.detail()} (redirects are not followed; to {_target(answer)})")
    if 300 <= status < 400:
        return Unknown(f"{answer.detail()} (redirects are not followed; to {_target(answer)})")
    if status >= 500 or status < 200:
        return Unknown(answer.detail(), stored=stored, retry_after=answer.retry_after)
    if status in unsure:
        return Unknown(answer.detail(), retry_after=answer.retry_after)
    if status == 412 and precondition:
        return Absent("PRECONDITION", answer.detail())
    if status == 409 and conflict == "refused":
        return Absent("REFUSED", answer.detail())
    if status == 422 and guarantee == Guarantee.IDEMPOTENT and answer.about_the_key:
        # Something else went under our key: repeating brings only this back, and what did happen is for others to say.
        return Unknown(answer.detail(), stored=True)
    if status in AMBIGUOUS:
        return Unknown(answer.detail(), retry_after=answer.retry_after)
    return Absent("REFUSED", answer.detail())


def found_by_key(answer: Answer) -> Found:
    """What an answer to the keyed query means: 200 it happened, 404 and 410 no such key, 202 and 409 in progress."""
    status = answer.status
    if status == 200:
        return Happened(answer.receipt(), answer.etag)
    if status in (404, 410):
        return NotFound()
    if status in (202, 409, 425):
        return StillUnknown(answer.detail(), in_progress=True, retry_after=answer.retry_after)
    return StillUnknown(answer.detail(), retry_after=answer.retry_after)


def confirmed(answer: Answer) -> Happened | Absent | Unknown:
    """What an answer to a reservation's confirmation means: 2xx confirmed (however often), 410 gone for good."""
    if 200 <= answer.status < 300:
        return Happened(answer.receipt(), answer.etag)
    if answer.status == 410:
        return Absent("RESERVATION_CANCELLED", answer.detail())
    return Unknown(answer.detail(), retry_after=answer.retry_after)


STATES = {
    "confirmed": "HAPPENED",
    "cancelled": "RESERVATION_CANCELLED",
    "canceled": "RESERVATION_CANCELLED",
    "expired": "RESERVATION_LAPSED",
    "lapsed": "RESERVATION_LAPSED",
}


def reservation_state(answer: Answer, field: str) -> Found:
    """What an answer about a reservation means: `field` says confirmed, cancelled, expired or lapsed; 410: lapsed."""
    if answer.status == 410:
        return Gone("RESERVATION_LAPSED", answer.detail())
    value = answer.value()
    if answer.status != 200 or not isinstance(value, dict):
        return StillUnknown(answer.detail(), retry_after=answer.retry_after)
    state = STATES.get(str(value.get(field)).lower())
    if state == "HAPPENED":
        return Happened(answer.receipt(), answer.etag)
    if state is not None:
        return Gone(state, answer.detail())
    return StillUnknown(f"the reservation is {value.get(field)!r}"[:MAX_DETAIL])


def _target(answer: Answer) -> str:
    return answer.headers.get("location", "nowhere")[:200]
