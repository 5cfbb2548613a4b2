"""Orders of events that broke an earlier wording of the contract, each named after its id in the list of attacks.

Where a guard mends it, the story is told again to the kernel without that guard, and must then end badly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import End, StagedState, State
from tests.kernel.situations import ACCEPTED, BREAKERS
from tests.model.world import World, new_task, presented

Told = Callable[[World], None]


def fails_without(story: Told, command: type, *guards: str) -> None:
    """The kernel that lacks these guards cannot tell the story to its end."""
    mutant = Kernel()
    for guard in guards:
        mutant = mutant.without(command, guard)
    with pytest.raises((AssertionError, AttributeError, TypeError, KeyError)):
        story(World(mutant))


def refused(answer: Any, outcome: Outcome, reason: str | None = None) -> None:
    assert type(answer) is Refusal, answer
    assert answer.outcome is outcome
    if reason is not None:
        assert answer.reason == reason


def accepted(answer: Any, outcome: Outcome, *, changed: bool = True) -> Accepted:
    assert type(answer) is Accepted, answer
    assert (answer.outcome, answer.changed) == (outcome, changed)
    return answer


# X01: the attempt of an old epoch presents the new number ---------------------------------------


def x01(kind: type, **fields: Any) -> Told:
    def story(world: World) -> None:
        world.submit()
        claim = world.claimed()
        world.raise_epoch()
        refused(world.ask(kind, claim, epoch=2, **fields), Outcome.FENCED, Reason.EPOCH)
        refused(world.ask(kind, claim, epoch=1, **fields), Outcome.FENCED, Reason.EPOCH)
        assert world.task.state == State.CLAIMED

    return story


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(k.Renew, {}), (k.Commit, {}), (k.Release, {}), (k.Fail, {}), (k.SaveCheckpoint, {"number": 1})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_x01_an_attempt_of_the_old_epoch_is_fenced_though_it_presents_the_new_one(
    kind: type, fields: dict[str, Any]
) -> None:
    x01(kind, **fields)(World())
    fails_without(x01(kind, **fields), kind, "fence:granted-under-older-epoch:fenced")
    fails_without(x01(kind, **fields), kind, "fence:other-epoch:fenced", "fence:granted-under-older-epoch:fenced")


# X17 to X22: ends of attempts -------------------------------------------------------------------

ENDS: dict[str, tuple[Callable[[World, k.Presented], Any], End]] = {
    "release": (lambda w, c: w.ask(k.Release, c), End.RELEASED),
    "fail": (lambda w, c: w.ask(k.Fail, c), End.FAILED),
    "cancel": (lambda w, c: w.person(k.Cancel), End.CANCELLED),
    "revise": (lambda w, c: w.person(k.Revise), End.SUPERSEDED),
    "take_over": (lambda w, c: w.person(k.TakeOver), End.EXPIRED),
    "expire": (lambda w, c: (w.run_out(), w.person(k.Expire)), End.EXPIRED),
    "claim": (lambda w, c: (w.run_out(), w.claim(owner="B")), End.EXPIRED),
}


@pytest.mark.parametrize("end", ENDS)
def test_x17_every_end_of_an_attempt_but_commit_discards_what_it_has_staged(end: str) -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    accepted(world.ask(k.Stage, claim, content=encode("draft")), Outcome.STAGED)
    assert [row.state for row in world.staged["t"]] == [StagedState.STAGED]
    call, how = ENDS[end]
    call(world, claim)
    assert [row.state for row in world.staged["t"]] == [StagedState.DISCARDED]
    said = [event.detail["end"] for event in world.events_of() if event.name == "attempt_ended" and event.detail]
    assert said == [how.name]
    # What comes after the end is kept beside the records, decided at once.
    moved = world.task.state_version
    late = accepted(world.ask(k.Stage, claim, content=encode("late")), Outcome.STAGED)
    assert late.info["state"] == "DISCARDED"
    assert world.task.state_version == moved
    assert {row.state for row in world.staged["t"]} == {StagedState.DISCARDED}


def test_x18_a_closed_intake_does_not_stop_expire_so_that_a_drain_reaches_zero() -> None:
    world = World()
    world.submit()
    world.claimed()
    accepted(world.pool_command(k.CloseIntake), Outcome.INTAKE_CLOSED)
    refused(world.person(k.Expire), Outcome.HELD)
    world.run_out()
    refused(world.claim(owner="B"), Outcome.INTAKE_CLOSED)
    accepted(world.person(k.Expire), Outcome.EXPIRED)
    assert world.task.state == State.READY


def test_x19_a_reopened_task_is_charged_from_zero_again() -> None:
    world = World()
    world.submit(new_task(max_attempts=1))
    world.claimed()
    world.run_out()
    accepted(world.person(k.Expire), Outcome.EXPIRED)
    assert (world.task.state, world.task.park_reason) == (State.PARKED, "ATTEMPTS")
    refused(world.claim(), Outcome.NOT_CLAIMABLE, "PARKED")
    accepted(world.person(k.Reopen), Outcome.REOPENED)
    assert world.task.charged_attempts == 0
    assert world.claimed().generation == 2


def test_x20_an_end_under_an_older_epoch_is_free_and_its_lease_holds_nobody_off() -> None:
    world = World()
    world.submit(new_task(max_attempts=2))
    for generation in (1, 2, 3):
        assert world.claimed().generation == generation  # the lease before it still ran
        world.raise_epoch()
    assert world.task.charged_attempts == 0
    accepted(world.person(k.Expire), Outcome.EXPIRED)
    assert (world.task.state, world.task.charged_attempts) == (State.READY, 0)


def test_x21_reopen_leads_to_blocked_while_a_parent_is_open_and_to_ready_if_it_committed_meanwhile() -> None:
    world = World()
    world.submit(new_task("parent"), new_task("t", depends_on=["parent"]))
    world.person(k.Cancel, "t")
    world.person(k.Reopen, "t")
    assert world.tasks["t"].state == State.BLOCKED
    world.person(k.Cancel, "t")
    world.ask(k.Commit, world.claimed("parent"))
    assert (world.tasks["t"].state, world.tasks["t"].deps_remaining) == (State.CANCELLED, 0)
    world.person(k.Reopen, "t")
    assert world.tasks["t"].state == State.READY


# X24, X25: claim asked again --------------------------------------------------------------------


def x24(world: World) -> None:
    world.submit()
    first = world.claim(request_id="r1")
    again = world.claim(request_id="r1", version=1)
    assert type(again) is Granted
    assert again.repeated
    assert presented(again.tasks[0]) == presented(first.tasks[0])
    assert again.tasks[0].lease_expires_at == first.tasks[0].lease_expires_at
    world.run_out()
    world.claimed(owner="B")
    late = world.claim(request_id="r1", version=1)
    refused(late, Outcome.ENDED)
    assert world.task.owner_id == "B"


def test_x24_a_repeated_claim_that_has_ended_says_so_and_is_never_the_dead_claim() -> None:
    x24(World())
    fails_without(x24, k.Claim, "claim:request-used:as-they-stand")


@pytest.mark.parametrize("end", ["release", "fail", "cancel", "expire", "take_over"])
def test_x24_a_repeated_claim_says_how_its_attempt_ended(end: str) -> None:
    world = World()
    world.submit()
    claim = world.claimed(request_id="r1")
    call, how = ENDS[end]
    call(world, claim)
    refused(world.claim(request_id="r1", version=1), Outcome.ENDED, how.name)


def test_x24_a_repeated_claim_of_an_older_epoch_is_fenced_before_its_id_is_looked_up() -> None:
    world = World()
    world.submit()
    world.claimed(request_id="r1")
    world.raise_epoch()
    refused(world.claim(request_id="r1", version=1, epoch=1), Outcome.FENCED, Reason.EPOCH)
    refused(world.claim(request_id="r1", version=1), Outcome.ENDED, "EPOCH")


def x25(world: World) -> None:
    world.submit(new_task("t"), new_task("u"))
    world.claimed("t", "A", request_id="r1")
    for task_id in ("t", "u"):
        answer = world.claim(task_id, "B", request_id="r1")
        assert type(answer) is Problem, answer
        assert (answer.code, answer.field) == ("INVALID", "request_id")
    assert world.tasks["u"].state == State.READY


def test_x25_two_owners_with_one_request_id_share_no_attempt() -> None:
    x25(World())
    fails_without(x25, k.Claim, "claim:request-used:as-they-stand")


# X26 to X28: after one's own commit -------------------------------------------------------------


def x26(world: World) -> None:
    world.submit()
    claim = world.claimed()
    accepted(world.ask(k.Commit, claim), Outcome.COMMITTED)
    answer = world.ask(k.Renew, claim)
    refused(answer, Outcome.ENDED, "COMMITTED")
    assert not answer.alarm
    assert [entry.outcome for entry in world.logged("refusal")] == ["ENDED"]


def test_x26_a_heartbeat_just_after_ones_own_commit_is_answered_ended_and_not_counted_as_fenced() -> None:
    x26(World())
    fails_without(x26, k.Renew, "fence:not-claimed:fenced-or-ended")


@pytest.mark.parametrize("end", ["release", "fail"])
def test_x26_a_heartbeat_after_ones_own_end_is_ended_but_after_somebody_elses_fenced(end: str) -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    ENDS[end][0](world, claim)
    refused(world.ask(k.Renew, claim), Outcome.ENDED, ENDS[end][1].name)
    world.advance(3_600)
    other = world.claimed(owner="B")
    refused(world.ask(k.Renew, claim), Outcome.FENCED, Reason.GENERATION)
    world.person(k.TakeOver)
    refused(world.ask(k.Renew, other), Outcome.FENCED, Reason.STATE)


def x27(world: World) -> None:
    world.submit()
    claim = world.claimed()
    first = accepted(world.ask(k.Commit, claim, result="done"), Outcome.COMMITTED)
    world.raise_epoch()
    events = len(world.events)
    for epoch in (1, 2):
        again = accepted(world.ask(k.Commit, claim, epoch=epoch, result="done"), Outcome.COMMITTED, changed=False)
        assert again.info["result"].result_commit_id == first.info["result"].result_commit_id
    assert len(world.events) == events
    assert len(world.logged("replay")) == 2


def test_x27_a_commit_whose_answer_was_lost_is_answered_again_even_after_a_raise() -> None:
    x27(World())
    fails_without(x27, k.Commit, "commit:repeated:committed-again")


def test_x28_the_same_result_with_other_spawned_tasks_is_no_replay_and_inserts_nothing() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    accepted(world.ask(k.Commit, claim, result="done", spawn=(new_task("s1"),)), Outcome.COMMITTED)
    for spawn in ((new_task("s2"),), (), (new_task("s1"), new_task("s2"))):
        refused(world.ask(k.Commit, claim, result="done", spawn=spawn), Outcome.ENDED, "COMMITTED")
    assert sorted(world.tasks) == ["s1", "t"]
    assert {entry.outcome for entry in world.logged("refusal")} == {"ENDED"}
    accepted(world.ask(k.Commit, claim, result="done", spawn=(new_task("s1"),)), Outcome.COMMITTED, changed=False)


# X29, X30: submit -------------------------------------------------------------------------------


def test_x29_a_late_copy_of_a_submit_finds_its_task_though_it_was_revised() -> None:
    world = World()
    new = new_task()
    world.submit(new)
    world.person(k.Revise)
    answer = accepted(world.submit(new), Outcome.SUBMITTED, changed=False)
    assert [(task.task_id, created) for task, created in answer.info["tasks"]] == [("t", False)]
    assert world.task.revision == 2
    refused(world.submit(new_task(value="something else")), Outcome.CONFLICT, Reason.DIFFERENT_TASK)


def test_x30_a_child_submitted_around_its_last_parents_commit_is_never_blocked_for_ever() -> None:
    """Each of the two is decided on a read from before the other; whichever is written second has lost its swap."""
    for submit_first in (True, False):
        world = World()
        world.submit(new_task("parent"))
        claim = world.claimed("parent")
        submit = k.Submit(request_id="s", tasks=(new_task("t", depends_on=["parent"]),))
        content = encode("done")
        commit = k.Commit(
            request_id="c",
            epoch=1,
            claim=claim,
            result_digest=content.digest,
            content=content,
            result_commit_id="commit-1",
        )
        first, second = (submit, commit) if submit_first else (commit, submit)
        decided = [world.decide(first).writes, world.decide(second).writes]
        assert decided[0] is not None and decided[1] is not None
        world.apply(decided[0])
        with pytest.raises(AssertionError, match="another version"):
            world.apply(decided[1])
        world.do(second)
        assert (world.tasks["t"].state, world.tasks["t"].deps_remaining) == (State.READY, 0)


# X31, X32: numbers that are too high, and too old -------------------------------------------------


def x31(world: World) -> None:
    world.submit()
    claim = world.claimed()
    above = msgspec.structs.replace(claim, generation=claim.generation + 1)
    another = msgspec.structs.replace(claim, attempt_id="made-up")
    answers = (
        world.ask(k.Commit, claim, epoch=2),
        world.ask(k.Commit, above),
        world.ask(k.Commit, another),
        world.claim(epoch=2),
    )
    for answer in answers:
        refused(answer, Outcome.FENCED, Reason.REWOUND)
        assert answer.alarm
    assert len(world.logged("alarm")) == len(world.logged("refusal")) == len(answers)
    assert world.pool.intake_open, "a liar must not be able to stop a pool"


def test_x31_numbers_from_the_future_are_rewound_with_an_alarm_and_leave_the_intake_open() -> None:
    x31(World())
    fails_without(x31, k.Commit, "fence:other-epoch:fenced")
    fails_without(x31, k.Commit, "fence:other-generation-or-attempt:fenced")
    fails_without(x31, k.Claim, "fence:other-epoch:fenced")


def x32(world: World) -> None:
    world.submit()
    claim = world.claimed()
    for number in (1, 2):
        accepted(world.ask(k.SaveCheckpoint, claim, number=number, request_id=f"save-{number}"), Outcome.CHECKPOINTED)
    accepted(world.ask(k.SaveCheckpoint, claim, number=1, request_id="save-1"), Outcome.CHECKPOINTED, changed=False)
    refused(world.ask(k.SaveCheckpoint, claim, number=1), Outcome.CONFLICT, Reason.NUMBER)
    refused(world.ask(k.SaveCheckpoint, claim, number=2), Outcome.CONFLICT, Reason.NUMBER)
    assert world.checkpoints["t"].number == 2


def test_x32_a_late_copy_of_a_checkpoint_leaves_the_newer_one() -> None:
    x32(World())
    fails_without(x32, k.SaveCheckpoint, "checkpoint:not-above-newest:conflict")
    fails_without(x32, k.SaveCheckpoint, "checkpoint:repeated:said-again")


def test_x32_the_newest_checkpoint_goes_to_the_successor_and_a_revise_drops_it() -> None:
    world = World()
    world.submit()
    world.ask(k.SaveCheckpoint, world.claimed(), number=7)
    world.run_out()
    second = world.claimed(owner="B")
    assert world.checkpoints["t"].number == 7
    accepted(world.ask(k.SaveCheckpoint, second, number=1), Outcome.CHECKPOINTED)  # numbers start again
    world.person(k.Revise)
    assert "t" not in world.checkpoints


# X34 to X36: prepared before, arriving after ------------------------------------------------------


def x34(world: World) -> None:
    world.submit()
    cancel = k.Cancel(request_id="c", task_id="t", expected_cancel_generation=0)
    accepted(world.do(cancel), Outcome.CANCELLED)
    accepted(world.do(cancel), Outcome.CANCELLED, changed=False)
    world.person(k.Reopen)
    said = accepted(world.do(cancel), Outcome.CANCELLED, changed=False)
    assert said.info == {"cancel_generation": 1, "state": "READY"}
    assert (world.task.state, world.task.cancel_generation) == (State.READY, 1)


def test_x34_a_late_copy_of_a_cancel_after_a_reopen_changes_nothing() -> None:
    x34(World())
    fails_without(x34, k.Cancel, "cancel:cancelled-since:said-so")


def test_x34_an_attempt_from_before_the_cancel_stays_cancelled_after_a_reopen() -> None:
    world = World()
    world.submit()
    claim = world.claimed()
    world.person(k.Cancel)
    refused(world.ask(k.Commit, claim), Outcome.CANCELLED)
    world.person(k.Reopen)
    refused(world.ask(k.Commit, claim), Outcome.CANCELLED)


def x35(kind: type, **fields: Any) -> Told:
    def story(world: World) -> None:
        world.submit()
        if kind is k.Reopen:
            world.person(k.Cancel)
        else:
            world.ask(k.Stage, world.claimed(), content=encode("draft"))
        world.raise_epoch()
        version = world.task.state_version
        refused(world.person(kind, epoch=1, **fields), Outcome.FENCED, Reason.EPOCH)
        assert world.task.state_version == version

    return story


@pytest.mark.parametrize("kind", [k.Reopen, k.Revise, k.TakeOver, k.Discard], ids=lambda kind: kind.__name__)
def test_x35_what_a_person_prepared_before_a_raise_is_fenced_after_it(kind: type) -> None:
    x35(kind)(World())
    fails_without(x35(kind), kind, "fence:other-epoch:fenced")


@pytest.mark.parametrize("kind", [k.CloseIntake, k.OpenIntake, k.RaiseEpoch], ids=lambda kind: kind.__name__)
def test_x35_a_pool_command_prepared_before_a_raise_is_fenced_after_it(kind: type) -> None:
    def story(world: World) -> None:
        world.raise_epoch()
        refused(world.pool_command(kind, expected_epoch=1), Outcome.FENCED, Reason.EPOCH)
        assert (world.pool.epoch, world.pool.state_version) == (2, 2)

    story(World())
    fails_without(story, kind, "pool:other-epoch:fenced")


def x36(world: World) -> None:
    version = world.pool.state_version
    world.pool_command(k.CloseIntake, expected_state_version=None)  # closing alone may leave the version out
    refused(world.pool_command(k.OpenIntake, expected_state_version=version), Outcome.CONFLICT, Reason.VERSION)
    refused(world.pool_command(k.OpenIntake, expected_state_version=None), Outcome.CONFLICT, Reason.VERSION)
    assert not world.pool.intake_open
    accepted(world.pool_command(k.OpenIntake), Outcome.INTAKE_OPENED)


def test_x36_an_opening_prepared_before_an_alarm_closed_the_intake_is_a_conflict() -> None:
    x36(World())
    fails_without(x36, k.OpenIntake, "pool:other-version:conflict")


# X40: what refusals show --------------------------------------------------------------------------


def test_x40_no_refusal_and_no_journalled_refusal_carries_the_current_attempt_id() -> None:
    shown = 0
    for operation in Kernel().operations:
        guards = [guard for guard in operation.guards if not guard.id.endswith(":committed-again")]
        ways = [[None, *BREAKERS[guard.id]] for guard in guards]
        for breakers in itertools.chain(*([[way] for way in found if way] for found in ways)):
            situation = ACCEPTED[operation.command]()
            for breaker in breakers:
                try:
                    breaker(situation)
                except TypeError:
                    continue
            decision = situation.decide(Kernel())
            if type(decision.answer) is not Refusal:
                continue
            shown += 1
            for secret in (b"attempt-2", b"attempt-3"):
                assert secret not in msgspec.json.encode(decision.answer), decision.answer
                assert secret not in msgspec.json.encode(decision.log), decision.log
    assert shown > 150
