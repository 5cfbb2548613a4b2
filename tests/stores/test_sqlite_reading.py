"""The read side on SQLite: pages in order, filters, histories, numbers."""

from __future__ import annotations

import msgspec

from fencepost.kernel.digests import encode
from fencepost.kernel.records import Dependency, LogEntry, State
from fencepost.stores.base import TaskFilter
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import applying, event, insert, replace, result, staged, task, writes

change = msgspec.structs.replace


async def _some(store: SQLiteStore) -> None:
    tasks = [
        task(
            f"t{i}",
            pool="default" if i % 2 else "other",
            queue=f"q{i % 3}",
            kind=f"k{i % 2}",
            state=int(State.READY if i < 4 else State.COMMITTED),
        )
        for i in range(9)
    ]
    made = insert(*tasks)
    made.dependencies += [Dependency("t7", "t1"), Dependency("t2", "t1")]
    await store.run(applying(made))


async def test_tasks_come_in_order_of_their_ids_page_by_page(store: SQLiteStore) -> None:
    await _some(store)
    where = TaskFilter()
    first = await store.tasks(where, None, 5)
    assert [t.task_id for t in first] == [f"t{i}" for i in range(5)]
    assert [t.task_id for t in await store.tasks(where, first[-1].task_id, 5)] == [f"t{i}" for i in range(5, 9)]


async def test_tasks_are_filtered_by_every_field(store: SQLiteStore) -> None:
    await _some(store)

    async def ids(**fields: object) -> list[str]:
        return [t.task_id for t in await store.tasks(TaskFilter(**fields), None, 100)]  # type: ignore[arg-type]

    assert await ids(pool="other") == ["t0", "t2", "t4", "t6", "t8"]
    assert await ids(queue="q1", kind="k1") == ["t1", "t7"]
    assert await ids(states=(1,)) == ["t0", "t1", "t2", "t3"]
    assert await ids(states=(1, 2), pool="default") == ["t1", "t3"]
    assert await ids(states=(6, 1), queue="q2") == ["t2", "t5", "t8"]
    assert await ids(parent="t1") == ["t2", "t7"]
    assert await ids(parent="t1", states=(6,)) == ["t7"]
    assert await ids(parent="none") == []


async def test_histories_page_over_everything_and_agree_with_single_ones(store: SQLiteStore) -> None:
    await _some(store)
    one = task("t1", pool="default", queue="q1", kind="k1")
    second = change(one, state_version=2)
    made = replace(one, second)
    made.staged.append(staged("t1", 1, "s"))
    made.results.append(result(second, encode("r")))
    await store.run(applying(made))
    pages = [await store.histories(None, 4), await store.histories("t3", 4), await store.histories("t7", 4)]
    found = [history for page in pages for history in page]
    assert [h.task.task_id for h in found] == [f"t{i}" for i in range(9)]
    assert await store.histories("t8", 4) == []
    for history in found:
        assert await store.history(history.task.task_id) == history
    assert [e.state_version for e in found[1].events] == [1, 2] and found[1].children == ["t2", "t7"]
    assert found[7].parents == ["t1"] and found[1].staged == [staged("t1", 1, "s")]
    assert found[1].result == result(second, encode("r"))
    assert await store.history("none") is None and await store.result("none") is None


async def test_events_and_log_share_growing_numbers_and_filter(store: SQLiteStore) -> None:
    await _some(store)
    await store.run(
        applying(log=[LogEntry("usage", 5, "other", "t2", "usage"), LogEntry("pool", 6, "other", None, "pool")])
    )
    one = task("t1", pool="default", queue="q1", kind="k1")
    await store.run(applying(replace(one, change(one, state_version=2))))
    events = await store.events(0, 100)
    log = await store.log(0, 100)
    assert [n.number for n in events] == [*range(1, 10), 12] and [n.number for n in log] == [10, 11]
    assert await store.last_numbers() == (12, 11)
    assert [n.number for n in await store.events(0, 2)] == [1, 2]
    assert [n.number for n in await store.events(9, 100)] == [12]
    assert [n.number for n in await store.events(0, 100, task_id="t1")] == [2, 12]
    assert [n.number for n in await store.events(2, 100, task_id="t1")] == [12]
    assert [n.number for n in await store.events(0, 100, pool="default")] == [2, 4, 6, 8, 12]
    assert [n.number for n in await store.events(0, 100, names=("attempt_renewed", "x"))] == [12]
    assert [n.number for n in await store.log(0, 100, kinds=("usage",))] == [10]
    assert [n.number for n in await store.log(0, 100, task_id="t2", pool="other")] == [10]
    assert [n.number for n in await store.log(10, 100)] == [11]


async def test_an_empty_store_has_nothing_and_says_so(store: SQLiteStore) -> None:
    assert await store.last_numbers() == (0, 0)
    assert await store.counts() == [] and await store.events(0, 5) == [] and await store.histories(None, 5) == []


async def test_counts_by_pool_queue_kind_and_state(store: SQLiteStore) -> None:
    await _some(store)
    counted = await store.counts()
    assert counted == sorted(counted) and sum(row[-1] for row in counted) == 9
    assert ("other", "q0", "k0", int(State.COMMITTED), 1) in counted


async def test_rows_without_a_task_are_counted_by_table(store: SQLiteStore) -> None:
    await _some(store)
    assert set((await store.orphans()).values()) == {0}
    ghost = task("ghost")
    made = writes()
    made.events.append(event(ghost))
    made.staged.append(staged("ghost", 1, "x"))
    made.results.append(result(ghost, encode("x")))
    made.inputs.append(("ghost", 1, encode("x")))
    await store.run(applying(made))
    found = await store.orphans()
    assert {name for name, count in found.items() if count} == {"event", "staged", "result", "input"}


async def test_a_staged_result_is_read_through_its_commit(store: SQLiteStore) -> None:
    a = task("a", claim_generation=1)
    made = insert(a)
    body = encode({"big": "x"})
    made.staged.append(staged("a", 1, {"big": "x"}))
    made.results.append(result(a, None, body.digest))
    await store.run(applying(made))
    found = await store.result("a")
    assert found is not None and found.content == body
    history = await store.history("a")
    assert history is not None and history.result is not None and history.result.content is None
