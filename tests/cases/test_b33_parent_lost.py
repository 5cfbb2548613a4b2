"""B33: the parent failed, was cancelled, or retried under a new id: its children wait for ever."""

from __future__ import annotations

from fencepost import Committed, Done, NewTask, Refused, TaskView
from tests.cases.cli import answered
from tests.conformance.actions import claimed
from tests.faults.stage import Stage


async def test_b33_a_child_of_a_parked_parent_is_named_with_its_blocker_and_runs_after_the_operators_retry(
    stage: Stage,
) -> None:
    client = await stage.client()
    await client.submit_many(
        [NewTask(1, task_id="parent"), NewTask(2, task_id="child", depends_on=["parent"], queue="children")]
    )
    await client.fail(await claimed(client), "out of ideas", retry=False)
    child = await client.task("child")
    assert isinstance(child, TaskView) and (child.state, child.unreachable) == ("BLOCKED", ("parent",))
    shown = answered(stage.folder, "show", "child", "--store", stage.url)
    assert shown["task"]["unreachable"] == ["parent"]
    assert (await client.report("status"))["unreachable"] == 1
    # Claiming or committing it is refused while it waits.
    refused = await client.claim("child", expected_state_version=child.state_version, owner="A")
    assert isinstance(refused, Refused) and refused.outcome == "NOT_CLAIMABLE"
    assert isinstance(await client.reopen("parent"), Done)
    child = await client.task("child")
    assert isinstance(child, TaskView) and child.unreachable == ()
    retried = await claimed(client, "operator's worker")
    assert retried.generation == 2  # the same task: nobody has to find out that another id took its place
    assert isinstance(await client.commit(retried, "at last"), Committed)
    page = await client.events(task_id="child")
    assert [item.state for item in page.items if item.accepted].count("READY") == 1
    assert (await claimed(client, queues=["children"])).parents == {"parent": "at last"}
    assert await client.claim_next(owner="B", queues=["children"]) == []
    await stage.audit()


async def test_b33_polling_does_not_spin_on_blocked_tasks(stage: Stage) -> None:
    client = await stage.client()
    await client.submit(NewTask(1, task_id="parent", queue="parents"))
    await client.submit_many([NewTask(n, depends_on=["parent"]) for n in range(500)])
    await client.cancel("parent")
    store = client.backend.store  # type: ignore[attr-defined]
    before = await store.last_numbers()
    for _ in range(50):
        assert await client.claim_next(owner="idle") == []
        await client.report("maintain")
    assert await store.last_numbers() == before, "idle polling wrote something"


async def test_b33_a_parent_cancelled_after_its_child_was_released_changes_nothing(stage: Stage) -> None:
    client = await stage.client()
    await client.submit_many([NewTask(1, task_id="parent"), NewTask(2, task_id="child", depends_on=["parent"])])
    await client.commit(await claimed(client), "done")
    late = await client.cancel("parent")
    assert isinstance(late, Refused) and late.outcome == "ALREADY_COMMITTED"
    child = await claimed(client)
    assert child.task_id == "child"
    assert isinstance(await client.commit(child, "done"), Committed)
    await stage.audit()


async def test_b33_a_cancelled_parent_ends_those_that_asked_for_it_and_only_names_itself_to_the_others(
    stage: Stage,
) -> None:
    client = await stage.client()
    await client.submit_many(
        [
            NewTask(1, task_id="parent"),
            NewTask(2, task_id="goes along", depends_on=["parent"], on_failure="cancel"),
            NewTask(3, task_id="and its child", depends_on=["goes along"], on_failure="cancel"),
            NewTask(4, task_id="waits", depends_on=["parent"]),
        ]
    )
    await client.cancel("parent")
    states = {}
    for name in ("goes along", "and its child", "waits"):
        view = await client.task(name)
        assert isinstance(view, TaskView)
        states[name] = view.state
    assert states == {"goes along": "CANCELLED", "and its child": "CANCELLED", "waits": "BLOCKED"}
    await stage.audit()
