"""Dependencies: released once, never before all parents are committed, never lost (claim.v1, section 6)."""

from __future__ import annotations

import asyncio

import pytest

from fencepost.client.client import Client
from fencepost.errors import InvalidRequest, SpawnConflict
from fencepost.wire import Claim, Committed, Done, NewTask, Refused, Result, TaskView
from tests.conformance.actions import claimed, committed, done, given, refusal, state_of, taken_over
from tests.conformance.worlds import World


async def test_a_task_waits_for_all_its_parents_and_gets_their_results(client: Client) -> None:
    await client.submit_many(
        [
            NewTask(0, task_id="child", depends_on=["p1", "p2"]),
            NewTask(1, task_id="p1"),
            NewTask(2, task_id="p2"),
        ]
    )
    assert await state_of(client, "child") == "BLOCKED"
    for _ in range(2):
        claim = await claimed(client)
        await committed(client, claim, {"from": claim.task_id})
    child = await claimed(client)
    assert child.task_id == "child"
    assert child.parents == {"p1": {"from": "p1"}, "p2": {"from": "p2"}}
    await committed(client, child, "end")
    result, p1, p2 = [await client.result(name) for name in ("child", "p1", "p2")]
    assert isinstance(result, Result) and isinstance(p1, Result) and isinstance(p2, Result)
    assert set(result.parents) == {p1.result_commit_id, p2.result_commit_id}


async def test_a_dependency_on_a_committed_parent_counts_as_done(client: Client) -> None:  # B15
    await done(client, "p")
    await given(client, "c", depends_on=["p"])
    assert await state_of(client, "c") == "READY"
    await given(client, "q")
    await given(client, "d", depends_on=["p", "q"])
    assert await state_of(client, "d") == "BLOCKED"


async def test_bad_dependencies_are_wrong_calls_and_nothing_is_written(client: Client) -> None:
    await client.create_pool("other")
    await given(client, "elsewhere", pool="other")
    for batch, what in (
        ([NewTask(1, task_id="c", depends_on=["missing"])], "no task"),
        ([NewTask(1, task_id="c", depends_on=["c"])], "itself"),
        ([NewTask(1, task_id="a", depends_on=["b"]), NewTask(1, task_id="b", depends_on=["a"])], "itself"),
        ([NewTask(1, task_id="c", depends_on=["elsewhere"])], "pool"),
        ([NewTask(1, task_id="p"), NewTask(1, task_id="c", depends_on=["p", "p"])], "twice"),
    ):
        with pytest.raises(InvalidRequest, match=what):
            await client.submit_many(batch)
    page = await client.tasks()
    assert [view.task_id for view in page.items] == ["elsewhere"]


async def test_a_child_with_an_open_parent_cannot_be_claimed(client: Client) -> None:  # B33
    await given(client, "p")
    view = await given(client, "c", depends_on=["p"])
    answer = await client.claim("c", expected_state_version=view.state_version, owner="A")
    assert refusal(answer) == ("NOT_CLAIMABLE", "BLOCKED")


async def test_a_parked_or_cancelled_parent_leaves_its_child_blocked_and_named_unreachable(client: Client) -> None:
    await given(client, "p")
    await given(client, "c", depends_on=["p"])
    await client.fail(await claimed(client), "broken", retry=False)
    view = await client.task("c")
    assert isinstance(view, TaskView) and view.state == "BLOCKED" and view.unreachable == ("p",)
    await client.reopen("p")
    await committed(client, await claimed(client))
    assert await state_of(client, "c") == "READY"


async def test_a_blocked_task_cancelled_and_reopened_is_blocked_again(client: Client) -> None:  # X21
    await given(client, "p")
    await given(client, "c", depends_on=["p"])
    await client.cancel("c")
    answer = await client.reopen("c")
    assert isinstance(answer, Done) and answer.state == "BLOCKED"
    await client.cancel("c")
    await committed(client, await claimed(client))
    assert await state_of(client, "c") == "CANCELLED"
    answer = await client.reopen("c")
    assert isinstance(answer, Done) and answer.state == "READY"


async def test_a_cancelled_parent_cancels_those_that_asked_for_it_all_the_way_down(client: Client) -> None:
    await client.submit_many(
        [
            NewTask(1, task_id="p"),
            NewTask(1, task_id="c1", depends_on=["p"], on_failure="cancel"),
            NewTask(1, task_id="c2", depends_on=["c1"], on_failure="cancel"),
            NewTask(1, task_id="keep", depends_on=["p"]),
        ]
    )
    answer = await client.cancel("p")
    assert isinstance(answer, Done) and set(answer.info["successors"]) == {"c1", "c2"}
    assert [await state_of(client, name) for name in ("p", "c1", "c2", "keep")] == ["CANCELLED"] * 3 + ["BLOCKED"]
    with pytest.raises(InvalidRequest, match="cancelled"):
        await client.submit(NewTask(1, depends_on=["p"], on_failure="cancel"))


