"""Mail by SMTP: NON_REPLAYABLE. SMTP knows no key: a mail whose last answer was lost may have been sent, and nobody
can be asked. What it does have is a line that divides exactly: nothing happens before the final dot of DATA.

| what went wrong | finding |
|---|---|
| no connection, no TLS, no login, a refused sender or recipient, a connection lost before the final dot | ABSENT |
| 4yz or 5yz in answer to the final dot: "the requested action did not occur" (RFC 5321, 4.2.1) | ABSENT |
| the connection lost, 421, nonsense or silence after the final dot | UNKNOWN: a person looks |

`Message-ID` is made of the effect id, so that whoever looks finds the mail; many servers drop a second one with the
same, but none promises it. A mail API that takes an idempotency key earns more: use `http`.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.policy
import email.utils
import ipaddress
import re
import smtplib
import socket
import ssl
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import Any, Literal, TypeVar

from fencepost.clock import to_datetime, wall_us
from fencepost.effects.asking import says
from fencepost.effects.base import Absent, Call, Checked, Deadline, Declaration, Guarantee, Happened, Unknown
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_id, check_integer, check_seconds

__all__ = ["Smtp"]

T = TypeVar("T")
FIELDS = ("from", "to", "cc", "bcc", "reply_to", "subject", "text", "html", "headers")
OURS = (
    "message-id", "date", "from", "to", "cc", "bcc", "reply-to", "subject", "sender", "mime-version", "content-type",
    "content-transfer-encoding", "fencepost-effect", "fencepost-epoch", "fencepost-generation",
)  # fmt: skip
_POLICY = email.policy.SMTP.clone(max_line_length=200)  # an effect id is one word, and is not to be folded
_DOT = re.compile(rb"^\.", re.MULTILINE)


class Smtp:
    """A mail server that takes mail for delivery.

    The payload: `to` (one address or a list; `cc`, `bcc` too), `subject`, `text` and/or `html`; `from` unless `sender`
    is set; perhaps `reply_to` and `headers`. Where one recipient is refused, nobody gets the mail.

    `security`: "starttls" (never without it), "tls", or "none", which with a password is taken for loopback alone.
    `domain` stands in `Message-ID`; without it, the sender's. `timeout` is for each step, in seconds.
    """

    def __init__(
        self,
        declaration: Declaration,
        host: str,
        *,
        port: int | None = None,
        security: Literal["starttls", "tls", "none"] = "starttls",
        user: str | None = None,
        password: str | None = None,
        sender: str | None = None,
        domain: str | None = None,
        timeout: float = 20.0,
        verify: str | None = None,
    ) -> None:
        if declaration.guarantee != Guarantee.NON_REPLAYABLE:
            raise InvalidRequest("guarantee", f"SMTP is NON_REPLAYABLE and cannot earn {declaration.guarantee}")
        if security not in ("starttls", "tls", "none"):
            raise InvalidRequest("security", f"must be starttls, tls or none, got {security!r}")
        if (user is None) != (password is None):
            raise InvalidRequest("user", "and password come together or not at all")
        check_id(host, "host")
        if security == "none" and password is not None and not _is_loopback(host):
            raise InvalidRequest("security", "a password is not sent in the clear, except to this machine itself")
        check_seconds(timeout, "timeout", above=True)
        if sender is not None:
            _addresses("sender", sender)
        if domain is not None and not _is_domain(domain):
            raise InvalidRequest("domain", f"must be a name of a domain, got {domain!r}")
        self.declaration = declaration
        self.host = host
        self.port = check_integer(port or {"starttls": 587, "tls": 465, "none": 25}[security], "port", 1, 65535)
        self.security = security
        self.user = user
        self.password = password
        self.sender = sender
        self.domain = domain
        self.timeout = timeout
        self.verify = verify

    async def bind(self, payload: Any) -> Any:
        """The payload as it is, or InvalidRequest naming the field that no mail can be made of."""
        self._message(payload, None)
        return payload

    async def same(self, bound: Any, payload: Any) -> bool:
        return False  # nothing was made up

    async def execute(self, call: Call) -> Happened | Absent | Unknown:
        message, sender, recipients = self._message(call.payload, call)
        sending = _Sending(self, call.send_by)
        return await _in_thread(lambda: sending.send(message, sender, recipients), sending.abort)

    async def check(self) -> Checked:
        """Connects, secures, logs in, and hangs up: no mail is sent."""
        sending = _Sending(self, Deadline.none())
        told = await _in_thread(sending.look, sending.abort)
        where = f"{self.host}:{self.port} ({self.security})"
        note = "an unknown outcome needs a person: SMTP cannot be asked and must not be repeated"
        return Checked(Guarantee.NON_REPLAYABLE, told is None, (where, note) if told is None else (where, told))

    def _message(self, payload: Any, call: Call | None) -> tuple[EmailMessage, str, list[str]]:
        """The mail, the envelope's sender and its recipients."""
        if not isinstance(payload, Mapping):
            raise InvalidRequest("payload", f"must be an object with `to` and `subject`, got {type(payload).__name__}")
        unknown = sorted(str(name) for name in payload.keys() - set(FIELDS))
        if unknown:
            raise InvalidRequest(f"payload.{unknown[0]}", f"is unknown; there are {', '.join(FIELDS)}")
        message = EmailMessage(policy=_POLICY)
        sender = payload.get("from", self.sender)
        if sender is None:
            raise InvalidRequest("payload.from", "is missing, and no `sender` is configured")
        [envelope_sender, *more] = _addresses("payload.from", sender)
        if more:
            raise InvalidRequest("payload.from", "must be one address")
        recipients: list[str] = []
        for field in ("to", "cc", "bcc"):
            if payload.get(field):
                recipients += _addresses(f"payload.{field}", payload[field])
                if field != "bcc":
                    message[field.title()] = _joined(payload[field])
        if not recipients:
            raise InvalidRequest("payload.to", "is missing: nobody would get it")
        message["From"] = sender
        if payload.get("reply_to"):
            _addresses("payload.reply_to", payload["reply_to"])
            message["Reply-To"] = _joined(payload["reply_to"])
        subject = _text(payload, "subject")
        _header(message, "Subject", subject or "", "payload.subject")
        for name, value in _headers(payload).items():
            _header(message, name, value, f"payload.headers.{name}")
        text, html = _text(payload, "text"), _text(payload, "html")
        if text is None and html is None:
            raise InvalidRequest("payload.text", "is missing, and so is html")
        if text is not None:
            message.set_content(text)
            if html is not None:
                message.add_alternative(html, subtype="html")
        else:
            message.set_content(html, subtype="html")
        if call is not None:
            domain = self.domain or envelope_sender.rpartition("@")[2]
            message["Message-ID"] = f"<{call.effect_id}@{domain if _is_domain(domain) else 'fencepost.invalid'}>"
            message["Date"] = email.utils.format_datetime(to_datetime(wall_us()))
            for name, value in call.marks.items():
                message[name.title()] = value
        return message, envelope_sender, list(dict.fromkeys(recipients))


