"""Scan on PostgreSQL: candidates in claim order, and no step spent on what nobody asked for.

The ready scan goes as SQLite's does (see sqlite_ready): of each lane, which is a queue and a kind, the lowest priority;
of all lanes, the lowest of these; of the lanes that have it, what is due, in order. Two things are different here:

- Several services look at the same head at once, and all but one of them lose. Who loses takes a *share* of the tasks
  (by a hash of their ids) of its own from then on. Shares go round by the store's clock, so that every task comes into
  somebody's share soon, and whoever finds too little in its own looks at all.
- A long transaction anywhere on the server keeps dead index entries in front of the living, and a look at the head
  walks over all of them. Where that takes long, the next looks go on from where the last one ended, for a multiple of
  that time. Nothing is ever said to be empty without a look at the head.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from fencepost.clock import elapsed
from fencepost.kernel.records import Content, Task
from fencepost.kernel.writes import Snapshot
from fencepost.stores import codec
from fencepost.stores.base import Scan
from fencepost.stores.postgres_ahead import Ahead
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_load import CLOCK
from fencepost.stores.postgres_rows import listed

_TASK = listed(codec.TASK_COLUMNS, "t.")
_READY = "FROM fencepost.task t WHERE t.pool = $1 AND t.state = 1"
_BODY = f"NULL::bigint, NULL::int2, NULL::bool, {_TASK}, i.data, i.digest, i.is_binary"
_NOTHING = ", ".join(["NULL"] * (len(codec.TASK_COLUMNS) + 3))
_FLOOR = -(1 << 15)

# A look at the head that took so many seconds, and so many for each task found, was slow. After two in a row the
# next one waits until so many times as long has passed.
SLOW = 0.003
SLOW_A_TASK = 0.00002
_AGAIN = 20.0
# A search for lapsed leases that finds none and is slow waits as well, but never longer than this: somebody's work
# stands still meanwhile.
LAPSED_AGAIN = 1.0
# How long a share belongs to one service, in microseconds of the store's clock.
TURN_US = 200_000
MOST_SHARES = 64
# Every so often, in seconds, a service that lost nothing tries with larger shares.
TRY_LARGER = 2.0


class Share:
    """Which part of the ready tasks this service takes first: all of them, as long as it loses to nobody."""

    def __init__(self) -> None:
        self.of = 1  # a power of two
        self.mine = 0
        self._before = (1, 0)
        self._changed = elapsed()
        self._trying = False
        self.losses = 0

    @property
    def alone(self) -> bool:
        """As far as is known, nobody else takes tasks here."""
        return self.of == 1 and not self._trying

    def claimed(self, tried: int, lost: int) -> None:
        """What became of a batch's claims."""
        now = elapsed()
        self.losses += lost
        if lost * 16 > tried:
            if self._trying:  # it had been enough before
                self.of, self.mine = self._before
            elif self.of == 1 or now - self._changed < 4 * TURN_US / 1e6:
                self.of = min(2 * self.of, MOST_SHARES)
                self.mine = random.randrange(self.of)
            else:
                self.mine = random.randrange(self.of)
            self._trying, self._changed = False, now
        elif self.of > 1 and tried and now - self._changed > TRY_LARGER * (0.5 + random.random()):
            self._before = (self.of, self.mine)
            self.of //= 2
            self.mine %= self.of
            self._trying, self._changed = True, now
        elif self._trying and now - self._changed > TRY_LARGER / 4:
            self._trying = False


class _Head:
    """Where the last look ended, for one question."""

    __slots__ = ("after", "again_at", "kinds", "priority", "queues")

    def __init__(self, again_at: float, last: Task, found: Sequence[Task]) -> None:
        self.again_at = again_at
        lanes = dict.fromkeys((task.queue, task.kind) for task in found if task.priority == last.priority)
        self.queues = [queue for queue, _ in lanes]
        self.kinds = [kind for _, kind in lanes]
        self.priority = last.priority
        self.after = (last.available_at, last.task_id)


