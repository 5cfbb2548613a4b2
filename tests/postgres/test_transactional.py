"""submit and commit inside the caller's own transaction: what stands, stands with the caller's rows or not at all."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from fencepost import Client, InvalidRequest, NewTask, NotStaged, Outcome, Pending, Refused, Unavailable
from fencepost.service.coordinator import Coordinator
from fencepost.stores import postgres_joined
from fencepost.wire import Backend, Committed, PoolChanged, Result, TaskView
from tests.postgres.callers import Join, claimed, clean, raised, rows, state
from tests.postgres.conftest import Open
from tests.postgres.databases import advance
from tests.postgres.server import Server

# together, or not at all --------------------------------------------------------------------------


async def test_a_task_submitted_with_business_rows_is_there_once_the_caller_commits(
    client: Client, join: Join, url: str
) -> None:
    business = await join()
    await business.begin()
    await business.write("order 1")
    answer = await client.submit(NewTask({"order": 1}, task_id="t"), connection=business.con)
    assert isinstance(answer, Pending)
    assert (answer.outcome, answer.will_be, answer.task_id, answer.changed) == ("PENDING", "SUBMITTED", "t", True)
    assert await state(client, "t") is None
    await business.do("COMMIT")
    assert await state(client, "t") == "READY"
    assert await rows(url) == {"order 1"}
    await clean(client)


async def test_a_rollback_takes_the_task_back_with_the_rows(client: Client, join: Join, url: str) -> None:
    business = await join()
    await business.begin()
    await business.write("order 1")
    assert isinstance(await client.submit(NewTask(1, task_id="t"), connection=business.con), Pending)
    await business.do("ROLLBACK")
    assert await state(client, "t") is None
    assert await rows(url) == set()
    again = await client.submit(NewTask(2, task_id="t"))
    assert not isinstance(again, Refused)
    assert again.created
    await clean(client)


async def test_a_result_and_business_rows_become_true_together(client: Client, join: Join, url: str) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin()
    await business.write("paid")
    answer = await client.commit(claim, {"ok": True}, connection=business.con)
    assert isinstance(answer, Pending)
    assert answer.will_be == Outcome.COMMITTED
    before = await client.result("t")
    assert isinstance(before, Refused)
    assert before.outcome == Outcome.NOT_COMMITTED
    await business.do("COMMIT")
    after = await client.result("t")
    assert isinstance(after, Result)
    assert after.value == {"ok": True}
    assert (after.result_commit_id, after.result_digest) == (answer.result_commit_id, answer.result_digest)
    assert await rows(url) == {"paid"}
    await clean(client)


async def test_after_a_rollback_the_claim_is_as_it_was_and_can_commit(client: Client, join: Join, url: str) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin()
    await business.write("paid")
    assert isinstance(await client.commit(claim, 1, connection=business.con), Pending)
    await business.do("ROLLBACK")
    assert await state(client, "t") == "CLAIMED"
    assert isinstance(await client.commit(claim, 2), Committed)
    assert await rows(url) == set()
    await clean(client)


async def test_many_changes_fit_into_one_transaction(client: Client, join: Join) -> None:
    claim = await claimed(client, "first")
    business = await join()
    await business.begin()
    for number in range(3):
        assert isinstance(await client.submit(NewTask(number, task_id=f"t{number}"), connection=business.con), Pending)
    many = [NewTask(number, task_id=f"m{number}") for number in range(50)]
    answer = await client.submit_many(many, connection=business.con)
    assert isinstance(answer, Pending)
    assert answer.task_ids == tuple(task.task_id for task in many)
    assert isinstance(await client.commit(claim, None, connection=business.con), Pending)
    again = await client.commit(claim, None, connection=business.con)
    assert isinstance(again, Pending)
    assert not again.changed
    await business.do("COMMIT")
    counted = await client.events(limit=1000)
    # The event of each submission and of what became of `first`, in an order that a reader can page through.
    assert len([event for event in counted.items if event.accepted]) == 1 + 1 + 53 + 1
    assert len({event.cursor for event in counted.items}) == len(counted.items)
    await clean(client)


async def test_the_same_submission_again_changes_nothing(client: Client, join: Join) -> None:
    await client.submit(NewTask(1, task_id="t"))
    business = await join()
    await business.begin()
    answer = await client.submit(NewTask(1, task_id="t"), connection=business.con)
    assert isinstance(answer, Pending)
    assert not answer.changed
    await business.do("COMMIT")


async def test_binary_contents_travel_as_they_are(client: Client, join: Join) -> None:
    business = await join()
    await business.begin()
    await client.submit(NewTask(b"\x00\xff%s$1\\", task_id="t", delay=0), connection=business.con)
    await business.do("COMMIT")
    [claim] = await client.claim_next(owner="w")  # type: ignore[misc]
    assert claim.input == b"\x00\xff%s$1\\"
    await business.begin()
    await client.commit(claim, b"\x01\x00%", connection=business.con)
    await business.do("COMMIT")
    found = await client.result("t")
    assert isinstance(found, Result)
    assert found.value == b"\x01\x00%"


# graphs -------------------------------------------------------------------------------------------


async def test_children_spawned_and_successors_released_wait_for_the_callers_commit(client: Client, join: Join) -> None:
    claim = await claimed(client, "parent")
    await client.submit(NewTask(1, task_id="successor", depends_on=["parent"]))
    business = await join()
    await business.begin()
    spawn = [NewTask(2, task_id="child"), NewTask(3, task_id="grandchild", depends_on=["child"])]
    assert isinstance(await client.commit(claim, "done", spawn=spawn, connection=business.con), Pending)
    assert (await state(client, "successor"), await state(client, "child")) == ("BLOCKED", None)
    await business.do("COMMIT")
    assert await state(client, "successor") == await state(client, "child") == "READY"
    assert await state(client, "grandchild") == "BLOCKED"
    await clean(client)


async def test_a_parent_may_have_been_submitted_in_the_same_transaction(client: Client, join: Join) -> None:
    await client.submit(NewTask(0, task_id="older"))
    business = await join()
    await business.begin()
    await client.submit(NewTask(1, task_id="parent"), connection=business.con)
    child = NewTask(2, task_id="child", depends_on=["parent", "older"])
    assert isinstance(await client.submit(child, connection=business.con), Pending)
    await business.do("COMMIT")
    found = await client.task("child")
    assert isinstance(found, TaskView)
    assert (found.state, found.deps_remaining) == ("BLOCKED", 2)
    for claim in await client.claim_next(owner="w", limit=2):  # type: ignore[union-attr]
        assert isinstance(await client.commit(claim), Committed)
    assert await state(client, "child") == "READY"
    await clean(client)


async def test_a_staged_result_is_committed_and_one_never_staged_raises_and_leaves_the_transaction(
    client: Client, join: Join, url: str
) -> None:
    claim = await claimed(client, "t")
    digest = await client.stage(claim, "staged")
    assert isinstance(digest, str)
    business = await join()
    await business.begin()
    await business.write("kept")
    with pytest.raises(NotStaged):
        await client.commit(claim, result_digest="0" * 64, connection=business.con)
    assert isinstance(await client.commit(claim, result_digest=digest, connection=business.con), Pending)
    await business.do("COMMIT")
    found = await client.result("t")
    assert isinstance(found, Result)
    assert found.value == "staged"
    assert await rows(url) == {"kept"}
    await clean(client)


# refusals -----------------------------------------------------------------------------------------


async def test_a_late_worker_is_fenced_and_its_rows_go_with_its_own_rollback(
    client: Client, join: Join, url: str
) -> None:
    late = await claimed(client, "t")
    await client.take_over("t", expected_generation=late.generation)
    business = await join()
    await business.begin()
    await business.write("charged by a late worker")
    answer = await client.commit(late, "late", connection=business.con)
    assert isinstance(answer, Refused)
    assert answer.outcome == Outcome.FENCED
    await business.do("ROLLBACK")
    assert await rows(url) == set()
    # The caller rolled back, and what was refused is on record all the same.
    journal = await client.events(task_id="t", names=["refusal"])
    assert [(entry.door, entry.outcome) for entry in journal.items] == [("commit", "FENCED")]
    await clean(client)


async def test_a_refusal_leaves_the_callers_transaction_usable_and_no_lock_behind(
    client: Client, join: Join, url: str
) -> None:
    late = await claimed(client, "t")
    await client.take_over("t", expected_generation=late.generation)
    business = await join()
    await business.begin()
    assert isinstance(await client.commit(late, "late", connection=business.con), Refused)
    await business.write("noted instead")
    # Nobody is held up by a transaction that was refused.
    assert isinstance(await raised(client), PoolChanged)
    await business.do("COMMIT")
    assert await rows(url) == {"noted instead"}


async def test_a_conflicting_submission_is_refused_and_changes_nothing(client: Client, join: Join) -> None:
    await client.submit(NewTask(1, task_id="t"))
    business = await join()
    await business.begin()
    answer = await client.submit(NewTask(2, task_id="t"), connection=business.con)
    assert isinstance(answer, Refused)
    assert (answer.outcome, answer.door, answer.task_id) == (Outcome.CONFLICT, "submit", "t")
    await business.do("COMMIT")


async def test_of_two_transactions_that_commit_one_claim_the_second_waits_and_is_refused(
    client: Client, join: Join
) -> None:
    claim = await claimed(client, "t")
    one, other = await join(), await join()
    await one.begin()
    await other.begin()
    assert isinstance(await client.commit(claim, "one", connection=one.con), Pending)
    waiting = asyncio.create_task(client.commit(claim, "other", connection=other.con))
    await asyncio.wait([waiting], timeout=0.3)
    assert not waiting.done()
    await one.do("COMMIT")
    answer = await asyncio.wait_for(waiting, 10)
    assert isinstance(answer, Refused)
    # Its swap was tried, under locks: they went with the refusal, and nobody waits for this transaction.
    assert isinstance(await raised(client), PoolChanged)
    await other.do("ROLLBACK")
    found = await client.result("t")
    assert isinstance(found, Result)
    assert found.value == "one"
    await clean(client)


async def test_where_the_first_of_two_transactions_rolls_back_the_second_commits(client: Client, join: Join) -> None:
    claim = await claimed(client, "t")
    one, other = await join(), await join()
    await one.begin()
    await other.begin()
    assert isinstance(await client.commit(claim, "one", connection=one.con), Pending)
    waiting = asyncio.create_task(client.commit(claim, "other", connection=other.con))
    await asyncio.wait([waiting], timeout=0.3)
    assert not waiting.done()
    await one.do("ROLLBACK")
    assert isinstance(await asyncio.wait_for(waiting, 10), Pending)
    await other.do("COMMIT")
    found = await client.result("t")
    assert isinstance(found, Result)
    assert found.value == "other"
    await clean(client)


async def test_a_swap_that_is_lost_is_decided_again_inside(client: Client, join: Join) -> None:
    await client.submit(NewTask(0, task_id="parent"))
    one, other = await join(), await join()
    await one.begin()
    await other.begin()
    await client.submit(NewTask(1, task_id="a", depends_on=["parent"]), connection=one.con)
    waiting = asyncio.create_task(client.submit(NewTask(2, task_id="b", depends_on=["parent"]), connection=other.con))
    await asyncio.wait([waiting], timeout=0.3)
    assert not waiting.done()
    await one.do("COMMIT")
    assert isinstance(await asyncio.wait_for(waiting, 10), Pending)
    await other.do("COMMIT")
    assert await state(client, "a") == await state(client, "b") == "BLOCKED"
    await clean(client)


# isolation ----------------------------------------------------------------------------------------

FIXED = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])


@FIXED
async def test_under_a_fixed_snapshot_what_nobody_else_has_touched_commits(
    client: Client, join: Join, isolation: str
) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin(isolation)
    assert isinstance(await client.submit(NewTask(1, task_id="u"), connection=business.con), Pending)
    assert isinstance(await client.commit(claim, "x", connection=business.con), Pending)
    await business.do("COMMIT")
    assert isinstance(await client.result("t"), Result)
    await clean(client)


@FIXED
async def test_a_record_that_moved_after_the_snapshot_is_unavailable_and_nothing_is_written(
    client: Client, join: Join, url: str, isolation: str
) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin(isolation)
    await business.write("paid")  # which takes the snapshot
    await client.renew(claim)
    with pytest.raises(Unavailable, match="nothing was written"):
        await client.commit(claim, "x", connection=business.con)
    await business.do("ROLLBACK")
    assert await state(client, "t") == "CLAIMED"
    assert await rows(url) == set()
    await business.begin(isolation)
    assert isinstance(await client.commit(claim, "x", connection=business.con), Pending)
    await business.do("COMMIT")
    await clean(client)


@FIXED
async def test_a_snapshot_from_before_the_claim_does_not_refuse_it(client: Client, join: Join, isolation: str) -> None:
    await client.submit(NewTask(1, task_id="t"))
    business = await join()
    await business.begin(isolation)
    await business.write("paid")
    [claim] = await client.claim_next(owner="w")  # type: ignore[misc]
    with pytest.raises(Unavailable, match="begin it again"):
        await client.commit(claim, "x", connection=business.con)
    await business.do("ROLLBACK")
    pool = await client.pool("default")
    assert not isinstance(pool, Refused)
    assert pool.intake == "OPEN"
    assert isinstance(await client.commit(claim, "x"), Committed)


@FIXED
async def test_a_raise_after_the_snapshot_stops_the_commit(client: Client, join: Join, isolation: str) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin(isolation)
    await business.write("paid")
    assert isinstance(await raised(client), PoolChanged)
    with pytest.raises(Unavailable):
        await client.commit(claim, "x", connection=business.con)
    await business.do("ROLLBACK")
    assert await state(client, "t") == "CLAIMED"


@FIXED
async def test_a_refusal_under_a_fixed_snapshot_that_is_still_true_is_a_refusal(
    client: Client, join: Join, isolation: str
) -> None:
    late = await claimed(client, "t")
    await client.take_over("t", expected_generation=late.generation)
    business = await join()
    await business.begin(isolation)
    answer = await client.commit(late, "late", connection=business.con)
    assert isinstance(answer, Refused)
    await business.do("ROLLBACK")


# raises -------------------------------------------------------------------------------------------


async def test_a_caller_that_sleeps_before_its_commit_holds_up_no_raise_and_is_fenced(
    client: Client, join: Join
) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin()
    await business.write("before a long sleep")
    assert isinstance(await raised(client), PoolChanged)
    answer = await client.commit(claim, "x", connection=business.con)
    assert isinstance(answer, Refused)
    assert (answer.outcome, answer.reason) == (Outcome.FENCED, "EPOCH")
    await business.do("ROLLBACK")


async def test_a_raise_waits_for_a_caller_that_sleeps_after_its_commit_and_then_names_it(
    client: Client, join: Join
) -> None:
    claim = await claimed(client, "t")
    business = await join()
    await business.begin()
    await business.do("SET LOCAL application_name = 'sleeper'")
    assert isinstance(await client.commit(claim, "x", connection=business.con), Pending)
    with pytest.raises(Unavailable, match=r"raise_timeout.*sleeper.*idle in transaction"):
        async with asyncio.timeout(10):
            await raised(client)
    pool = await client.pool("default")
    assert not isinstance(pool, Refused)
    assert pool.epoch == 1
    # It was in time: what it committed before the raise counts.
    await business.do("COMMIT")
    assert isinstance(await raised(client), PoolChanged)
    assert isinstance(await client.result("t"), Result)
    await clean(client)


async def test_a_caller_that_sleeps_past_its_lease_keeps_nobody_waiting_and_still_commits(
    server: Server, database: str, opened: Open, url: str
) -> None:
    backend = Coordinator(await opened())

    async def reopen() -> Backend:
        return backend

    async with Client(backend, url=url, reopen=reopen, epochs={}) as client:
        claim = await claimed(client, "t")
        await client.submit(NewTask(2, task_id="other"))
        con = await asyncpg.connect(url)
        await con.execute("BEGIN")
        assert isinstance(await client.commit(claim, "in time", connection=con), Pending)
        await advance(server, database, 3_600)
        async with asyncio.timeout(3):
            found = await client.claim_next(owner="next", limit=5)
            assert not isinstance(found, Refused)
            assert [claim.task_id for claim in found] == ["other"]
            await client.report("maintain")
        await con.execute("COMMIT")
        await con.close()
        assert isinstance(await client.result("t"), Result)
        await clean(client)


async def test_transactions_that_lock_each_other_out_are_ended_by_one_unavailable(client: Client, join: Join) -> None:
    first, second = await claimed(client, "first"), await claimed(client, "second")
    one, other = await join(), await join()
    await one.begin()
    await other.begin()
    assert isinstance(await client.commit(first, 1, connection=one.con), Pending)
    assert isinstance(await client.commit(second, 2, connection=other.con), Pending)
    waiting = asyncio.create_task(client.commit(second, 1, connection=one.con))
    await asyncio.wait([waiting], timeout=0.3)
    assert not waiting.done()
    with pytest.raises(Unavailable, match="nothing was written"):
        async with asyncio.timeout(10):
            await client.commit(first, 2, connection=other.con)
    await other.do("ROLLBACK")
    assert isinstance(await asyncio.wait_for(waiting, 10), Pending)
    await one.do("COMMIT")
    assert await state(client, "first") == await state(client, "second") == "COMMITTED"
    await clean(client)


async def test_one_transaction_holds_so_many_changes_and_no_more(
    client: Client, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_joined, "MOST_ROWS", 5)
    business = await join()
    await business.begin()
    four = [NewTask(number, task_id=f"t{number}") for number in range(4)]
    assert isinstance(await client.submit_many(four, connection=business.con), Pending)
    with pytest.raises(InvalidRequest, match="at most 5 changes"):
        await client.submit(NewTask(5, task_id="t5"), connection=business.con)
    await business.do("COMMIT")
    assert (await state(client, "t0"), await state(client, "t5")) == ("READY", None)
