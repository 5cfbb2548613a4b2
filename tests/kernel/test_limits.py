"""The limits of ids and numbers: stated in one place, refused with the field and the limit, never clamped."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fencepost.errors import InvalidRequest
from fencepost.kernel import commands as k
from fencepost.kernel.commands import (
    MAX_ERROR_BYTES,
    MAX_ID_LENGTH,
    MAX_USAGE_KEYS,
    check_id,
    check_integer,
    check_policy,
    check_seconds,
    check_usage,
    cut_error,
)
from fencepost.kernel.digests import MAX_CONTENT_BYTES, encode
from fencepost.kernel.operations import Accepted
from fencepost.kernel.outcomes import Outcome, Problem
from fencepost.kernel.records import Content, Policy
from fencepost.service.effect_admission import CHECKS
from tests.kernel import effect_stories as s
from tests.kernel.effect_stories import PAY
from tests.kernel.situations import ACCEPTED
from tests.model.world import SECOND, World, new_task

replace = msgspec.structs.replace


@pytest.mark.parametrize("value", ["a", "A b", " a ", "\u00e9", "e\u0301", "\U0001f600", "a" * MAX_ID_LENGTH, "a/b#c"])
def test_an_id_is_taken_exactly_as_it_is(value: str) -> None:
    assert check_id(value, "task_id") == value


@pytest.mark.parametrize(
    "value", ["", "a" * (MAX_ID_LENGTH + 1), "a\n", "\x00", "\x7f", "\x85", "\ud800", 7, None, b"a", True]
)
def test_an_id_of_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_id(value, "task_id")
    assert refused.value.field == "task_id"


def test_ids_that_look_alike_are_different_tasks() -> None:
    world = World()
    world.submit(new_task("\u00e9"), new_task("e\u0301"), new_task("E\u0301"), new_task(" \u00e9"))
    assert len(world.tasks) == 4


@pytest.mark.parametrize(
    "value", [0, 0.0, -1, -0.5, float("nan"), float("inf"), float("-inf"), "30", True, False, None, 3_601, 1e300]
)
def test_a_ttl_that_is_no_number_within_the_limits_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_seconds(value, "ttl", above=True, most=3_600.0)


def test_seconds_become_microseconds() -> None:
    assert check_seconds(30, "ttl", above=True) == 30 * SECOND
    assert check_seconds(0.25, "ttl", above=True) == 250_000
    assert check_seconds(0, "delay") == 0
    with pytest.raises(InvalidRequest, match="one microsecond"):
        check_seconds(1e-9, "ttl", above=True)


def test_a_ttl_over_the_pools_policy_is_invalid_and_not_clamped() -> None:
    world = World(policy=Policy(max_ttl=10.0))
    world.submit()
    answer = world.claim(ttl_us=11 * SECOND)
    assert type(answer) is Problem
    assert (answer.code, answer.field) == ("INVALID", "ttl")
    claim = world.claimed(ttl_us=10 * SECOND)
    assert type(world.ask(k.Renew, claim, ttl_us=11 * SECOND)) is Problem


def test_a_lease_never_reaches_beyond_the_claims_age_and_is_never_shortened() -> None:
    world = World(policy=Policy(max_ttl=30.0, max_claim_age=40.0))
    world.submit()
    claim = world.claimed()
    first = world.task.lease_expires_at
    assert first is not None
    assert type(world.ask(k.Renew, claim, ttl_us=1 * SECOND)) is Accepted
    assert world.task.lease_expires_at == first
    world.advance(20)
    world.ask(k.Renew, claim)
    assert world.task.lease_expires_at == first + 10 * SECOND
    assert world.ask(k.Renew, claim).outcome.value == "EXHAUSTED"
    assert type(world.ask(k.Commit, claim)) is Accepted, "the claim stands, and commit is open"


@pytest.mark.parametrize("value", [1.0, True, "1", None, -1, 11])
def test_whole_numbers_are_whole_numbers_within_their_limits(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_integer(value, "priority", 0, 10)


@pytest.mark.parametrize(
    "usage",
    [
        [],
        {f"k{n}": 1 for n in range(MAX_USAGE_KEYS + 1)},
        {"a": "1"},
        {"a": True},
        {"a": float("nan")},
        {"a": -1},
        {"a": 2**60},
        {"": 1},
        {7: 1},
    ],
    ids=str,
)
def test_usage_is_a_few_finite_numbers(usage: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_usage(usage)


def test_error_text_is_cut_with_a_mark_and_never_splits_a_character() -> None:
    assert cut_error("short") == "short"
    cut = cut_error("\u20ac" * MAX_ERROR_BYTES)
    assert len(cut.encode()) <= MAX_ERROR_BYTES
    assert cut.endswith(f"cut: {3 * MAX_ERROR_BYTES} bytes in all")
    assert "\0" not in cut_error("a\0b")
    assert cut_error("a\ud800b").encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_ttl": 0.0},
        {"max_ttl": 100.0, "max_claim_age": 50.0},
        {"max_attempts": 0},
        {"backoff_base": 0.5},
        {"backoff_jitter": 1.5},
        {"reclaim_grace": -1.0},
        {"retention": 0.0},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_safe_is_refused(changes: dict[str, Any]) -> None:
    check_policy(Policy())
    with pytest.raises(InvalidRequest) as refused:
        check_policy(replace(Policy(), **changes))
    assert refused.value.field.startswith("policy.")


def test_a_task_has_a_limited_number_of_effects_and_an_effect_of_executions(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(world: World) -> None:
        monkeypatch.setattr(k, "MAX_EFFECTS", 3)
        monkeypatch.setattr(k, "MAX_EXECUTIONS", 4)
        claim = s.started(world)
        for slot in ("a", "b", "c"):
            s.executes(world, claim, slot=slot)
            s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
        s.problem(world.ask(k.Prepare, claim, terms=PAY, slot="d"), "INVALID", "slot")
        for _ in range(3):
            s.executes(world, claim, slot="c")
            s.accepted(world.ask(k.Settle, claim, finding="ABSENT", why="REFUSED"), Outcome.SETTLED)
        s.problem(world.ask(k.Prepare, claim, terms=PAY, slot="c"), "INVALID", "slot")
        s.stands(world, "ABSENT", executions=4)
        statement = k.NewStatement("d", encode("insert"), "sql/ledger")
        s.problem(world.ask(k.Commit, claim, statements=(statement,)), "INVALID", "statements")
        s.accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)

    story(World())
    s.fails_without(story, k.Prepare, "prepare:too-many:invalid")


@pytest.mark.parametrize("limit", ["MAX_EFFECTS", "MAX_EXECUTIONS", "MAX_EVIDENCE", "MAX_STATEMENTS"])
def test_the_limits_of_effects_leave_room_for_work(limit: str) -> None:
    assert getattr(k, limit) >= 20


LONG_NOTE = "\u20ac" * (k.MAX_NOTE_BYTES // 3) + "xx"
EFFECT_FIELDS: list[tuple[type, dict[str, Any], str]] = [
    (k.Prepare, {"payload": Content(b"1" * (MAX_CONTENT_BYTES + 1), "sha256:long")}, "payload"),
    (k.Prepare, {"payload": b"bare"}, "payload"),
    (k.Prepare, {"slot": ""}, "slot"),
    (k.Prepare, {"slot": "a" * (MAX_ID_LENGTH + 1)}, "slot"),
    (k.Prepare, {"node_id": "a\n"}, "node_id"),
    (k.Prepare, {"precondition": ""}, "precondition"),
    (k.Prepare, {"repeat": 1}, "repeat"),
    (k.Prepare, {"terms": replace(PAY, guarantee="EXACTLY_ONCE")}, "guarantee"),
    (k.Prepare, {"terms": replace(PAY, downstream="")}, "downstream"),
    (k.Prepare, {"terms": replace(PAY, send_window_us=0)}, "send_window"),
    (k.Prepare, {"terms": replace(PAY, settle_time_us=-1)}, "settle_time"),
    (k.Prepare, {"terms": replace(PAY, retention_us=PAY.send_window_us)}, "retention"),
    (k.Prepare, {"terms": replace(PAY, margin_us=PAY.retention_us)}, "retention"),
    (k.Prepare, {"terms": replace(PAY, approval=1)}, "approval"),
    (k.Reserve, {"reservation_id": ""}, "reservation_id"),
    (k.Reserve, {"execution": 0}, "execution"),
    (k.Settle, {"execution": True}, "execution"),
    (k.Settle, {"finding": "PERHAPS"}, "finding"),
    (k.Settle, {"finding": "ABSENT", "why": "TIRED"}, "why"),
    (k.Settle, {"note": LONG_NOTE}, "note"),
    (k.Settle, {"note": "a\0"}, "note"),
    (k.Settle, {"note": "\ud800"}, "note"),
    (k.Settle, {"receipt": encode(1)}, "receipt"),
    (k.Settle, {"finding": "HAPPENED", "receipt": Content(b"1" * (k.MAX_RECEIPT_BYTES + 1), "sha256:r")}, "receipt"),
    (k.Reconcile, {"asked_at": -1}, "asked_at"),
    (k.Reconcile, {"ground": "TIRED"}, "ground"),
    (k.Reconcile, {"ground": None}, "ground"),
    (k.Reconcile, {"finding": "UNKNOWN"}, "finding"),
    (k.Evidence, {"execution": 0}, "execution"),
    (k.Evidence, {"receipt": Content(b"1" * (k.MAX_RECEIPT_BYTES + 1), "sha256:r")}, "receipt"),
    (k.Approve, {"who": ""}, "who"),
    (k.Approve, {"expected_version": 0}, "expected_version"),
    (k.Deny, {"note": LONG_NOTE}, "note"),
    (k.Resolve, {"evidence": ""}, "evidence"),
    (k.Resolve, {"evidence": LONG_NOTE}, "evidence"),
    (k.Resolve, {"finding": "STILL_UNKNOWN"}, "finding"),
    (k.Resolve, {"late_evidence": -1}, "late_evidence"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "field"), EFFECT_FIELDS, ids=lambda value: getattr(value, "__name__", None) or str(value)[:40]
)
def test_a_call_about_an_effect_beyond_a_limit_is_refused_with_its_field(
    kind: type, fields: dict[str, Any], field: str
) -> None:
    command = ACCEPTED[kind]().command
    CHECKS[kind](command)
    with pytest.raises(InvalidRequest) as refused:
        CHECKS[kind](replace(command, **fields))
    assert refused.value.field == field
