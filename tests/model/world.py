"""A store of a few lines: it applies write sets to dictionaries and asserts what every store must be able to rely on.

It shares no code with the shipped stores. Kernel tests tell their stories on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel.digests import digest, encode
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.records import (
    Checkpoint,
    Content,
    Effect,
    Event,
    LogEntry,
    Policy,
    Pool,
    Request,
    ResultCommit,
    Staged,
    StagedState,
    State,
    Statement,
    Task,
    Terms,
)
from fencepost.kernel.table import EFFECT_MOVES
from fencepost.kernel.writes import Decision, Keys, Snapshot, WriteSet

SECOND = 1_000_000
START = 1_000_000 * SECOND
POOL = "pool"

replace = msgspec.structs.replace

EFFECT_CALLS = (k.Reserve, k.Settle, k.Reconcile, k.Withdraw, k.Evidence)
EXECUTION_CALLS = (k.Reserve, k.Settle, k.Reconcile, k.Evidence)


def new_task(task_id: str = "t", value: Any = None, **fields: Any) -> k.NewTask:
    """A task as `Client.submit` would build it; the digest covers input, pool, node and dependencies."""
    content = encode({"do": task_id} if value is None else value)
    depends_on = tuple(fields.pop("depends_on", ()))
    pool = fields.pop("pool", POOL)
    node_id = fields.pop("node_id", "main")
    submitted = digest([content.digest, pool, node_id, sorted(depends_on)])
    return k.NewTask(
        task_id=task_id,
        pool=pool,
        queue=fields.pop("queue", "default"),
        kind=fields.pop("kind", "default"),
        node_id=node_id,
        input=content,
        submitted_digest=submitted,
        depends_on=depends_on,
        **fields,
    )


class World:
    """Records in dictionaries, a clock that stands until it is moved, and the kernel that decides."""

    def __init__(self, kernel: Kernel | None = None, policy: Policy | None = None, pool: str = POOL) -> None:
        self.kernel = kernel or Kernel()
        self.now = START
        self.pools: dict[str, Pool] = {pool: Pool(pool, policy=policy or Policy())}
        self.tasks: dict[str, Task] = {}
        self.requests: dict[str, Request] = {}
        self.results: dict[str, ResultCommit] = {}
        self.staged: dict[str, list[Staged]] = {}
        self.inputs: dict[str, Content] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.parents: dict[str, list[str]] = {}
        self.children: dict[str, list[str]] = {}
        self.effects: dict[str, list[Effect]] = {}
        self.payloads: dict[tuple[str, int], Content] = {}
        self.executed: list[Statement] = []
        self.events: list[Event] = []
        self.log: list[LogEntry] = []
        self._made = 0

    # reading ------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The only task, or the one called `t`."""
        return self.tasks["t"] if "t" in self.tasks else next(iter(self.tasks.values()))

    @property
    def pool(self) -> Pool:
        return next(iter(self.pools.values()))

    @property
    def effect(self) -> Effect:
        """The latest effect of the task called `t`."""
        return self.effects["t"][-1]

    def events_of(self, task_id: str = "t") -> list[Event]:
        return [event for event in self.events if event.task_id == task_id]

    def logged(self, kind: str) -> list[LogEntry]:
        return [entry for entry in self.log if entry.kind == kind]

    def load(self, keys: Keys) -> Snapshot:
        starts = {
            (e.task_id, e.generation): e
            for e in self.events
            if e.name == "attempt_started" and (e.task_id, e.generation) in keys.starts
        }

        def some(table: dict[Any, Any], wanted: Iterable[Any]) -> dict[Any, Any]:
            return {key: table[key] for key in wanted if key in table}

        return Snapshot(
            self.now,
            some(self.pools, keys.pools),
            some(self.tasks, keys.tasks),
            some(self.requests, keys.requests),
            some(self.results, keys.results),
            {key: list(rows) for key, rows in some(self.staged, keys.staged).items()},
            some(self.inputs, keys.inputs),
            some(self.checkpoints, keys.checkpoints),
            {key: list(self.children.get(key, ())) for key in keys.children},
            {key: list(self.parents.get(key, ())) for key in keys.parents},
            starts,
            {key: list(self.effects.get(key, ())) for key in keys.effects},
            some(self.payloads, keys.payloads),
        )

    def snapshot(self, command: Any) -> Snapshot:
        """What the kernel says that it needs, loaded until it asks for nothing more."""
        keys = Keys()
        seen: Any = None
        snapshot = Snapshot(self.now)
        while True:
            self.kernel.need(command, snapshot, keys)
            asked = {name: frozenset(getattr(keys, name)) for name in keys.__struct_fields__}
            if asked == seen:
                return snapshot
            seen = asked
            snapshot = self.load(keys)

    # deciding and writing -----------------------------------------------------------------------

    def decide(self, command: Any) -> Decision:
        candidates: Sequence[Task] = ()
        if type(command) is k.ClaimNext:
            candidates = sorted(
                (t for t in self.tasks.values() if t.pool == command.pool and t.state in (State.READY, State.CLAIMED)),
                key=lambda t: (t.priority, t.available_at, t.task_id),
            )
        snapshot = self.snapshot(command)
        for task in candidates:
            snapshot.effects[task.task_id] = list(self.effects.get(task.task_id, ()))
        return self.kernel.decide(snapshot, command, candidates)

    def do(self, command: Any) -> Any:
        """Decide and write; the answer."""
        decision = self.decide(command)
        self.log.extend(decision.log)
        if decision.writes is not None:
            self.apply(decision.writes)
        return decision.answer

    def apply(self, writes: WriteSet) -> None:
        """All or nothing. A set that no store could write is an AssertionError, not a lost swap."""
        moved = list(writes.records())
        assert len(moved) == len(set(moved)), f"a record appears twice in one write set: {moved}"
        if writes.epoch is not None:
            assert self.pools[writes.pool].epoch == writes.epoch, "decided under another epoch"
        journalled: dict[str, list[Event]] = {}
        for event in writes.events:
            journalled.setdefault(event.task_id, []).append(event)
        for write in writes.tasks:
            before = self.tasks.get(write.task.task_id)
            assert write.expected_version == (before.state_version if before else 0), "decided on another version"
            events = journalled.pop(write.task.task_id, [])
            if write.family == "compare":
                assert write.task == before
                assert not events
                continue
            first = write.expected_version + 1
            versions = [event.state_version for event in events]
            assert versions == list(range(first, write.task.state_version + 1)), "one event for every version"
            assert events[-1].state == write.task.state, "the last event says how the record stands"
        if writes.pool_write is not None:
            expected, pool = writes.pool_write
            there = self.pools.get(pool.name)
            assert expected == (there.state_version if there else 0), "decided on another version of the pool"
        self._check_effects(writes)
        assert not journalled, f"events without their record: {journalled}"
        # Nothing was written so far: from here on it is all or nothing.
        self.tasks.update((write.task.task_id, write.task) for write in writes.tasks)
        self.events.extend(writes.events)
        for task_id, _, content in writes.inputs:
            self.inputs[task_id] = content
        for edge in writes.dependencies:
            self.parents.setdefault(edge.task_id, []).append(edge.parent_id)
            self.children.setdefault(edge.parent_id, []).append(edge.task_id)
        for checkpoint in writes.checkpoints:
            self.checkpoints[checkpoint.task_id] = checkpoint
        for task_id in writes.drop_checkpoints:
            self.checkpoints.pop(task_id, None)
        for result in writes.results:
            assert result.task_id not in self.results, "a second canonical result"
            self.results[result.task_id] = result
        self._apply_staged(writes)
        self._apply_effects(writes)
        for request in writes.requests:
            self.requests[request.request_id] = request
        if writes.pool_write is not None:
            self.pools[writes.pool_write[1].name] = writes.pool_write[1]
        self.log.extend(writes.log)

    def _apply_staged(self, writes: WriteSet) -> None:
        for staged in writes.staged:
            rows = self.staged.setdefault(staged.task_id, [])
            if not any(r.generation == staged.generation and r.content.digest == staged.content.digest for r in rows):
                rows.append(staged)
        for task_id, generation in writes.discard_attempts:
            self._settle(task_id, lambda r, g=generation: StagedState.DISCARDED if r.generation == g else None)
        for task_id, generation, kept in writes.discard_rivals:
            self._settle(
                task_id,
                lambda r, g=generation, d=kept: (
                    StagedState.COMMITTED if (r.generation, r.content.digest) == (g, d) else StagedState.DISCARDED
                ),
            )

    def _check_effects(self, writes: WriteSet) -> None:
        """Rows of effects come with their task's record, one version further each, bound for good."""
        moved = {write.task.task_id: write.task for write in writes.tasks if write.family != "compare"}
        rows = [(effect.task_id, effect.number) for effect in writes.effects]
        assert len(rows) == len(set(rows)), f"an effect appears twice in one write set: {rows}"
        for effect in writes.effects:
            assert effect.task_id in moved, "an effect without its task's record"
            assert 0 < effect.number <= moved[effect.task_id].effects, "an effect that the task does not count"
            there = self.effects.get(effect.task_id, [])
            before = there[effect.number - 1] if effect.number <= len(there) else None
            move = (writes.proof.door, before.state if before else None, effect.state)
            assert move in EFFECT_MOVES, f"no row of the table allows {move}"
            assert effect.version == (before.version if before else 0) + 1, "an effect's version moves by one"
            if before is None:
                assert (effect.task_id, effect.number) in [(t, n) for t, n, _ in writes.payloads], "no payload is bound"
                continue
            for name in ("effect_id", "revision", "node_id", "slot", "payload_digest", "terms", "pool"):
                assert getattr(effect, name) == getattr(before, name), f"{name} is bound for good"
            known = len(before.executions)
            assert len(effect.executions) - known in (0, 1), "executions are stored one by one"
            assert before.receipt is None or effect.receipt == before.receipt, "a second receipt"

    def _apply_effects(self, writes: WriteSet) -> None:
        for effect in writes.effects:
            rows = self.effects.setdefault(effect.task_id, [])
            rows[effect.number - 1 : effect.number] = [effect]
        for task_id, number, content in writes.payloads:
            assert (task_id, number) not in self.payloads, "a payload is bound once"
            self.payloads[task_id, number] = content
        self.executed.extend(writes.statements)

    def _settle(self, task_id: str, state_of: Any) -> None:
        rows = self.staged.get(task_id, [])
        for position, row in enumerate(rows):
            state = state_of(row) if row.state == StagedState.STAGED else None
            if state is not None:
                rows[position] = replace(row, state=int(state))

    # asking, in few words -----------------------------------------------------------------------

    def request_id(self) -> str:
        self._made += 1
        return f"request-{self._made}"

    def submit(self, *tasks: k.NewTask) -> Any:
        return self.do(k.Submit(request_id=self.request_id(), tasks=tasks or (new_task(),)))

    def claim(self, task_id: str = "t", owner: str = "A", *, epoch: int | None = None, **fields: Any) -> Any:
        """The attempt id is new for every call, as the coordinator makes it."""
        pool = self.pools[self.tasks[task_id].pool]
        self._made += 1
        return self.do(
            k.Claim(
                request_id=fields.pop("request_id", None) or self.request_id(),
                task_id=task_id,
                expected_state_version=fields.pop("version", None) or self.tasks[task_id].state_version,
                epoch=pool.epoch if epoch is None else epoch,
                owner_id=owner,
                ttl_us=fields.pop("ttl_us", 30 * SECOND),
                attempt_id=f"attempt-{self._made}",
                **fields,
            )
        )

    def claimed(self, task_id: str = "t", owner: str = "A", **fields: Any) -> k.Presented:
        """A granted claim as what its holder presents."""
        answer = self.claim(task_id, owner, **fields)
        assert type(answer) is Granted, answer
        return presented(answer.tasks[0])

    def ask(self, kind: type, claim: k.Presented, *, epoch: int | None = None, **fields: Any) -> Any:
        """A call of a claim's holder, by default under the pool's present epoch and with a new request id."""
        if kind is k.Commit and "result_digest" not in fields:
            content = encode(fields.pop("result", {"by": claim.owner_id}))
            fields.update(result_digest=content.digest, content=content)
        if kind is k.Commit:
            fields.setdefault("result_commit_id", f"commit-{self.request_id()}")
        if kind is k.Renew:
            fields.setdefault("ttl_us", 30 * SECOND)
        if kind is k.SaveCheckpoint:
            fields.setdefault("content", encode({"at": fields["number"]}))
        if kind is k.Fail:
            fields.setdefault("error", "it broke")
        if kind is k.Prepare:
            fields["payload"] = encode(fields.pop("payload", {"to": "somebody"}))
            fields.setdefault("slot", "mail")
            fields.setdefault("terms", Terms("smtp"))
            fields.setdefault("namespace", "namespace")
        if kind in EFFECT_CALLS:
            fields.setdefault("effect_id", self.effects[claim.task_id][-1].effect_id)
        if kind in EXECUTION_CALLS:
            fields.setdefault("execution", len(self.effects[claim.task_id][-1].executions))
        if kind is k.Reconcile:
            fields.setdefault("asked_at", self.now)
        if fields.get("receipt") is not None:
            fields["receipt"] = encode(fields["receipt"])
        if kind not in (k.Stage, k.Usage, k.Evidence):
            name = self.tasks[claim.task_id].pool if claim.task_id in self.tasks else claim.pool
            fields["epoch"] = self.pools[name].epoch if epoch is None else epoch
        return self.do(kind(request_id=fields.pop("request_id", None) or self.request_id(), claim=claim, **fields))

    def person(self, kind: type, task_id: str = "t", *, epoch: int | None = None, **fields: Any) -> Any:
        """A call about a task, presenting what is there unless told otherwise."""
        task = self.tasks[task_id]
        defaults: dict[type, dict[str, Any]] = {
            k.Expire: {"expected_state_version": task.state_version},
            k.Cancel: {"expected_cancel_generation": task.cancel_generation},
            k.Reopen: {"expected_state_version": task.state_version},
            k.Revise: {"expected_revision": task.revision, "input": encode({"revised": task.revision})},
            k.TakeOver: {"expected_generation": task.claim_generation},
            k.Discard: {"generation": task.claim_generation},
        }
        if kind in (k.Approve, k.Deny, k.Resolve):
            effect = self.effects[task_id][-1]
            defaults[kind] = {"effect_id": effect.effect_id, "expected_version": effect.version, "who": "P"}
            if kind is k.Resolve:
                defaults[kind].update(asked_at=self.now, evidence="looked", late_evidence=len(effect.evidence))
            else:
                defaults[kind]["payload_digest"] = effect.payload_digest
        if fields.get("receipt") is not None:
            fields["receipt"] = encode(fields["receipt"])
        asked = {**defaults[kind], **fields}
        if kind not in (k.Expire, k.Cancel):
            asked["epoch"] = self.pools[task.pool].epoch if epoch is None else epoch
        return self.do(kind(request_id=asked.pop("request_id", None) or self.request_id(), task_id=task_id, **asked))

    def pool_command(self, kind: type, **fields: Any) -> Any:
        asked = {
            "pool": self.pool.name,
            "expected_epoch": self.pool.epoch,
            "expected_state_version": self.pool.state_version,
            "request_id": self.request_id(),
            **fields,
        }
        return self.do(kind(**asked))

    def raise_epoch(self) -> None:
        answer = self.pool_command(k.RaiseEpoch)
        assert type(answer) is Accepted, answer

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    def run_out(self, task_id: str = "t") -> None:
        """Move the clock just beyond the lease."""
        lease = self.tasks[task_id].lease_expires_at
        assert lease is not None
        self.now = max(self.now, lease)


def presented(task: Task, store_id: str = "store") -> k.Presented:
    return k.Presented(
        store_id=store_id,
        pool=task.pool,
        task_id=task.task_id,
        attempt_id=task.attempt_id or "",
        generation=task.claim_generation,
        cancel_generation=task.cancel_generation,
        input_digest=task.input_digest,
        owner_id=task.owner_id,
    )