class Scanner:
    """Scans, by one clock. Remembers where it was, and what share it takes."""

    def __init__(self, clock: str = CLOCK) -> None:
        self.share = Share()
        self._ahead = Ahead()
        self._losses = 0
        self._heads: dict[Any, _Head] = {}
        self._slow = 0
        self._lapsed_slow: dict[Any, tuple[int, float]] = {}  # for one question: how often in a row, and until when
        self._clock = f"SELECT {clock}"
        named = "SELECT w.queue, w.kind FROM unnest($2::text[], $3::text[]) w(queue, kind)"
        walked = f"""
SELECT w.queue, (SELECT t.kind {_READY} AND t.queue = w.queue ORDER BY t.kind LIMIT 1)
FROM unnest($2::text[]) w(queue) WHERE $3::text[] IS NULL
UNION ALL
SELECT k.queue, (SELECT t.kind {_READY} AND t.queue = k.queue AND t.kind > k.kind ORDER BY t.kind LIMIT 1)
FROM k WHERE k.kind IS NOT NULL"""
        part = f"""AND (hashtext(t.task_id) & ($6::int - 1)) =
((($7::int + (SELECT now FROM c) / {TURN_US}) % $6::int)::int)"""
        self._one_lane = [_one_lane(clock, ""), _one_lane(clock, part)]
        self._named = [_lanes(clock, named, ""), _lanes(clock, named, part)]
        self._any_kind = [_lanes(clock, walked, ""), _lanes(clock, walked, part)]
        self._further = _further(clock)
        self._queues = f"""
WITH RECURSIVE q(queue) AS (
    (SELECT t.queue {_READY} ORDER BY t.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT t.queue {_READY} AND t.queue > q.queue ORDER BY t.queue LIMIT 1) FROM q WHERE q.queue IS NOT NULL
)
SELECT queue FROM q WHERE queue IS NOT NULL"""
        # What another transaction has moved, and has not ended yet, is left alone: a caller that commits together with
        # rows of its own, and sleeps past its lease, must not make everybody wait who would take its task back.
        self._lapsed = f"""
WITH c AS MATERIALIZED (SELECT {clock} AS now)
SELECT (SELECT now FROM c), NULL::int2, NULL::bool, {_NOTHING}
UNION ALL
SELECT * FROM (
SELECT {_BODY} FROM fencepost.task t LEFT JOIN fencepost.input i ON i.task_id = t.task_id
WHERE t.pool = $1 AND t.state = 2 AND (t.lease_expires_at <= (SELECT now FROM c) - $2::bigint OR t.scheduler_epoch < $3)
AND ($4::text[] IS NULL OR t.queue = ANY($4)) AND ($5::text[] IS NULL OR t.kind = ANY($5))
ORDER BY t.priority, t.available_at, t.task_id LIMIT $6 FOR SHARE OF t SKIP LOCKED) t"""

    async def scan(self, con: Connection, step: Scan) -> list[Task]:
        queues = None if step.queues is None else list(dict.fromkeys(step.queues))
        kinds = None if step.kinds is None else list(dict.fromkeys(step.kinds))
        if step.limit <= 0 or queues == [] or kinds == []:
            step.into.now = await con.fetchval(self._clock)
            return []
        if step.lapsed:
            return await self._scan_lapsed(con, step, queues, kinds)
        question = (step.pool, step.queues, step.kinds)
        if not self.share.alone:
            return await self._ready(con, step, question, queues, kinds)
        ahead = self._ahead
        if self._losses != self.share.losses:  # somebody else has been at what was seen
            self._losses = self.share.losses
            ahead.drop()
        found = ahead.take(question, step)
        if found is None:
            began = elapsed()
            more = msgspec.structs.replace(step, limit=ahead.limit(question, step))
            found = ahead.keep(question, step, await self._ready(con, more, question, queues, kinds), began)
        return found

    async def _ready(
        self, con: Connection, step: Scan, question: Any, queues: list[str] | None, kinds: list[str] | None
    ) -> list[Task]:
        if queues is None:
            queues = [row[0] for row in await con.fetch(self._queues, step.pool)]
        head = self._heads.get(question)
        if head is not None:
            if elapsed() < head.again_at:
                found = await self._go_on(con, step, head)
                if found:
                    return found
            del self._heads[question]
        began = elapsed()
        found = await self._look(con, step, queues, kinds)
        took = elapsed() - began
        if took < SLOW + SLOW_A_TASK * len(found):
            self._slow = 0
        elif found:
            self._slow += 1
            if self._slow > 1:
                if len(self._heads) > 100:
                    self._heads.clear()
                self._heads[question] = _Head(began + _AGAIN * took, found[-1], found)
        return found

    def forget(self) -> None:
        """The next look is at the head, and for what has lapsed, however slow the last ones were."""
        self._heads.clear()
        self._slow = 0
        self._lapsed_slow.clear()
        self._ahead = Ahead()

    def wrote(self, task: Task) -> None:
        """This service made `task` ready: what comes before where it goes on must be looked at."""
        self._ahead.wrote(task)
        for question, head in list(self._heads.items()):
            if (task.priority, task.available_at, task.task_id) < (head.priority, *head.after):
                del self._heads[question]

    async def _look(self, con: Connection, step: Scan, queues: list[str], kinds: list[str] | None) -> list[Task]:
        """From the head."""
        chosen: Any
        if kinds is None:
            statements, chosen = self._any_kind, (queues, None)
        elif len(queues) == 1 and len(kinds) == 1:
            statements, chosen = self._one_lane, (queues[0], kinds[0])
        else:
            lanes = [(queue, kind) for queue in queues for kind in kinds]
            statements, chosen = self._named, ([queue for queue, _ in lanes], [kind for _, kind in lanes])
        share = self.share
        if share.of > 1:
            rows = await con.fetch(statements[1], step.pool, *chosen, step.limit, _FLOOR, share.of, share.mine)
            if len(rows) > step.limit:
                return _take(rows, step.into)
        floor = _FLOOR
        found: list[Task] = []
        while True:
            rows = await con.fetch(statements[0], step.pool, *chosen, step.limit - len(found), floor)
            found += _take(rows, step.into)
            _, floor, more = rows[0][:3]
            if not more or len(found) >= step.limit:
                return found

    async def _go_on(self, con: Connection, step: Scan, head: _Head) -> list[Task]:
        """From where the last look ended."""
        rows = await con.fetch(
            self._further,
            step.pool,
            head.queues,
            head.kinds,
            step.limit,
            head.priority,
            self.share.of,
            self.share.mine,
            *head.after,
        )
        found = _take(rows, step.into)
        if found:
            head.after = (found[-1].available_at, found[-1].task_id)
        return found

    async def _scan_lapsed(
        self, con: Connection, step: Scan, queues: list[str] | None, kinds: list[str] | None
    ) -> list[Task]:
        began = elapsed()
        question = (step.pool, step.queues, step.kinds, step.epoch, step.grace_us)
        times, again_at = self._lapsed_slow.get(question, (0, 0.0))
        if began < again_at:
            step.into.now = await con.fetchval(self._clock)
            return []
        rows = await con.fetch(self._lapsed, step.pool, step.grace_us, step.epoch, queues, kinds, step.limit)
        found = _take(rows, step.into)
        took = elapsed() - began
        if found or took <= 2 * SLOW:
            self._lapsed_slow.pop(question, None)
        else:  # once may be chance
            if len(self._lapsed_slow) > 100:
                self._lapsed_slow.clear()
            pause = min(_AGAIN * took, LAPSED_AGAIN) if times else 0.0
            self._lapsed_slow[question] = (times + 1, began + pause)
        return found


