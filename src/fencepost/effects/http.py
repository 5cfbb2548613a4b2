"""HTTP downstreams: one request for one effect, and what can be promised by what the server offers.

| guarantee | what the server offers | settings |
|---|---|---|
| IDEMPOTENT | it remembers `Idempotency-Key` and answers from it | `retention`, perhaps `query` |
| CONDITIONAL | `If-Match` on an ETag that never returns, `If-None-Match: *` | `version_url`, perhaps `history` |
| RESERVATION | reserve, then confirm or cancel | `confirm`, `cancel`, perhaps `query` |
| READ_ONLY | nothing changes | |
| NON_REPLAYABLE | none of these | |

Every request carries the effect id, the epoch and the generation, and says until when it may be acted on. Redirects
are not followed, nothing is retried, each call has a connection of its own, and no proxy is taken from the environment
unless that is asked for. Not promised: that the server keeps what it declares.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from fencepost.effects import http_answers as answers
from fencepost.effects.base import (
    Absent,
    Call,
    Checked,
    Deadline,
    Declaration,
    Found,
    Gone,
    Guarantee,
    Happened,
    Outcome,
    Standing,
    StillUnknown,
    Unknown,
)
from fencepost.effects.http_answers import Answer
from fencepost.effects.http_wire import CutOffError, NotSentError, TooLateError, Wire, library
from fencepost.effects.templates import HeaderTemplate, UrlTemplate
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_RECEIPT_BYTES, check_seconds
from fencepost.kernel.digests import canonical

__all__ = ["Http"]

METHODS = ("POST", "PUT", "PATCH", "DELETE", "GET", "HEAD")
# Set by us, for every call: a template may not speak for the fence.
OURS = (
    "idempotency-key", "if-match", "if-none-match", "fencepost-effect", "fencepost-epoch", "fencepost-generation",
    "fencepost-send-by", "content-length", "transfer-encoding", "host", "connection",
)  # fmt: skip
REPLAYED = ("idempotent-replayed", "idempotency-replayed", "x-idempotent-replayed", "x-idempotency-replayed")
MAX_HISTORY = 16 << 20  # bytes; a longer history is not complete as far as we are concerned
MAX_REMEMBERED = 1_000
NONE_YET = "*"  # the precondition of what must not exist yet


class Http:
    """`url`, `headers`: templates with `{fields}` of the payload (see `templates`). Durations are seconds.

    `body`: "json" (canonical, so that a repeat sends the same bytes; the default for POST, PUT and PATCH), "form",
    "text", or "none"; `body_from` names the payload's field to send instead of the whole. `conflict`: what 409 means.
    `unsure`: refusals (4xx) after which the server may have acted all the same. `stores_failures`: a 500 is kept under
    the key, and so never worth repeating.

    `key_header`, `key_quoted`: the draft's header holds a quoted string; some servers want another header, or it bare.

    IDEMPOTENT: `query`, a URL with `{key}`, answers 200 for what happened, 404 for an unknown key, 202 or 409 for one
    in progress.

    RESERVATION: `confirm`, `cancel` and `query` have `{reservation}` in them; `reservation_field` names the id in the
    answer to `url`, `state_field` the state in the answer to `query`.

    CONDITIONAL: `version_url` (default: `url`) is looked at for the ETag; `create_only`: the write must create;
    `history`: a URL whose answer names the ids of *all* effects that ever changed the resource. Without it, what became
    of a write that the resource has moved on from is a person's to judge.

    `proxy`: through which every call goes; `trust_env`: take proxy and certificates from the environment.

    Raises InvalidRequest naming the setting that cannot be, and from `bind` the payload's field that cannot be sent.
    """

    def __init__(
        self,
        declaration: Declaration,
        url: str,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        body: Literal["json", "form", "text", "none"] | None = None,
        body_from: str | None = None,
        key_header: str = "Idempotency-Key",
        key_quoted: bool = True,
        conflict: Literal["in_progress", "refused"] = "in_progress",
        unsure: Sequence[int] = (),
        stores_failures: bool = False,
        query: str | None = None,
        version_url: str | None = None,
        create_only: bool = False,
        history: str | None = None,
        confirm: str | None = None,
        cancel: str | None = None,
        reservation_field: str = "id",
        state_field: str = "state",
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        proxy: str | None = None,
        trust_env: bool = False,
        verify: str | bool = True,
    ) -> None:
        self.declaration = declaration
        if method not in METHODS:
            raise InvalidRequest("method", f"must be one of {', '.join(METHODS)}, got {method!r}")
        if body not in (None, "json", "form", "text", "none"):
            raise InvalidRequest("body", f"must be json, form, text or none, got {body!r}")
        if conflict not in ("in_progress", "refused"):
            raise InvalidRequest("conflict", f"must be in_progress or refused, got {conflict!r}")
        for status in unsure:
            if type(status) is not int or not 400 <= status < 500:
                raise InvalidRequest("unsure", f"holds statuses from 400 to 499, got {status!r}")
        check_seconds(timeout, "timeout", above=True)
        check_seconds(connect_timeout, "connect_timeout", above=True)
        self.method = method
        self.url = UrlTemplate(url)
        self.headers = {name: HeaderTemplate(name, text) for name, text in (headers or {}).items()}
        for name in self.headers:
            if name.lower() in OURS or name.lower() == key_header.lower():
                raise InvalidRequest(f"headers.{name}", "is set for every call, and cannot be set here")
        HeaderTemplate(key_header, "", "key_header")
        self.key_header = key_header
        self.key_quoted = key_quoted
        self.body = body or ("json" if method in ("POST", "PUT", "PATCH") else "none")
        self.body_from = body_from
        self.conflict = conflict
        self.unsure = frozenset(unsure)
        self.stores_failures = stores_failures
        self.query_url = _template(query, "query")
        self.version_url = _template(version_url, "version_url") or self.url
        self.create_only = create_only
        self.history = _template(history, "history")
        self.confirm_url = _template(confirm, "confirm")
        self.cancel_url = _template(cancel, "cancel")
        self.reservation_field = reservation_field
        self.state_field = state_field
        self.wire = Wire(
            timeout=timeout, connect_timeout=connect_timeout, proxy=proxy, trust_env=trust_env, verify=verify
        )
        self._failures: OrderedDict[str, str] = OrderedDict()
        self._refuse_what_cannot_work()
        if not self._can_be_asked:
            # Whoever asks whether this can be asked looks for the method.
            self.query = None  # type: ignore[assignment,method-assign]

    def _refuse_what_cannot_work(self) -> None:
        guarantee = self.declaration.guarantee
        if guarantee == Guarantee.TRANSACTIONAL:
            raise InvalidRequest("guarantee", "TRANSACTIONAL is for a statement in the store's own database")
        if guarantee == Guarantee.RESERVATION:
            for name, template in (("confirm", self.confirm_url), ("cancel", self.cancel_url)):
                if template is None:
                    raise InvalidRequest(name, "RESERVATION needs it: a URL with {reservation}")
                if "reservation" not in template.names:
                    raise InvalidRequest(name, "must name the {reservation}")
            if self.query_url is not None and "reservation" not in self.query_url.names:
                raise InvalidRequest("query", "must name the {reservation}")
        elif self.confirm_url is not None or self.cancel_url is not None:
            raise InvalidRequest(
                "confirm" if self.confirm_url else "cancel", f"is for RESERVATION, not for {guarantee}"
            )
        if guarantee == Guarantee.IDEMPOTENT and self.query_url is not None and "key" not in self.query_url.names:
            raise InvalidRequest("query", "must name the {key}: a look at anything else proves nothing")
        if self.query_url is not None and guarantee not in (Guarantee.IDEMPOTENT, Guarantee.RESERVATION):
            raise InvalidRequest(
                "query", f"is for IDEMPOTENT and RESERVATION: with {guarantee} nothing follows from it"
            )
        if guarantee != Guarantee.CONDITIONAL and (self.create_only or self.history is not None):
            raise InvalidRequest("history" if self.history else "create_only", "is for CONDITIONAL")
        if guarantee == Guarantee.READ_ONLY and self.method not in ("GET", "HEAD", "POST"):
            raise InvalidRequest("method", f"{self.method} is never READ_ONLY")
        if self.method in ("GET", "HEAD") and guarantee not in (Guarantee.READ_ONLY, Guarantee.NON_REPLAYABLE):
            raise InvalidRequest("method", f"{self.method} may be repeated by anybody on the way: declare READ_ONLY")

    @property
    def _can_be_asked(self) -> bool:
        return self.query_url is not None or self.declaration.guarantee == Guarantee.CONDITIONAL

    # the protocol ---------------------------------------------------------------------------------

    async def bind(self, payload: Any) -> Any:
        """The payload as it is; what its templates need and it lacks is said before anything is prepared."""
        pretended = {"key": "0" * 64, "slot": "slot", "task": "task", "reservation": "reservation"}
        templates = [self.url, self.version_url, self.query_url, self.history, self.confirm_url, self.cancel_url]
        for template in (*templates, *self.headers.values()):
            if template is not None:
                filled = template.fill(payload, pretended)
                if isinstance(template, UrlTemplate):
                    _check_url(filled)
        self._content(payload)
        return payload

    async def same(self, bound: Any, payload: Any) -> bool:
        return False  # nothing was made up: another digest is another payload

    async def execute(self, call: Call) -> Outcome:
        precondition = call.precondition
        extra = {}
        if precondition is not None:
            extra["If-None-Match" if precondition == NONE_YET else "If-Match"] = precondition
        answer = await self._send(self.method, self.url, call, extra, body=True)
        if not isinstance(answer, Answer):
            return answer
        return answers.executed(
            answer,
            self.declaration.guarantee,
            conflict=self.conflict,
            stored=self._is_stored(call, answer),
            precondition=precondition is not None,
            unsure=self.unsure,
        )

    async def query(self, call: Call) -> Found:
        guarantee = self.declaration.guarantee
        if guarantee == Guarantee.CONDITIONAL:
            return await self._look(call)
        assert self.query_url is not None
        answer = await self._ask(self.query_url, call)
        if not isinstance(answer, Answer):
            return answer
        if guarantee == Guarantee.RESERVATION:
            return answers.reservation_state(answer, self.state_field)
        return answers.found_by_key(answer)

    async def precondition(self, payload: Any) -> str:
        """The ETag that the resource stands at, or `*` where it must not exist yet."""
        if self.create_only:
            return NONE_YET
        call = _nobody(payload)
        answer = await self._ask(self.version_url, call)
        if not isinstance(answer, Answer):
            raise ConnectionError(f"{self.declaration.downstream}: {answer.why}")
        if answer.status in (404, 410):
            return NONE_YET
        if answer.status != 200:
            raise ConnectionError(f"{self.declaration.downstream}: {answer.detail()}")
        if answer.etag is None or answer.etag.startswith("W/"):
            raise InvalidRequest(
                "precondition", f"the server gives no strong ETag ({answer.etag}): it is not CONDITIONAL"
            )
        return answer.etag

    async def reserve(self, call: Call) -> str | Absent:
        answer = await self._send(self.method, self.url, call, {}, body=True)
        if not isinstance(answer, Answer):
            return Absent("REFUSED", answer.detail if isinstance(answer, Absent) else answer.why)
        value = answer.value()
        found = value.get(self.reservation_field) if isinstance(value, dict) else None
        if not 200 <= answer.status < 300 or type(found) not in (str, int):
            return Absent("REFUSED", answer.detail())
        return str(found)

    async def confirm(self, call: Call) -> Outcome:
        assert self.confirm_url is not None
        answer = await self._send("POST", self.confirm_url, call, {}, body=False)
        return answers.confirmed(answer) if isinstance(answer, Answer) else answer

    async def cancel(self, call: Call) -> Found:
        assert self.cancel_url is not None
        answer = await self._send("POST", self.cancel_url, call, {}, body=False)
        if not isinstance(answer, Answer):
            return StillUnknown(answer.detail or "not sent" if isinstance(answer, Absent) else answer.why)
        if 200 <= answer.status < 300:
            return Gone("RESERVATION_CANCELLED", answer.detail())
        if answer.status == 410:
            return Gone("RESERVATION_LAPSED", answer.detail())
        return StillUnknown(answer.detail(), retry_after=answer.retry_after)

    async def check(self) -> Checked:
        """Connects, and sends nothing. What the server does with a key or a precondition cannot be tried so."""
        guarantee = self.declaration.guarantee
        parts = urlsplit(self.url.parts[0][0])
        says = [f"{self.method} {self.url.text}", _PROMISES[guarantee]]
        try:
            async with asyncio.timeout(self.wire.connect_timeout):
                port = parts.port or (443 if parts.scheme == "https" else 80)
                context = self.wire.context() if parts.scheme == "https" else None
                _, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
                writer.close()
        except (OSError, TimeoutError) as error:
            return Checked(guarantee, False, (*says, f"cannot be reached: {type(error).__name__} {error}".rstrip()))
        if not self._can_be_asked and guarantee == Guarantee.IDEMPOTENT:
            says.append("no `query`: an unknown outcome is cleared by repeating under the key, within the retention")
        if guarantee == Guarantee.CONDITIONAL and self.history is None:
            says.append("no `history`: once the resource has moved on, an unknown outcome needs a person")
        return Checked(guarantee, True, tuple(says))

    # how it is sent -------------------------------------------------------------------------------

    def _content(self, payload: Any) -> tuple[bytes | None, str | None]:
        """The body and its type: the same bytes each time."""
        if self.body == "none":
            return None, None
        if self.body_from is not None:
            if not isinstance(payload, Mapping) or self.body_from not in payload:
                raise InvalidRequest(f"payload.{self.body_from}", "is missing: it is the body to send")
            payload = payload[self.body_from]
        if isinstance(payload, bytes):
            return payload, "application/octet-stream"
        if self.body == "json":
            return canonical(payload, "payload"), "application/json"
        if self.body == "text":
            if type(payload) is not str:
                raise InvalidRequest("payload", f"must be text to be sent as text, got {type(payload).__name__}")
            return payload.encode(), "text/plain; charset=utf-8"
        if not isinstance(payload, Mapping) or not all(type(value) in (str, int) for value in payload.values()):
            raise InvalidRequest("payload", "must be an object of text and whole numbers to be sent as a form")
        return urlencode(dict(payload)).encode(), "application/x-www-form-urlencoded"

    def _names(self, call: Call) -> dict[str, str]:
        names = {"key": call.key, "slot": call.slot, "task": call.task_id}
        if call.reservation_id is not None:
            names["reservation"] = call.reservation_id
        return names

    def _head(self, call: Call, extra: Mapping[str, str]) -> dict[str, str]:
        names = self._names(call)
        head = {name: template.fill(call.payload, names) for name, template in self.headers.items()}
        head |= {"Accept-Encoding": "identity", "User-Agent": "fencepost"}
        if call.effect_id:
            head |= {name.title(): value for name, value in call.marks.items()}
            head[self.key_header] = f'"{call.key}"' if self.key_quoted else call.key
        if call.send_by.unix is not None:
            head["Fencepost-Send-By"] = f"{call.send_by.unix:.3f}"
        return head | dict(extra)

    async def _send(
        self,
        method: str,
        url: UrlTemplate,
        call: Call,
        extra: Mapping[str, str],
        *,
        body: bool,
        most: int = MAX_RECEIPT_BYTES,
    ) -> Answer | Absent | Unknown:
        """One request. Absent: not a byte left. Unknown: it left, and no whole answer came back."""
        content, kind = self._content(call.payload) if body else (None, None)
        head = self._head(call, extra)
        if kind is not None:
            head.setdefault("Content-Type", kind)
        where = url.fill(call.payload, self._names(call))
        try:
            return await self.wire.exchange(method, where, head, content, send_by=call.send_by, most=most)
        except TooLateError:
            return Unknown("not sent: its send_by was over")
        except NotSentError as error:
            return Absent("REFUSED", f"not sent: {error}")
        except CutOffError as error:
            return Unknown(f"no whole answer: {error}")

    async def _ask(self, url: UrlTemplate, call: Call, most: int = MAX_RECEIPT_BYTES) -> Answer | StillUnknown:
        answer = await self._send("GET", url, call, {}, body=False, most=most)
        if isinstance(answer, Absent):
            return StillUnknown(answer.detail or "not sent")
        return StillUnknown(answer.why) if isinstance(answer, Unknown) else answer

    # what it says ---------------------------------------------------------------------------------

    def _is_stored(self, call: Call, answer: Answer) -> bool:
        """A failure that the server keeps under the key: it says so, or it answers the repeat with the very same."""
        if answer.status < 500 or self.declaration.guarantee != Guarantee.IDEMPOTENT:
            return False
        if any(answer.headers.get(name, "").strip().lower() in ("true", "1", "?1") for name in REPLAYED):
            return True
        if answer.status in (502, 503, 504):
            return False  # of something on the way, which keeps nothing
        if self.stores_failures:
            return True
        print_ = hashlib.sha256(b"%d\n" % answer.status + answer.body).hexdigest()
        before = self._failures.pop(call.key, None)
        self._failures[call.key] = print_
        if len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)
        return before == print_

    async def _look(self, call: Call) -> Found:
        """CONDITIONAL: does it still stand at the bound precondition? If not, does its history name this effect?"""
        answer = await self._ask(self.version_url, call)
        if not isinstance(answer, Answer):
            return answer
        if answer.status not in (200, 404, 410):
            return StillUnknown(answer.detail(), retry_after=answer.retry_after)
        if answer.status == 200 and answer.headers.get("fencepost-effect") == call.effect_id:
            return Happened(answer.receipt(), answer.etag)
        if (NONE_YET if answer.status != 200 else answer.etag) == call.precondition:
            return Standing()
        if self.history is None:
            return StillUnknown("it has moved on, and has no complete history", moved_on=True)
        told = await self._ask(self.history, call, MAX_HISTORY)
        if not isinstance(told, Answer):
            return told
        if told.status != 200 or told.cut:
            return StillUnknown(f"its history: {told.detail()}", retry_after=told.retry_after)
        if call.effect_id.encode() in told.body:
            return Happened({"status": told.status, "history": True}, None)
        return Gone("MOVED_ON", "its complete history lacks the effect")


_PROMISES = {
    Guarantee.IDEMPOTENT: "the server remembers Idempotency-Key for the stated retention (declared, not tried)",
    Guarantee.CONDITIONAL: "the server refuses a write whose If-Match no longer holds (declared, not tried)",
    Guarantee.RESERVATION: "only a stored reservation is confirmed; it lapses by itself (declared, not tried)",
    Guarantee.READ_ONLY: "nothing changes there, so it is simply asked again (declared)",
    Guarantee.NON_REPLAYABLE: "an unknown outcome needs a person; declare what the server offers to get more",
}


def _template(text: str | None, field: str) -> UrlTemplate | None:
    return None if text is None else UrlTemplate(text, field)


def _check_url(url: str) -> None:
    try:
        library().URL(url)
    except ValueError as error:
        raise InvalidRequest("url", f"cannot be sent to: {error}") from None
    except Exception as error:
        if type(error).__name__ != "InvalidURL":
            raise
        raise InvalidRequest("url", f"cannot be sent to: {error}") from None


def _nobody(payload: Any) -> Call:
    """A look that belongs to no effect yet."""
    return Call(
        effect_id="", task_id="", slot="", execution=0, epoch=0, generation=0, payload=payload, send_by=Deadline.none()
    )
