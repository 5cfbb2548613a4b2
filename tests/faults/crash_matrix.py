"""A sender that dies, or is paused and wakes when its successor is done, at each point of an effect.

`crash` plays one combination and gives what came of it; `promised` is what the guarantee promises of it, from the
contract and not from what was seen. docs/crash-matrix.md says it in words: see `crash_page`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import fencepost
from fencepost.client.client import Client
from fencepost.effects.config import Downstreams
from fencepost.kernel.effect_rules import effect_id
from fencepost.wire import Done, EffectView, NewTask, Refused, Result, TaskView
from tests.faults.programs.sender import TTL
from tests.faults.stage import PATIENCE, Program, Stage, until
from tests.faults.worlds import SECRETS, WINDOWS, World, make_table, statement

SIGNALS = ("SIGKILL", "SIGSTOP")
TOGETHER = 4  # senders at a time
TAKES = 8  # of a combination whose sender was too slow for its windows: it says so, and nothing is promised about it
CALLS = ("before prepare", "after prepare", "past the last look", "after send", "before settle", "after settle")
COMMITS = ("before prepare", "before commit", "after commit")  # TRANSACTIONAL has no prepare and no settle


def points(guarantee: str) -> tuple[str, ...]:
    if guarantee == "TRANSACTIONAL":
        return COMMITS
    if guarantee == "RESERVATION":
        return (*CALLS[:2], "after reserve", *CALLS[2:])
    if guarantee == "NON_REPLAYABLE":  # a sender that does not look any more is what the person has to rule out
        return tuple(point for point in CALLS if point != "past the last look")
    return CALLS


@dataclass(frozen=True)
class Crash:
    """One combination, and what came of it in words that are the same in every run."""

    world: str
    point: str
    signal: str
    before: int  # in the world when the sender was gone, or stood still
    after: int  # when everybody was done, the late sender included
    led_on: tuple[str, ...]  # what the successor, and people, did about the effect up to a call of their own
    committed_by: str
    late: tuple[str, ...]  # what the late sender was told at each door, and what its late call found

    @property
    def sent_by(self) -> str:
        return "the sender" if self.before else "the successor"

    @property
    def person(self) -> bool:
        return any(step.startswith("a person") for step in self.led_on)


@dataclass(frozen=True)
class Promise:
    sent_by: str
    person: bool  # who alone can lead on
    committed_by: str = "successor"


def promised(guarantee: str, point: str) -> Promise:
    """What section 5 of the contract promises, whichever signal it was."""
    if guarantee == "TRANSACTIONAL":
        done = "sender" if point == "after commit" else "successor"
        return Promise(f"the {done}", False, done)
    sent = point in ("after send", "before settle", "after settle")
    open_still = point not in ("before prepare", "after settle")  # prepared, and nothing more is known
    return Promise("the sender" if sent else "the successor", guarantee == "NON_REPLAYABLE" and open_still)


def kept(world: World, done: Crash) -> None:
    """Assert what was promised: never two in the world, one result, and nothing canonical from a late sender."""
    promise = promised(world.guarantee, done.point)
    assert done.before in (0, 1), done
    assert done.after == 1, done
    assert done.sent_by == promise.sent_by, done
    assert done.person == promise.person, done
    assert done.committed_by == promise.committed_by, done
    if done.signal == "SIGKILL":
        assert done.late == (), done
    elif done.committed_by == "sender":
        assert done.late == ("commit: COMMITTED",), done
    else:
        doors = [said for said in done.late if not said.startswith("call: ")]
        assert doors and all(said.endswith(": FENCED") for said in doors), done


class Missed(Exception):
    """The sender never stood at its point: its window, or its lease, was over before."""


async def crash(stage: Stage, client: Client, world: World, point: str, signal: str, take: int = 1) -> Crash:
    task = f"{stage.store}-{world.name}-{point}-{signal}-{take}".lower().replace(" ", "-")
    payload = statement(stage, task) if world.guarantee == "TRANSACTIONAL" else world.payload(task)
    table = world.table(task)
    effect = effect_id(client.backend.store.namespace, task, 1, "main", "send")  # type: ignore[attr-defined]

    async def count() -> int:
        return await asyncio.to_thread(world.count, stage, task, effect)

    await client.submit(NewTask(None, task_id=task, kind="send", queue=task))
    options = {"queue": task, "point": point, "downstream": table, "payload": payload}
    sender = await stage.program("sender", stage.url, "sender", options, TMPDIR=str(stage.folder), **SECRETS)
    if (await sender.reaches("at"))["point"] is None:
        raise Missed(sender.stderr()[-4000:])
    stands = await client.task(task)
    assert isinstance(stands, TaskView)
    if signal == "SIGKILL":
        await sender.kill()
    else:
        await stage.pause(sender)
        sender.tell("go")  # it finds that in its pipe when it wakes
    before = await count()
    await until(lambda: over(client, task))
    downstreams = Downstreams({"world": table}, environment=SECRETS)
    try:
        await succeed(client, task, payload, downstreams["world"], count)
        late = await wake(sender, signal)
        after = await count()
    finally:
        await downstreams.close()
        await sender.close()
    result = await client.result(task)
    assert isinstance(result, Result), result
    [view] = await effects_of(client, task)
    assert (view.effect_id, view.state, view.contested) == (effect, "COMMITTED", False), view
    led_on = await steps(client, task, stands.generation)
    return Crash(world.name, point, signal, before, after, led_on, result.value["by"], late)


async def effects_of(client: Client, task: str) -> list[EffectView]:
    return list((await client.effects(task_id=task)).items)


async def over(client: Client, task: str) -> bool:
    """Nothing can be under way any more: what a query does not find now did not happen."""
    ready = WINDOWS["send_window"] + WINDOWS["settle_time"]
    return all(view.age > ready for view in await effects_of(client, task))


async def succeed(client: Client, task: str, payload: Any, downstream: Any, count: Any) -> None:
    """A worker that takes the task over once its lease is out, and a person who decides what only a person may."""
    app = fencepost.App()

    @app.task("send", ttl=max(TTL, 3.0))  # its own lease is not what is tried
    async def send(attempt: fencepost.Attempt, input: Any) -> Any:
        await attempt.effect("send", payload, using=downstream)
        return {"by": "successor"}

    worker = fencepost.Worker(client, app, owner="successor", queues=[task], concurrency=1, handle_signals=False)
    working = asyncio.create_task(worker.run())

    async def done() -> bool:
        assert not working.done(), working.result()
        view = await client.task(task)
        assert isinstance(view, TaskView)
        if view.state == "PARKED":
            assert view.park_reason == "WAITING", view
            await decide(client, task, count)
        return view.state == "COMMITTED"

    try:
        await until(done, look_every=0.05)
    finally:
        worker.stop()
        await working


async def decide(client: Client, task: str, count: Any) -> None:
    """What a person does who looks into the mailbox: says what is there, and lets what is not be sent."""
    for view in await effects_of(client, task):
        if view.state == "AWAITING_APPROVAL":
            answer: Any = await client.approve(view, who="a person")
        elif view.state == "UNKNOWN":
            assert view.open == ("PERSON",), view
            found = await count()
            answer = await client.resolve(
                view,
                "HAPPENED" if found else "ABSENT",
                who="a person",
                evidence="the mailbox",
                receipt={"mails": found} if found else None,
            )
        else:
            continue
        early = isinstance(answer, Refused) and answer.outcome == "TOO_EARLY"  # looked at again in a moment
        assert isinstance(answer, Done) or early, answer


async def wake(sender: Program, signal: str) -> tuple[str, ...]:
    if signal == "SIGKILL":
        return ()
    sender.wake()

    def done() -> bool:
        assert not sender.over, sender.stderr()[-4000:]
        return sender.count("reported") > 0 and sender.count("late call") == sender.count("calls")

    await until(done)
    told = [
        f"{said['door']}: {said['outcome']}" if said["did"] == "door" else f"call: {said['found']}"
        for said in sender.seen
        if said["did"] in ("door", "late call")
    ]
    # In an order of their own: the call and what follows it run side by side once the lease is lost.
    return tuple(sorted(set(told), key=lambda said: DOORS.index(said.partition(":")[0])))


DOORS = ("call", "prepare", "reserve", "settle", "reconcile", "commit")
STEPS = {
    ("effect_committed", "effect.reconcile"): "asks: it happened",
    ("effect_absent", "effect.reconcile"): "asks: it did not happen",
    ("effect_committed", "resolve"): "a person: it happened",
    ("effect_absent", "resolve"): "a person: it did not happen",
    ("effect_awaiting", "effect.prepare"): "asks to be allowed",
    ("effect_approved", "approve"): "a person: approved",
}
PEOPLE = ("resolve", "approve")


async def steps(client: Client, task: str, generation: int) -> tuple[str, ...]:
    """From the journal, what came after the sender's `generation`, up to the successor's own call.

    What follows that is its settle; and where the machine was too slow for the window, it did not send and says so.
    """
    page = await client.events(task_id=task, limit=500)
    events = [event for event in page.items if event.accepted and event.name.startswith("effect_")]
    found: list[str] = []
    for event in events:
        if event.generation is not None and event.generation <= generation and event.door not in PEOPLE:
            continue
        if event.name == "effect_prepared":
            return (*found, "sends again" if event.detail["repeats"] else "sends")
        found.append(STEPS[event.name, event.door])
    return tuple(found)


async def play(stage: Stage, every: dict[str, World], combinations: Iterable[tuple[str, str, str]]) -> list[Crash]:
    """Each of them, several at a time; raises what went wrong with any, all of it. Audited at the end."""
    client = await stage.client()
    await make_table(stage)
    places = asyncio.Semaphore(TOGETHER)

    async def one(name: str, point: str, signal: str) -> Crash:
        async with places:
            for take in range(1, TAKES + 1):
                try:
                    async with asyncio.timeout(PATIENCE):
                        done = await crash(stage, client, every[name], point, signal, take)
                        kept(every[name], done)
                        return done
                except Missed as missed:
                    print(f"{name}, {point}, {signal} on {stage.store}: once more. {missed}")
                except Exception as error:
                    error.add_note(f"{name}, {point}, {signal} on {stage.store}")
                    raise
            raise AssertionError(f"{name}, {point}, {signal}: the sender came past its point {TAKES} times")

    done = await asyncio.gather(*(one(*each) for each in combinations), return_exceptions=True)
    failed = [each for each in done if isinstance(each, Exception)]
    if failed:
        raise ExceptionGroup("combinations failed", failed)
    await stage.audit()
    return [each for each in done if isinstance(each, Crash)]
