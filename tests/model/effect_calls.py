"""What may be asked in the search of effects: by the holder of any claim, by a late copy of its calls, by people and by
the reconciler. And the records that a search goes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fencepost.kernel import commands as k
from fencepost.kernel import effect_rules
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, Effect, State, Task, Terms
from tests.model.calls import LEASE, NOW, OWNERS, SECOND, VERSION, digest_of
from tests.model.effect_downstreams import CANCELLED, FALSE, REFUSED, SETTLE, STORED, TOOK, WINDOW, Scenario
from tests.model.oracle import Asked

TICK = SECOND
EFFECT_VERSION = 100  # of every effect at every step
NAMESPACE = "namespace"
SLOT, SECOND_SLOT = "mail", "another"
PAYLOADS = (encode({"to": "somebody"}), encode({"to": "somebody", "text": "put otherwise"}))
RESULT = encode("result")
WHYS = {REFUSED: "REFUSED", FALSE: "PRECONDITION", CANCELLED: "RESERVATION_CANCELLED"}
FRESH = "fresh"  # a request id that nobody used
ASK = "ask"  # the one that was answered APPROVAL_REQUIRED last
EFFECT_ID = effect_rules.effect_id(NAMESPACE, "t", 1, "main", SLOT)

Call = tuple[Asked, Any]


class Core(NamedTuple):
    """What a decision reads. All times are relative: now is always `NOW`."""

    epoch: int = 1
    task: Task | None = None
    effects: tuple[Effect, ...] = ()
    claims: tuple[tuple[int, int], ...] = ()  # epoch and cancel generation of every claim that was granted
    asked: int = 0  # generation of the attempt that was answered APPROVAL_REQUIRED last
    revised: int = 0  # 1: revised; 2: and what the old revision may have done was said to be done with


def new_task(**fields: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "t",
        "pool": "pool",
        "queue": "q",
        "kind": "k",
        "graph_id": None,
        "node_id": "main",
        "revision": 1,
        "input_digest": digest_of(1),
        "submitted_digest": "sha256:submitted",
        "state": int(State.READY),
        "state_version": VERSION,
        "scheduler_epoch": 0,
        "claim_generation": 0,
        "attempt_id": None,
        "owner_id": None,
        "claimed_at": None,
        "lease_expires_at": None,
        "cancel_generation": 0,
        "result_commit_id": None,
        "priority": 0,
        "available_at": NOW,
        "ready_at": NOW,
        "charged_attempts": 0,
        "max_attempts": 9,
        "deps_total": 0,
        "deps_remaining": 0,
        "successors": 0,
        "checkpoint_number": 0,
        "checkpoint_generation": 0,
        "end": 0,
        "cancel_with_parent": False,
        "park_reason": None,
        "created_at": NOW,
    }
    return Task(**{**values, **fields})


def terms_of(s: Scenario, guarantee: str) -> Terms:
    retention = s.retention * TICK if guarantee == "IDEMPOTENT" else 0
    approval = s.approval and guarantee == s.guarantee
    return Terms(f"d/{guarantee}", guarantee, WINDOW * TICK, SETTLE * TICK, retention, 0, approval)


class Calls:
    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.terms = terms_of(scenario, scenario.guarantee)
        self.second = terms_of(scenario, scenario.second) if scenario.second else None

    def _presented(self, core: Core, g: int, owner: str | None) -> k.Presented:
        return k.Presented("store", "pool", "t", f"attempt-{g}", g, core.claims[g - 1][1], digest_of(1), owner)

    def _speakers(self, core: Core) -> Iterator[tuple[int, int, k.Presented]]:
        """Every claim that was ever granted, under the epoch of its grant and one that its client learnt since."""
        for g in range(1, len(core.claims) + 1):
            own = OWNERS[g - 1]
            owners: tuple[str | None, ...] = (own, None, "another") if self.s.every else (own,)
            for epoch in self._epochs(core):
                for owner in owners:
                    yield g, epoch, self._presented(core, g, owner)

    def _holders(self, core: Core) -> Iterator[tuple[int, int, k.Presented]]:
        """Who may pass the fence, or, with `every`, who may come to it."""
        task, latest = core.task, len(core.claims)
        assert task is not None
        for g, epoch, claim in self._speakers(core):
            holds = g == latest and task.state == State.CLAIMED and task.scheduler_epoch == core.epoch
            if self.s.every or holds:
                yield g, epoch, claim

    def _versions(self) -> tuple[int, ...]:
        return (EFFECT_VERSION, EFFECT_VERSION - 1) if self.s.every else (EFFECT_VERSION,)

    def _epochs(self, core: Core) -> Iterator[int]:
        yield from range(1, core.epoch + 1) if self.s.every else (core.epoch,)

    def _asked(self, door: str, epoch: int, claim: k.Presented, request: str = FRESH) -> Asked:
        return Asked(
            door,
            "t",
            epoch,
            claim.generation,
            claim.attempt_id,
            claim.cancel_generation,
            claim.input_digest,
            claim.owner_id,
            request=request,
        )

    def _of(self, door: str, kind: type, epoch: int, claim: k.Presented, request: str = FRESH, **fields: Any) -> Call:
        return self._asked(door, epoch, claim, request), kind(request_id=request, epoch=epoch, claim=claim, **fields)

    def prepare(
        self, epoch: int, claim: k.Presented, request: str = FRESH, payload: Content = PAYLOADS[0], **fields: Any
    ) -> Call:
        fields = {"slot": SLOT, "terms": self.terms, "namespace": NAMESPACE, "payload": payload, **fields}
        return self._of("effect.prepare", k.Prepare, epoch, claim, request, **fields)

    # what anybody may ask at any time -------------------------------------------------------------

    def free(self, core: Core) -> Iterator[Call]:
        for g, epoch, claim in self._holders(core):
            yield from self._of_claim(core, g, epoch, claim)
        yield from self._of_people(core)
        if not core.revised or self.s.every:
            yield from self._of_loops(core)

    def _of_claim(self, core: Core, g: int, epoch: int, claim: k.Presented) -> Iterator[Call]:
        s, effects = self.s, core.effects
        conditional = s.guarantee == "CONDITIONAL"
        executions = effects[0].executions if effects else ()
        if len(executions) < s.executions:
            if not conditional:
                yield self.prepare(epoch, claim)
            if effects or s.every:
                yield self.prepare(epoch, claim, payload=PAYLOADS[1], precondition="v0" if conditional else None)
            if s.every:
                yield self.prepare(epoch, claim, precondition=None if conditional else "v0")
            yield self.prepare(epoch, claim, repeat=True)
            for execution in executions:
                if execution.attempt_id == claim.attempt_id:
                    yield self.prepare(epoch, claim, execution.request_id, precondition=execution.precondition)
            if core.asked == g:
                yield self.prepare(epoch, claim, ASK)
        if self.second is not None and len(effects) == 1:
            yield self.prepare(epoch, claim, slot=SECOND_SLOT, terms=self.second)
        if s.guarantee == "TRANSACTIONAL" or effects:
            statement = k.NewStatement(SLOT, PAYLOADS[0], "d/sql")
            yield self.commit(epoch, claim, statements=(statement,), namespace=NAMESPACE)
        yield self.commit(epoch, claim)
        yield self._of("release", k.Release, epoch, claim)
        yield self._of("release", k.Release, epoch, claim, wait=True)
        yield self._of("fail", k.Fail, epoch, claim, error="it broke")
        for effect in effects:
            named = {"effect_id": effect.effect_id}
            yield self._of("effect.withdraw", k.Withdraw, epoch, claim, **named)
            for execution in effect.executions:
                named["execution"] = execution.execution
                yield from self._of_execution(effect, execution, epoch, claim, named)

    def _of_execution(
        self, effect: Effect, execution: Any, epoch: int, claim: k.Presented, named: dict[str, Any]
    ) -> Iterator[Call]:
        number = execution.execution
        if execution.attempt_id == claim.attempt_id:
            yield self._of("effect.settle", k.Settle, epoch, claim, finding="UNKNOWN", **named)
            if self.s.guarantee == "RESERVATION":
                yield self._of("effect.reserve", k.Reserve, epoch, claim, reservation_id=f"r{number}", **named)
                if execution.reservation_id is not None:
                    yield self._of("effect.reserve", k.Reserve, epoch, claim, reservation_id=f"s{number}", **named)
            if effect.slot == SECOND_SLOT:
                yield self._of("effect.settle", k.Settle, epoch, claim, finding="HAPPENED", **named)
        early = dict(named, asked_at=self.early(effect), finding="ABSENT")
        if self.s.guarantee == "RESERVATION":
            early["ground"] = "NO_RESERVATION"
        else:
            early["ground"] = "NOT_FOUND"
        if effect.slot == SLOT and self.s.every:
            yield self._of("effect.reconcile", k.Reconcile, epoch, claim, **early)
            ahead = dict(named, asked_at=NOW + TICK, finding="ABSENT", ground=early["ground"])
            yield self._of("effect.reconcile", k.Reconcile, epoch, claim, **ahead)

    def early(self, effect: Effect) -> int:
        """The latest time of a look at which something that was sent in time may not have been seen yet."""
        latest = max((e.send_by for e in effect.executions), default=effect.first_prepared_at)
        return min(NOW, latest + SETTLE * TICK - 1)

    def commit(self, epoch: int, claim: k.Presented, **fields: Any) -> Call:
        result = {"result_digest": RESULT.digest, "content": RESULT, "result_commit_id": "commit"}
        return self._of("commit", k.Commit, epoch, claim, **result, **fields)

    def _of_people(self, core: Core) -> Iterator[Call]:
        for epoch in self._epochs(core):
            for effect in core.effects:
                for version in self._versions():
                    named = {"effect_id": effect.effect_id, "expected_version": version}
                    for door, kind in (("approve", k.Approve), ("deny", k.Deny)):
                        for payload in PAYLOADS if self.s.every else PAYLOADS[:1]:
                            yield self.decide(door, kind, epoch, payload_digest=payload.digest, **named)
                    asked = {"asked_at": self.early(effect), "finding": "ABSENT", **named}
                    if effect.slot == SLOT:
                        yield self.resolve(effect, epoch, ground=None, **asked)
                        ground = "NO_RESERVATION" if self.s.guarantee == "RESERVATION" else "NOT_FOUND"
                        yield self.resolve(effect, epoch, reconciler=True, ground=ground, **asked)
                    else:
                        for finding in ("HAPPENED", "ABANDONED"):
                            asked.update(finding=finding, asked_at=NOW)
                            yield self.resolve(effect, epoch, **asked)
                    asked.update(finding="ABANDONED", asked_at=NOW)
                    yield self.resolve(effect, epoch, **asked)
                    yield self.resolve(effect, epoch, reconciler=True, **asked)
                if effect.evidence:
                    asked.update(expected_version=EFFECT_VERSION, late_evidence=0)
                    yield self.resolve(effect, epoch, **asked)
                if self.s.every:
                    asked.update(asked_at=NOW + TICK, expected_version=EFFECT_VERSION)
                    yield self.resolve(effect, epoch, **asked)

    def decide(self, door: str, kind: type, epoch: int, **fields: Any) -> Call:
        return Asked(door, "t", epoch), kind(request_id=FRESH, task_id="t", epoch=epoch, who="P", **fields)

    def resolve(self, effect: Effect, epoch: int, **fields: Any) -> Call:
        said = {"effect_id": effect.effect_id, "late_evidence": len(effect.evidence), "evidence": "looked"}
        return self.decide("resolve", k.Resolve, epoch, **{**said, **fields})

    def _of_loops(self, core: Core) -> Iterator[Call]:
        s, task = self.s, core.task
        assert task is not None
        generation, epoch = len(core.claims), core.epoch
        claimed = {"task_id": "t", "expected_state_version": VERSION, "request_id": FRESH}
        if generation < s.attempts and not core.revised:
            yield (
                Asked("claim", "t", epoch, version=VERSION),
                k.Claim(
                    epoch=epoch,
                    owner_id=OWNERS[generation],
                    ttl_us=LEASE,
                    attempt_id=f"attempt-{generation + 1}",
                    **claimed,
                ),
            )
        yield Asked("expire", "t", version=VERSION), k.Expire(**claimed)
        if generation:
            yield (
                Asked("take_over", "t", epoch, generation=generation),
                k.TakeOver(request_id=FRESH, task_id="t", expected_generation=generation, epoch=epoch),
            )
        yield Asked("reopen", "t", epoch, version=VERSION), k.Reopen(epoch=epoch, **claimed)
        if core.epoch - 1 + task.cancel_generation < s.disturbances:  # for ever, where they are forgotten
            yield (
                Asked("cancel", "t", cancel=task.cancel_generation),
                k.Cancel(request_id=FRESH, task_id="t", expected_cancel_generation=task.cancel_generation),
            )
            yield (
                Asked("pool", None, epoch, version=VERSION),
                k.RaiseEpoch(request_id=FRESH, pool="pool", expected_epoch=epoch, expected_state_version=VERSION),
            )
        if task.revision <= s.revisions:
            for accept in (False, True):
                yield (
                    Asked("revise", "t", epoch, revision=task.revision),
                    k.Revise(
                        request_id=FRESH,
                        task_id="t",
                        input=Content(b"", digest_of(task.revision + 1)),
                        expected_revision=task.revision,
                        epoch=epoch,
                        accept_effects=accept,
                    ),
                )

    # what takes knowing something -----------------------------------------------------------------

    def told(self, core: Core, fact: tuple[Any, ...]) -> Iterator[Call]:
        effect = core.effects[0] if core.effects else None
        if fact[0] == "version":
            if effect is None or len(effect.executions) < self.s.executions:
                for _, epoch, claim in self._holders(core):
                    for repeat in (False, True) if effect is not None else (False,):
                        yield self.prepare(epoch, claim, precondition=f"v{fact[1]}", repeat=repeat)
            return
        if effect is None:
            return
        if fact[0] == "settle":
            yield from self._settles(core, effect, *fact[1:])
        elif fact[0] == "person":
            for epoch in self._epochs(core):
                for version in self._versions():
                    yield self.resolve(effect, epoch, expected_version=version, finding=fact[1], asked_at=NOW)
        elif fact[0] == "gone":
            yield from self._reports(core, effect, len(effect.executions), "ABSENT", "RESERVATION_CANCELLED")
            yield self.resolve(
                effect,
                core.epoch,
                expected_version=EFFECT_VERSION,
                finding="ABSENT",
                asked_at=NOW,
                ground="RESERVATION_CANCELLED",
            )
        elif fact[0] == "gone-earlier":
            yield from self._reports(core, effect, fact[1], "ABSENT", "RESERVATION_CANCELLED")
        elif fact[0] == "not-found":
            yield from self._reports(core, effect, len(effect.executions), "ABSENT", "NOT_FOUND")
        elif fact[0] == "happened":
            for number in range(1, len(effect.executions) + 1):
                yield from self._reports(core, effect, number, "HAPPENED", None)
        elif fact[0] == "moved-on":
            yield from self._reports(core, effect, fact[1], "ABSENT", "MOVED_ON")
        elif fact[0] == "cannot-tell":
            yield from self._reports(core, effect, fact[1], "STILL_UNKNOWN", "MOVED_ON")

    def _settles(self, core: Core, effect: Effect, number: int, status: int) -> Iterator[Call]:
        """What the sender of this execution knows of it; also a late copy of what it said then."""
        if number > len(effect.executions):
            return
        sender = effect.executions[number - 1].generation
        for g, epoch, claim in self._speakers(core):
            if g != sender:
                continue
            fields: dict[str, Any] = {"effect_id": effect.effect_id, "execution": number}
            if status == TOOK:
                fields["finding"] = "HAPPENED"
            elif status == STORED:
                fields.update(finding="UNKNOWN", why="STORED_FAILURE")
            else:
                fields.update(finding="ABSENT", why=WHYS[status])
            yield self._of("effect.settle", k.Settle, epoch, claim, **fields)

    def _reports(self, core: Core, effect: Effect, number: int, finding: str, ground: str | None) -> Iterator[Call]:
        """By whoever holds or held a claim, and by the reconciler: of the latest execution, or of an earlier one."""
        named = {"effect_id": effect.effect_id, "finding": finding, "ground": ground, "asked_at": NOW}
        for _, epoch, claim in self._speakers(core) if finding == "HAPPENED" else self._holders(core):
            yield self._of("effect.reconcile", k.Reconcile, epoch, claim, execution=number, **named)
        if finding == "STILL_UNKNOWN":
            return
        latest = number == len(effect.executions)
        for version in self._versions() if latest else self._versions()[1:]:
            fields = {"expected_version": version, "reconciler": True, **named}
            yield self.resolve(effect, core.epoch, **fields)
