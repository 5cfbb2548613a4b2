"""The fast way through Apply: claims, renewals, checkpoints, commits and effects of one task each, and claims of many
tasks, as one autocommit statement.

Sets of one shape, decided at one time on one pool's record, are a group. What all of a group have in common travels
once, what differs as one array a column, and what the journal and the result repeat of the task is taken from the
task's row. Each group is one UPDATE guarded by the version of each task, and by the pool's record under a shared lock
which a raise waits for; everything else is inserted from what that UPDATE returns. A claim of many tasks is a group by
itself: it locks its tasks first, and updates all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from fencepost.kernel.records import Event, LogEntry, Task
from fencepost.kernel.writes import WriteSet
from fencepost.stores import codec
from fencepost.stores import postgres_swift_effects as effects
from fencepost.stores.postgres_apply import EVENTS, FREE_LOG, LOG, locked_pools, log_statement, numbering, settle
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import Arrays, listed, type_of
from fencepost.stores.postgres_texts import Texts

# More groups than these in one batch are written one statement after the other; each has its range of numbers.
MOST_GROUPS = 4
_RANGE = 1 << 16

_encode = msgspec.json.Encoder().encode


class Shape:
    """What sets of one kind have in common (`steady` columns of the task) and what differs (`varying`)."""

    def __init__(
        self, family: str, made: set[str], steady: tuple[str, ...], varying: tuple[str, ...], speaker: str = ""
    ) -> None:
        self.family = family
        self.made = made
        self.steady = steady
        self.varying = varying
        self.speaker = speaker  # the task's column that a request's owner stands in
        self.of_steady: Callable[[Task], Any] = attrgetter(*steady) if len(steady) > 1 else lambda task: ()
        one = attrgetter(*varying)
        self.of_varying: Callable[[Task], tuple[Any, ...]] = one if len(varying) > 1 else lambda task: (one(task),)


_BEAT = ("lease_expires_at", "checkpoint_number", "checkpoint_generation")
CLAIM = Shape(
    "claim",
    {"requests"},
    ("state", "scheduler_epoch", "claimed_at", "checkpoint_number", "end", "park_reason"),
    ("claim_generation", "attempt_id", "owner_id", "lease_expires_at", "charged_attempts"),
    "owner_id",
)
# One request that claims several tasks: everything or nothing.
CLAIM_MANY = Shape("claim", {"requests"}, CLAIM.steady, CLAIM.varying, "owner_id")
RENEW = Shape("renew", {"requests"}, (), _BEAT, "attempt_id")
CHECKPOINT = Shape("renew", {"requests", "checkpoints"}, (), _BEAT, "attempt_id")
_END = ("state", "lease_expires_at", "end")
COMMIT = Shape("commit", {"results", "discard_rivals"}, _END, ("result_commit_id",))
# With what the attempt has used, which a worker's commit says.
COMMIT_USED = Shape("commit", {"results", "discard_rivals", "log"}, _END, ("result_commit_id",))
# One effect of a task: its first prepare; what became of it; and the same under a request id of its own.
EFFECT_NEW = Shape("effect", {"effects", "payloads"}, (), ("effects",))
EFFECT_MOVED = Shape("effect", {"effects"}, (), ("effects",))
EFFECT_SAID = Shape("effect", {"effects", "requests"}, (), ("effects",), "attempt_id")
_OF_USAGE = ("attempt", "used")
_OF_RESULT = ("result_digest", "commit_digest", "data", "content_digest")
# What comes with a request.
_BESIDE = {CHECKPOINT: ("data", "digest"), EFFECT_SAID: effects.MOVED}
# What is read off the updated task for the journal and the result.
_TOLD = (
    "task_id",
    "state_version",
    "scheduler_epoch",
    "claim_generation",
    "cancel_generation",
    "revision",
    "attempt_id",
    "owner_id",
    "state",
    "result_commit_id",
    "checkpoint_number",
)


class Group:
    """Sets of one shape that share `key`."""

    __slots__ = ("key", "rows", "sets", "shape")

    def __init__(self, shape: Shape, key: tuple[Any, ...]) -> None:
        self.shape = shape
        self.key = key  # pool, epoch, pool_version, at, door, name, compared, the shape's own, the steady columns
        self.sets: list[WriteSet] = []
        self.rows: list[tuple[Any, ...]] = []


def sort(sets: Sequence[WriteSet]) -> tuple[list[Group], list[WriteSet]]:
    """The groups, and the sets that have no shape."""
    groups: dict[tuple[Any, ...], Group] = {}
    others = [writes for writes in sets if not _place(writes, groups)]
    for group in groups.values():
        if len(group.rows) > 1:  # every batch takes its locks in the same order
            order = sorted(range(len(group.rows)), key=[row[0] for row in group.rows].__getitem__)
            if group.shape is not CLAIM_MANY:
                group.sets = [group.sets[i] for i in order]
            group.rows = [group.rows[i] for i in order]
    return list(groups.values()), others


def _place(writes: WriteSet, groups: dict[tuple[Any, ...], Group]) -> bool:
    """Put the set into its group; False where it has none."""
    if writes.epoch is None or writes.pool_write is not None or len(writes.tasks) != len(writes.events):
        return False
    if len(writes.tasks) > 1:
        return _place_many(writes, groups)
    if not writes.tasks:
        return False
    write = writes.tasks[0]
    task, event, family = write.task, writes.events[0], write.family
    made = writes.made
    if family == "claim":
        shape = CLAIM
    elif family == "commit":
        shape = COMMIT_USED if "log" in made else COMMIT
    elif family == "renew":
        shape = CHECKPOINT if "checkpoints" in made else RENEW
    elif family == "effect":
        shape = EFFECT_NEW if "payloads" in made else EFFECT_SAID if "requests" in made else EFFECT_MOVED
    else:
        return False
    version = write.expected_version + 1
    if (
        version == 1
        or version != task.state_version
        or len(made) != len(shape.made)
        or not shape.made.issuperset(made)
        or not _tells(event, task)
    ):
        return False
    detail = None if event.detail is None else _encode(event.detail).decode()
    more: tuple[Any, ...] = ()
    own: tuple[Any, ...] = ()
    if family == "commit":
        result = writes.results[0]
        if (
            len(writes.results) != 1
            or writes.discard_rivals != [(task.task_id, task.claim_generation, result.result_digest)]
            or (result.task_id, result.revision, result.generation) != event_key(task)
            or result.attempt_id != task.attempt_id
            or result.result_commit_id != task.result_commit_id
            or result.committed_at != event.at
        ):
            return False
        body = result.content
        data, content_digest, own = None, None, (bool(result.parents), 0)
        if body is not None:
            data = body.data
            content_digest = None if body.digest == result.result_digest else body.digest
            own = (bool(result.parents), int(body.binary))
        used = writes.log[0] if shape is COMMIT_USED else None
        if used is not None:
            said = (used.at, used.pool, used.task_id, used.reason, used.generation, used.count)
            if len(writes.log) != 1 or said != (event.at, writes.pool, task.task_id, None, task.claim_generation, 1):
                return False
            own = (*own, used.kind, used.door, used.outcome)
        more = (result.result_digest, result.commit_digest, data, content_digest)
        if result.parents:
            more = (*more, codec.json_text(result.parents))
        if used is not None:
            more = (*more, used.attempt, None if used.detail is None else _encode(used.detail).decode())
    elif "requests" in made:
        request = writes.requests[0]
        if (
            len(writes.requests) != 1
            or request.at != event.at
            or request.door != event.door
            or request.owner != (task.owner_id if shape is CLAIM else task.attempt_id)
        ):
            return False
        more = (request.request_id, _encode(request.answer).decode())
        if shape is CHECKPOINT:
            found = writes.checkpoints[0]
            expected = (*event_key(task), task.checkpoint_number)
            if (found.task_id, found.revision, found.generation, found.number) != expected or len(
                writes.checkpoints
            ) != 1:
                return False
            own = (int(found.content.binary),)
            more = (*more, found.content.data, found.content.digest)
    if family == "effect":
        placed = (effects.place_new if shape is EFFECT_NEW else effects.place_moved)(writes, task, event)
        if placed is None:
            return False
        own, more = placed[0], (*more, *placed[1])
    key = (
        shape,
        writes.pool,
        writes.epoch,
        writes.pool_version,
        event.at,
        event.door,
        event.name,
        event.compared,
        own,
        shape.of_steady(task),
    )
    group = groups.get(key)
    if group is None:
        group = groups[key] = Group(shape, key[1:])
    group.sets.append(writes)
    group.rows.append((task.task_id, write.expected_version, *shape.of_varying(task), detail, *more))
    return True


def _place_many(writes: WriteSet, groups: dict[tuple[Any, ...], Group]) -> bool:
    """The same for a claim of several tasks, which becomes a group by itself."""
    if writes.made != ("requests",) or len(writes.requests) != 1:
        return False
    request, first, steady = writes.requests[0], writes.events[0], CLAIM_MANY.of_steady(writes.tasks[0].task)
    said = (first.at, first.door, first.name, first.compared)
    if (request.at, request.door) != said[:2]:
        return False
    rows: list[tuple[Any, ...]] = []
    for write, event in zip(writes.tasks, writes.events, strict=True):
        task, version = write.task, write.expected_version + 1
        if (
            write.family != "claim"
            or version == 1
            or version != task.state_version
            or not _tells(event, task)
            or (event.at, event.door, event.name, event.compared) != said
            or task.owner_id != request.owner
            or CLAIM_MANY.of_steady(task) != steady
        ):
            return False
        detail = None if event.detail is None else _encode(event.detail).decode()
        rows.append((task.task_id, write.expected_version, *CLAIM_MANY.of_varying(task), detail))
    own = (request.request_id, _encode(request.answer).decode(), request.owner)
    key = (writes.pool, writes.epoch, writes.pool_version, *said, own, steady)
    group = groups[CLAIM_MANY, request.request_id] = Group(CLAIM_MANY, key)
    group.sets.append(writes)
    group.rows = rows
    return True


def _tells(event: Event, task: Task) -> bool:
    """Whether all that the event repeats of the task can be read off the task's row."""
    return (
        event.task_id,
        event.state_version,
        event.epoch,
        event.generation,
        event.cancel_generation,
        event.revision,
        event.attempt_id,
        event.state,
    ) == (
        task.task_id,
        task.state_version,
        task.scheduler_epoch,
        task.claim_generation,
        task.cancel_generation,
        task.revision,
        task.attempt_id,
        task.state,
    )


