"""One task's effects as its journal tells them, held against their records: invariant 4 (claim.v1, section 9).

Written from the contract and not from the doors, so that a rule that is missing there shows here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.kernel.digests import canonical, digest_bytes
from fencepost.kernel.records import Effect, EffectState, Event, Execution, Guarantee, State
from fencepost.stores.base import TaskHistory

Report = Callable[[int, str], None]

_AWAITING, _UNKNOWN, _PREPARED = EffectState.AWAITING_APPROVAL, EffectState.UNKNOWN, EffectState.PREPARED
_COMMITTED, _ABSENT = EffectState.COMMITTED, EffectState.ABSENT
_DENIED, _ABANDONED = EffectState.DENIED, EffectState.ABANDONED
_NEW = None

# event → the states that it may start from, and where it leads (None: it leaves the state as it is).
_MOVES: dict[str, tuple[tuple[EffectState | None, ...], EffectState | None]] = {
    "effect_awaiting": ((_NEW, _ABSENT), _AWAITING),
    "effect_approved": ((_AWAITING,), None),
    "effect_prepared": ((_NEW, _AWAITING, _ABSENT, _UNKNOWN), _PREPARED),
    "effect_reserved": ((_PREPARED,), None),
    "effect_committed": ((_PREPARED, _UNKNOWN), _COMMITTED),
    "effect_absent": ((_PREPARED, _UNKNOWN), _ABSENT),
    "effect_unknown": ((_PREPARED, _UNKNOWN), _UNKNOWN),
    "effect_denied": ((_AWAITING,), _DENIED),
    "effect_abandoned": ((_UNKNOWN,), _ABANDONED),
}
_REPEATABLE = (Guarantee.IDEMPOTENT, Guarantee.CONDITIONAL, Guarantee.READ_ONLY)


class _Told:
    """One effect, as far as the journal has told of it."""

    def __init__(self, detail: dict[str, Any]) -> None:
        self.effect_id = detail.get("effect")
        self.payload = detail.get("payload")
        self.downstream = detail.get("downstream")
        self.guarantee = detail.get("guarantee")
        self.state: EffectState | None = _NEW
        self.version = 0
        self.executions = 0
        self.first: int | None = None
        self.approved = False


class EffectReplay:
    """Feed it every event of the task, in order; then `finish` compares with the records."""

    def __init__(self, history: TaskHistory, namespace: str, report: Report) -> None:
        self._history = history
        self._namespace = namespace
        self._report = report
        self._records = {effect.number: effect for effect in history.effects}
        self._told: dict[int, _Told] = {}
        self._whole = not history.task.pruned_to_version

    def follow(self, event: Event) -> None:
        detail = event.detail or {}
        if event.name.startswith("effect_"):
            self._effect(event, detail)
        elif event.name == "attempt_ended":
            self._ended(event, detail.get("effects_unknown") or [])
        elif event.name == "result_committed":
            self._committed(event, detail)

    # events -------------------------------------------------------------------------------------

    def _effect(self, event: Event, detail: dict[str, Any]) -> None:
        number = detail.get("number")
        if not isinstance(number, int) or number < 1:
            self._report(7, f"{event.name} (state version {event.state_version}) names no effect")
            return
        told = self._told.get(number)
        if told is None:
            told = self._told[number] = _Told(detail)
            if not self._whole or event.name not in ("effect_awaiting", "effect_prepared"):
                self._forget(told, number, event, detail)
        at = f"effect {number} ({event.name}, state version {event.state_version})"
        for field, shown in (
            ("effect_id", detail.get("effect")),
            ("payload", detail.get("payload")),
            ("downstream", detail.get("downstream")),
            ("guarantee", detail.get("guarantee")),
        ):
            if shown != getattr(told, field):
                self._report(4, f"{at} shows another {field} than was bound to it")
        self._step(told, detail.get("version"), at)
        self._move(told, event, detail, at)
        if event.name == "effect_prepared":
            self._executed(told, number, event, detail, at)
        if event.name == "effect_approved":
            told.approved = True
        state = detail.get("state")
        if told.state is not None and state != told.state.name:
            self._report(7, f"{at} shows {state}, and leads to {told.state.name}")

    def _forget(self, told: _Told, number: int, event: Event, detail: dict[str, Any]) -> None:
        """What came before is pruned: take what the event does not change from it."""
        if self._whole:
            self._report(7, f"effect {number} begins with {event.name}, not with its prepare")
        told.version = int(detail.get("version") or 1) - 1
        executed = event.name == "effect_prepared"
        told.executions = int(detail.get("execution") or 0) - executed
        told.approved = True  # not known
        before = _MOVES.get(event.name, ((EffectState[detail["state"]],), None))[0]
        told.state = before[-1]
        told.first = None

    def _step(self, told: _Told, version: Any, at: str) -> None:
        if version != told.version + 1:
            self._report(7, f"{at} is version {version} of the effect, after {told.version}")
        told.version = version if isinstance(version, int) else told.version + 1

    def _move(self, told: _Told, event: Event, detail: dict[str, Any], at: str) -> None:
        if event.name == "effect_evidence":
            if told.state == _COMMITTED:
                self._report(4, f"{at} changes an effect that is COMMITTED")
            elif told.state not in (_PREPARED, _UNKNOWN):
                told.state = _UNKNOWN
            return
        before, after = _MOVES[event.name]
        if told.state not in before:
            came = told.state.name if told.state is not None else "nothing"
            self._report(4, f"{at} leads on from {came}")
        if event.name == "effect_prepared":
            self._may_execute(told, event, at)
        if after is not None:
            told.state = after

    def _may_execute(self, told: _Told, event: Event, at: str) -> None:
        """No second execution while an earlier one may still take effect, unless something at the downstream keeps it
        from taking effect twice."""
        if told.state == _UNKNOWN and told.guarantee not in _REPEATABLE:
            self._report(4, f"{at} repeats an execution that is UNKNOWN, and {told.guarantee} does not allow it")
        if told.guarantee == Guarantee.NON_REPLAYABLE and told.executions and not told.approved:
            self._report(4, f"{at} executes again what nobody approved again")
        for number, other in self._told.items():
            if other is told or other.state not in (_PREPARED, _UNKNOWN):
                continue
            pair = (told.guarantee, other.guarantee)
            if Guarantee.NON_REPLAYABLE in pair and Guarantee.READ_ONLY not in pair:
                self._report(4, f"{at} was executed while effect {number} was under way, and one of them goes alone")

    def _executed(self, told: _Told, number: int, event: Event, detail: dict[str, Any], at: str) -> None:
        told.executions += 1
        told.approved = False
        if detail.get("execution") != told.executions:
            self._report(4, f"{at} is execution {detail.get('execution')}, not {told.executions}")
        record = self._records.get(number)
        if record is None or told.executions > len(record.executions):
            return
        execution = record.executions[told.executions - 1]
        shown = (event.generation, event.attempt_id, event.at, detail.get("send_by_us"))
        if shown != (execution.generation, execution.attempt_id, execution.prepared_at, execution.send_by):
            self._report(7, f"{at} is not the execution that the record holds")

    def _ended(self, event: Event, unknown: list[Any]) -> None:
        named = {told.effect_id: told for told in self._told.values()}
        for effect_id in unknown:
            told = named.get(effect_id)
            if told is None:
                if self._whole:
                    self._report(7, f"attempt_ended (state version {event.state_version}) names an unknown effect")
                continue
            if told.state != _PREPARED:
                self._report(7, f"attempt_ended (state version {event.state_version}) took back what was not PREPARED")
            told.state = _UNKNOWN
            told.version += 1
        left = [number for number, told in self._told.items() if told.state == _PREPARED]
        if left:
            self._report(4, f"effects {left} were PREPARED still when their attempt had ended")

    def _committed(self, event: Event, detail: dict[str, Any]) -> None:
        named = {told.effect_id: told for told in self._told.values()}
        for key, before, after in (
            ("effects_absent", (_PREPARED, _UNKNOWN), _ABSENT),
            ("effects_denied", (_AWAITING,), _DENIED),
        ):
            for effect_id in detail.get(key) or []:
                told = named.get(effect_id)
                if told is None:
                    if self._whole:
                        self._report(
                            7, f"result_committed (state version {event.state_version}) ends an unknown effect"
                        )
                    continue
                if told.state not in before or told.guarantee != Guarantee.READ_ONLY:
                    self._report(4, f"was committed and took effect {effect_id[:8]} for {after.name}, which it was not")
                told.state, told.version = after, told.version + 1
        for said in detail.get("effects") or []:
            number = said.get("number")
            told = self._told[number] = _Told(
                {**said, "downstream": self._downstream(number), "guarantee": Guarantee.TRANSACTIONAL.value}
            )
            told.state, told.version, told.executions, told.first = _COMMITTED, 1, 1, event.at
        for number, told in self._told.items():
            record = self._records.get(number)
            # What only reads is ended by the commit, of whatever revision it is.
            reads = told.guarantee == Guarantee.READ_ONLY
            if record is None or (record.revision != event.revision and not reads):
                continue
            if told.state in (_AWAITING, _PREPARED, _UNKNOWN):
                self._report(4, f"was committed while effect {number} was {told.state.name}")

    def _downstream(self, number: Any) -> str | None:
        record = self._records.get(number)
        return record.terms.downstream if record is not None else None

    # records ------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Compare with the records; how many effects there are."""
        task = self._history.task
        effects = self._history.effects
        if task.effects != len(effects) or [e.number for e in effects] != list(range(1, len(effects) + 1)):
            self._report(7, f"counts {task.effects} effects, {len(effects)} stand with it")
        for number in self._told.keys() - self._records.keys():
            self._report(7, f"effect {number} is in the journal, and has no record")
        seen: set[tuple[int, str, str]] = set()
        for effect in effects:
            place = (effect.revision, effect.node_id, effect.slot)
            if place in seen:
                self._report(4, f"slot {effect.slot!r} holds two effects")
            seen.add(place)
            self._record(effect)
            self._executions(effect)
        return len(effects)

    def _record(self, effect: Effect) -> None:
        number, task = effect.number, self._history.task
        told = self._told.get(number)
        if told is None:
            if self._whole:
                self._report(7, f"effect {number} has no event")
        else:
            for shown, held, says in (
                (told.effect_id, effect.effect_id, "id"),
                (told.payload, effect.payload_digest, "payload digest"),
                (told.downstream, effect.terms.downstream, "downstream"),
                (told.guarantee, effect.terms.guarantee, "guarantee"),
                (told.state, EffectState(effect.state), "state"),
                (told.version, effect.version, "version"),
                (told.executions, len(effect.executions), "number of executions"),
            ):
                if shown != held:
                    self._report(7, f"effect {number}'s {says} is {held!s}, its journal says {shown!s}")
        named = [self._namespace, effect.task_id, effect.revision, effect.node_id, effect.slot]
        if digest_bytes(canonical(named)).removeprefix("sha256:") != effect.effect_id:
            self._report(4, f"effect {number} does not have the id of its slot")
        if self._history.payload_digests.get(number) != effect.payload_digest:
            self._report(4, f"effect {number}'s payload is not the one that was bound to it")
        if effect.state == _PREPARED:
            last = effect.executions[-1] if effect.executions else None
            if task.state != State.CLAIMED or last is None or last.generation != task.claim_generation:
                self._report(7, f"effect {number} is PREPARED, and the attempt that prepared it does not hold the task")
        if (effect.state == _ABSENT) != (effect.absent_ground is not None) and effect.state in (_ABSENT, _COMMITTED):
            self._report(7, f"effect {number} is {EffectState(effect.state).name} on the ground {effect.absent_ground}")

    def _executions(self, effect: Effect) -> None:
        before: Execution | None = None
        used: set[str] = set()
        for count, execution in enumerate(effect.executions, 1):
            at = f"execution {execution.execution} of effect {effect.number}"
            if execution.execution != count:
                self._report(4, f"{at} is the {count}. of its effect")
            if execution.request_id in used:
                self._report(4, f"{at} has the request id of an earlier one")
            used.add(execution.request_id)
            if execution.repeats and before is not None:
                if execution.precondition != before.precondition:
                    self._report(4, f"{at} repeats one under another precondition")
                self._in_window(effect, execution, at)
            if before is not None and execution.generation < before.generation:
                self._report(2, f"{at} is of an older generation than the one before")
            before = execution
        if effect.executions and effect.executions[0].prepared_at != effect.first_prepared_at:
            self._report(4, f"effect {effect.number}'s retention does not count from its first execution")

    def _in_window(self, effect: Effect, execution: Execution, at: str) -> None:
        terms = effect.terms
        if terms.guarantee != Guarantee.IDEMPOTENT:
            return
        if execution.send_by > effect.first_prepared_at + terms.retention_us:
            self._report(4, f"{at} may be sent after its key was forgotten")