def _one_lane(clock: str, part: str) -> str:
    lane = f"{_READY} AND t.queue = $2 AND t.kind = $3"
    return f"""
WITH c AS MATERIALIZED (SELECT {clock} AS now),
b AS MATERIALIZED (SELECT t.priority {lane} AND t.priority > $5 ORDER BY t.priority LIMIT 1)
SELECT (SELECT now FROM c), (SELECT priority FROM b),
EXISTS (SELECT 1 {lane} AND t.priority > (SELECT priority FROM b)), {_NOTHING}
UNION ALL (
SELECT {_BODY} FROM fencepost.task t LEFT JOIN fencepost.input i ON i.task_id = t.task_id
WHERE t.pool = $1 AND t.state = 1 AND t.queue = $2 AND t.kind = $3
AND t.priority = (SELECT priority FROM b) AND t.available_at <= (SELECT now FROM c) {part}
ORDER BY t.available_at, t.task_id LIMIT $4)"""


def _lanes(clock: str, lanes: str, part: str) -> str:
    lane = f"{_READY} AND t.queue = k.queue AND t.kind = k.kind"
    return f"""
WITH RECURSIVE c AS MATERIALIZED (SELECT {clock} AS now), k(queue, kind) AS ({lanes}),
h AS MATERIALIZED (
    SELECT k.queue, k.kind, (SELECT t.priority {lane} AND t.priority > $5 ORDER BY t.priority LIMIT 1) AS priority
    FROM k WHERE k.kind IS NOT NULL),
b AS MATERIALIZED (SELECT min(h.priority) AS priority FROM h),
x AS MATERIALIZED (
    SELECT l.available_at, l.task_id FROM h AS k CROSS JOIN LATERAL (
        SELECT t.available_at, t.task_id {lane} AND t.priority = k.priority
        AND t.available_at <= (SELECT now FROM c) {part} ORDER BY t.available_at, t.task_id LIMIT $4
    ) l WHERE k.priority = (SELECT priority FROM b) ORDER BY 1, 2 LIMIT $4)
SELECT (SELECT now FROM c), (SELECT priority FROM b),
EXISTS (SELECT 1 FROM h WHERE h.priority > (SELECT priority FROM b))
OR EXISTS (SELECT 1 FROM h AS k WHERE EXISTS (SELECT 1 {lane} AND t.priority > k.priority)), {_NOTHING}
UNION ALL (
SELECT {_BODY} FROM x JOIN fencepost.task t ON t.task_id = x.task_id
LEFT JOIN fencepost.input i ON i.task_id = t.task_id ORDER BY x.available_at, x.task_id)"""


