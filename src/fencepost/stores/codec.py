"""Records as rows: what a record's fields look like in a database's columns, and back.

Columns stand in the order of the fields (a task is its row), JSON columns hold text, contents are bytes
beside their digest. Nothing here knows a rule, or which database it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fencepost.errors import InvalidRequest
from fencepost.kernel.records import (
    Approval,
    Checkpoint,
    Content,
    Effect,
    Event,
    Execution,
    LateEvidence,
    LogEntry,
    Policy,
    Pool,
    Request,
    ResultCommit,
    Staged,
    Statement,
    Task,
    Terms,
)

Row = Sequence[Any]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_astuple = msgspec.structs.astuple
_replace = msgspec.structs.replace
_decode_policy = msgspec.json.Decoder(Policy).decode
_decode_terms = msgspec.json.Decoder(Terms).decode
_decode_executions = msgspec.json.Decoder(tuple[Execution, ...]).decode
_decode_approval = msgspec.json.Decoder(Approval).decode
_decode_evidence = msgspec.json.Decoder(tuple[LateEvidence, ...]).decode


class _SQL(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a statement."""

    sql: str
    parameters: tuple[bool | int | float | str | None, ...] = ()


_decode_statement = msgspec.json.Decoder(_SQL).decode

TASK_COLUMNS: tuple[str, ...] = Task.__struct_fields__
EVENT_COLUMNS: tuple[str, ...] = Event.__struct_fields__
LOG_COLUMNS: tuple[str, ...] = LogEntry.__struct_fields__
REQUEST_COLUMNS = ("request_id", "owner", "door", "at", "answer")
POOL_COLUMNS: tuple[str, ...] = Pool.__struct_fields__
RESULT_COLUMNS = (
    "task_id",
    "result_commit_id",
    "revision",
    "attempt_id",
    "generation",
    "result_digest",
    "commit_digest",
    "parents",
    "committed_at",
    "data",
    "content_digest",
    "is_binary",
)
STAGED_COLUMNS = ("task_id", "generation", "digest", "attempt_id", "data", "is_binary", "state", "staged_at")
CHECKPOINT_COLUMNS = ("task_id", "revision", "generation", "number", "data", "digest", "is_binary")
INPUT_COLUMNS = ("task_id", "revision", "data", "digest", "is_binary")
EFFECT_COLUMNS = (
    "task_id",
    "number",
    "effect_id",
    "pool",
    "revision",
    "node_id",
    "slot",
    "payload_digest",
    "terms",
    "state",
    "version",
    "first_prepared_at",
    "changed_at",
    "executions",
    "repeat_closed",
    "person_only",
    "absent_ground",
    "receipt",
    "receipt_digest",
    "receipt_is_binary",
    "etag",
    "approval",
    "evidence",
    "evidence_settled",
    "decided_by",
    "note",
)
PAYLOAD_COLUMNS = ("task_id", "number", "data", "digest", "is_binary")


def json_text(value: Any) -> str:
    return _encode(value).decode()


task_row: Callable[[Task], tuple[Any, ...]] = _astuple


def task(row: Row) -> Task:
    return Task(*row)


def event_row(number: int, event: Event) -> tuple[Any, ...]:
    row = _astuple(event)
    detail = row[-1]
    return (number, *row[:-1], None if detail is None else _encode(detail).decode())


def event(row: Row) -> Event:
    """From EVENT_COLUMNS, without the number."""
    detail = row[-1]
    return Event(*(*row[:-1], None if detail is None else _decode(detail)))


def log_row(number: int, entry: LogEntry) -> tuple[Any, ...]:
    detail = entry.detail
    return (
        number,
        entry.kind,
        entry.at,
        entry.pool,
        entry.task_id,
        entry.door,
        entry.outcome,
        entry.reason,
        entry.attempt,
        entry.generation,
        None if detail is None else _encode(detail).decode(),
        entry.count,
    )


def log_entry(row: Row) -> LogEntry:
    """From LOG_COLUMNS, without the number."""
    detail = row[9]
    return LogEntry(*(*row[:9], None if detail is None else _decode(detail), row[10]))


def pool_row(pool: Pool) -> tuple[Any, ...]:
    return (
        pool.name,
        pool.state_version,
        pool.epoch,
        int(pool.intake_open),
        pool.stage,
        pool.min_protocol,
        json_text(pool.policy),
    )


def pool(row: Row) -> Pool:
    return Pool(row[0], row[1], row[2], bool(row[3]), row[4], row[5], _decode_policy(row[6]))


def request_row(request: Request) -> tuple[Any, ...]:
    return (request.request_id, request.owner, request.door, request.at, _encode(request.answer).decode())


def request(row: Row) -> Request:
    return Request(row[0], row[1], row[2], row[3], _decode(row[4]))


