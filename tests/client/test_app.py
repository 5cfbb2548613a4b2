"""App: names, annotations, and the tasks that it makes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from fencepost.app import App, Final, Snooze
from fencepost.client.handling import AppWorks
from fencepost.errors import InvalidRequest

if TYPE_CHECKING:
    from somewhere import Nothing  # type: ignore[import-not-found]

    from fencepost.client.attempt import Attempt


class Doc(msgspec.Struct):
    title: str
    pages: int = 1


@dataclasses.dataclass
class Note:
    text: str


def test_a_name_has_one_handler():
    app = App()
    app.task("a")(lambda attempt: None)
    with pytest.raises(InvalidRequest, match="has a handler already"):
        app.task("a")


def test_a_name_declared_twice_at_once_is_refused_too():
    app = App()
    first, second = app.task("a"), app.task("a")
    first(lambda attempt: None)
    with pytest.raises(InvalidRequest, match="has a handler already"):
        second(lambda attempt: None)


@pytest.mark.parametrize(
    "options", [{"ttl": 0.0}, {"ttl": "60"}, {"timeout": -1.0}, {"max_attempts": 0}, {"silence": 0}]
)
def test_bad_numbers_are_refused_where_they_stand(options: Any):
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        App().task("a", **options)


def test_a_generator_is_no_handler():
    def pages(attempt):
        yield 1

    with pytest.raises(InvalidRequest, match="generator"):
        App().task("a")(pages)


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None, lambda a, *, c: None])
def test_a_handler_takes_the_attempt_and_perhaps_the_input(function: Any):
    with pytest.raises(InvalidRequest, match="handler"):
        App().task("a")(function)


def test_calling_a_handler_calls_the_function():
    app = App()

    @app.task("double")
    def double(attempt: Attempt, input: int) -> int:
        return 2 * input

    assert double(None, 4) == 8  # type: ignore[arg-type]


def test_a_task_carries_the_handlers_name_its_attempts_and_plain_json():
    app = App()

    @app.task("summarise", max_attempts=3)
    async def summarise(attempt: Attempt, input: Doc) -> None: ...

    task = summarise.task(Doc("x"), task_id="doc-17", queue="llm", priority=5, depends_on=["p"], delay=2.0)
    assert (task.kind, task.input, task.task_id, task.queue) == (
        "summarise",
        {"title": "x", "pages": 1},
        "doc-17",
        "llm",
    )
    assert (task.max_attempts, task.priority, task.depends_on, task.delay) == (3, 5, ["p"], 2.0)
    assert summarise.task(Doc("x"), max_attempts=7).max_attempts == 7
    assert summarise.task(b"\x00raw").input == b"\x00raw"
    with pytest.raises(InvalidRequest, match="input"):
        summarise.task(object())


def test_the_input_becomes_what_the_annotation_says():
    app = App()

    @app.task("doc")
    async def doc(attempt: Attempt, input: Doc) -> None: ...

    @app.task("note")
    async def note(attempt: Attempt, input: Note) -> None: ...

    @app.task("plain")
    async def plain(attempt: Attempt, input: dict) -> None: ...  # type: ignore[type-arg]

    @app.task("anything")
    async def anything(attempt: Attempt, input) -> None: ...

    assert doc.accept({"title": "x"}) == Doc("x")
    assert note.accept({"text": "x"}) == Note("x")
    assert plain.accept({"x": 1}) == {"x": 1}
    assert anything.accept([1]) == [1]
    with pytest.raises(Final, match="title"):
        doc.accept({"pages": 2})
    with pytest.raises(Final, match="dict"):
        plain.accept(["no"])


def test_a_class_beside_its_handler_is_found_although_annotations_are_text():
    class Local(msgspec.Struct):
        x: int

    app = App()

    @app.task("local")
    async def local(attempt: Attempt, input: Local) -> Nothing: ...

    assert local.accept({"x": 1}) == Local(1)


def test_an_annotation_may_name_what_comes_later_in_the_module():
    app = App()

    @app.task("later")
    async def later(attempt: Attempt, input: Later) -> None: ...

    assert later.accept({"x": 1}) == Later(1)


class Later(msgspec.Struct):
    x: int


def test_an_annotation_that_names_nothing_is_refused_when_a_worker_is_made():
    app = App()

    @app.task("lost")
    async def lost(attempt: Attempt, input: Nothing) -> None: ...

    with pytest.raises(InvalidRequest, match="Nothing"):
        AppWorks(app)


def test_an_app_without_handlers_makes_no_worker():
    with pytest.raises(InvalidRequest, match="no handlers"):
        AppWorks(App())


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", True])
def test_snooze_takes_seconds(seconds: Any):
    with pytest.raises(InvalidRequest):
        Snooze(seconds)
