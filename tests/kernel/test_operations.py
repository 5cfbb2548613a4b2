"""What the operations of section 4 do once they are let in: numbers, times, charges, and what others may hear again."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import End, Policy, State
from fencepost.kernel.tasks import backoff_us
from tests.model.world import SECOND, World, new_task, presented


def refused(answer: Any, outcome: Outcome, reason: str | None = None) -> Refusal:
    assert type(answer) is Refusal, answer
    assert (answer.outcome, answer.reason) == (outcome, reason)
    return answer


def next_of(world: World, limit: int = 1, **fields: Any) -> tuple[Any, ...]:
    asked = {"pool": "pool", "queues": ("default",), "kinds": None, "owner_id": "A", "ttl_us": 30 * SECOND, **fields}
    attempts = tuple(f"next-{world.request_id()}-{n}" for n in range(limit))
    answer = world.do(
        k.ClaimNext(
            request_id=asked.pop("request_id", None) or world.request_id(), epoch=1, attempt_ids=attempts, **asked
        )
    )
    assert type(answer) is Granted, answer
    return answer.tasks


# claim ------------------------------------------------------------------------------------------


def test_every_claim_is_one_generation_more_with_a_new_attempt() -> None:
    world = World()
    world.submit()
    seen = []
    for generation in range(1, 6):
        claim = world.claimed(owner=f"owner-{generation}")
        assert claim.generation == generation
        seen.append(claim.attempt_id)
        world.ask(k.Release, claim)
    assert len(set(seen)) == 5
    assert world.task.claim_generation == 5
    assert world.task.attempt_id == seen[-1], "the latest claim's stays after it ended"


def test_a_claim_with_an_old_state_version_is_a_conflict_that_shows_who_holds_it() -> None:
    world = World()
    world.submit()
    world.claimed(owner="B")
    answer = world.claim(version=1)
    refused(answer, Outcome.CONFLICT, Reason.VERSION)
    assert (answer.current["owner"], answer.current["generation"]) == ("B", 1)


def test_the_same_owner_asking_again_with_a_new_request_id_gets_no_favour() -> None:
    world = World()
    world.submit()
    world.claimed()
    answer = refused(world.claim(), Outcome.HELD)
    assert answer.current["lease_expires_at"] == world.task.lease_expires_at


def test_the_grace_of_the_pool_keeps_a_lapsed_task_for_its_owner_a_little_longer() -> None:
    world = World(policy=Policy(reclaim_grace=5.0))
    world.submit()
    world.claimed()
    world.run_out()
    refused(world.claim(owner="B"), Outcome.HELD)
    refused(world.person(k.Expire), Outcome.HELD)
    world.advance(5)
    assert world.claimed(owner="B").generation == 2


def test_a_task_is_not_claimable_before_its_time() -> None:
    world = World()
    world.submit(new_task(delay_us=10 * SECOND))
    answer = refused(world.claim(), Outcome.NOT_CLAIMABLE, Reason.NOT_YET)
    assert answer.current["available_at"] == world.now + 10 * SECOND
    assert next_of(world) == ()
    world.advance(10)
    assert world.claimed().generation == 1


def test_claim_next_grants_smaller_priorities_first_and_never_more_than_the_limit() -> None:
    world = World()
    world.submit(*(new_task(f"t{n}", priority=-n) for n in range(5)))
    assert [task.task_id for task in next_of(world, limit=2)] == ["t4", "t3"]
    assert len(next_of(world, limit=9)) == 3
    assert next_of(world) == ()


def test_claim_next_parks_what_is_used_up_on_its_way_and_takes_the_next_one() -> None:
    world = World()
    world.submit(new_task("worn", max_attempts=1, priority=-1), new_task("fresh"))
    world.claimed("worn")
    world.run_out("worn")
    assert [task.task_id for task in next_of(world)] == ["fresh"]
    assert world.tasks["worn"].state == State.PARKED


def test_a_repeated_claim_next_returns_the_claims_that_it_made_and_no_others() -> None:
    world = World()
    world.submit(*(new_task(f"t{n}") for n in range(4)))
    first = next_of(world, limit=2, request_id="r")
    again = next_of(world, limit=2, request_id="r")
    assert again == first
    assert sum(task.state == State.CLAIMED for task in world.tasks.values()) == 2
    world.ask(k.Release, presented(first[0]))
    assert next_of(world, limit=2, request_id="r") == first[1:]


# renew ------------------------------------------------------------------------------------------


def test_a_renewal_after_the_lease_that_nobody_used_is_granted_and_counted_as_late() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    world.advance(100)
    answer = world.ask(k.Renew, claim)
    assert type(answer) is Accepted
    assert answer.info["late"] is True
    assert world.task.lease_expires_at == world.now + 30 * SECOND
    assert world.events_of()[-1].detail == {"lease_us": world.task.lease_expires_at, "late_renew": True}


def test_a_repeated_renewal_has_the_times_of_the_first_answer_and_moves_nothing() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    first = world.ask(k.Renew, claim, request_id="r")
    world.advance(7)
    again = world.ask(k.Renew, claim, request_id="r")
    assert (again.info, again.changed) == (first.info, False)
    assert world.task.state_version == 3
    world.person(k.TakeOver)
    refused(world.ask(k.Renew, claim, request_id="r"), Outcome.FENCED, Reason.STATE)


def test_a_renewal_that_nearly_came_too_late_is_marked() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    world.advance(25)
    world.ask(k.Renew, claim)
    assert (world.events_of()[-1].detail or {})["near_miss"] is True


# release, fail ----------------------------------------------------------------------------------


def test_release_charges_nothing_and_may_wait() -> None:
    world = World()
    world.submit(new_task(max_attempts=1))
    for _ in range(3):
        answer = world.ask(k.Release, world.claimed(), delay_us=3 * SECOND)
        assert answer.outcome is Outcome.RELEASED
        assert (world.task.state, world.task.charged_attempts) == (State.READY, 0)
        refused(world.claim(), Outcome.NOT_CLAIMABLE, Reason.NOT_YET)
        world.advance(3)


def test_fail_waits_longer_each_time_and_parks_when_the_attempts_are_used_up() -> None:
    world = World()
    world.submit(new_task(max_attempts=3))
    waits = []
    for _ in range(3):
        world.ask(k.Fail, world.claimed())
        waits.append((world.task.available_at - world.now) // SECOND)
        world.now = max(world.now, world.task.available_at)
    assert waits[:2] == [2, 4]
    assert (world.task.state, world.task.park_reason, world.task.charged_attempts) == (State.PARKED, "ATTEMPTS", 3)


def test_a_final_error_parks_at_once_and_is_kept_in_the_journal() -> None:
    world = World()
    world.submit()
    world.ask(k.Fail, world.claimed(), retry=False, error="never")
    assert (world.task.state, world.task.park_reason) == (State.PARKED, "FINAL")
    assert (world.events_of()[-1].detail or {})["error"] == "never"


def test_the_backoff_grows_up_to_its_limit_and_jitter_moves_it_by_its_share() -> None:
    policy = Policy()
    plain = [backoff_us(policy, n, 0.0) // SECOND for n in range(1, 12)]
    assert plain == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert backoff_us(policy, 3, 1.0) == round(9.6 * SECOND)
    assert backoff_us(policy, 3, -1.0) == round(6.4 * SECOND)
    assert backoff_us(policy, 3, 99.0) == backoff_us(policy, 3, 1.0)
    assert backoff_us(policy, 10**9, 0.0) == 300 * SECOND


@pytest.mark.parametrize(
    ("kind", "outcome", "fields"),
    [
        (k.Release, Outcome.RELEASED, {}),
        (k.Fail, Outcome.FAILED, {}),
        (k.SaveCheckpoint, Outcome.CHECKPOINTED, {"number": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_reports_a_finished_change_says_again_what_it_said_and_to_nobody_else(
    kind: type, outcome: Outcome, fields: dict[str, Any]
) -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    first = world.ask(kind, claim, request_id="r", **fields)
    version = world.task.state_version
    again = world.ask(kind, claim, request_id="r", **fields)
    assert (again.outcome, again.info, again.changed) == (outcome, first.info, False)
    other = msgspec.structs.replace(claim, attempt_id="another")
    assert type(world.ask(kind, other, request_id="r", **fields)) is Problem
    assert world.task.state_version == version
    world.raise_epoch()
    refused(world.ask(kind, claim, request_id="r", epoch=1, **fields), Outcome.FENCED, Reason.EPOCH)


# commit, stage, usage -----------------------------------------------------------------------------


def test_a_commit_by_digest_needs_the_result_staged_by_this_very_attempt() -> None:
    world = World()
    world.submit()
    first = world.claimed()
    content = encode({"answer": 42})
    answer = world.ask(k.Commit, first, result_digest=content.digest, content=None)
    assert type(answer) is Problem
    assert answer.code == "NOT_STAGED"
    world.ask(k.Stage, first, content=content)
    world.person(k.TakeOver)
    second = world.claimed(owner="B")
    assert type(world.ask(k.Commit, second, result_digest=content.digest, content=None)) is Problem
    world.ask(k.Stage, second, content=content)
    assert type(world.ask(k.Commit, second, result_digest=content.digest, content=None)) is Accepted
    assert [row.state.__int__() for row in world.staged["t"]] == [3, 2]


def test_a_committed_task_is_never_revised_reopened_cancelled_or_claimed_again() -> None:
    world = World()
    world.submit()
    world.ask(k.Commit, world.claimed())
    before = world.task
    for kind in (k.Revise, k.Reopen, k.Cancel):
        refused(world.person(kind), Outcome.ALREADY_COMMITTED)
    refused(world.claim(), Outcome.NOT_CLAIMABLE, "COMMITTED")
    refused(world.person(k.TakeOver), Outcome.CONFLICT, Reason.STATE)
    assert world.task == before


def test_whoever_ever_held_an_attempt_may_stage_and_report_usage_and_nobody_else() -> None:
    world = World()
    world.submit()
    first = world.claimed()
    world.ask(k.Release, first)
    world.claimed(owner="B")
    assert world.ask(k.Usage, first, usage={"tokens": 7.0}).outcome is Outcome.RECORDED
    assert world.ask(k.Stage, first, content=encode(1)).info["state"] == "DISCARDED"
    stranger = msgspec.structs.replace(first, attempt_id="made-up")
    for kind, fields in ((k.Usage, {"usage": {}}), (k.Stage, {"content": encode(1)})):
        refused(world.ask(kind, stranger, **fields), Outcome.NOT_FOUND, "ATTEMPT")
    mixed = msgspec.structs.replace(first, generation=2)
    refused(world.ask(k.Usage, mixed, usage={}), Outcome.NOT_FOUND, "ATTEMPT")


# people -------------------------------------------------------------------------------------------


def test_revise_is_one_revision_more_ends_a_live_attempt_and_starts_the_charge_again() -> None:
    world = World()
    world.submit()
    world.ask(k.Fail, world.claimed())
    world.advance(10)
    claim = world.claimed()
    digest = world.task.input_digest
    world.person(k.Revise, input=encode("better"))
    task = world.task
    assert (task.revision, task.state, task.charged_attempts, task.end) == (2, State.READY, 0, End.SUPERSEDED)
    assert task.input_digest == encode("better").digest != digest
    assert task.submitted_digest == new_task().submitted_digest
    refused(world.ask(k.Commit, claim), Outcome.STALE_INPUT)
    refused(world.person(k.Revise, expected_revision=1), Outcome.CONFLICT, Reason.REVISION)


def test_a_cancelled_task_is_not_revised() -> None:
    world = World()
    world.submit()
    world.person(k.Cancel)
    refused(world.person(k.Revise), Outcome.CONFLICT, Reason.STATE)


def test_take_over_ends_a_live_attempt_free_of_charge_and_says_conflict_where_none_is_live() -> None:
    world = World()
    world.submit(new_task(max_attempts=1))
    refused(world.person(k.TakeOver), Outcome.CONFLICT, Reason.STATE)
    claim = world.claimed()
    refused(world.person(k.TakeOver, expected_generation=0), Outcome.CONFLICT, Reason.GENERATION)
    assert world.person(k.TakeOver).outcome is Outcome.TAKEN_OVER
    assert (world.task.state, world.task.end, world.task.charged_attempts) == (State.READY, End.EXPIRED, 0)
    refused(world.ask(k.Commit, claim), Outcome.FENCED, Reason.STATE)


def test_discard_decides_what_an_attempt_has_staged_so_that_it_cannot_be_committed_by_digest() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    refused(world.person(k.Discard), Outcome.CONFLICT, Reason.STATE)
    content = encode("draft")
    world.ask(k.Stage, claim, content=content)
    assert world.person(k.Discard).outcome is Outcome.DISCARDED
    answer = world.ask(k.Commit, claim, result_digest=content.digest, content=None)
    assert type(answer) is Problem


def test_expire_records_how_late_the_task_was_taken_back() -> None:
    world = World()
    world.submit()
    world.claimed()
    world.run_out()
    world.advance(4)
    world.person(k.Expire)
    assert (world.events_of()[-1].detail or {})["reclaim_delay_us"] == 4 * SECOND


# the pool -----------------------------------------------------------------------------------------


def test_a_raise_goes_up_and_an_intake_stays_as_it_was() -> None:
    world = World()
    world.pool_command(k.CloseIntake)
    for to in (1, 0):
        assert type(world.pool_command(k.RaiseEpoch, to=to)) is Problem
    world.pool_command(k.RaiseEpoch, to=5)
    assert (world.pool.epoch, world.pool.intake_open) == (5, False)
    world.pool_command(k.RaiseEpoch)
    assert world.pool.epoch == 6


def test_creating_a_pool_that_exists_leaves_it_as_it_stands() -> None:
    world = World()
    world.raise_epoch()
    answer = world.do(k.CreatePool(request_id="r", pool="pool"))
    assert (answer.changed, answer.info["pool"].epoch) == (False, 2)


def test_after_a_raise_every_door_that_compares_an_epoch_refuses_the_old_one_and_the_others_stay_open() -> None:
    compared = {o.command.__name__ for o in Kernel().operations if any("epoch" in g.id for g in o.guards)}
    assert compared == {o.command.__name__ for o in Kernel().operations} - {
        "Submit",
        "Cancel",
        "Expire",
        "Stage",
        "Usage",
        "CreatePool",
        "Evidence",
    }
    world = World()
    world.submit()
    claim = world.claimed()
    world.raise_epoch()
    for kind, fields in (
        (k.Renew, {}),
        (k.Commit, {}),
        (k.Release, {}),
        (k.Fail, {}),
        (k.SaveCheckpoint, {"number": 1}),
    ):
        refused(world.ask(kind, claim, epoch=1, **fields), Outcome.FENCED, Reason.EPOCH)
    for kind in (k.Reopen, k.Revise, k.TakeOver, k.Discard):
        refused(world.person(kind, epoch=1), Outcome.FENCED, Reason.EPOCH)
    refused(world.claim(epoch=1), Outcome.FENCED, Reason.EPOCH)
    assert world.person(k.Expire).outcome is Outcome.EXPIRED
    assert world.person(k.Cancel).outcome is Outcome.CANCELLED


def test_ids_are_compared_exactly() -> None:
    world = World()
    world.submit(new_task("t"))
    for wrong in ("T", "t ", " t", "t\u0301"):
        answer = world.do(k.Expire(request_id="r", task_id=wrong, expected_state_version=1))
        refused(answer, Outcome.NOT_FOUND, Reason.TASK)


def test_a_renewal_and_a_commit_of_one_owner_cost_one_version_each() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    world.ask(k.Renew, claim)
    world.ask(k.Commit, claim)
    versions = [event.state_version for event in world.events_of()]
    assert versions == list(itertools.accumulate([1] * len(versions)))


def test_a_persons_request_id_used_for_another_task_or_another_command_is_invalid_and_not_said_again() -> None:
    world = World()
    world.submit(new_task("t"), new_task("u"))
    for task_id in ("t", "u"):
        world.person(k.Cancel, task_id)
    assert world.person(k.Reopen, "t", request_id="r").outcome is Outcome.REOPENED
    assert world.person(k.Reopen, "t", request_id="r").changed is False
    answer = world.person(k.Reopen, "u", request_id="r")
    assert type(answer) is Problem
    assert (answer.code, answer.field) == ("INVALID", "request_id")
    world.pool_command(k.CloseIntake, request_id="p")
    assert type(world.pool_command(k.OpenIntake, request_id="p")) is Problem
    assert world.pool_command(k.CloseIntake, request_id="p").changed is False
