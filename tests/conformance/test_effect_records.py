"""Effects as a store keeps them: whole, beside their task, and under its compare-and-swap. No rule is asked here."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fencepost.errors import FencepostError, InvalidRequest, StatementFailed, StoreRefused
from fencepost.kernel.digests import encode
from fencepost.kernel.records import Content, EffectState, State, Terms
from fencepost.stores.base import EffectFilter
from tests.conformance.worlds import World
from tests.stores.building import (
    applying,
    effect,
    event,
    full_effect,
    insert,
    loading,
    replace,
    result,
    statement,
    task,
    with_effects,
)

change = msgspec.structs.replace
OPEN = (int(EffectState.AWAITING_APPROVAL), int(EffectState.UNKNOWN))


@pytest_asyncio.fixture
async def store(world: World) -> Any:
    client = await world.client()
    return client.backend.store  # type: ignore[attr-defined]


async def _standing(store: Any, *task_ids: str) -> None:
    assert await store.run(applying(insert(*(task(task_id) for task_id in task_ids)))) == [True]


async def test_every_field_of_an_effect_and_its_payload_come_back_as_they_were_written(store: Any) -> None:
    await _standing(store, "a", "b")
    full, bare = full_effect("a", 2), effect("a", 1, receipt=Content(b"\x00\xff", "sha256:raw", True))
    payloads = {1: Content(b"", "sha256:empty", True), 2: encode({"to": "ü", "n": 1.5})}
    assert await store.run(applying(with_effects(task("a"), full, bare, payloads=payloads))) == [True]
    found = await store.run(loading(effects=["a", "b", "c"], tasks=["a"], payloads=[("a", 1), ("a", 2), ("a", 3)]))
    assert found.effects == {"a": [bare, full], "b": [], "c": []}
    assert found.payloads == {("a", number): payload for number, payload in payloads.items()}
    assert found.tasks["a"].effects == 2
    history = await store.history("a")
    assert history.effects == [bare, full]
    assert history.payload_digests == {number: payload.digest for number, payload in payloads.items()}
    assert await store.payloads([("a", 2), ("b", 1)]) == {("a", 2): payloads[2]}
    assert [h.effects for h in await store.histories(None, 10)] == [[bare, full], []]


def test_the_effect_of_these_tests_has_something_in_every_field() -> None:
    full = full_effect("a")
    for record in (full, full.terms, full.executions[1], full.approval, full.evidence[0]):
        for field in msgspec.structs.fields(record):  # type: ignore[arg-type]
            assert getattr(record, field.name) not in (None, field.default, field.default_factory), field.name


async def test_all_of_an_effect_but_what_it_is_bound_to_can_change_and_the_others_of_its_task_stay(store: Any) -> None:
    await _standing(store, "a")
    full, bare = full_effect("a", 1), effect("a", 1, state=int(EffectState.COMMITTED), version=2)
    bound = ("effect_id", "pool", "revision", "node_id", "slot", "payload_digest", "terms")
    less = change(bare, **{name: getattr(full, name) for name in bound})
    await store.run(applying(with_effects(task("a"), full, effect("a", 2))))
    assert await store.run(applying(with_effects(task("a", state_version=2, effects=2), less))) == [True]
    assert (await store.run(loading(effects=["a"]))).effects == {"a": [less, effect("a", 2)]}
    assert await store.run(applying(with_effects(task("a", state_version=3, effects=2), full))) == [True]
    assert (await store.run(loading(effects=["a"]))).effects == {"a": [full, effect("a", 2)]}


async def test_a_set_that_loses_its_swap_leaves_no_effect_and_no_payload(store: Any) -> None:
    await _standing(store, "a", "b")
    lost = with_effects(task("a", state_version=7), effect("a"), payloads={1: encode(1)})
    won = with_effects(task("b"), effect("b"), payloads={1: encode(2)})
    assert await store.run(applying(lost, won)) == [False, True]
    found = await store.run(loading(effects=["a", "b"], payloads=[("a", 1), ("b", 1)], tasks=["a"]))
    assert found.effects == {"a": [], "b": [effect("b")]}
    assert found.payloads == {("b", 1): encode(2)} and found.tasks["a"].effects == 0


async def test_a_payload_that_is_bound_stays_bound(store: Any) -> None:
    await _standing(store, "a")
    await store.run(applying(with_effects(task("a"), effect("a"), payloads={1: encode("first")})))
    before = task("a", state_version=2, effects=1)
    with contextlib.suppress(FencepostError):
        await store.run(applying(with_effects(before, effect("a", version=2), payloads={1: encode("second")})))
    assert await store.payloads([("a", 1)]) == {("a", 1): encode("first")}


async def test_effects_are_listed_in_pages_and_by_what_is_asked_of_them(store: Any) -> None:
    await _standing(store, "a", "b", "c")
    states = list(EffectState)
    made = {
        (name, number): effect(
            name,
            number,
            pool="other" if name == "b" else "default",
            state=int(states[number % len(states)]),
            terms=Terms("git" if number % 2 else "mail", "CONDITIONAL" if number % 2 else "NON_REPLAYABLE"),
        )
        for name in "cab"
        for number in range(1, 15)
    }
    for name in "abc":
        await store.run(applying(with_effects(task(name), *(e for e in made.values() if e.task_id == name))))
    everything = [made[place] for place in sorted(made)]
    assert await store.effects(EffectFilter(), None, 100) == everything
    paged, after = [], None
    while page := await store.effects(EffectFilter(), after, 10):
        paged += page
        after = (page[-1].task_id, page[-1].number)
    assert paged == everything
    for where, belongs in (
        (EffectFilter(pool="other"), lambda e: e.pool == "other"),
        (EffectFilter(task_id="c"), lambda e: e.task_id == "c"),
        (EffectFilter(states=OPEN), lambda e: e.state in OPEN),
        (EffectFilter(states=(3, 4)), lambda e: e.state in (3, 4)),
        (EffectFilter(task_id="a", states=(2,)), lambda e: e.task_id == "a" and e.state == 2),
        (EffectFilter(guarantee="CONDITIONAL"), lambda e: e.terms.guarantee == "CONDITIONAL"),
        (EffectFilter(states=OPEN, downstream="mail"), lambda e: e.state in OPEN and e.terms.downstream == "mail"),
        (EffectFilter(pool="none"), lambda e: False),
    ):
        expected = [e for e in everything if belongs(e)]
        assert await store.effects(where, None, 100) == expected, where
        assert await store.effects(where, ("a", 9), 4) == [e for e in expected if (e.task_id, e.number) > ("a", 9)][:4]


async def test_the_backlog_counts_what_is_open_with_the_oldest_of_each(store: Any) -> None:
    await _standing(store, "a", "b")
    git = Terms("git", "CONDITIONAL")
    await store.run(
        applying(
            with_effects(
                task("a"),
                effect("a", 1, state=2, first_prepared_at=50),
                effect("a", 2, state=2, first_prepared_at=40),
                effect("a", 3, state=2, terms=git),
                effect("a", 4, state=1),
                effect("a", 5, state=3, first_prepared_at=1),
                effect("a", 6, state=4, first_prepared_at=1),
            ),
            with_effects(task("b"), effect("b", 1, state=2, pool="other", first_prepared_at=7)),
        )
    )
    assert await store.unknown_backlog() == [
        ("default", "CONDITIONAL", 2, 1, 103),
        ("default", "NON_REPLAYABLE", 1, 1, 104),
        ("default", "NON_REPLAYABLE", 2, 2, 40),
        ("other", "NON_REPLAYABLE", 2, 1, 7),
    ]


@pytest.mark.parametrize("state", [State.COMMITTED, State.CANCELLED])
async def test_retention_takes_what_was_sent_and_got_and_nothing_else(store: Any, world: World, state: State) -> None:
    before = task("a", state=int(state), attempt_id="x")
    made = insert(before)
    if state == State.COMMITTED:
        made.results.append(result(before, encode("done")))
    assert await store.run(applying(made)) == [True]
    over = change(full_effect("a", 1), state=int(EffectState.COMMITTED))
    waits = full_effect("a", 2)
    raw = effect("a", 3, state=int(EffectState.COMMITTED), receipt=Content(b"\xff", "sha256:raw", True))
    payloads = {1: encode("one"), 2: encode("two"), 3: Content(b"\xfe", "sha256:raw", True)}
    assert await store.run(applying(with_effects(before, over, waits, raw, payloads=payloads))) == [True]
    if world.name.endswith("as a worker"):  # whose role prunes nothing
        with pytest.raises(StoreRefused):
            await store.prune(100, 10)
        assert (await store.run(loading(effects=["a"]))).effects["a"] == [over, waits, raw]
        return
    removed = await store.prune(100, 10)
    assert removed["tasks"] == 1
    if state == State.CANCELLED:  # may be reopened
        assert (await store.run(loading(effects=["a"]))).effects["a"] == [over, waits, raw]
        assert await store.payloads([("a", number) for number in payloads]) == {
            ("a", number): payload for number, payload in payloads.items()
        }
        return
    assert (removed["payloads"], removed["receipts"]) == (2, 2)
    [left, kept, last] = (await store.run(loading(effects=["a"]))).effects["a"]
    assert kept == waits and await store.payloads([("a", number) for number in payloads]) == {("a", 2): encode("two")}
    assert last == change(raw, receipt=Content(b"", "sha256:raw"))
    assert left.receipt.digest == over.receipt.digest and not left.receipt.data and not left.receipt.binary
    assert [(e.receipt, e.receipt_digest) for e in left.evidence] == [(None, "sha256:d"), (None, None)]
    assert change(left, receipt=over.receipt, evidence=over.evidence) == over
    history = await store.history("a")
    assert history.payload_digests == {number: payload.digest for number, payload in payloads.items()}
    # What is written of it afterwards keeps the digest.
    before = change(before, state_version=2, effects=3, pruned_to_version=2)
    again = change(left, version=left.version + 1)
    assert await store.run(applying(with_effects(before, again))) == [True]
    assert (await store.run(loading(effects=["a"]))).effects["a"] == [again, waits, last]
    removed = await store.prune(100, 10)
    assert (removed["tasks"], removed["payloads"], removed["receipts"]) == (1, 0, 0)


async def test_no_row_of_an_effect_is_without_its_task(store: Any) -> None:
    await _standing(store, "a")
    await store.run(applying(with_effects(task("a"), effect("a"), payloads={1: encode(1)})))
    orphans = await store.orphans()
    assert (orphans["effect"], orphans["effect_payload"]) == (0, 0)


async def test_a_statement_that_fails_takes_its_whole_set_along(store: Any) -> None:
    await _standing(store, "a")
    made = with_effects(task("a"), effect("a"), payloads={1: encode(1)})
    made.statements.append(statement("INSERT INTO nowhere_at_all VALUES (1)"))
    if store.capabilities.statements:
        with pytest.raises(StatementFailed, match="nowhere_at_all") as failed:
            await store.run(applying(made))
        assert failed.value.slot == "count"
    else:
        with pytest.raises(InvalidRequest, match="no database"):
            await store.run(applying(made))
    found = await store.run(loading(tasks=["a"], effects=["a"], payloads=[("a", 1)]))
    assert found.tasks == {"a": task("a")} and found.effects == {"a": []} and found.payloads == {}
    assert len(await store.events(0, 10)) == 1
    # ... and the store goes on.
    assert await store.run(applying(replace(task("a"), task("a", state_version=2)))) == [True]
    assert event(task("a", state_version=2), name="attempt_renewed") == (await store.events(0, 10))[-1].entry
