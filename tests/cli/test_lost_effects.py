"""What lost attempts cost, and what waits in the backlog of effects, as `status`, `show` and `effects` tell people."""

from __future__ import annotations

import asyncio
from typing import Any

import apsw
import pytest

from fencepost import App, Attempt, connect
from fencepost.client.worker import Worker
from fencepost.effects.base import Call, Declaration, Guarantee, Happened
from fencepost.kernel.records import Terms
from fencepost.wire import NewTask, Refused
from tests.cli.running import Folder


@pytest.fixture
async def lost(folder: Folder) -> Folder:
    """A worker loses its task in the middle of its effect, after it has spent something; another one commits it."""
    async with connect(folder.url) as client:
        app, calls = App(), []

        class Overtaken:
            declaration = Declaration(name="mail", guarantee=Guarantee.IDEMPOTENT, retention=3600.0)

            async def execute(self, call: Call) -> Happened:
                calls.append(call)
                if len(calls) == 1:
                    assert not isinstance(await client.take_over("t", who="eve"), Refused)
                return Happened({"mail": 1})

            async def query(self, call: Call) -> Happened:
                return Happened({"mail": 1})

        @app.task("default")
        async def send(attempt: Attempt, number: int) -> Any:
            lost = attempt.claim.generation == 1
            attempt.usage(tokens=1200 if lost else 30, usd=0.5 if lost else 0.01)
            return await attempt.effect("send", "hello", using=Overtaken())

        await client.submit(NewTask(1, task_id="t"))
        await asyncio.wait_for(Worker(client, app, handle_signals=False).run_until_idle(), 20)
        assert len(calls) == 1
    return folder


async def test_status_says_what_attempts_cost_that_were_lost_in_the_middle_of_an_effect(lost: Folder) -> None:
    found = lost.json("status")["discarded_compute"]
    seconds = found["usage"].pop("seconds")
    assert (found["attempts"], found["unreported"], found["usage"]) == (1, 0, {"tokens": 1200, "usd": 0.5})
    assert seconds > 0
    # The worker dropped the task at the one door that refused it, and did not say at another that its handler failed.
    assert [(row["door"], row["count"]) for row in lost.json("status")["fenced"]] == [("effect.settle", 1)]
    said = next(line for line in lost.ok("status").splitlines() if line.startswith("discarded compute"))
    assert "tokens: 1200" in said and "usd: 0.5" in said


async def test_show_says_what_each_attempt_cost_and_what_those_did_that_were_lost(lost: Folder) -> None:
    shown = lost.json("show", "t")
    attempts = [
        (one["generation"], one["end"], one["usage"]["tokens"], one["usage"]["usd"]) for one in shown["attempts"]
    ]
    assert attempts == [(1, "EXPIRED", 1200, 0.5), (2, "COMMITTED", 30, 0.01)]
    lines = lost.ok("show", "t").splitlines()
    [total] = [line for line in lines if line.startswith("  lost ")]
    assert "1 attempt, which cost tokens 1200, usd 0.5, seconds" in total
    [row] = [line for line in lines if "COMMITTED  tokens" in line]
    assert "tokens 30, usd 0.01" in row


async def test_the_journal_shows_until_when_a_call_could_be_sent_as_a_time(lost: Folder) -> None:
    shown = lost.json("show", "t")["timeline"]
    detail = next(event["detail"] for event in shown if event["name"] == "effect_prepared")
    at = next(event["at"] for event in shown if event["name"] == "effect_prepared")
    assert detail["send_by"][:16] >= at[:16], detail


# the backlog --------------------------------------------------------------------------------------

MAIL = Terms("mail", "IDEMPOTENT", send_window_us=50_000, settle_time_us=0, retention_us=3_600_000_000)
LETTER = Terms("letter", "NON_REPLAYABLE", send_window_us=50_000, settle_time_us=0)
PAGE = Terms("page", "CONDITIONAL", send_window_us=50_000, settle_time_us=0, approval=True)


async def advance(folder: Folder, seconds: float) -> None:
    """Move the store's clock on: it never goes below the highest time that it has stored."""
    connection = apsw.Connection(str(folder.path / "fencepost.db"))
    connection.set_busy_timeout(10_000)
    connection.execute("UPDATE clock SET at = at + ?", (round(seconds * 1_000_000),))
    connection.close()


@pytest.fixture
async def backlog(folder: Folder) -> Folder:
    """Two mails and a letter of which nobody knows, and a page that waits for an approval."""
    async with connect(folder.url) as client:
        await client.submit_many([NewTask(n, task_id=f"t{n}") for n in range(4)])
        for terms in (MAIL, MAIL, LETTER, PAGE):
            [claim] = await client.claim_next(owner="A")  # type: ignore[misc]
            precondition = "e0" if terms is PAGE else None
            assert not isinstance(
                await client.prepare(claim, "send", "hello", terms, precondition=precondition), Refused
            )
            await client.release(claim)
            if terms is MAIL:
                await advance(folder, 100)
    return folder


async def test_status_counts_what_is_unknown_or_waits_with_the_age_of_the_oldest(backlog: Folder) -> None:
    found = backlog.json("status")["effects"]
    rows = {(row["guarantee"], row["state"]): (row["count"], row["oldest_age"]) for row in found}
    assert {key: count for key, (count, _) in rows.items()} == {
        ("IDEMPOTENT", "UNKNOWN"): 2,
        ("NON_REPLAYABLE", "UNKNOWN"): 1,
        ("CONDITIONAL", "AWAITING_APPROVAL"): 1,
    }
    assert 200 <= rows["IDEMPOTENT", "UNKNOWN"][1] < 300  # the older of the two
    assert rows["NON_REPLAYABLE", "UNKNOWN"][1] < 100
    lines = backlog.ok("status").splitlines()
    start = lines.index("effects")
    said = [line for line in lines[start:] if "UNKNOWN" in line or "AWAITING_APPROVAL" in line]
    assert len(said) == 3
    [mails] = [line for line in said if "IDEMPOTENT" in line]
    assert mails.split()[-3:] == ["2", "3", "min"]


async def test_status_says_that_nothing_is_unknown(folder: Folder) -> None:
    folder.ok("submit", "--input", "1")
    assert folder.json("status")["effects"] == []
    [said] = [line for line in folder.ok("status").splitlines() if line.startswith("effects")]
    assert said.split() == ["effects", "0"]


async def test_an_unknown_effect_past_its_retention_is_a_persons_before_anybody_can_repeat_it(backlog: Folder) -> None:
    def ways() -> dict[str, list[str]]:
        return {one["task_id"]: one["open"] for one in backlog.json("effects", "--state", "UNKNOWN")["items"]}

    assert ways() == {"t0": ["ASK", "REPEAT"], "t1": ["ASK", "REPEAT"], "t2": ["PERSON"]}
    await advance(backlog, 3600 - 200 + 50)  # t0's key is forgotten by now, t1's is not
    assert ways() == {"t0": ["PERSON"], "t1": ["ASK", "REPEAT"], "t2": ["PERSON"]}
    said = backlog.ok("effects", "--task", "t0")
    assert "open: PERSON" in said
    async with connect(backlog.url) as client:
        view = await client.task("t0")
        assert not isinstance(view, Refused)
        claim = await client.claim("t0", expected_state_version=view.state_version, owner="B")
        assert not isinstance(claim, Refused)
        answer = await client.prepare(claim, "send", "hello", MAIL, repeat=True)
        assert (answer.outcome, answer.open) == ("RECONCILE", ("PERSON",))
    assert "PERSON" in backlog.ok("show", "t0")
