"""A kit that any downstream must pass: what it is called through is the real flow, on a store in memory.

    class MailWorld(DownstreamWorld):
        unsupported = {"show_late": "the server shows what it did at once"}
        async def downstream(self): ...
        async def count(self, effect_id, payload): ...
        async def lose_answer(self): ...

    @pytest.mark.parametrize("scenario", downstream_suite(MailWorld), ids=str)
    async def test_mail_is_never_sent_twice(scenario):
        await scenario()

What each scenario asserts, whatever the guarantee: the effect is in the world once at most, what is unknown is never
taken for absent, and what the guarantee promises is reached. READ_ONLY may be called as often as it likes.

Not covered: that the server keeps a key as long as it declares (only its operator can know), and crashes of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import unittest
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

from fencepost.client.effect_port import AttemptPort
from fencepost.clock import elapsed
from fencepost.effects.base import Declaration, Guarantee, offers
from fencepost.effects.failures import EffectError, EffectUnknown, PayloadConflict, PersonRequired
from fencepost.effects.performing import declared, perform
from fencepost.errors import Fenced
from fencepost.testing.memory import MemoryClient, memory_client
from fencepost.wire import Claim, EffectView, NewTask, Refused

__all__ = ["DownstreamWorld", "Scenario", "downstream_suite"]

PATIENCE = 30.0  # seconds for whatever must happen in the end
TIMEOUT = 0.5  # of a call that is to be given up: long enough to reach the downstream
LONGEST_WINDOW = 3.0  # of a downstream under test: the kit really waits for it
SLOT = "slot"


class DownstreamWorld:
    """The downstream under test and what it reaches. Subclass it; a new one is made for each scenario.

    `unsupported`: faults that cannot be brought about here, each with the reason, which the skipped scenario shows. A
    fault that is neither written nor named there fails.
    """

    unsupported: ClassVar[Mapping[str, str]] = {}

    async def __aenter__(self) -> DownstreamWorld:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what was started."""

    async def downstream(self) -> Any:
        """A downstream that reaches this world: another object each time, as another process would have.

        It declares a `send_window` and a `settle_time` of at most 3 seconds: the kit really waits for them.
        """
        raise NotImplementedError

    def payload(self, number: int) -> Any:
        """A payload that can be sent, another one for each number. For CONDITIONAL: all for the same resource."""
        return {"number": number}

    async def count(self, effect_id: str, payload: Any) -> int:
        """How often this effect is in the world, looked at from behind, not by the downstream's own query."""
        raise NotImplementedError

    async def lose_answer(self) -> None:
        """Of the next call that acts: it acts, and its answer is lost."""
        raise NotImplementedError

    async def act_late(self, seconds: float) -> None:
        """The next call that acts does so only after `seconds`, whatever its caller does meanwhile."""
        raise NotImplementedError

    async def show_late(self, seconds: float) -> None:
        """The next call that acts does so, loses its answer, and a query shows it only after `seconds`."""
        raise NotImplementedError

    async def forget(self) -> None:
        """Every key is forgotten, as after the retention."""
        raise NotImplementedError


class Scenario:
    """One scenario: `await scenario()`. Raises AssertionError, or unittest.SkipTest with the reason."""

    def __init__(self, name: str, body: Callable[[_Stage], Awaitable[None]], world: Callable[[], Any]) -> None:
        self.name = name
        self._body = body
        self._world = world

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Scenario {self.name}>"

    async def __call__(self) -> None:
        async with self._world() as world, memory_client() as client:
            stage = _Stage(world, client)
            await stage.open()
            try:
                await self._body(stage)
            finally:
                await stage.close()


def downstream_suite(world: Callable[[], DownstreamWorld]) -> list[Scenario]:
    """Every scenario, each with a world of its own: `world()` makes one, and is entered as a context manager."""
    return [Scenario(name, body, world) for name, body in _SCENARIOS]