class _Sending:
    """One session, in a thread. `abort` ends it from outside: the connection is cut, and the dot is never sent."""

    def __init__(self, smtp: Smtp, send_by: Deadline) -> None:
        self._smtp = smtp
        self._send_by = send_by
        self._aborted = False
        self._session: smtplib.SMTP | None = None
        self._dotted = False

    def abort(self) -> None:
        self._aborted = True
        sock = self._session.sock if self._session is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):  # it may be gone already, which is what is wanted
                sock.shutdown(socket.SHUT_RDWR)

    def look(self) -> str | None:
        """None where all is well, else what is not."""
        try:
            with self._open():
                return None
        except (OSError, smtplib.SMTPException) as error:
            return _told(error)

    def send(self, message: EmailMessage, sender: str, recipients: list[str]) -> Happened | Absent | Unknown:
        try:
            with self._open() as session:
                return self._transact(session, message, sender, recipients)
        except (OSError, smtplib.SMTPException) as error:
            if self._dotted:
                return Unknown(f"no answer to the end of the mail: {_told(error)}")
            return Absent("REFUSED", _told(error))

    def _open(self) -> smtplib.SMTP:
        smtp = self._smtp
        if smtp.security == "tls":
            session: smtplib.SMTP = smtplib.SMTP_SSL(timeout=smtp.timeout, context=self._context())
        else:
            session = smtplib.SMTP(timeout=smtp.timeout)
        self._session = session
        # `connect` alone does not tell the name that certificates are compared with.
        session._host = smtp.host  # type: ignore[attr-defined]
        try:
            code, text = session.connect(smtp.host, smtp.port)
            if code != 220:
                raise smtplib.SMTPConnectError(code, text)
            session.ehlo_or_helo_if_needed()
            if smtp.security == "starttls":
                session.starttls(context=self._context())
                session.ehlo()
            if smtp.user is not None and smtp.password is not None:
                session.login(smtp.user, smtp.password)
        except BaseException:
            session.close()
            raise
        return session

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._smtp.verify)

    def _transact(
        self, session: smtplib.SMTP, message: EmailMessage, sender: str, recipients: list[str]
    ) -> Happened | Absent | Unknown:
        utf8 = not all(address.isascii() for address in (sender, *recipients))
        if utf8 and not session.has_extn("smtputf8"):
            return Absent("REFUSED", "the server takes no addresses beyond ASCII")
        code, text = session.mail(sender, ["SMTPUTF8", "BODY=8BITMIME"] if utf8 else [])
        if code != 250:
            return self._refused(session, f"the sender {sender}", code, text)
        for recipient in recipients:
            code, text = session.rcpt(recipient)
            if code not in (250, 251):
                return self._refused(session, f"the recipient {recipient}", code, text)
        if self._too_late():
            return Unknown("not sent: its send_by was over")
        code, text = session.docmd("data")
        if code != 354:
            return self._refused(session, "the mail", code, text)
        data = _DOT.sub(b"..", message.as_bytes(policy=_POLICY.clone(utf8=utf8)))
        session.send(data if data.endswith(b"\r\n") else data + b"\r\n")
        if self._too_late():
            session.close()  # without the final dot the server has no mail
            return Unknown("not sent: its send_by was over")
        self._dotted = True
        session.send(b".\r\n")
        code, text = session.getreply()
        said = f"{code} {text.decode('utf-8', 'replace')}"
        if 200 <= code < 300:
            return Happened({"code": code, "text": said[4:], "message_id": message["Message-ID"]})
        if 400 <= code < 600 and code != 421:
            return Absent("REFUSED", f"the mail was refused: {said}")
        return Unknown(f"answered the end of the mail with {said}")

    def _too_late(self) -> bool:
        return self._send_by.expired or self._aborted

    def _refused(self, session: smtplib.SMTP, what: str, code: int, text: bytes) -> Absent:
        session.close()
        return Absent("REFUSED", f"{what} was refused: {code} {text.decode('utf-8', 'replace')}")