async def test_a_parked_parent_cancels_nobody(client: Client) -> None:
    await given(client, "p")
    await given(client, "c", depends_on=["p"], on_failure="cancel")
    await client.fail(await claimed(client), "x", retry=False)
    assert await state_of(client, "c") == "BLOCKED"


async def test_sixty_four_parents_that_commit_at_once_release_their_child_exactly_once(
    client: Client, world: World
) -> None:
    other = await world.client()
    await client.submit_many([NewTask(n, task_id=f"p{n}") for n in range(64)])
    await given(client, "child", depends_on=[f"p{n}" for n in range(64)])
    answer = await client.claim_next(owner="A", limit=64)
    assert not isinstance(answer, Refused) and len(answer) == 64
    await asyncio.gather(
        *(committed(client if n % 2 else other, claim) for n, claim in enumerate(answer)),
    )
    page = await client.events(task_id="child", limit=1000)
    released = [e for e in page.items if e.name == "parent_committed"]
    assert len(released) == 64
    assert [e.state for e in released].count("READY") == 1
    assert (await claimed(client)).task_id == "child"
    assert await client.claim_next(owner="B") == []


async def test_a_spawned_task_is_inserted_with_the_commit_and_may_depend_on_it(client: Client) -> None:
    await given(client)
    claim = await claimed(client)
    await committed(client, claim, "r", spawn=[NewTask(1, task_id="next", depends_on=["t"]), NewTask(2, task_id="n2")])
    assert await state_of(client, "next") == "READY"
    child = await claimed(client)
    assert child.task_id in ("n2", "next")
    again = await client.commit(
        claim, "r", spawn=[NewTask(1, task_id="next", depends_on=["t"]), NewTask(2, task_id="n2")]
    )
    assert isinstance(again, Committed) and again.replayed


async def test_the_same_commit_with_other_spawned_tasks_is_no_replay(client: Client) -> None:  # X28
    await given(client)
    claim = await claimed(client)
    await committed(client, claim, "r", spawn=[NewTask(1, task_id="a")])
    answer = await client.commit(claim, "r", spawn=[NewTask(1, task_id="b")])
    assert refusal(answer) == ("ENDED", "COMMITTED")
    assert refusal(await client.task("b"))[0] == "NOT_FOUND"


async def test_a_commit_asked_again_with_its_request_id_spawns_no_second_task(client: Client) -> None:
    await given(client, "p")
    claim = await claimed(client)
    first = await committed(client, claim, 1, spawn=[NewTask(1), NewTask(1)], request_id="r")
    again = await committed(client, claim, 1, spawn=[NewTask(1), NewTask(1)], request_id="r")
    assert again.replayed and again.result_commit_id == first.result_commit_id
    assert len((await client.tasks()).items) == 3


async def test_a_wrong_spawn_is_named_as_such_and_nothing_is_written(client: Client) -> None:
    await given(client, "p")
    claim = await claimed(client)
    with pytest.raises(InvalidRequest, match=r"spawn\[1\].depends_on: no task 'nobody'"):
        await client.commit(claim, 1, spawn=[NewTask(1, task_id="a"), NewTask(1, depends_on=["nobody"])])
    assert await state_of(client, "p") == "CLAIMED" and len((await client.tasks()).items) == 1


async def test_a_spawned_id_that_stands_otherwise_stops_the_whole_commit(client: Client) -> None:
    await given(client, "t")
    await given(client, "taken", {"other": 1}, priority=9)
    claim = await claimed(client)
    with pytest.raises(SpawnConflict, match="taken"):
        await client.commit(claim, "r", spawn=[NewTask(1, task_id="fresh"), NewTask(1, task_id="taken")])
    assert await state_of(client) == "CLAIMED"
    assert refusal(await client.task("fresh"))[0] == "NOT_FOUND"


async def test_a_late_worker_spawns_nothing(client: Client, world: World) -> None:
    await given(client)
    late = await claimed(client, ttl=5.0)
    await taken_over(world, client, late)
    assert refusal(await client.commit(late, 1, spawn=[NewTask(1, task_id="ghost")]))[0] == "FENCED"
    assert refusal(await client.task("ghost"))[0] == "NOT_FOUND"


async def test_a_child_submitted_while_its_last_parent_commits_is_never_stuck(client: Client, world: World) -> None:
    # X30, B15: submit and commit race; whichever order the store takes them in, the child ends up READY.
    other = await world.client()
    for n in range(25):
        await given(client, f"p{n}", priority=-1)
        claim = await claimed(client)
        assert isinstance(claim, Claim)
        child, _ = await asyncio.gather(
            other.submit(NewTask(1, task_id=f"c{n}", depends_on=[f"p{n}"])), client.commit(claim, 1)
        )
        assert not isinstance(child, Refused)
        assert await state_of(client, f"c{n}") == "READY"
