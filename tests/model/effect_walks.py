"""Random orders of events around one effect, on a downstream that does exactly what its guarantee promises.

Workers prepare, send, pause without bound, settle what they know, ask and report late; attempts are taken over; time
passes. Whoever speaks tells the truth about what it saw; nobody knows more than it saw. What must hold is counted at
the downstream: the effect takes place at most once, the record never says ABSENT of what took place for certain, and
never COMMITTED of what did not.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from fencepost.kernel import commands as k
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted
from fencepost.kernel.outcomes import Outcome
from fencepost.kernel.prepare import Prepared
from fencepost.kernel.records import EffectState, State, Terms
from tests.model.oracle import Violation
from tests.model.world import SECOND, World

WINDOW, SETTLE, RETENTION = 10, 20, 60
COMMITTED, ABSENT, UNKNOWN = EffectState.COMMITTED, EffectState.ABSENT, EffectState.UNKNOWN


def terms(guarantee: str) -> Terms:
    retention = RETENTION * SECOND if guarantee == "IDEMPOTENT" else 0
    return Terms("downstream", guarantee, WINDOW * SECOND, SETTLE * SECOND, retention_us=retention)


class Downstream:
    """Counts what took place. `arrive` is a call reaching it; the answer may be lost on the way back."""

    def __init__(self, guarantee: str) -> None:
        self.guarantee = guarantee
        self.took_place = 0
        self.known_until = -1  # IDEMPOTENT: how long the key is remembered
        self.resource = 0  # CONDITIONAL: its version, which never returns
        self.ours = False  # its complete history names the effect
        self.cancelled: set[str] = set()
        self.confirmed: set[str] = set()

    def arrive(self, call: Call, now: int) -> bool:
        """Whether it took place, by this call or by an earlier one that it is answered from."""
        if self.guarantee == "CONDITIONAL":
            if call.precondition != f"v{self.resource}":
                return False
            self.resource += 1
            self.ours = True
            self.took_place += 1
            return True
        if self.guarantee == "IDEMPOTENT":
            if now > self.known_until:
                self.took_place += 1
                self.known_until = now + RETENTION * SECOND
            return True
        if self.guarantee == "RESERVATION":
            assert call.reservation is not None
            if call.reservation in self.cancelled:
                return False
            if call.reservation not in self.confirmed:
                self.confirmed.add(call.reservation)
                self.took_place += 1
            return True
        self.took_place += 1
        return True


class Call:
    """One execution in its sender's hands: sent or not, answered or not."""

    def __init__(self, claim: k.Presented, prepared: Prepared) -> None:
        assert prepared.execution is not None
        self.claim = claim
        self.effect_id = prepared.effect.effect_id
        self.execution = prepared.execution.execution
        self.send_by = prepared.execution.send_by
        self.precondition = prepared.execution.precondition
        self.reservation: str | None = None
        self.sent = False
        self.knows: str | None = None  # HAPPENED or ABSENT, where its answer came back
        self.why: str | None = None


class Asked:
    """A look at the downstream, to be reported later."""

    def __init__(self, claim: k.Presented | None, effect: Any, at: int, finding: str, ground: str | None) -> None:
        self.claim, self.effect, self.at, self.finding, self.ground = claim, effect, at, finding, ground