def event_key(task: Task) -> tuple[Any, ...]:
    return (task.task_id, task.revision, task.claim_generation)


def statement(groups: Sequence[Group], log: Sequence[LogEntry], base: int) -> tuple[str, list[Any]]:
    """One row: for each group, the places (counted from 1) of the sets that were won."""
    arrays = Texts()
    pools = arrays.one(sorted({group.key[0] for group in groups}), "text[]")
    parts = [f"p AS MATERIALIZED ({locked_pools(pools, False)})", numbering(arrays.one(base, "int8"))]
    for number, group in enumerate(groups):
        parts += _parts(group, number, arrays)
    if log:
        rows = [codec.log_row(0, entry)[1:] for entry in log]
        parts.append(f"fl AS ({log_statement(arrays, rows, FREE_LOG)})")
    answer = ", ".join(f"(SELECT array_agg(place) FROM u{number})" for number in range(len(groups)))
    return f"WITH {', '.join(parts)} SELECT {answer}", arrays.values


def _parts(group: Group, number: int, arrays: Arrays) -> list[str]:
    shape = group.shape
    pool, epoch, pool_version, at, door, name, compared, own, steady = group.key
    names: list[str] = ["task_id", "expected", *shape.varying, "detail"]
    extra: list[str]
    committing, many = shape.family == "commit", shape is CLAIM_MANY
    if many:
        extra = []
    elif committing:
        extra = [*_OF_RESULT, *(("parents",) if own[0] else ()), *(_OF_USAGE if shape is COMMIT_USED else ())]
    elif shape is EFFECT_NEW or shape is EFFECT_MOVED:
        extra = [*(effects.NEW if shape is EFFECT_NEW else effects.MOVED)]
    else:
        extra = ["request_id", "answer", *_BESIDE.get(shape, ())]
    names += extra
    changes = [f'"{column}" = v."{column}"' for column in shape.varying]
    changes += (
        f'"{column}" = {arrays.one(value, type_of(column))}' for column, value in zip(shape.steady, steady, strict=True)
    )
    u = f"u{number}"
    at_ = arrays.one(at, "int8")
    door_ = arrays.one(door, "text")
    source = f"{arrays.unnest(names, group.rows)} WITH ORDINALITY v({listed(names)}, place)"
    stands = "t.task_id = v.task_id AND t.state_version = v.expected"
    if committing:
        # A statement that waited for a row goes on with the row as it is by then, and sees all others as they were. So
        # a commit would miss what was staged meanwhile. Staging moves the row (see postgres_apply): the swap is lost.
        stands += " AND t.xmin = (SELECT o.xmin FROM fencepost.task o WHERE o.task_id = t.task_id)"
    pool_ = arrays.one(pool, "text")
    judged = (
        f"EXISTS (SELECT 1 FROM p WHERE p.name = {pool_} AND p.epoch = {arrays.one(epoch, 'int8')} "
        f"AND p.state_version = coalesce({arrays.one(pool_version, 'int8')}, p.state_version))"
    )
    parts: list[str] = []
    if many:
        # Locked, a task stays at its version until this transaction ends; the pool's record is locked before.
        parts.append(
            f"k{number} AS MATERIALIZED (SELECT t.task_id FROM {arrays.unnest(names[:2], [r[:2] for r in group.rows])} "
            f"v(task_id, expected) JOIN fencepost.task t ON {stands} WHERE {judged} FOR UPDATE OF t)"
        )
        judged = f"(SELECT count(*) FROM k{number}) = {arrays.one(len(group.rows), 'int8')}"
    told = [f't."{name}"' for name in _TOLD] + [f'v."{name}"' for name in extra]
    update = (
        f"{u} AS (UPDATE fencepost.task t SET state_version = v.expected + 1, {', '.join(changes)} FROM {source} "
        f"WHERE {stands} AND {judged} RETURNING v.place, v.detail, {', '.join(told)})"
    )
    event = (
        f"e{number} AS (INSERT INTO fencepost.event (number, {listed(codec.EVENT_COLUMNS)}) "
        f"SELECT n.base + {EVENTS + number * _RANGE} + u.place, u.task_id, u.state_version, {at_}, {door_}, "
        f"{arrays.one(name, 'text')}, u.scheduler_epoch, u.claim_generation, u.cancel_generation, u.revision, "
        f"u.attempt_id, {arrays.one(compared, 'int4')}, u.state, u.detail FROM n, {u} u)"
    )
    parts += [update, event]
    if committing:
        parents = "u.parents" if own[0] else "'[]'"
        parts.append(
            f"r{number} AS (INSERT INTO fencepost.result ({listed(codec.RESULT_COLUMNS)}) SELECT u.task_id, "
            "u.result_commit_id, u.revision, u.attempt_id, u.claim_generation, u.result_digest, u.commit_digest, "
            f"{parents}, {at_}, u.data, u.content_digest, {arrays.one(own[1], 'int2')} FROM {u} u)"
        )
        source = f"(SELECT task_id, claim_generation AS generation, result_digest AS digest FROM {u}) x"
        parts.append(f"s{number} AS ({settle(source)})")
    if shape is COMMIT_USED:
        kind, log_door, outcome = (arrays.one(value, "text") for value in own[2:])
        parts.append(
            f"l{number} AS (INSERT INTO fencepost.log (number, {listed(codec.LOG_COLUMNS)}) "
            f"SELECT n.base + {LOG + number * _RANGE} + u.place, {kind}, {at_}, {pool_}, u.task_id, "
            f"{log_door}, {outcome}, NULL, u.attempt, u.claim_generation, u.used, 1 FROM n, {u} u)"
        )
    if many:
        request_id, answer, owner = (arrays.one(value, "text") for value in own)
        parts.append(
            f"q{number} AS (INSERT INTO fencepost.request ({listed(codec.REQUEST_COLUMNS)}) "
            f"SELECT {request_id}, {owner}, {door_}, {at_}, {answer} FROM {u} u WHERE u.place = 1)"
        )
    elif "requests" in shape.made:
        # No ON CONFLICT: an id that was used in the meantime fails the batch, and the other way sorts it out.
        parts.append(
            f"q{number} AS (INSERT INTO fencepost.request ({listed(codec.REQUEST_COLUMNS)}) SELECT "
            f'u.request_id, u."{shape.speaker}", {door_}, {at_}, u.answer FROM {u} u)'
        )
    if shape is EFFECT_NEW:
        parts += effects.insert_new(number, u, at_, pool_, own, arrays)
    elif shape.family == "effect":
        parts += effects.update_moved(number, u, at_, own, arrays)
    if shape is CHECKPOINT:
        columns = codec.CHECKPOINT_COLUMNS
        parts.append(
            f"c{number} AS (INSERT INTO fencepost.checkpoint ({listed(columns)}) SELECT u.task_id, u.revision, "
            f"u.claim_generation, u.checkpoint_number, u.data, u.digest, {arrays.one(own[0], 'int2')} FROM {u} u "
            "ON CONFLICT (task_id) DO UPDATE SET "
            + ", ".join(f'"{column}" = excluded."{column}"' for column in columns[1:])
            + ")"
        )
    return parts


async def apply_swift(con: Connection, groups: Sequence[Group], log: Sequence[LogEntry], base: int) -> list[WriteSet]:
    """The sets that were won. Raises UniqueViolationError, with nothing written, where a request id was used in the
    meantime."""
    text, values = statement(groups, log, base)
    row = await con.fetchrow(text, *values)
    won: list[WriteSet] = []
    for group, places in zip(groups, row, strict=True):
        if group.shape is CLAIM_MANY:
            won += group.sets if places else ()
        else:
            won += [group.sets[place - 1] for place in places or ()]
    return won