class _Stage:
    """A task, its attempts, and the downstream under test."""

    def __init__(self, world: DownstreamWorld, client: MemoryClient) -> None:
        self.world = world
        self.client = client
        self._opened: list[Any] = []
        self.declaration: Declaration

    async def open(self) -> None:
        first = await self.fresh()
        self.declaration = await declared(first)
        assert self.guarantee != Guarantee.TRANSACTIONAL, "a statement in the commit has no downstream to be called"
        for name in ("send_window", "settle_time"):
            found = getattr(self.declaration, name)
            assert found <= LONGEST_WINDOW, f"for this kit {name} must be at most {LONGEST_WINDOW:g} s, got {found:g}"
        await self.client.submit(NewTask({}, task_id="task"))

    async def close(self) -> None:
        for downstream in self._opened:
            if offers(downstream, "close"):
                await downstream.close()

    @property
    def guarantee(self) -> Guarantee:
        return self.declaration.guarantee

    async def fresh(self) -> Any:
        made = await self.world.downstream()
        self._opened.append(made)
        return made

    async def fault(self, name: str, *arguments: float) -> None:
        if name in self.world.unsupported:
            raise unittest.SkipTest(f"{name}: {self.world.unsupported[name]}")
        method = getattr(type(self.world), name)
        assert method is not getattr(DownstreamWorld, name), f"write {name}, or say in `unsupported` why it cannot be"
        await getattr(self.world, name)(*arguments)

    def only(self, *guarantees: Guarantee) -> None:
        if self.guarantee not in guarantees:
            raise unittest.SkipTest(f"of no meaning for {self.guarantee}")

    async def claim(self) -> Claim:
        claims = await self.client.claim_next(owner="A", ttl=0.2)
        assert not isinstance(claims, Refused)
        return claims[0]

    async def successor(self, claim: Claim) -> Claim:
        """Its lease runs out, and somebody else takes the task."""
        return await self.client.reclaim(claim, owner="B")

    async def perform(self, claim: Claim, number: int = 1, *, using: Any = None, slot: str = SLOT, **how: Any) -> Any:
        port = AttemptPort(self.client, claim, lambda: PATIENCE)
        downstream = using if using is not None else await self.fresh()
        how = {"on_approval": "raise", "timeout": 10.0, "patience": PATIENCE, **how}
        return await asyncio.wait_for(perform(port, downstream, slot, self.world.payload(number), **how), 2 * PATIENCE)

    async def effect(self, slot: str = SLOT) -> EffectView:
        page = await self.client.effects(task_id="task")
        found: list[EffectView] = [view for view in page.items if view.slot == slot]
        return found[0]

    async def count(self, slot: str = SLOT) -> int:
        effect = await self.effect(slot)
        return await self.world.count(effect.effect_id, effect.payload)

    async def once(self, slot: str = SLOT) -> None:
        """It is in the world, and once."""
        if self.guarantee == Guarantee.READ_ONLY:
            return
        found = await self.count(slot)
        assert found == 1, f"the effect is in the world {found} times"

    async def until_once(self) -> None:
        """Wait until it is there."""
        if self.guarantee == Guarantee.READ_ONLY:
            return
        ends = elapsed() + PATIENCE
        while await self.count() == 0:
            assert elapsed() < ends, "it never acted: did the call reach it before its time-out?"
            await asyncio.sleep(0.02)
        await self.once()

    async def leaves_unknown(self, claim: Claim, **how: Any) -> None:
        """An attempt that learns nothing and gives up at once. That is never taken for absent."""
        with contextlib.suppress(EffectUnknown, PersonRequired):
            await self.perform(claim, patience=0.0, **how)
            raise AssertionError("the answer was lost, and the attempt has a receipt all the same")
        state = (await self.effect()).state
        assert state == "UNKNOWN", f"nobody knows what became of it, and it is {state}"

    async def finishes(self, claim: Claim, number: int = 1, **how: Any) -> Any:
        """What the guarantee promises a successor: the receipt, or that a person has to look."""
        may_need_a_person = self.guarantee in (Guarantee.NON_REPLAYABLE, Guarantee.CONDITIONAL)
        try:
            receipt = await self.perform(claim, number, **how)
        except PersonRequired:
            assert may_need_a_person, f"{self.guarantee} needs no person here"
            return None
        assert self.guarantee != Guarantee.NON_REPLAYABLE, "what cannot be asked about was cleared without a person"
        return receipt