def _further(clock: str) -> str:
    """At one priority, beyond ($8, $9)."""
    lane = f"{_READY} AND t.queue = k.queue AND t.kind = k.kind"
    return f"""
WITH c AS MATERIALIZED (SELECT {clock} AS now),
x AS MATERIALIZED (
    SELECT l.available_at, l.task_id FROM unnest($2::text[], $3::text[]) k(queue, kind) CROSS JOIN LATERAL (
        SELECT t.available_at, t.task_id {lane} AND t.priority = $5
        AND (t.available_at, t.task_id) > ($8::bigint, $9::text COLLATE "C") AND t.available_at <= (SELECT now FROM c)
        AND (hashtext(t.task_id) & ($6::int - 1)) = ((($7::int + (SELECT now FROM c) / {TURN_US}) % $6::int)::int)
        ORDER BY t.available_at, t.task_id LIMIT $4
    ) l ORDER BY 1, 2 LIMIT $4)
SELECT (SELECT now FROM c), NULL::int2, NULL::bool, {_NOTHING}
UNION ALL (
SELECT {_BODY} FROM x JOIN fencepost.task t ON t.task_id = x.task_id
LEFT JOIN fencepost.input i ON i.task_id = t.task_id ORDER BY x.available_at, x.task_id)"""


def _take(rows: Sequence[Any], into: Snapshot) -> list[Task]:
    """The first row is the clock's, the others are tasks and their inputs."""
    into.now = rows[0][0]
    inputs = into.inputs
    found: list[Task] = []
    for row in rows[1:]:
        task = Task(*row[3:-3])
        data = row[-3]
        if data is not None:
            inputs[task.task_id] = Content(data, row[-2], row[-1] != 0)
        found.append(task)
    return found