class Walk:
    def __init__(self, seed: int, guarantee: str, kernel: Kernel | None = None) -> None:
        self.choose = random.Random(seed)
        self.guarantee = guarantee
        self.world = World(kernel)
        self.world.submit()
        self.claim: k.Presented | None = self.world.claimed()
        self.downstream = Downstream(guarantee)
        self.calls: list[Call] = []
        self.asked: list[Asked] = []
        self.seen: Counter[str] = Counter()
        self.story: list[str] = []

    def run(self, steps: int) -> Counter[str]:
        actions = (self.prepare, self.send, self.send, self.answer, self.settle, self.settle, self.ask, self.report,
                   self.report, self.hand_over, self.pass_time, self.third_party, self.reserve)  # fmt: skip
        for _ in range(steps):
            action = self.choose.choice(actions)
            said = action()
            if said is not None:
                self.story.append(f"{action.__name__}: {said}")
                self.seen[f"{action.__name__}: {said}"] += 1
                self.check()
        return self.seen

    # what is done -------------------------------------------------------------------------------

    def prepare(self) -> str | None:
        if self.claim is None:
            return None
        fields: dict[str, Any] = {"repeat": self.choose.random() < 0.5}
        known = self.world.effects.get("t", [])
        if self.guarantee == "CONDITIONAL" and not (known and known[-1].state == UNKNOWN):
            fields["precondition"] = f"v{self.downstream.resource}"
        answer = self.world.ask(k.Prepare, self.claim, terms=terms(self.guarantee), **fields)
        if type(answer) is not Prepared:
            return str(getattr(answer, "outcome", answer))
        if answer.outcome is Outcome.EXECUTE:
            self.calls.append(Call(self.claim, answer))
        return answer.outcome.value

    def send(self) -> str | None:
        """The call reaches the downstream: in time where that counts; a paused sender otherwise at any time."""
        bound = self.guarantee not in ("RESERVATION", "CONDITIONAL")
        ready = [c for c in self.calls if not c.sent and not (bound and self.world.now > c.send_by)]
        if self.guarantee == "RESERVATION":
            ready = [c for c in ready if c.reservation is not None]
        if not ready:
            return None
        call = self.choose.choice(ready)
        call.sent = True
        happened = self.downstream.arrive(call, self.world.now)
        if self.choose.random() < 0.5:
            return "answer lost"
        call.knows = "HAPPENED" if happened else "ABSENT"
        if not happened:
            call.why = {"CONDITIONAL": "PRECONDITION", "RESERVATION": "RESERVATION_CANCELLED"}[self.guarantee]
        return call.knows

    def answer(self) -> str | None:
        """The downstream refuses for certain: this call does nothing, now and later."""
        ready = [c for c in self.calls if not c.sent and c.reservation is None]
        if not ready or self.choose.random() < 0.5:
            return None
        call = self.choose.choice(ready)
        call.sent, call.knows, call.why = True, "ABSENT", "REFUSED"
        return "REFUSED"

    def reserve(self) -> str | None:
        if self.guarantee != "RESERVATION":
            return None
        ready = [c for c in self.calls if not c.sent and c.reservation is None]
        if not ready:
            return None
        call = self.choose.choice(ready)
        name = f"r{call.execution}"
        fields = {"effect_id": call.effect_id, "execution": call.execution, "reservation_id": name}
        said = self.world.ask(k.Reserve, call.claim, **fields)
        if type(said) is Accepted:
            call.reservation = name
        return str(said.outcome)

    def settle(self) -> str | None:
        if not self.calls:
            return None
        call = self.choose.choice(self.calls)
        finding = call.knows or "UNKNOWN"
        if finding == "UNKNOWN":
            call.why = None
        fields: dict[str, Any] = {"effect_id": call.effect_id, "execution": call.execution, "finding": finding}
        said = self.world.ask(k.Settle, call.claim, why=call.why, **fields)
        return f"{finding} {said.outcome}"

    def ask(self) -> str | None:
        """Look, and keep the finding with the time; the claim's holder, or the reconciler."""
        effects = self.world.effects.get("t", [])
        if not effects or effects[-1].state != UNKNOWN or self.guarantee in ("READ_ONLY", "NON_REPLAYABLE"):
            return None
        effect, down = effects[-1], self.downstream
        finding, ground = "ABSENT", "NOT_FOUND"
        stored = effect.executions[-1].reservation_id
        if self.guarantee == "CONDITIONAL":
            if down.ours:
                finding = "HAPPENED"
            elif effect.executions[-1].precondition != f"v{down.resource}":
                ground = "MOVED_ON"
        elif self.guarantee == "IDEMPOTENT":
            if self.world.now <= down.known_until:
                finding = "HAPPENED"
        elif stored is None:
            ground = "NO_RESERVATION"
        elif stored in down.confirmed:
            finding = "HAPPENED"
        elif self.choose.random() < 0.5:
            down.cancelled.add(stored)
            ground = "RESERVATION_CANCELLED"
        else:
            return None
        holder = self.claim if self.choose.random() < 0.7 else None
        self.asked.append(Asked(holder, effect, self.world.now, finding, ground if finding == "ABSENT" else None))
        return finding

    def report(self) -> str | None:
        if not self.asked:
            return None
        asked = self.asked.pop(self.choose.randrange(len(self.asked)))
        common: dict[str, Any] = {"effect_id": asked.effect.effect_id, "asked_at": asked.at, "ground": asked.ground}
        if asked.claim is not None:
            execution = len(asked.effect.executions)
            said = self.world.ask(k.Reconcile, asked.claim, execution=execution, finding=asked.finding, **common)
        else:
            common.update(expected_version=asked.effect.version, reconciler=True, who="reconciler")
            said = self.world.person(k.Resolve, finding=asked.finding, **common)
        return f"{asked.finding} {getattr(said, 'outcome', said)}"

    def hand_over(self) -> str | None:
        if self.claim is not None and self.choose.random() < 0.5:
            self.world.person(k.TakeOver)
            self.claim = None
            return "ended"
        if self.claim is None:
            self.claim = self.world.claimed(owner=f"W{self.world.task.claim_generation}")
            return "claimed"
        return None

    def pass_time(self) -> str:
        self.world.advance(self.choose.choice((1, WINDOW, SETTLE, WINDOW + SETTLE)))
        if self.claim is not None and self.world.task.state == State.CLAIMED:
            self.world.ask(k.Renew, self.claim)
        return "passes"

    def third_party(self) -> str | None:
        if self.guarantee != "CONDITIONAL" or self.choose.random() < 0.5:
            return None
        self.downstream.resource += 1
        return "writes"

    # what must hold -----------------------------------------------------------------------------

    def check(self) -> None:
        took = self.downstream.took_place
        effects = self.world.effects.get("t", [])
        if took > 1 and self.guarantee != "READ_ONLY":
            self.broken("4", f"took place {took} times")
        if not effects:
            return
        effect = effects[-1]
        if effect.state == COMMITTED and not took:
            self.broken("record", "COMMITTED, and it never took place")
        if effect.state == ABSENT and took and self.guarantee != "READ_ONLY":
            self.broken("record", f"ABSENT ({effect.absent_ground}), and it took place")
        if effect.state == ABSENT and effect.absent_ground == "CERTAIN" and self.may_still_arrive():
            self.broken("4", "ABSENT for certain, and a call may still arrive")

    def may_still_arrive(self) -> bool:
        for call in self.calls:
            if call.sent or (self.guarantee == "CONDITIONAL" and call.precondition != f"v{self.downstream.resource}"):
                continue
            if self.guarantee == "RESERVATION":
                if call.reservation is None or call.reservation in self.downstream.cancelled:
                    continue
                return True
            if self.world.now <= call.send_by or self.guarantee == "CONDITIONAL":
                return True
        return False

    def broken(self, rule: str, text: str) -> None:
        raise Violation(rule, f"{self.guarantee}: {text}\n  " + "\n  ".join(self.story))


def walk(guarantee: str, seeds: range, steps: int = 40, kernel: Kernel | None = None) -> Counter[str]:
    """What was met, by action and answer. Raises Violation with the story that led there."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += Walk(seed, guarantee, kernel).run(steps)
    return seen