async def _in_thread(work: Callable[[], T], abort: Callable[[], None]) -> T:
    """`work` in a thread; where the caller is cancelled, `abort` makes it end, and nothing goes on unseen."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        abort()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


def _told(error: BaseException) -> str:
    if isinstance(error, smtplib.SMTPResponseException):
        text = error.smtp_error
        return f"{error.smtp_code} {text.decode('utf-8', 'replace') if isinstance(text, bytes) else text}"
    return says(error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_domain(text: str) -> bool:
    return text.isascii() and text.replace("-", "").replace(".", "").isalnum()


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _addresses(field: str, value: Any) -> list[str]:
    """The addresses alone, without the names, of one text or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(field, "must be an address, or a list of them")
    found: list[str] = []
    for text in texts:
        parsed = EmailMessage(policy=_POLICY)
        try:
            parsed["To"] = text
            header: Any = parsed["To"]
            addresses = [address.addr_spec for address in header.addresses]
            faulty = bool(header.defects)
        except (ValueError, IndexError, AttributeError):
            addresses, faulty = [], True
        if faulty or not addresses or not all(each.count("@") == 1 and each[0] != "@" for each in addresses):
            raise InvalidRequest(field, f"{text[:100]!r} is no address")
        found += addresses
    return found


def _text(payload: Mapping[str, Any], field: str) -> str | None:
    value = payload.get(field)
    if value is not None and type(value) is not str:
        raise InvalidRequest(f"payload.{field}", f"must be text, got {type(value).__name__}")
    return value


def _headers(payload: Mapping[str, Any]) -> dict[str, str]:
    headers = payload.get("headers", {})
    if not isinstance(headers, Mapping):
        raise InvalidRequest("payload.headers", "must be an object of texts")
    for name, value in headers.items():
        if type(name) is not str or type(value) is not str or not name.replace("-", "").isalnum() or not name.isascii():
            raise InvalidRequest("payload.headers", f"{name!r} is no header with a text")
        if name.lower() in OURS:
            raise InvalidRequest(f"payload.headers.{name}", "is set for every mail, and cannot be set here")
    return dict(headers)


def _header(message: EmailMessage, name: str, value: str, field: str) -> None:
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in value):
        raise InvalidRequest(field, "must be one line, without control characters")
    try:
        message[name] = value
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from None
