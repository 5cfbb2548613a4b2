"""What the commands of effects must look like before they are queued: ids, times, findings, sizes."""

from __future__ import annotations

from typing import Any

from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules as rules
from fencepost.kernel.commands import check_id, check_integer
from fencepost.kernel.digests import MAX_CONTENT_BYTES
from fencepost.kernel.records import Content, Guarantee, Terms

_MAX_US = round(k.MAX_SECONDS * 1_000_000)


def check_terms(terms: Terms) -> Terms:
    """Refuses declarations that promise what cannot be kept."""
    check_id(terms.downstream, "downstream")
    if terms.guarantee not in Guarantee.__members__:
        raise InvalidRequest("guarantee", f"must be one of {', '.join(Guarantee)}, got {terms.guarantee!r}")
    check_integer(terms.send_window_us, "send_window", 1, _MAX_US)
    check_integer(terms.settle_time_us, "settle_time", 0, _MAX_US)
    check_integer(terms.retention_us, "retention", 0, _MAX_US)
    check_integer(terms.margin_us, "margin", 0, _MAX_US)
    if type(terms.approval) is not bool:
        raise InvalidRequest("approval", f"must be True or False, got {type(terms.approval).__name__}")
    margin = max(terms.margin_us, terms.send_window_us)
    if terms.guarantee == Guarantee.IDEMPOTENT and terms.retention_us <= margin:
        raise InvalidRequest(
            "retention", f"must exceed the margin of {margin / 1_000_000:g} seconds (at least the send window)"
        )
    return terms


def _content(content: Any, field: str, most: int = MAX_CONTENT_BYTES) -> None:
    if not isinstance(content, Content):
        raise InvalidRequest(field, "must be encoded content")
    if len(content.data) > most:
        raise InvalidRequest(field, f"{len(content.data)} bytes is over the limit of {most}")


def _prepare(command: k.Prepare) -> None:
    check_id(command.slot, "slot")
    if command.node_id is not None:
        check_id(command.node_id, "node_id")
    _content(command.payload, "payload")
    check_terms(command.terms)
    if command.precondition is not None:
        check_id(command.precondition, "precondition")
    if type(command.repeat) is not bool:
        raise InvalidRequest("repeat", f"must be True or False, got {type(command.repeat).__name__}")


def _named(command: Any) -> None:
    check_id(command.effect_id, "effect_id")
    _note(getattr(command, "note", None), "note")


def _note(text: Any, field: str) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text, got {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, "lone surrogates are not allowed") from None
    if "\0" in text:
        raise InvalidRequest(field, "U+0000 is not allowed")
    if size > k.MAX_NOTE_BYTES:
        raise InvalidRequest(field, f"{size} bytes is over the limit of {k.MAX_NOTE_BYTES}")


def _receipt(command: Any) -> None:
    if command.finding != "HAPPENED" and (command.receipt is not None or command.etag is not None):
        raise InvalidRequest("receipt", "comes with HAPPENED only")
    if command.receipt is not None:
        _content(command.receipt, "receipt", k.MAX_RECEIPT_BYTES)
    if command.etag is not None:
        check_id(command.etag, "etag")


def _finding(command: Any, allowed: tuple[str, ...]) -> None:
    if command.finding not in allowed:
        raise InvalidRequest("finding", f"must be one of {', '.join(allowed)}, got {command.finding!r}")


def _reserve(command: k.Reserve) -> None:
    _named(command)
    check_integer(command.execution, "execution", 1)
    check_id(command.reservation_id, "reservation_id")


def _settle(command: k.Settle) -> None:
    _named(command)
    check_integer(command.execution, "execution", 1)
    _finding(command, ("HAPPENED", "ABSENT", "UNKNOWN"))
    _receipt(command)
    if command.finding == "ABSENT" and command.why not in rules.ABSENT_REASONS:
        raise InvalidRequest("why", f"of ABSENT must be one of {', '.join(rules.ABSENT_REASONS)}, got {command.why!r}")
    _note(command.why, "why")


def _reconcile(command: k.Reconcile) -> None:
    _named(command)
    check_integer(command.execution, "execution", 1)
    check_integer(command.asked_at, "asked_at", 0)
    _finding(command, ("HAPPENED", "ABSENT", "STILL_UNKNOWN"))
    _receipt(command)
    if command.ground is not None and command.ground not in rules.GROUNDS:
        raise InvalidRequest("ground", f"must be one of {', '.join(rules.GROUNDS)}, got {command.ground!r}")
    if command.finding == "ABSENT" and command.ground is None:
        raise InvalidRequest("ground", f"of ABSENT must be one of {', '.join(rules.GROUNDS)}")


def _evidence(command: k.Evidence) -> None:
    _named(command)
    check_integer(command.execution, "execution", 1)
    if command.receipt is not None:
        _content(command.receipt, "receipt", k.MAX_RECEIPT_BYTES)
    if command.etag is not None:
        check_id(command.etag, "etag")


def _decide(command: Any) -> None:
    check_id(command.task_id, "task_id")
    _named(command)
    check_integer(command.expected_version, "expected_version", 1)
    if command.epoch is not None:
        check_integer(command.epoch, "epoch", 0)
    if not command.who:
        raise InvalidRequest("who", "must say who decides")
    check_id(command.who, "who")
    if hasattr(command, "payload_digest"):
        check_id(command.payload_digest, "payload_digest")


def _resolve(command: k.Resolve) -> None:
    _decide(command)
    _finding(command, ("HAPPENED", "ABSENT", "ABANDONED"))
    _receipt(command)
    check_integer(command.asked_at, "asked_at", 0)
    check_integer(command.late_evidence, "late_evidence", 0)
    if not command.evidence:
        raise InvalidRequest("evidence", "must say what the finding rests on")
    _note(command.evidence, "evidence")
    if command.ground is not None and command.ground not in rules.GROUNDS:
        raise InvalidRequest("ground", f"must be one of {', '.join(rules.GROUNDS)}, got {command.ground!r}")


CHECKS: dict[type, Any] = {
    k.Prepare: _prepare,
    k.Reserve: _reserve,
    k.Settle: _settle,
    k.Reconcile: _reconcile,
    k.Withdraw: _named,
    k.Evidence: _evidence,
    k.Approve: _decide,
    k.Deny: _decide,
    k.Resolve: _resolve,
}
