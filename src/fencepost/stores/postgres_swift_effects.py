"""Effects on the fast way: one of a task's is prepared for the first time, or moves on.

What is bound at the first prepare travels once, with it. An effect that waits for an approval, or beside which
somebody's late report stands, is rare, and takes the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fencepost.kernel.records import Effect, Event, Task
from fencepost.kernel.writes import WriteSet
from fencepost.stores import codec
from fencepost.stores.postgres_rows import Arrays, listed

# What differs from effect to effect, each an array; the rest is common to a group, or stands in the task's row.
NEW = (
    *("number", "effect_id", "node_id", "slot", "payload_digest", "terms", "executions"),
    *("data", "is_binary"),
)
MOVED = (
    *("number", "version", "first_prepared_at", "executions"),
    *("receipt", "receipt_digest", "receipt_is_binary", "etag", "decided_by", "note"),
)

Placed = tuple[tuple[Any, ...], tuple[Any, ...]]

_terms_text = lru_cache(1024)(codec.json_text)


def place_new(writes: WriteSet, task: Task, event: Event) -> Placed | None:
    """What a group has in common, and what is this set's own, in the order of NEW; None where it has no group."""
    effect, payloads = _only(writes, task, event), writes.payloads
    if effect is None or len(payloads) != 1:
        return None
    task_id, number, payload = payloads[0]
    if (
        (task_id, number, payload.digest) != (effect.task_id, effect.number, effect.payload_digest)
        or (effect.pool, effect.revision, effect.version) != (task.pool, task.revision, 1)
        or effect.first_prepared_at != event.at
        or effect.receipt is not None
        or any((effect.repeat_closed, effect.person_only, effect.absent_ground, effect.etag))
        or not (effect.decided_by is None and effect.note is None)
    ):
        return None
    more = (
        effect.number,
        effect.effect_id,
        effect.node_id,
        effect.slot,
        effect.payload_digest,
        _terms_text(effect.terms),
        codec.json_text(effect.executions),
        payload.data,
        int(payload.binary),
    )
    return (int(effect.state),), more


def place_moved(writes: WriteSet, task: Task, event: Event) -> Placed | None:
    """The same, in the order of MOVED."""
    effect = _only(writes, task, event)
    if effect is None:
        return None
    receipt = effect.receipt
    data = None if receipt is None or codec.is_pruned(receipt) else receipt.data
    more = (
        effect.number,
        effect.version,
        effect.first_prepared_at,
        codec.json_text(effect.executions),
        data,
        None if receipt is None else receipt.digest,
        0 if receipt is None else int(receipt.binary),
        effect.etag,
        effect.decided_by,
        effect.note,
    )
    return (int(effect.state), int(effect.repeat_closed), int(effect.person_only), effect.absent_ground), more


def _only(writes: WriteSet, task: Task, event: Event) -> Effect | None:
    effects = writes.effects
    if len(effects) != 1:
        return None
    effect: Effect = effects[0]
    if (effect.task_id, effect.changed_at) != (task.task_id, event.at):
        return None
    if effect.approval is not None or effect.evidence or effect.evidence_settled:
        return None
    return effect


def insert_new(number: int, u: str, at: str, pool: str, own: Sequence[Any], arrays: Arrays) -> list[str]:
    """Parts of the statement, from the tasks that `u` returns. `at` and `pool` are parameters of it already."""
    values = {
        **{column: f'u."{column}"' for column in ("task_id", "revision", *NEW)},
        "pool": pool,
        "state": arrays.one(own[0], "int2"),
        "version": "1",
        "first_prepared_at": at,
        "changed_at": at,
        "repeat_closed": "0",
        "person_only": "0",
        "receipt_is_binary": "0",
        "evidence": "'[]'",
        "evidence_settled": "0",
    }
    columns = [column for column in codec.EFFECT_COLUMNS if column in values]  # the others are NULL
    effect = (
        f"f{number} AS (INSERT INTO fencepost.effect ({listed(columns)}) "
        f"SELECT {', '.join(values[column] for column in columns)} FROM {u} u)"
    )
    payload = (
        f"y{number} AS (INSERT INTO fencepost.effect_payload ({listed(codec.PAYLOAD_COLUMNS)}) "
        f"SELECT u.task_id, u.number, u.data, u.payload_digest, u.is_binary FROM {u} u)"
    )
    return [effect, payload]


def update_moved(number: int, u: str, at: str, own: Sequence[Any], arrays: Arrays) -> list[str]:
    state, repeat_closed, person_only, absent_ground = own
    values = {
        **{column: f'u."{column}"' for column in MOVED if column != "number"},
        "state": arrays.one(state, "int2"),
        "changed_at": at,
        "repeat_closed": arrays.one(repeat_closed, "int2"),
        "person_only": arrays.one(person_only, "int2"),
        "absent_ground": arrays.one(absent_ground, "text"),
        "approval": "NULL",
        "evidence": "'[]'",
        "evidence_settled": "0",
    }
    changes = ", ".join(f"{column} = {value}" for column, value in values.items())
    effect = (
        f"f{number} AS (UPDATE fencepost.effect f SET {changes} FROM {u} u "
        "WHERE f.task_id = u.task_id AND f.number = u.number)"
    )
    return [effect]