# the scenarios ------------------------------------------------------------------------------------


async def _happens_once(stage: _Stage) -> None:
    claim = await stage.claim()
    receipt = await stage.perform(claim)
    await stage.once()
    again = await stage.perform(await stage.successor(claim))
    assert again == receipt, f"the kept receipt is {receipt!r}, and {again!r} came back"
    await stage.once()


async def _two_slots(stage: _Stage) -> None:
    """The same payload in two slots is two effects, whatever their order in the next attempt."""
    claim = await stage.claim()
    await stage.perform(claim, slot="s1")
    await stage.perform(claim, slot="s2")
    claim = await stage.successor(claim)
    await stage.perform(claim, slot="s2")
    await stage.perform(claim, slot="s1")
    one, other = await stage.effect("s1"), await stage.effect("s2")
    assert one.effect_id != other.effect_id
    await stage.once("s1")
    await stage.once("s2")


async def _answer_lost(stage: _Stage) -> None:
    claim = await stage.claim()
    await stage.fault("lose_answer")
    await stage.leaves_unknown(claim)
    await stage.once()
    await stage.finishes(await stage.successor(claim))
    await stage.once()


async def _other_payload(stage: _Stage) -> None:
    """The successor words it differently: it gets the receipt of what was bound, and sends nothing."""
    claim = await stage.claim()
    await stage.fault("lose_answer")
    await stage.leaves_unknown(claim)
    claim = await stage.successor(claim)
    with contextlib.suppress(PayloadConflict):
        await stage.perform(claim, 2)
        raise AssertionError("another payload went through under the same slot")
    await stage.finishes(claim, 2, on_conflict="adopt")
    await stage.once()


async def _acts_after_the_timeout(stage: _Stage) -> None:
    claim = await stage.claim()
    await stage.fault("act_late", 2 * TIMEOUT)
    await stage.leaves_unknown(claim, timeout=TIMEOUT)
    claim = await stage.successor(claim)
    with contextlib.suppress(EffectError):  # at once, while nothing can be known
        await stage.perform(claim, patience=0.0, timeout=TIMEOUT)
    await stage.until_once()
    await stage.finishes(claim)
    await asyncio.sleep(0.1)
    await stage.once()


async def _lagging_query(stage: _Stage) -> None:
    if not offers(await stage.fresh(), "query"):
        raise unittest.SkipTest("it cannot be asked")
    claim = await stage.claim()
    await stage.fault("show_late", stage.declaration.settle_time / 2)
    await stage.leaves_unknown(claim)
    await stage.finishes(await stage.successor(claim))
    await stage.once()


async def _forgotten_key(stage: _Stage) -> None:
    stage.only(Guarantee.IDEMPOTENT)
    claim = await stage.claim()
    await stage.fault("lose_answer")
    await stage.leaves_unknown(claim)
    await stage.fault("forget")
    assert stage.declaration.retention is not None
    stage.client.advance(stage.declaration.retention)
    try:
        await stage.perform(await stage.successor(claim))
    except PersonRequired:
        pass
    else:
        raise AssertionError("past its retention it was repeated, or cleared, without a person")
    await stage.once()


async def _key_in_progress(stage: _Stage) -> None:
    stage.only(Guarantee.IDEMPOTENT)
    claim = await stage.claim()
    await stage.fault("act_late", 3 * TIMEOUT)
    await stage.leaves_unknown(claim, timeout=TIMEOUT)
    await stage.finishes(await stage.successor(claim))
    await stage.once()


