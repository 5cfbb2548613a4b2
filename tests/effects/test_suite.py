"""Our own downstreams pass the kit, and the kit finds what does not."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from fencepost.effects.base import Absent, Call, Declaration, Guarantee, Happened, NotFound, Unknown
from fencepost.testing import DownstreamWorld, Scenario, downstream_suite
from tests.effects import worlds
from tests.effects.processes import http_server, mail_server


@pytest.fixture(scope="module", autouse=True)
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("worlds")
    with http_server(folder) as http, mail_server(folder) as mail:
        worlds.HttpWorld.server, worlds.SmtpWorld.server = http, mail
        yield


def scenarios(*those: type[DownstreamWorld]) -> pytest.MarkDecorator:
    every = [(world, scenario) for world in those for scenario in downstream_suite(world)]
    ids = [f"{world.__name__}: {scenario}" for world, scenario in every]
    return pytest.mark.parametrize("scenario", [scenario for _, scenario in every], ids=ids)


@pytest.mark.slow
@scenarios(worlds.KeyedWorld, worlds.SmtpWorld)
async def test_our_own_downstreams_pass(scenario: Scenario) -> None:
    await worlds.passed(scenario)


@pytest.mark.soak
@scenarios(worlds.DocumentWorld, worlds.RoomWorld, worlds.KeyedUnaskedWorld, worlds.PlainWorld, worlds.ReadingWorld)
async def test_http_passes_in_its_other_forms(scenario: Scenario) -> None:
    await worlds.passed(scenario)


# the kit itself can fail --------------------------------------------------------------------------


class Mailbox(DownstreamWorld):
    """A world in this process, with as much wrong as a test asks for."""

    guarantee: ClassVar[Guarantee] = Guarantee.IDEMPOTENT
    wrong: ClassVar[str] = ""
    unsupported: ClassVar = {
        "act_late": "nothing is slow in here",
        "show_late": "nothing is slow in here",
        "forget": "it has no memory to lose",
    }

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.sent: list[str] = []
        self.lost = False

    async def downstream(self) -> Any:
        return Post(self, type(self).guarantee)

    async def count(self, effect_id: str, payload: Any) -> int:
        return self.sent.count(effect_id)

    async def lose_answer(self) -> None:
        self.lost = True


class Post:
    def __init__(self, box: Mailbox, guarantee: Guarantee) -> None:
        retention = 60.0 if guarantee == Guarantee.IDEMPOTENT else None
        self.box = box
        self.declaration = Declaration(name="post", guarantee=guarantee, retention=retention, **worlds.WINDOWS)

    async def execute(self, call: Call) -> Any:
        box = self.box
        if call.key not in box.keys or box.wrong == "forgets":
            box.keys[call.key] = len(box.sent)
            box.sent.append(call.effect_id)
        if box.lost:
            box.lost = False
            return Absent() if box.wrong == "takes unknown for absent" else Unknown("lost")
        return Happened(box.keys[call.key])

    async def query(self, call: Call) -> Any:
        if call.key in self.box.keys and self.box.wrong != "never finds it":
            return Happened(self.box.keys[call.key])
        return NotFound()


def world_with(**fields: Any) -> type[Mailbox]:
    return type("Broken", (Mailbox,), fields)


async def run(world: Any) -> dict[str, str]:
    """How each scenario ended: passed, skipped with its reason, or failed with what it says."""
    ended = {}
    for scenario in downstream_suite(world):
        try:
            await scenario()
            ended[scenario.name] = "passed"
        except unittest.SkipTest as skipped:
            ended[scenario.name] = f"skipped: {skipped}"
        except (AssertionError, NotImplementedError) as failed:
            ended[scenario.name] = f"failed: {failed}"
    return ended


async def test_a_downstream_in_order_passes_and_what_was_skipped_says_why() -> None:
    ended = await run(Mailbox)
    assert not [name for name, how in ended.items() if how.startswith("failed")], ended
    assert ended["answer lost after acting"] == "passed"
    assert ended["lagging query"] == "skipped: show_late: nothing is slow in here"
    assert ended["forgotten key"] == "skipped: forget: it has no memory to lose"


@pytest.mark.parametrize(
    ("wrong", "scenario", "says"),
    [
        ({"wrong": "forgets"}, "paused sender wakes up in time", "in the world 2 times"),
        ({"wrong": "takes unknown for absent"}, "answer lost after acting", "did not happen"),
        (
            {"wrong": "never finds it", "guarantee": Guarantee.NON_REPLAYABLE, "unsupported": {}},
            "acts after the time-out",
            "write act_late, or say in `unsupported` why it cannot be",
        ),
    ],
    ids=["forgets", "absent", "undeclared"],
)
async def test_a_downstream_that_breaks_its_promise_is_found(wrong: Any, scenario: str, says: str) -> None:
    [found] = [each for each in downstream_suite(world_with(**wrong)) if each.name == scenario]
    with pytest.raises(Exception, match=says):
        await found()


async def test_a_window_that_the_kit_would_have_to_wait_for_is_refused() -> None:
    class Slow(Mailbox):
        async def downstream(self) -> Any:
            post = Post(self, Guarantee.NON_REPLAYABLE)
            post.declaration = Declaration(name="post")
            return post

    with pytest.raises(AssertionError, match="at most 3 s, got 10"):
        await downstream_suite(Slow)[0]()
