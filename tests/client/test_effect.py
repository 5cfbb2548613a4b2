"""`attempt.effect` in handlers: sent once, whoever runs; given back where a person has to decide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost import connect
from fencepost.app import App
from fencepost.client.attempt import Attempt, SyncAttempt
from fencepost.client.client import Client
from fencepost.client.reconciler import Reconciler
from fencepost.client.worker import Worker
from fencepost.effects.base import Call, Declaration, Found, Guarantee, Happened, NotFound, Outcome, Unknown
from fencepost.effects.failures import EffectUnknown, PayloadConflict
from fencepost.effects.sql import Deferred, sql
from fencepost.errors import Fenced
from fencepost.testing import MemoryClient
from fencepost.wire import Claim, Committed, NewTask, Prepared, Refused, Result, TaskView

BOUND = 10.0


class Mail:
    """A mail service with idempotency keys; `lose` answers are lost after it has acted."""

    def __init__(self, *, lose: int = 0, knows: bool = True, **declared: Any) -> None:
        settings = {"guarantee": Guarantee.IDEMPOTENT, "retention": 3600.0, "send_window": 0.05, "settle_time": 0.0}
        self.declaration = Declaration(**{"name": "mail", **settings, **declared})
        self.box: dict[str, Any] = {}
        self.calls = 0
        self.lose = lose
        self.knows = knows

    async def execute(self, call: Call) -> Outcome:
        self.calls += 1
        self.box.setdefault(call.key, call.payload)
        if self.lose:
            self.lose -= 1
            raise ConnectionResetError("the answer was lost")
        return Happened({"mail": len(self.box)})

    async def query(self, call: Call) -> Found:
        return Happened({"mail": "found"}) if self.knows and call.key in self.box else NotFound()


def letters(**declared: Any) -> Mail:
    return Mail(guarantee=Guarantee.NON_REPLAYABLE, retention=None, **declared)


async def worked(client: Client, app: App) -> None:
    await asyncio.wait_for(Worker(client, app, handle_signals=False).run_until_idle(), BOUND)


async def value_of(client: Client, task_id: str = "t") -> Any:
    result = await client.result(task_id)
    assert isinstance(result, Result), result
    return result.value


async def view_of(client: Client, task_id: str = "t") -> TaskView:
    view = await client.task(task_id)
    assert isinstance(view, TaskView)
    return view


async def test_a_handler_gets_the_receipt_and_a_successor_the_kept_one_without_a_call(client: MemoryClient) -> None:
    app, mail = App(), Mail()
    broken = [True]

    @app.task("default", max_attempts=5)
    async def send(attempt: Attempt, to: str) -> Any:
        receipt = await attempt.effect("send", {"to": to}, using=mail)
        if broken:
            broken.clear()
            raise RuntimeError("after the mail was sent")
        return receipt

    await client.submit(NewTask("bob", task_id="t"))
    await worked(client, app)
    client.advance(600)
    await worked(client, app)
    assert await value_of(client) == {"mail": 1}
    assert (mail.calls, len(mail.box)) == (1, 1)


async def test_a_lost_answer_is_asked_for_before_anything_is_sent_again(client: MemoryClient) -> None:
    app, mail = App(), Mail(lose=1)

    @app.task("default")
    async def send(attempt: Attempt) -> Any:
        return await attempt.effect("send", "hello", using=mail)

    await client.submit(NewTask(1, task_id="t"))
    await worked(client, app)
    assert await value_of(client) == {"mail": "found"}
    assert mail.calls == 1


async def test_a_plain_function_sends_from_its_thread(client: MemoryClient) -> None:
    app, mail = App(), Mail()

    @app.task("default")
    def send(attempt: SyncAttempt) -> Any:
        return attempt.effect("send", "hello", using=mail)

    await client.submit(NewTask(1, task_id="t"))
    await worked(client, app)
    assert await value_of(client) == {"mail": 1}


async def test_another_text_is_a_conflict_or_the_bound_one_is_adopted(client: MemoryClient) -> None:
    app, mail = App(), Mail()
    said: list[Any] = []

    @app.task("default")
    async def send(attempt: Attempt) -> Any:
        await attempt.effect("send", "hello", using=mail)
        try:
            await attempt.effect("send", "hello again", using=mail)
        except PayloadConflict as conflict:
            said.append((conflict.payload, conflict.state))
        return await attempt.effect("send", "hello once more", using=mail, on_conflict="adopt")

    await client.submit(NewTask(1, task_id="t"))
    await worked(client, app)
    assert said == [("hello", "COMMITTED")]
    assert await value_of(client) == {"mail": 1}
    assert list(mail.box.values()) == ["hello"]


async def test_a_handler_that_swallows_exceptions_is_stopped_all_the_same_and_its_task_waits(
    client: MemoryClient,
) -> None:
    app, letter = App(), letters(approval=True)
    went_on: list[bool] = []

    @app.task("default")
    async def send(attempt: Attempt) -> Any:
        try:
            return await attempt.effect("send", "hello", using=letter)
        except Exception:  # noqa: BLE001 - what an agent's loop does
            went_on.append(True)
            return "pretended"

    await client.submit(NewTask(1, task_id="t"))
    await worked(client, app)
    view = await view_of(client)
    assert (view.state, view.park_reason, view.charged_attempts, went_on) == ("PARKED", "WAITING", 0, [])
    (waiting,) = (await client.effects(state="AWAITING_APPROVAL")).items
    await client.approve(waiting, who="eve")
    await worked(client, app)
    assert await value_of(client) == {"mail": 1}
    assert letter.calls == 1


async def test_a_handler_that_goes_on_without_its_effect_cannot_commit_and_waits_for_the_person(
    client: MemoryClient,
) -> None:
    app, letter = App(), letters(lose=1)

    @app.task("default")
    async def send(attempt: Attempt) -> Any:
        try:
            return await attempt.effect("send", "hello", using=letter, on_approval="raise")
        except Exception:  # noqa: BLE001 - what an agent's loop does
            return "pretended"

    await client.submit(NewTask(1, task_id="t"))
    await worked(client, app)
    view = await view_of(client)
    assert (view.state, view.park_reason) == ("PARKED", "WAITING")
    (unknown,) = (await client.effects(state="UNKNOWN")).items
    assert unknown.open == ("PERSON",)
    await client.resolve(unknown, "HAPPENED", who="eve", evidence="it is in the box", receipt="seen")
    await worked(client, app)
    assert await value_of(client) == "seen"
    assert letter.calls == 1


async def test_an_open_effect_that_is_nobodys_fails_the_attempt_and_the_next_one_asks(client: MemoryClient) -> None:
    app, mail = App(), Mail(lose=1, knows=False)

    @app.task("default")
    async def send(attempt: Attempt) -> Any:
        try:
            return await attempt.effect("send", "hello", using=mail, patience=0.0)
        except EffectUnknown:
            return "pretended"

    await client.submit(NewTask(1, task_id="t"))
    await worked(client, app)
    assert (await view_of(client)).charged_attempts == 1
    mail.knows = True
    client.advance(600)
    await worked(client, app)
    assert await value_of(client) == {"mail": "found"}


async def test_a_cancelled_call_is_unknown(client: MemoryClient) -> None:
    class Hanging(Mail):
        def __init__(self) -> None:
            super().__init__()
            self.reached = asyncio.Event()

        async def execute(self, call: Call) -> Outcome:
            self.reached.set()
            await asyncio.Event().wait()
            return Unknown("never")

    mail = Hanging()
    await client.submit(NewTask(1, task_id="t"))
    (claim,) = await client.claim_next(owner="A")  # type: ignore[misc]
    async with client.hold(claim) as attempt:
        sending = asyncio.create_task(attempt.effect("send", "hello", using=mail))
        await asyncio.wait_for(mail.reached.wait(), BOUND)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        (view,) = (await client.effects(task_id="t")).items
        assert (view.state, view.open) == ("UNKNOWN", ("ASK", "REPEAT"))


async def test_a_worker_that_lost_its_claim_is_stopped_at_its_effect_and_its_report_is_kept(
    client: MemoryClient,
) -> None:
    mail = Mail()
    await client.submit(NewTask(1, task_id="t"))
    (claim,) = await client.claim_next(owner="A")  # type: ignore[misc]

    class Overtaken(Mail):
        async def execute(self, call: Call) -> Outcome:
            done = await super().execute(call)
            await client.take_over("t")
            return done

    mail = Overtaken()
    with pytest.raises(Fenced):
        async with client.hold(claim) as attempt:
            await attempt.effect("send", "hello", using=mail)
    (view,) = (await client.effects(task_id="t")).items
    assert (view.state, [late.receipt for late in view.evidence]) == ("UNKNOWN", [{"mail": 1}])


# TRANSACTIONAL ------------------------------------------------------------------------------------


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[tuple[Client, Path]]:
    path = tmp_path / "books.db"
    async with connect(f"sqlite:///{path}") as client:
        con = apsw.Connection(str(path))
        con.execute("CREATE TABLE invoice (number INTEGER PRIMARY KEY, who TEXT NOT NULL)")
        con.close()
        yield client, path


def invoices(path: Path) -> list[Any]:
    con = apsw.Connection(str(path))
    try:
        return list(con.execute("SELECT number, who FROM invoice ORDER BY number"))
    finally:
        con.close()


async def test_a_statement_happens_with_the_commit(books: tuple[Client, Path]) -> None:
    client, path = books
    app = App()
    seen: list[Any] = []

    @app.task("default")
    async def book(attempt: Attempt, who: str) -> Any:
        statement = {"sql": "INSERT INTO invoice (who) VALUES (?)", "parameters": [who]}
        done = await attempt.effect("book", statement, using=sql)
        seen.append((done, invoices(path)))
        return "booked"

    await client.submit(NewTask("bob", task_id="t"))
    await worked(client, app)
    assert seen == [(Deferred("book"), [])]
    assert invoices(path) == [(1, "bob")]
    (view,) = (await client.effects(task_id="t")).items
    assert (view.state, view.guarantee) == ("COMMITTED", "TRANSACTIONAL")


async def test_a_refused_commit_takes_its_statement_along(books: tuple[Client, Path]) -> None:
    client, path = books
    await client.submit(NewTask("bob", task_id="t"))
    (claim,) = await client.claim_next(owner="A")  # type: ignore[misc]
    async with client.hold(claim) as attempt:
        await attempt.effect("book", "INSERT INTO invoice (who) VALUES ('late')", using=sql)
        await client.take_over("t")
        refused = await client.commit(claim, "late")
        assert isinstance(refused, Refused)
    assert invoices(path) == []
    (successor,) = await client.claim_next(owner="B")  # type: ignore[misc]
    assert isinstance(await client.commit(successor, "nothing of A's"), Committed)
    assert invoices(path) == []


async def test_a_failing_statement_fails_its_commit_alone(books: tuple[Client, Path]) -> None:
    client, path = books
    app = App()

    @app.task("default", max_attempts=1)
    async def book(attempt: Attempt, who: str | None) -> Any:
        statement = {"sql": "INSERT INTO invoice (who) VALUES (?)", "parameters": [who]}
        await attempt.effect("book", statement, using=sql)
        return "booked"

    await client.submit_many([NewTask(None, task_id="bad"), NewTask("bob", task_id="good")])
    await worked(client, app)
    assert invoices(path) == [(1, "bob")]
    assert (await view_of(client, "bad")).state == "PARKED"
    assert (await view_of(client, "good")).state == "COMMITTED"


# the reconciler -----------------------------------------------------------------------------------


async def unknown(client: Client, mail: Mail, task_id: str, *, sent: bool) -> Prepared:
    await client.submit(NewTask(1, task_id=task_id))
    view = await view_of(client, task_id)
    claim = await client.claim(task_id, expected_state_version=view.state_version, owner="A")
    assert isinstance(claim, Claim)
    prepared = await client.prepare(claim, "send", "hello", mail.declaration.terms)
    assert isinstance(prepared, Prepared)
    if sent:
        mail.box[prepared.effect_id] = "hello"
    await client.release(claim)
    return prepared


async def test_the_reconciler_asks_and_records_and_never_sends(client: MemoryClient) -> None:
    mail = Mail()
    await unknown(client, mail, "sent", sent=True)
    await unknown(client, mail, "not", sent=False)
    await client.close_intake()
    reconciler = Reconciler(client, [mail])
    first = {one.effect.task_id: (one.became, one.needs) for one in await reconciler.round()}
    assert first == {"sent": ("COMMITTED", None), "not": ("UNKNOWN", "time")}
    client.advance(1)
    assert [(one.effect.task_id, one.became) for one in await reconciler.round()] == [("not", "ABSENT")]
    assert await reconciler.round() == []
    assert mail.calls == 0


async def test_the_reconciler_leaves_alone_what_somebody_holds_or_only_a_person_knows(client: MemoryClient) -> None:
    mail, letter = Mail(), letters(name="letter")
    await unknown(client, letter, "letter", sent=True)
    await unknown(client, mail, "held", sent=True)
    (claim,) = await client.claim_next(owner="B", kinds=["default"], limit=1)  # type: ignore[misc]
    other = Mail(name="elsewhere")
    await unknown(client, other, "elsewhere", sent=True)
    found = {one.effect.task_id: (one.became, one.needs) for one in await Reconciler(client, [mail, letter]).round()}
    held = claim.task_id
    assert held in ("letter", "held")
    assert found["elsewhere"] == ("UNKNOWN", "downstream")
    assert found["letter"] == ("UNKNOWN", "person")
    assert found["held"] == (("UNKNOWN", "holder") if held == "held" else ("COMMITTED", None))


async def test_a_worker_reconciles_with_the_downstreams_of_its_app(client: MemoryClient) -> None:
    mail = Mail()
    await unknown(client, mail, "t", sent=True)
    await client.close_intake()
    app = App(downstreams=[mail])

    @app.task("default")
    async def send(attempt: Attempt) -> None:
        raise AssertionError("the intake is closed")

    worker = Worker(client, app, handle_signals=False, reconcile_interval=0.01)
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(BOUND):
        while (await client.effects(task_id="t")).items[0].state != "COMMITTED":
            await asyncio.sleep(0)
        worker.stop()
        await running
    assert mail.calls == 0