async def _paused_sender(stage: _Stage, *, too_late: bool) -> None:
    """A is stopped between its look at the time and its first byte; B goes on without it; A wakes up."""
    claim = await stage.claim()
    paused = _Paused(await stage.fresh())
    sender = asyncio.create_task(stage.perform(claim, using=paused))
    try:
        async with asyncio.timeout(PATIENCE):
            await paused.reached.wait()
        await stage.finishes(await stage.successor(claim))
        if too_late:
            await asyncio.sleep(stage.declaration.send_window)
        paused.go.set()
        with contextlib.suppress(Fenced, EffectError):
            await sender
            assert stage.guarantee == Guarantee.READ_ONLY, "an attempt that had lost its task got a receipt"
    finally:
        paused.go.set()
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    if stage.guarantee != Guarantee.READ_ONLY:
        found = await stage.count()
        assert found <= 1, f"the effect is in the world {found} times"


async def _wakes_in_time(stage: _Stage) -> None:
    await _paused_sender(stage, too_late=False)


async def _wakes_too_late(stage: _Stage) -> None:
    await _paused_sender(stage, too_late=True)


async def _never_past_send_by(stage: _Stage) -> None:
    """What is prepared and whose send_by then passes is not sent at all, by the flow itself."""
    claim = await stage.claim()
    late = _Paused(await stage.fresh())
    late.go.set()
    port: Any = _Slow(AttemptPort(stage.client, claim, lambda: PATIENCE), stage.declaration.send_window)
    with contextlib.suppress(EffectUnknown, PersonRequired):
        await perform(port, late, SLOT, stage.world.payload(1), patience=0.0, on_approval="raise")
        raise AssertionError("it was sent after its send_by")
    assert not late.reached.is_set(), "it was called after its send_by"
    assert await stage.count() == 0


_SCENARIOS: Sequence[tuple[str, Callable[[_Stage], Awaitable[None]]]] = (
    ("happens once, and its receipt is kept", _happens_once),
    ("two slots are two effects", _two_slots),
    ("answer lost after acting", _answer_lost),
    ("answer lost, and the successor words it differently", _other_payload),
    ("acts after the time-out", _acts_after_the_timeout),
    ("lagging query", _lagging_query),
    ("forgotten key", _forgotten_key),
    ("key known but still in progress", _key_in_progress),
    ("paused sender wakes up in time", _wakes_in_time),
    ("paused sender wakes up too late", _wakes_too_late),
    ("nothing is sent past send_by", _never_past_send_by),
)

_SENDS = ("execute", "reserve")


class _Paused:
    """A downstream whose sending stops right before the real one's, until it is let go."""

    def __init__(self, inner: Any) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self.declaration = inner.declaration
        for name in ("precondition", "query", "confirm", "cancel", "bind", "bind_for", "same", "earn"):
            if callable(getattr(inner, name, None)):
                setattr(self, name, getattr(inner, name))
        for name in _SENDS:
            if callable(getattr(inner, name, None)):
                setattr(self, name, self._stopping(getattr(inner, name)))

    def _stopping(self, send: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def stopped(call: Any) -> Any:
            self.reached.set()
            await self.go.wait()
            return await send(call)

        return stopped


class _Slow:
    """A port whose prepare is answered, and then heard only after the send window is over."""

    def __init__(self, inner: AttemptPort, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.task_id, self.generation, self.epoch = inner.task_id, inner.generation, inner.epoch
        self.trusted = inner.trusted
        for name in ("reserve", "settle", "reconcile", "defer", "give_back"):
            setattr(self, name, getattr(inner, name))

    async def prepare(self, *arguments: Any, **more: Any) -> Any:
        answer = await self._inner.prepare(*arguments, **more)
        await asyncio.sleep(self._seconds)
        return answer