def content(data: bytes, digest: str, is_binary: int) -> Content:
    return Content(data, digest, is_binary != 0)


def input_row(task_id: str, revision: int, content: Content) -> tuple[Any, ...]:
    return (task_id, revision, content.data, content.digest, int(content.binary))


def checkpoint_row(found: Checkpoint) -> tuple[Any, ...]:
    body = found.content
    return (found.task_id, found.revision, found.generation, found.number, body.data, body.digest, int(body.binary))


def checkpoint(row: Row) -> Checkpoint:
    return Checkpoint(row[0], row[1], row[2], row[3], content(row[4], row[5], row[6]))


def staged_row(found: Staged) -> tuple[Any, ...]:
    body = found.content
    return (
        found.task_id,
        found.generation,
        body.digest,
        found.attempt_id,
        body.data,
        int(body.binary),
        found.state,
        found.staged_at,
    )


def staged(row: Row) -> Staged:
    return Staged(row[0], row[1], row[3], content(row[4], row[2], row[5]), row[6], row[7])


def result_row(found: ResultCommit) -> tuple[Any, ...]:
    body = found.content
    return (
        found.task_id,
        found.result_commit_id,
        found.revision,
        found.attempt_id,
        found.generation,
        found.result_digest,
        found.commit_digest,
        "[]" if not found.parents else _encode(found.parents).decode(),
        found.committed_at,
        None if body is None else body.data,
        None if body is None or body.digest == found.result_digest else body.digest,
        0 if body is None else int(body.binary),
    )


def result(row: Row) -> ResultCommit:
    data = row[9]
    parents = () if row[7] == "[]" else tuple(_decode(row[7]))
    body = None if data is None else content(data, row[10] or row[5], row[11])
    return ResultCommit(*(*row[:7], parents, row[8], body))


def pruned(content: Content) -> Content:
    """What is left of a receipt whose body retention has removed: its digest, so that another one is still told apart,
    beside no bytes at all, which no JSON value is."""
    return Content(b"", content.digest)


def is_pruned(content: Content) -> bool:
    return not content.data and not content.binary


def effect_row(found: Effect) -> tuple[Any, ...]:
    receipt = found.receipt
    return (
        found.task_id,
        found.number,
        found.effect_id,
        found.pool,
        found.revision,
        found.node_id,
        found.slot,
        found.payload_digest,
        _encode(found.terms).decode(),
        int(found.state),
        found.version,
        found.first_prepared_at,
        found.changed_at,
        _encode(found.executions).decode(),
        int(found.repeat_closed),
        int(found.person_only),
        found.absent_ground,
        None if receipt is None or is_pruned(receipt) else receipt.data,
        None if receipt is None else receipt.digest,
        0 if receipt is None else int(receipt.binary),
        found.etag,
        None if found.approval is None else _encode(found.approval).decode(),
        "[]" if not found.evidence else _encode(found.evidence).decode(),
        found.evidence_settled,
        found.decided_by,
        found.note,
    )


def effect(row: Row) -> Effect:
    """From EFFECT_COLUMNS. A receipt that was pruned is `pruned`."""
    digest = row[18]
    values = (
        *row[:8],
        _decode_terms(row[8]),
        *row[9:13],
        _decode_executions(row[13]),
        row[14] != 0,
        row[15] != 0,
        row[16],
        None if digest is None else Content(b"", digest) if row[17] is None else content(row[17], digest, row[19]),
        row[20],
        None if row[21] is None else _decode_approval(row[21]),
        () if row[22] == "[]" else _decode_evidence(row[22]),
        *row[23:],
    )
    return Effect(*values)


def evidence_without_receipts(text: str) -> str:
    """What retention leaves of the column `evidence`: the digests stay."""
    return _encode([_replace(one, receipt=None) for one in _decode_evidence(text)]).decode()


def payload_row(task_id: str, number: int, content: Content) -> tuple[Any, ...]:
    return (task_id, number, content.data, content.digest, int(content.binary))


def payload(row: Row) -> Content | None:
    """From PAYLOAD_COLUMNS; None once its body was pruned."""
    return None if row[2] is None else content(row[2], row[3], row[4])


def statement(found: Statement) -> tuple[str, tuple[bool | int | float | str | None, ...]]:
    """Its SQL, and the values for its parameters in order. Raises InvalidRequest where its payload says none."""
    try:
        if found.payload.binary:
            raise msgspec.ValidationError("a statement is JSON, not bytes")
        made = _decode_statement(found.payload.data)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"statements[{found.slot!r}]",
            f'{{"sql": "...", "parameters": [...]}} with null, booleans, numbers and texts as parameters: {error}',
        ) from None
    return made.sql, made.parameters
