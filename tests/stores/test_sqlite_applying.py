"""Apply on SQLite: each set is compared and written whole, or not at all; records come back as they went in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fencepost.errors import Inconsistent
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Checkpoint, Dependency, LogEntry, Policy, Pool, Request, StagedState, State
from fencepost.kernel.writes import FAMILIES, Keys, Snapshot, TaskWrite
from fencepost.stores.base import REQUEST_RETENTION_US, Apply, Load
from fencepost.stores.sqlite import SQLiteStore
from tests.stores.building import (
    Plan,
    applying,
    event,
    insert,
    loading,
    replace,
    result,
    scanning,
    staged,
    task,
    writes,
)
from tests.stores.conftest import Open

change = msgspec.structs.replace


async def test_every_field_of_a_task_comes_back_as_it_was_written(store: SQLiteStore) -> None:
    full = task(
        "a",
        graph_id="g",
        state=int(State.CLAIMED),
        state_version=7,
        scheduler_epoch=2,
        claim_generation=3,
        attempt_id="at",
        owner_id="ow\u202e\uffff",
        claimed_at=11,
        lease_expires_at=22,
        cancel_generation=4,
        result_commit_id="rc",
        priority=-1000,
        available_at=1 << 52,
        ready_at=5,
        charged_attempts=1,
        max_attempts=9,
        deps_total=6,
        deps_remaining=5,
        successors=8,
        checkpoint_number=12,
        checkpoint_generation=3,
        end=6,
        cancel_with_parent=True,
        park_reason="ATTEMPTS",
        created_at=13,
        pruned_to_version=2,
        trace_context="tc",
    )
    bare = task("b")
    assert await store.run(applying(insert(full, bare))) == [True]
    found = (await store.run(loading(tasks=["a", "b"]))).tasks
    assert found == {"a": full, "b": bare}
    assert (await store.run(loading(tasks=["a"]))).tasks == {"a": full}


async def test_a_lost_set_writes_nothing_and_hurts_no_other(store: SQLiteStore) -> None:
    now = await store.clock()
    before = [task(f"t{i}") for i in range(4)]
    await store.run(applying(insert(*before)))
    sets = []
    for one in before:
        made = replace(one, change(one, state_version=2, owner_id="new"), "any")
        made.inputs.append((one.task_id, 2, encode("new")))
        made.requests.append(Request(f"r-{one.task_id}", "o", "claim", now, {}))
        made.log.append(LogEntry("usage", 1, "default", one.task_id, "usage"))
        made.staged.append(staged(one.task_id, 1, "new"))
        made.checkpoints.append(Checkpoint(one.task_id, 1, 1, 1, encode("new")))
        sets.append(made)
    stale = change(before[1], state_version=5)
    sets[1] = replace(stale, change(stale, state_version=6), "claim")
    sets[1].inputs.append(("t1", 2, encode("lost")))
    sets[1].requests.append(Request("r-t1", "o", "claim", now, {}))
    sets[1].log.append(LogEntry("usage", 1, "default", "t1", "usage"))
    sets[1].staged.append(staged("t1", 1, "lost"))
    assert await store.run(applying(*sets)) == [True, False, True, True]
    histories = {h.task.task_id: h for h in await store.histories(None, 10)}
    assert histories["t1"].task == before[1]
    assert histories["t1"].input == (1, encode({"n": "t1"})) and histories["t1"].staged == []
    assert [e.state_version for e in histories["t1"].events] == [1]
    for name in ("t0", "t2", "t3"):
        assert histories[name].task.owner_id == "new" and histories[name].input == (2, encode("new"))
        assert [e.state_version for e in histories[name].events] == [1, 2]
    assert {n.entry.task_id for n in await store.log(0, 10)} == {"t0", "t2", "t3"}
    found = await store.run(loading(requests=[f"r-t{i}" for i in range(4)], checkpoints=["t0", "t1"]))
    assert set(found.requests) == {"r-t0", "r-t2", "r-t3"} and set(found.checkpoints) == {"t0"}


async def test_one_stale_record_loses_the_whole_set(store: SQLiteStore) -> None:
    a, b = task("a"), task("b")
    await store.run(applying(insert(a, b)))
    made = replace(a, change(a, state_version=2))
    made.tasks.append(TaskWrite(9, b, "compare"))
    assert await store.run(applying(made)) == [False]
    assert (await store.run(loading(tasks=["a"]))).tasks["a"] == a


async def test_compare_writes_nothing_to_its_task(store: SQLiteStore) -> None:
    a, b = task("a"), task("b")
    await store.run(applying(insert(a, b)))
    made = replace(a, change(a, state_version=2))
    made.tasks.append(TaskWrite(1, change(b, owner_id="no"), "compare"))
    assert await store.run(applying(made)) == [True]
    assert (await store.run(loading(tasks=["b"]))).tasks["b"] == b


async def test_inserting_an_id_that_stands_is_lost(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("a"))))
    assert await store.run(applying(insert(task("a", queue="other")), insert(task("b")))) == [False, True]
    assert (await store.run(loading(tasks=["a"]))).tasks["a"].queue == "default"


async def test_writing_a_task_that_is_not_there_is_lost(store: SQLiteStore) -> None:
    ghost = task("ghost")
    assert await store.run(applying(replace(ghost, change(ghost, state_version=2)))) == [False]


async def test_a_set_under_another_epoch_is_lost_and_a_raise_before_it_counts(store: SQLiteStore) -> None:
    a, b, c = task("a"), task("b"), task("c")
    await store.run(applying(insert(a, b, c)))
    raised = writes(epoch=1)
    raised.pool_write = (1, Pool("default", 2, 2))
    won = await store.run(
        applying(
            replace(a, change(a, state_version=2), epoch=1),
            raised,
            replace(b, change(b, state_version=2), epoch=1),
            replace(c, change(c, state_version=2), epoch=2),
        )
    )
    assert won == [True, True, False, True]
    assert (await store.pools())[0].epoch == 2
    assert await store.run(applying(replace(b, change(b, state_version=2), epoch=1))) == [False]
    nowhere = writes("nowhere", 1)
    assert await store.run(applying(nowhere)) == [False]


async def test_a_set_decided_on_another_version_of_the_pool_is_lost(store: SQLiteStore) -> None:
    a = task("a")
    await store.run(applying(insert(a)))
    for version, won in ((2, False), (1, True)):
        made = replace(a, change(a, state_version=2), epoch=1)
        made.pool_version = version
        assert await store.run(applying(made)) == [won]


async def test_a_statement_that_changes_too_few_records_undoes_everything(store: SQLiteStore) -> None:
    a = task("a")
    await store.run(applying(insert(a)))
    await store._writer.do(
        lambda con: con.execute("CREATE TEMP TRIGGER t BEFORE UPDATE ON task BEGIN SELECT RAISE(IGNORE); END")
    )
    with pytest.raises(Inconsistent, match="holds the write lock"):
        await store.run(applying(insert(task("b")), replace(a, change(a, state_version=2))))
    await store._writer.do(lambda con: con.execute("DROP TRIGGER t"))
    assert set((await store.run(loading(tasks=["a", "b"]))).tasks) == {"a"}


async def test_pools_are_written_by_version(store: SQLiteStore) -> None:
    new = writes()
    new.pool_write = (0, Pool("b", policy=Policy(max_attempts=3), intake_open=False))
    assert await store.run(applying(new)) == [True]
    assert await store.run(applying(new)) == [False]
    assert [p.name for p in await store.pools()] == ["b", "default"]
    found = (await store.run(loading(pools=["b", "none"]))).pools
    assert found == {"b": Pool("b", policy=Policy(max_attempts=3), intake_open=False)}
    assert found["b"].intake_open is False


@pytest.mark.parametrize("family", [*FAMILIES, "any"])
async def test_a_family_writes_its_columns_and_no_other(store: SQLiteStore, family: str) -> None:
    before = task("a", state=int(State.CLAIMED), attempt_id="at", owner_id="ow", claimed_at=1, lease_expires_at=2)
    await store.run(applying(insert(before)))
    columns = FAMILIES.get(family, before.__struct_fields__[1:])
    after = before
    for name in before.__struct_fields__[1:]:
        value = getattr(before, name)
        after = change(after, **{name: "x" if isinstance(value, str) or name in TEXTS else 3})
    after = change(after, state=2, state_version=2, end=1, cancel_with_parent=True)
    assert await store.run(applying(replace(before, after, family))) == [True]
    expected = change(before, **{name: getattr(after, name) for name in columns})
    assert (await store.run(loading(tasks=["a"]))).tasks["a"] == expected


TEXTS = {"graph_id", "result_commit_id", "park_reason", "trace_context"}


def _columns_touched(statement: str) -> set[str]:
    return {part.split('"')[1] for part in statement.split(" SET ")[1].split(" WHERE ")[0].split(", ")}


def test_a_renewal_touches_no_indexed_column() -> None:
    from fencepost.stores.sqlite_transaction import _FAMILIES

    indexed = {"pool", "state", "queue", "kind", "priority", "available_at", "task_id"}
    assert _columns_touched(_FAMILIES["renew"].sql).isdisjoint(indexed)
    assert not _columns_touched(_FAMILIES["claim"].sql).isdisjoint(indexed)


async def test_staged_results_keep_their_first_copy_and_are_settled(store: SQLiteStore) -> None:
    a, b = task("a"), task("b")
    made = insert(a, b)
    made.staged += [staged("a", 1, "one"), staged("a", 2, "two"), staged("a", 2, "three"), staged("b", 1, "one")]
    await store.run(applying(made))
    again = writes()
    again.staged.append(change(staged("a", 1, "one"), staged_at=99))
    discard = writes()
    discard.discard_attempts.append(("b", 1))
    assert await store.run(applying(again, discard)) == [True, True]
    commit = replace(a, change(a, state_version=2), "any")
    two = encode("two")
    commit.results.append(result(a, None, two.digest))
    commit.results[0] = change(commit.results[0], generation=2)
    commit.discard_rivals.append(("a", 2, two.digest))
    assert await store.run(applying(commit)) == [True]
    rows = (await store.run(loading(staged=["a", "b", "none"]))).staged
    states = {(s.generation, s.content.digest): s.state for s in rows["a"]}
    assert states == {
        (1, encode("one").digest): StagedState.DISCARDED,
        (2, two.digest): StagedState.COMMITTED,
        (2, encode("three").digest): StagedState.DISCARDED,
    }
    assert [s.staged_at for s in rows["a"] if s.generation == 1] == [1]
    assert [s.state for s in rows["b"]] == [StagedState.DISCARDED] and not rows["none"]
    found = await store.result("a")
    assert found is not None and found.content == two


async def test_bodies_come_back_byte_exact(store: SQLiteStore) -> None:
    bodies: list[Any] = ["", {"ü": "\U0001f600\u202e\uffff"}, b"\x00\xff" * 10, [1.0, None, True], "x" * 500_000, b""]
    made = writes()
    for i, body in enumerate(bodies):
        one = task(f"t{i}")
        made.tasks.append(TaskWrite(0, one, "insert"))
        made.inputs.append((one.task_id, 1, encode(body)))
        made.results.append(result(one, encode(body)))
        made.checkpoints.append(Checkpoint(one.task_id, 1, 2, 3, encode(body)))
    assert await store.run(applying(made)) == [True]
    names = [f"t{i}" for i in range(len(bodies))]
    found = await store.run(loading(inputs=names, results=names, checkpoints=names))
    for i, body in enumerate(bodies):
        assert found.inputs[f"t{i}"] == encode(body)
        assert found.results[f"t{i}"] == made.results[i]
        assert found.checkpoints[f"t{i}"] == made.checkpoints[i]
    scanned: Snapshot = Snapshot()
    await store.run(scanning(into=scanned))
    assert scanned.inputs == found.inputs


async def test_checkpoints_are_replaced_and_dropped(store: SQLiteStore) -> None:
    a = task("a")
    await store.run(applying(insert(a)))
    for number in (1, 2):
        made = writes()
        made.checkpoints.append(Checkpoint("a", 1, 1, number, encode(number)))
        await store.run(applying(made))
    assert (await store.run(loading(checkpoints=["a"]))).checkpoints["a"].number == 2
    dropped = writes()
    dropped.drop_checkpoints.append("a")
    await store.run(applying(dropped))
    assert (await store.run(loading(checkpoints=["a"]))).checkpoints == {}


async def test_dependencies_are_found_from_both_ends_in_order(store: SQLiteStore) -> None:
    made = insert(task("c"), task("a"), task("b"), task("p"))
    made.dependencies += [Dependency("c", "p"), Dependency("c", "a"), Dependency("b", "p")]
    await store.run(applying(made))
    found = await store.run(loading(parents=["c", "a"], children=["p", "c"]))
    assert found.parents.get("c") == ["p", "a"] and not found.parents.get("a")
    assert sorted(found.children["p"]) == ["b", "c"] and not found.children["c"]


async def test_request_ids_are_found_for_their_ten_minutes_and_the_first_answer_stays(store: SQLiteStore) -> None:
    now = await store.clock()
    ages = {"new": 0, "middle": REQUEST_RETENTION_US // 2, "old": REQUEST_RETENTION_US - 5_000_000, "past": 0}
    ages["past"] = REQUEST_RETENTION_US + 1
    made = writes()
    made.requests += [Request(name, "o", "claim", now - age, {"n": [name, None]}) for name, age in ages.items()]
    await store.run(applying(made))
    again = writes()
    again.requests.append(Request("new", "o", "claim", now, {"n": "second"}))
    await store.run(applying(again))
    found = (await store.run(loading(requests=[*ages, "unknown"]))).requests
    assert set(found) == {"new", "middle", "old"}
    assert found["new"] == made.requests[0]


async def test_starts_are_found_by_generation(store: SQLiteStore) -> None:
    a = task("a", claim_generation=1, attempt_id="x")
    made = insert(a)
    second = change(a, state_version=2, claim_generation=2, attempt_id="y")
    made.events.append(event(second, 5, "attempt_started", detail={"owner": "o", "lease_us": None}))
    await store.run(applying(made))
    found = (await store.run(loading(starts=[("a", 2), ("a", 1), ("b", 1)]))).starts
    assert found == {("a", 2): made.events[1]}


async def test_a_plan_reads_its_own_writes(store: SQLiteStore) -> None:
    def plan() -> Plan:
        yield Apply([insert(task("a"))])
        snapshot = Snapshot()
        yield Load(Keys(tasks={"a", "b"}), snapshot)
        first = dict(snapshot.tasks)
        a = snapshot.tasks["a"]
        won = yield Apply([replace(a, change(a, state_version=2, owner_id="me")), insert(task("b"))])
        yield Load(Keys(tasks={"a", "b"}), snapshot)
        return first, won, snapshot

    first, won, snapshot = await store.run(plan())
    assert set(first) == {"a"} and won == [True, True]
    assert snapshot.tasks["a"].owner_id == "me" and snapshot.tasks["b"].state_version == 1


async def test_what_a_plan_itself_has_moved_is_stale_to_its_next_step(store: SQLiteStore) -> None:
    a = task("a")
    await store.run(applying(insert(a)))

    def plan() -> Plan:
        first = yield Apply([replace(a, change(a, state_version=2, owner_id="first"))])
        second = yield Apply([replace(a, change(a, state_version=2, owner_id="second")), insert(task("b"))])
        return first, second

    assert await store.run(plan()) == ([True], [False, True])
    assert (await store.run(loading(tasks=["a"]))).tasks["a"].owner_id == "first"


async def test_a_plan_that_raises_leaves_nothing_behind(store: SQLiteStore) -> None:
    def plan() -> Plan:
        won = yield Apply([insert(task("a"))])
        assert won == [True]
        raise LookupError("a bug in a plan")

    with pytest.raises(LookupError, match="a bug in a plan"):
        await store.run(plan())
    assert (await store.run(loading(tasks=["a"]))).tasks == {}
    assert await store.run(applying(insert(task("a")))) == [True]


async def test_a_plan_without_steps_is_just_run(store: SQLiteStore) -> None:
    def plan() -> Plan:
        return 5
        yield

    assert await store.run(plan()) == 5


async def test_reading_alone_writes_nothing(store: SQLiteStore) -> None:
    await store.run(applying(insert(task("a"))))
    seen = await store.version()
    await store.run(loading(tasks=["a"]))
    await store.run(scanning())
    await store.run(applying())
    assert await store.version() == seen
    await store.run(applying(log=[LogEntry("usage", 1, None, None, "usage")]))
    assert await store.version() != seen


async def test_another_handles_write_moves_the_version(store: SQLiteStore, opened: Open) -> None:
    other = await opened()
    seen = await store.version()
    await other.run(applying(insert(task("a"))))
    assert await store.version() != seen


async def test_log_entries_are_kept_whatever_is_won(store: SQLiteStore) -> None:
    entry = LogEntry("refusal", 3, "default", "a", "commit", "FENCED", "GENERATION", "hash", 2, {"presented": {}}, 4)
    ghost = task("ghost")
    won = await store.run(applying(replace(ghost, change(ghost, state_version=2)), log=[entry]))
    assert won == [False]
    assert [n.entry for n in await store.log(0, 10)] == [entry]


async def test_a_row_that_cannot_fit_is_inconsistent_and_nothing_is_written(store: SQLiteStore) -> None:
    a = task("a")
    await store.run(applying(insert(a)))
    bad = insert(task("b"))
    bad.events.append(event(a))  # (a, 1) stands in the journal
    with pytest.raises(Inconsistent, match="fencepost audit"):
        await store.run(applying(bad))
    assert (await store.run(loading(tasks=["b"]))).tasks == {}
    assert await store.run(applying(insert(task("b")))) == [True]
