"""What readers are shown: pages, attempts, the journal, one task's whole history; and never an attempt id."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from datetime import UTC
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest
from fencepost.kernel.digests import short_hash
from fencepost.kernel.records import EVENTS, LOG_KINDS, LogEntry
from fencepost.service import queries
from fencepost.service.audit import audit
from fencepost.service.journal import public_detail
from fencepost.service.numbers import numbers
from fencepost.stores.base import Store
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SQLiteStore
from fencepost.wire import EventView, NewTask, Outcome, Page, Refused, Result
from tests.service.lives import claim, client_of, live


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else await SQLiteStore.open(str(tmp_path / "read.db"))
    yield made
    await made.close()


@pytest.fixture
async def client(store: Store) -> AsyncIterator[Client]:
    made = await client_of(store)
    yield made
    await made.close()


async def all_pages(store: Store, limit: int, **asked: Any) -> list[EventView]:
    found: list[EventView] = []
    cursor = None
    while True:
        page = await queries.events(store, cursor=cursor, limit=limit, **asked)
        found += page.items
        assert len(page.items) <= limit
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


# tasks -------------------------------------------------------------------------------------------


async def test_a_task_shows_its_input_its_parents_and_which_of_them_make_it_unreachable(
    store: Store, client: Client
) -> None:
    await live(client)
    view = await queries.task(store, "orphaned")
    assert view is not None
    assert (view.state, view.input, view.depends_on, view.unreachable) == ("BLOCKED", "waits", ("final",), ("final",))
    child = await queries.task(store, "child")
    assert child is not None
    assert child.unreachable == ()
    assert child.depends_on == ("mother", "father")
    assert child.created_at.tzinfo is UTC
    assert await queries.task(store, "nobody") is None


async def test_pages_of_tasks_hold_each_task_once_in_order_of_id(store: Store, client: Client) -> None:
    await client.submit_many([NewTask(n, task_id=f"t{n:02}") for n in range(25)])
    found: list[str] = []
    cursor = None
    while True:
        page = await queries.tasks(store, {}, cursor, 10)
        found += [item.task_id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [f"t{n:02}" for n in range(25)]
    assert (await queries.tasks(store, {}, None, 25)).next_cursor is None


async def test_tasks_are_filtered_by_pool_queue_kind_state_and_parent(store: Store, client: Client) -> None:
    await client.create_pool("other")
    await client.submit_many(
        [
            NewTask(1, task_id="a", queue="q"),
            NewTask(1, task_id="b", kind="k"),
            NewTask(1, task_id="d", depends_on=["a"]),
        ]
    )
    await client.submit(NewTask(1, task_id="c", pool="other"))

    async def ids(**where: Any) -> list[str]:
        return [item.task_id for item in (await queries.tasks(store, where)).items]

    assert await ids(pool="other") == ["c"]
    assert await ids(queue="q") == ["a"]
    assert await ids(kind="k") == ["b"]
    assert await ids(parent="a") == ["d"]
    assert await ids(state="BLOCKED") == ["d"]
    assert await ids(state=["blocked", "READY"], pool="default") == ["a", "b", "d"]
    assert await ids(pool=None, state=None) == ["a", "b", "c", "d"]


BAD = [
    ({"state": "RUNNING"}, None, 10, "state"),
    ({"state": 5}, None, 10, "state"),
    ({"state": ["READY", 7]}, None, 10, "state"),
    ({"colour": "red"}, None, 10, "colour"),
    ({"queue": ""}, None, 10, "queue"),
    ({"pool": "a\nb"}, None, 10, "pool"),
    ({}, None, 0, "limit"),
    ({}, None, 1001, "limit"),
    ({}, None, True, "limit"),
    ({}, "nonsense", 10, "cursor"),
    ({}, "", 10, "cursor"),
    ({}, 7, 10, "cursor"),
    ({}, "é", 10, "cursor"),
    ({}, base64.urlsafe_b64encode(b"e1:0.0").decode(), 10, "cursor"),
    ({}, base64.urlsafe_b64encode(b"t1:").decode(), 10, "cursor"),
]


@pytest.mark.parametrize(("where", "cursor", "limit", "field"), BAD)
async def test_a_bad_filter_cursor_or_limit_is_refused_by_name(where: Any, cursor: Any, limit: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await queries.tasks(MemoryStore(), where, cursor, limit)
    assert caught.value.field == field


# results and attempts ----------------------------------------------------------------------------


async def test_a_result_is_given_or_refused_with_the_state_as_reason(store: Store, client: Client) -> None:
    await live(client)
    found = await queries.result(store, "lost")
    assert isinstance(found, Result)
    assert (found.value, found.generation, found.pruned) == ({"r": "right"}, 2, False)
    binary = await queries.result(store, "father")
    assert isinstance(binary, Result)
    assert binary.value == b"raw bytes"
    for task_id, outcome, reason in (
        ("failed", Outcome.NOT_COMMITTED, "READY"),
        ("final", Outcome.NOT_COMMITTED, "PARKED"),
        ("fallen", Outcome.NOT_COMMITTED, "CANCELLED"),
        ("nobody", Outcome.NOT_FOUND, "TASK"),
    ):
        refused = await queries.result(store, task_id)
        assert isinstance(refused, Refused)
        assert (refused.outcome, refused.reason) == (outcome, reason)


async def test_a_result_that_is_committed_while_it_is_asked_for_is_given(client: Client) -> None:
    store = MemoryStore()
    writer = await client_of(store)
    await live(writer)
    asked = 0

    async def result(task_id: str) -> Any:
        nonlocal asked
        asked += 1
        return None if asked == 1 else await MemoryStore.result(store, task_id)

    store.result = result  # type: ignore[method-assign]
    assert isinstance(await queries.result(store, "child"), Result)
    assert asked == 2
    await writer.close()


async def test_a_pruned_result_is_still_answered_and_says_that_it_was_pruned(store: Store, client: Client) -> None:
    await live(client)
    await store.prune(await store.clock() + 1, 100)
    found = await queries.result(store, "lost")
    assert isinstance(found, Result)
    assert (found.value, found.pruned) == (None, True)
    assert found.result_digest.startswith("sha256:")
    view = await queries.task(store, "lost")
    assert view is not None
    assert view.input is None
    assert view.pruned_to_version == view.state_version
    (attempt,) = await queries.attempts(store, "lost")
    assert (attempt.generation, attempt.end, attempt.owner_id) == (2, "COMMITTED", "bob")
    history = await queries.history(store, "lost")
    assert history is not None
    assert history.timeline == []


async def test_attempts_tell_each_end_with_renewals_usage_and_error(store: Store, client: Client) -> None:
    await live(client)
    first, second = await queries.attempts(store, "lost")
    assert (first.end, first.owner_id, first.usage) == ("EXPIRED", "ann", {"tokens": 4})
    assert (second.end, second.owner_id, second.renewals, second.usage) == ("COMMITTED", "bob", 1, {"tokens": 7})
    assert first.ended_at is not None
    assert first.started_at <= first.ended_at <= second.started_at
    (failed,) = await queries.attempts(store, "failed")
    assert (failed.end, failed.error) == ("FAILED", "the model answered nonsense")
    ends = {task_id: (await queries.attempts(store, task_id))[0].end for task_id in ("revised", "taken", "cancelled")}
    assert ends == {"revised": "SUPERSEDED", "taken": "EXPIRED", "cancelled": "CANCELLED"}
    running = (await queries.attempts(store, "taken"))[1]
    assert (running.end, running.ended_at, running.epoch) == (None, None, 2)
    assert await queries.attempts(store, "nobody") == []
    assert await queries.attempts(store, "orphaned") == []


# the journal -------------------------------------------------------------------------------------


async def test_journal_and_log_come_as_one_list_in_order_of_time_whatever_the_page(
    store: Store, client: Client
) -> None:
    await live(client)
    await client.events(limit=1)  # has the coordinator write its refusals
    whole = await all_pages(store, 1000)
    times = [item.at for item in whole if item.name != "refusal"]  # those are written a little later than answered
    assert times == sorted(times)
    for limit in (1, 7):
        again = await all_pages(store, limit)
        assert [(item.name, item.task_id, item.at) for item in again] == [(i.name, i.task_id, i.at) for i in whole]
    names = {item.name for item in whole}
    assert names <= set(EVENTS) | set(LOG_KINDS)
    assert {"submitted", "result_committed", "refusal", "pool", "usage", "result_staged"} <= names
    assert all(item.accepted == (item.name in EVENTS) for item in whole)


async def test_events_are_chosen_by_task_pool_and_name(store: Store, client: Client) -> None:
    await live(client)
    await client.events(limit=1)
    of_lost = await all_pages(store, 3, task_id="lost")
    assert {item.task_id for item in of_lost} == {"lost"}
    assert {"refusal", "attempt_started"} <= {item.name for item in of_lost}
    only = await all_pages(store, 2, names=["attempt_started", "refusal"])
    assert {item.name for item in only} == {"attempt_started", "refusal"}
    assert all(item.accepted for item in await all_pages(store, 2, names=["attempt_started"]))
    assert [item.outcome for item in await all_pages(store, 2, pool="other")] == ["POOL_CREATED"]
    refused = [item for item in of_lost if item.name == "refusal" and item.door != "expire"]
    assert {(item.door, item.outcome, item.reason) for item in refused} == {
        ("renew", "FENCED", "GENERATION"),
        ("commit", "FENCED", "GENERATION"),
    }


async def test_a_page_goes_on_behind_its_cursor_with_what_was_written_since(store: Store, client: Client) -> None:
    await client.submit(NewTask(1, task_id="a"))
    first = await queries.events(store)
    assert first.next_cursor is None
    await client.submit(NewTask(1, task_id="b"))
    then = await queries.events(store, cursor=first.items[-1].cursor)
    assert [item.task_id for item in then.items] == ["b"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"cursor": "nonsense"}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"e1:1").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"e1:1.-2").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"t1:a").decode()}, "cursor"),
        ({"limit": 0}, "limit"),
        ({"names": ["attempt_vanished"]}, "names"),
        ({"names": "submitted"}, "names"),
        ({"task_id": ""}, "task_id"),
        ({"pool": 3}, "pool"),
    ],
)
async def test_a_bad_question_to_the_journal_is_refused_by_name(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await queries.events(MemoryStore(), **asked)
    assert caught.value.field == field


async def test_times_in_details_are_datetimes_and_durations_seconds() -> None:
    shown = public_detail(
        {"lease_us": 1_000_000, "reclaim_delay_us": 1_500_000, "current": {"lease_expires_at": 2_000_000}, "left": 2}
    )
    assert shown["lease_expires_at"].timestamp() == 1.0
    assert shown["reclaim_delay"] == 1.5
    assert shown["current"]["lease_expires_at"].timestamp() == 2.0
    assert shown["left"] == 2
    assert public_detail({"usage": {"slept_us": 5}}) == {"usage": {"slept_us": 5}}


# watch -------------------------------------------------------------------------------------------


async def test_a_watcher_sees_what_happens_from_now_on_and_nothing_of_before(store: Store, client: Client) -> None:
    await client.submit(NewTask(1, task_id="before"))
    watching = queries.watch(store, poll=0.01)
    seen = asyncio.create_task(_take(watching, 5))
    async with asyncio.timeout(10):
        while not seen.done():
            await client.submit(NewTask(1))
            await asyncio.sleep(0.01)
    lines = await seen
    assert {line.name for line in lines} == {"submitted"}
    shown = {line.task_id for line in lines}
    assert "before" not in shown
    assert len(shown) == 5
    await watching.aclose()


async def test_a_watcher_goes_on_behind_a_cursor_without_losing_a_line(store: Store, client: Client) -> None:
    await live(client)
    await client.events(limit=1)
    whole = await all_pages(store, 1000)
    async with asyncio.timeout(10):
        watching = queries.watch(store, cursor=whole[4].cursor, poll=0.01)
        rest = await _take(watching, len(whole) - 5)
        await watching.aclose()
    assert [(line.name, line.task_id) for line in rest] == [(line.name, line.task_id) for line in whole[5:]]


async def test_an_idle_watcher_asks_for_the_version_and_reads_nothing() -> None:
    store = MemoryStore()
    asked = {"version": 0, "events": 0}
    version, events = store.version, store.events

    async def counted_version() -> int:
        asked["version"] += 1
        return await version()

    async def counted_events(*args: Any, **rest: Any) -> Any:
        asked["events"] += 1
        return await events(*args, **rest)

    store.version, store.events = counted_version, counted_events  # type: ignore[method-assign]
    watching = queries.watch(store, poll=0.001)
    waiting = asyncio.ensure_future(anext(watching))
    async with asyncio.timeout(10):
        while asked["version"] < 20:
            await asyncio.sleep(0.001)
    assert asked["events"] == 1
    waiting.cancel()
    await asyncio.wait([waiting])


async def _take(watching: AsyncIterator[EventView], count: int) -> list[EventView]:
    found: list[EventView] = []
    while len(found) < count:
        found.append(await anext(watching))
    return found


# one task, whole ---------------------------------------------------------------------------------


async def test_a_history_tells_record_attempts_timeline_staged_results_and_lineage(
    store: Store, client: Client
) -> None:
    await live(client)
    await client.events(limit=1)
    shown = await queries.history(store, "lost")
    assert shown is not None
    assert [attempt.end for attempt in shown.attempts] == ["EXPIRED", "COMMITTED"]
    assert [(item.generation, item.state, item.value) for item in shown.staged] == [
        (2, "DISCARDED", {"r": "rival"}),
        (2, "COMMITTED", {"r": "right"}),
        (1, "DISCARDED", {"r": "late"}),
    ]
    assert shown.conflict
    assert shown.result is not None
    assert shown.canonical == shown.result.result_digest == shown.staged[1].digest
    assert [line.name for line in shown.timeline][:3] == ["submitted", "attempt_started", "checkpoint_saved"]
    assert "refusal" in {line.name for line in shown.timeline}
    assert [line.at for line in shown.timeline] == sorted(line.at for line in shown.timeline)
    assert not shown.truncated
    child = await queries.history(store, "child")
    assert child is not None
    assert child.result is not None
    assert {parent.task_id: parent.result_commit_id for parent in child.lineage}.keys() == {"mother", "father"}
    assert set(child.result.parents) == {parent.result_commit_id for parent in child.lineage}
    assert child.successors == ["later"]
    assert child.conflict  # what was staged, discarded and never committed counts too
    released = await queries.history(store, "released")
    assert released is not None
    assert not released.conflict
    assert released.canonical is None
    assert await queries.history(store, "nobody") is None


async def test_a_timeline_longer_than_the_limit_says_so(store: Store, client: Client) -> None:
    await live(client)
    shown = await queries.history(store, "lost", timeline_limit=3)
    assert shown is not None
    assert len(shown.timeline) == 3
    assert shown.truncated


# X40 ---------------------------------------------------------------------------------------------


async def test_x40_no_view_carries_an_attempt_id(store: Store, client: Client) -> None:
    keys = await live(client)
    quoting = await claim(client, "released")
    keys.append(quoting.attempt_id)
    await client.fail(quoting, f"my claim was {quoting.attempt_id}, and it failed")
    refused = await client.renew(quoting)
    ids = [item.task_id for item in (await queries.tasks(store, {})).items]
    views: list[Any] = [
        refused,
        await queries.tasks(store, {}),
        await queries.events(store, limit=1000),
        await audit(store),
        await numbers(store),
        await client.backend.report("history", task_id="released"),
    ]
    for task_id in ids:
        views.append(await queries.task(store, task_id))
        views.append(await queries.attempts(store, task_id))
        views.append(await queries.result(store, task_id))
        views.append(await queries.history(store, task_id))
    async with asyncio.timeout(10):
        watching = queries.watch(store, cursor=_start(), poll=0.01)
        views.append(await _take(watching, 40))
        await watching.aclose()
    text = msgspec.json.encode(views).decode()
    assert len(keys) >= 14
    assert [key for key in keys if key in text] == []
    assert all((short_hash(key) or "?") in text for key in keys)


def _start() -> str:
    return base64.urlsafe_b64encode(b"e1:0.0").decode().rstrip("=")


async def test_x40_an_attempt_id_under_any_name_in_a_detail_is_shown_as_its_hash() -> None:
    key = "0f9a-secret"
    detail = {"attempt_id": key, "note": f"by {key}", key: 1, "list": [key, {"deep": key}]}
    shown = public_detail(detail, (key,))
    assert key not in repr(shown)
    assert shown["attempt"] == short_hash(key)
    assert public_detail({"attempt_id": key})["attempt"] == short_hash(key)


async def test_usage_of_equal_reports_that_were_counted_as_one_is_added_as_often() -> None:
    total: dict[str, float] = {}
    queries.add_usage(total, LogEntry("usage", 0, None, "t", "usage", detail={"usage": {"tokens": 2}}, count=3))
    assert total == {"tokens": 6}


async def test_a_page_is_a_plain_value() -> None:
    assert await queries.tasks(MemoryStore(), {}) == Page([], None)
