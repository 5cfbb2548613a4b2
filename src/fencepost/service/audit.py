"""`fencepost audit`: the invariants of claim.v1, section 9, re-checked over all records and the whole journal.

It shares no code with the kernel's decisions: only the records, the list of doors, and digests. It
reads page by page, so that its memory does not grow with the store, and takes no lock: where two
records were not read at one moment, what looks wrong is read again before it is reported.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from fencepost.clock import to_datetime
from fencepost.errors import InvalidRequest
from fencepost.kernel.digests import digest, digest_bytes
from fencepost.kernel.records import Content, Guarantee, ResultCommit, Staged, StagedState, State, Task
from fencepost.service.audit_report import CHECKS, COUNTED, AuditReport, Check, Violation
from fencepost.service.coverage import Coverage
from fencepost.service.effect_replay import EffectReplay
from fencepost.service.epochs import FENCED, Epochs, passes_fence, read_epochs
from fencepost.service.replay import Replay
from fencepost.stores.base import Numbered, Store, TaskFilter, TaskHistory

FIRST_PAGE = 25  # tasks; then as many as PAGE_BYTES of bodies let in, at most doubling
LARGEST_PAGE = 500
PAGE_BYTES = 8 << 20
MAX_SHOWN = 1000  # violations kept in the report; all are counted
MAX_REMEMBERED = 4_000_000  # attempts, and committed parents, that are told apart over the whole store

# What a store raises for a row that no codec wrote.
_UNREADABLE = (msgspec.MsgspecError, ValueError)


class _Audit:
    def __init__(self, store: Store) -> None:
        self.store = store
        # Where decisions are timed before they are swapped in, times of different records do not order them.
        self.timed = not store.capabilities.loses_swaps
        self.violations: list[Violation] = []
        self.found: Counter[int] = Counter()
        self.checked: Counter[int] = Counter()
        self.totals: Counter[str] = Counter()
        self.coverage = Coverage()
        self.epochs: dict[str, Epochs] = {}
        self._attempts: set[int] = set()
        self._parents: dict[str, ResultCommit] = {}

    def report(self, invariant: int, task_id: str | None, says: str) -> None:
        self.found[invariant] += 1
        if len(self.violations) < MAX_SHOWN:
            self.violations.append(Violation(invariant, task_id, says))

    # pages --------------------------------------------------------------------------------------

    async def pages(self) -> AsyncIterator[list[TaskHistory]]:
        """Every task's history, in order of id. One that cannot be read is reported, and the rest goes on."""
        after: str | None = None
        limit = FIRST_PAGE
        while True:
            try:
                page = await self.store.histories(after, limit)
                read, last = len(page), page[-1].task.task_id if page else None
            except _UNREADABLE:
                tasks = await self.store.tasks(TaskFilter(), after, limit)
                page = [found for task in tasks if (found := await self._one(task.task_id)) is not None]
                read, last = len(tasks), tasks[-1].task_id if tasks else None
            yield page
            if read < limit:
                return
            after = last
            fitting = PAGE_BYTES * len(page) // (sum(map(_bytes_of, page)) + 1)
            limit = max(1, min(fitting, 2 * limit, LARGEST_PAGE))
            await asyncio.sleep(0)  # a store that answers at once must not keep the loop from everybody else

    async def _one(self, task_id: str) -> TaskHistory | None:
        try:
            return await self.store.history(task_id)
        except _UNREADABLE as error:
            self.report(7, task_id, f"what is stored about it cannot be read ({error})")
            return None

    # tasks --------------------------------------------------------------------------------------

    async def task(self, history: TaskHistory) -> None:
        task = history.task
        task_id = task.task_id

        def report(invariant: int, says: str) -> None:
            self.report(invariant, task_id, says)

        self.totals["tasks"] += 1
        self.totals["events"] += len(history.events)
        self.totals["staged"] += len(history.staged)
        self.totals["pruned"] += bool(task.pruned_to_version)
        self.checked[1] += 1
        self.checked[7] += 1
        self.checked[3] += len(history.events)
        replay = Replay(history, report)
        replay.run()
        self._record(task, report)
        self._attempts_of(replay, report)
        self._result(history, replay, report)
        self._bodies(history, replay, report)
        await self._effects(history, report)
        executions = sum(len(effect.executions) for effect in history.effects)
        statements = sum(effect.terms.guarantee == Guarantee.TRANSACTIONAL for effect in history.effects)
        if self.coverage.record(task, executions - statements):
            for event in history.events:
                self.coverage.event(event)
        await self._epochs_of(history, report)
        try:
            await self._graph(history, replay, report)
        except _UNREADABLE as error:
            report(7, f"what is stored about one of its parents cannot be read ({error})")

    def _record(self, task: Task, report: Callable[[int, str], None]) -> None:
        """What one record says about itself."""
        if task.state not in State._value2member_map_:
            report(7, f"has the state {task.state!r}")
        if task.state_version < 1 or task.revision < 1 or task.claim_generation < 0 or task.cancel_generation < 0:
            report(2, "has a number below its first")
        if (task.state == State.CLAIMED) != (task.lease_expires_at is not None):
            report(7, "has a lease without being CLAIMED, or is CLAIMED without one")
        if (task.claim_generation > 0) != (task.attempt_id is not None) or (task.claim_generation > 0) != (
            task.scheduler_epoch > 0
        ):
            report(2, "its generation, attempt and epoch do not belong together")
        if task.pruned_to_version > task.state_version:
            report(7, f"was pruned to version {task.pruned_to_version}, which it never had")

    def _attempts_of(self, replay: Replay, report: Callable[[int, str], None]) -> None:
        """An attempt id is never used again, not by another task either."""
        self.checked[2] += len(replay.starts)
        self.totals["attempts"] += replay.task.claim_generation
        for generation, attempt_id in replay.starts.items():
            if attempt_id is None or len(self._attempts) >= MAX_REMEMBERED:
                continue
            key = int.from_bytes(hashlib.blake2b(attempt_id.encode(), digest_size=8).digest(), "big")
            if key in self._attempts:
                report(2, f"the attempt of generation {generation} was seen before")
            self._attempts.add(key)

    def _result(self, history: TaskHistory, replay: Replay, report: Callable[[int, str], None]) -> None:
        task, result = history.task, history.result
        committed = task.state == State.COMMITTED
        if len(replay.commits) > 1:
            report(1, f"was committed {len(replay.commits)} times")
        if result is None:
            if committed:
                report(1, "is COMMITTED without a result")
            if task.result_commit_id is not None:
                report(1, "names a result commit that does not exist")
            if replay.commits and not committed:
                report(1, "a result was committed, and neither record nor result shows it")
            return
        self.totals["results"] += 1
        if not committed:
            report(1, f"has a result although it is {_name(task)}")
        for shown, held, says in (
            (result.result_commit_id, task.result_commit_id, "result commit"),
            (result.attempt_id, task.attempt_id, "attempt"),
            (result.generation, task.claim_generation, "generation"),
            (result.revision, task.revision, "revision"),
        ):
            if shown != held:
                report(1, f"its result is of another {says} than held the task")
        for event in replay.commits:
            same = (event.attempt_id, event.generation, event.revision, event.at) == (
                result.attempt_id,
                result.generation,
                result.revision,
                result.committed_at,
            )
            if not same or (event.detail or {}).get("result") != result.result_digest:
                report(1, "its result is not the one that its journal says was committed")
        if not replay.commits and not task.pruned_to_version:
            report(1, "has a result that no event committed")
        content = result.content
        if content is None:
            content = next(
                (
                    staged.content
                    for staged in history.staged
                    if staged.generation == result.generation and staged.content.digest == result.result_digest
                ),
                None,
            )
        if content is None:
            if not task.pruned_to_version:
                report(1, "its result's body is missing, and nothing was pruned")
        else:
            wrong = _digest_error(content, result.result_digest)
            if wrong:
                report(1, f"its result's body {wrong}")

    def _bodies(self, history: TaskHistory, replay: Replay, report: Callable[[int, str], None]) -> None:
        """Input, checkpoint and staged results: their digests, and that they belong to this record."""
        task = history.task
        if history.input is None:
            if not task.pruned_to_version:
                report(7, "its input is missing, and nothing was pruned")
        else:
            revision, content = history.input
            if revision != task.revision:
                report(7, f"its input is of revision {revision}, the record of {task.revision}")
            wrong = _digest_error(content, task.input_digest)
            if wrong:
                report(7, f"its input {wrong}")
        checkpoint = history.checkpoint
        if checkpoint is not None:
            if (checkpoint.revision, checkpoint.generation) != (task.revision, task.checkpoint_generation):
                report(7, "its checkpoint is of another revision or generation than the record names")
            wrong = _digest_error(checkpoint.content, checkpoint.content.digest)
            saved = next((e for e in reversed(history.events) if e.name == "checkpoint_saved"), None)
            if saved is not None and (saved.detail or {}).get("digest") != checkpoint.content.digest:
                wrong = "is not the one that its journal says was saved"
            if wrong:
                report(7, f"its checkpoint {wrong}")
        elif task.checkpoint_generation and not task.pruned_to_version:
            report(7, "its checkpoint is missing, and nothing was pruned")
        for staged in history.staged:
            self._staged(staged, history, replay, report)

    def _staged(self, staged: Staged, history: TaskHistory, replay: Replay, report: Callable[[int, str], None]) -> None:
        task, result = history.task, history.result
        which = f"the staged result of generation {staged.generation}"
        wrong = _digest_error(staged.content, staged.content.digest)
        if wrong:
            report(7, f"{which} {wrong}")
        if not 1 <= staged.generation <= task.claim_generation or (
            replay.starts.get(staged.generation, staged.attempt_id) != staged.attempt_id
        ):
            report(7, f"{which} is of an attempt that never was")
        if staged.state == StagedState.STAGED:
            if task.state != State.CLAIMED or staged.generation != task.claim_generation:
                report(7, f"{which} is still STAGED although its attempt ended")
        elif staged.state == StagedState.COMMITTED:
            canonical = (result.generation, result.result_digest) if result is not None else None
            if canonical != (staged.generation, staged.content.digest):
                report(1, f"{which} is COMMITTED and is not the canonical one")
        elif staged.state != StagedState.DISCARDED:
            report(7, f"{which} has the state {staged.state!r}")

    async def _effects(self, history: TaskHistory, report: Callable[[int, str], None]) -> None:
        """What was sent, and may have been: records and journal of every effect, and the bodies of their payloads."""
        replay = EffectReplay(history, self.store.namespace, report)
        for event in history.events:
            replay.follow(event)
        self.checked[4] += replay.finish()
        if not history.effects:
            return
        task_id = history.task.task_id
        payloads = await self.store.payloads([(task_id, effect.number) for effect in history.effects])
        for effect in history.effects:
            payload = payloads.get((task_id, effect.number))
            wrong = _digest_error(payload, effect.payload_digest) if payload is not None else ""
            if wrong:
                report(4, f"effect {effect.number}'s payload {wrong}")
            receipt = effect.receipt
            if receipt is not None and (receipt.data or receipt.binary):
                wrong = _digest_error(receipt, receipt.digest)
                if wrong:
                    report(4, f"effect {effect.number}'s receipt {wrong}")

    # epochs -------------------------------------------------------------------------------------

    async def _read_epochs(self) -> None:
        """Once more, because something newer than what was read has shown; what is wrong was reported already."""
        self.epochs = await read_epochs(self.store, lambda invariant, says: None)

    async def _epochs_of(self, history: TaskHistory, report: Callable[[int, str], None]) -> None:
        """Against the pool's log: what passed the fence stood under the epoch that was the pool's at that time."""
        task = history.task
        known = self.epochs.get(task.pool)
        if known is None or task.scheduler_epoch > known.current:
            await self._read_epochs()
            known = self.epochs.get(task.pool)
        if known is None:
            report(7, f"lives in pool {task.pool!r}, which does not exist")
            return
        if task.scheduler_epoch > known.current:
            report(2, f"was granted under epoch {task.scheduler_epoch}, the pool has reached {known.current}")
        for event in history.events:
            if not passes_fence(event):
                continue
            self.checked[8] += 1
            if not self.timed:
                continue
            if event.epoch < known.before(event.at):
                report(
                    8,
                    f"{event.name} (state version {event.state_version}) of epoch {event.epoch} was accepted"
                    f" after the raise to {known.before(event.at)}",
                )
            highest = known.until(event.at)
            if highest is not None and event.epoch > highest:
                await self._read_epochs()
                known = self.epochs[task.pool]
                highest = known.until(event.at)
                if highest is not None and event.epoch > highest:
                    report(
                        3,
                        f"{event.name} (state version {event.state_version}) shows epoch {event.epoch}"
                        f" before the pool reached it",
                    )

    async def order(self) -> None:
        """In order of commit, what passes a pool's fence never shows an epoch below one seen before: no clock in it."""
        for pool in list(self.epochs):
            highest, after = 0, 0
            while True:
                try:
                    page: list[Numbered] = await self.store.events(after, 1000, pool=pool, names=FENCED)
                except _UNREADABLE as error:
                    self.report(7, None, f"pool {pool!r}: its journal cannot be read in order of commit ({error})")
                    break
                for numbered in page:
                    event = numbered.entry
                    if not passes_fence(event):
                        continue
                    if event.epoch < highest:
                        self.report(
                            8,
                            event.task_id,
                            f"{event.name} (state version {event.state_version}) of epoch {event.epoch} was accepted"
                            f" after one of epoch {highest}",
                        )
                    highest = max(highest, event.epoch)
                if len(page) < 1000:
                    break
                after = page[-1].number

    # graph --------------------------------------------------------------------------------------

    async def _graph(self, history: TaskHistory, replay: Replay, report: Callable[[int, str], None]) -> None:
        task = history.task
        if task.state == State.COMMITTED:
            wrong = task.successors > len(history.children)
        else:
            wrong = task.successors != len(history.children)
        if wrong:
            report(5, f"counts {task.successors} successors, {len(history.children)} tasks name it as a parent")
        if len(history.parents) != task.deps_total or len(set(history.parents)) != len(history.parents):
            report(5, f"has {len(history.parents)} dependencies, its record says {task.deps_total}")
        if task.state == State.BLOCKED and task.deps_remaining <= 0:
            report(5, "is BLOCKED with no parent open")
        if task.deps_remaining > 0 and task.state in (State.READY, State.CLAIMED, State.COMMITTED):
            report(5, f"is {_name(task)} with {task.deps_remaining} parent(s) open")
        if not history.parents:
            return
        self.checked[5] += len(history.parents)
        results = {parent: await self._parent(parent) for parent in history.parents}
        open_now = sum(1 for found in results.values() if found is None)
        moved = task.deps_remaining != open_now  # read at another moment than the parents, or wrong
        if moved and await self._still_wrong(task, open_now):
            report(5, f"counts {task.deps_remaining} open parents, {open_now} are not committed")
        for parent, found in results.items():
            if found is None:
                continue
            since = replay.released_by.get(parent)
            if since is None:
                if moved or task.pruned_to_version:
                    continue
                since = task.created_at  # not counted down, so it was committed before this task was submitted
            if found.committed_at > since:
                report(5, f"was counted down for {parent!r} before that one was committed")
        for parent in replay.released_by:
            if parent not in results:
                report(5, f"was counted down for {parent!r}, which is no parent of it")
        if history.result is not None and not task.deps_remaining:
            lineage = {found.result_commit_id for found in results.values() if found is not None}
            if set(history.result.parents) != lineage:
                report(1, "its result's lineage is not the result commits of its parents")

    async def _parent(self, task_id: str) -> ResultCommit | None:
        """The parent's result commit. One that exists stays for ever, so it may be remembered (without its body)."""
        known = self._parents.get(task_id)
        if known is None:
            found = await self.store.result(task_id)
            if found is None:
                return None
            known = msgspec.structs.replace(found, content=None)
            if len(self._parents) >= 100_000:
                self._parents.clear()
            self._parents[task_id] = known
        return known

    async def _still_wrong(self, task: Task, open_then: int) -> bool:
        """Whether the count is wrong, and not only older than the parents' commits that were read after it."""
        if task.deps_remaining < open_then:
            return True  # parents only ever close: fewer were open then than are now
        for _ in range(10):
            history = await self.store.history(task.task_id)
            if history is None or history.task.state_version == task.state_version:
                return history is not None  # nothing moved it, so those commits did not count it down
            task = history.task
            found = [await self._parent(parent) for parent in history.parents]
            open_now = found.count(None)
            if task.deps_remaining == open_now:
                return False
            if task.deps_remaining < open_now:
                return True
        return False

    # rows without a task ------------------------------------------------------------------------

    async def orphans(self) -> None:
        for table, count in (await self.store.orphans()).items():
            if count:
                self.report(7, None, f"{count} row(s) of {table} belong to no task")


def _name(task: Task) -> str:
    return State(task.state).name if task.state in State._value2member_map_ else f"state {task.state!r}"


def _bytes_of(history: TaskHistory) -> int:
    bodies = [staged.content for staged in history.staged]
    if history.input is not None:
        bodies.append(history.input[1])
    if history.result is not None and history.result.content is not None:
        bodies.append(history.result.content)
    if history.checkpoint is not None:
        bodies.append(history.checkpoint.content)
    return sum(len(content.data) for content in bodies) + 200 * len(history.events)


def _digest_error(content: Content, expected: str) -> str:
    """What is wrong with a body: empty where its digest, computed again, is `expected`."""
    if content.digest != expected:
        return "is stored under another digest"
    if content.binary:
        return "" if digest_bytes(content.data) == expected else "does not have its digest"
    try:
        value: Any = msgspec.json.decode(content.data)
        return "" if digest(value) == expected else "does not have its digest"
    except (msgspec.DecodeError, InvalidRequest, ValueError, RecursionError):
        return "is not the JSON that it was stored as"


async def audit(store: Store, progress: Callable[[int, int], None] | None = None) -> AuditReport:
    """Re-check every invariant that has records. Reads all of them; on a store in use, too.

    `progress(tasks done, tasks in all)` is called after each page. Raises Unavailable where the store
    cannot be read. It finds what the journal and the records contradict; somebody who rewrites both so
    that they agree is not found.
    """
    run = _Audit(store)
    at = await store.clock()
    run.epochs = await read_epochs(store, lambda invariant, says: run.report(invariant, None, says))
    for epochs in run.epochs.values():
        run.coverage.pool(epochs)
    total = sum(count for *_, count in await store.counts())
    async for page in run.pages():
        for history in page:
            await run.task(history)
        if progress is not None:
            progress(run.totals["tasks"], max(total, run.totals["tasks"]))
    await run.order()
    await run.orphans()
    coverage = run.coverage.rows()
    totals = run.totals
    return AuditReport(
        clean=not run.found and all(row.ratio in (None, 1.0) for row in coverage),
        at=to_datetime(at),
        tasks=totals["tasks"],
        events=totals["events"],
        attempts=totals["attempts"],
        results=totals["results"],
        staged=totals["staged"],
        pools=len(run.epochs),
        pruned_tasks=totals["pruned"],
        checks=[
            Check(number, says, run.checked[number], COUNTED[number], run.found[number])
            for number, says in CHECKS.items()
        ],
        coverage=coverage,
        violations=run.violations,
        violation_count=run.found.total(),
    )
