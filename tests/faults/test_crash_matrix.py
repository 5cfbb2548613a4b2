"""One point of the crash matrix for each downstream, on SQLite; tests/soak has all of them, on each store."""

from __future__ import annotations

import pytest

from tests.faults.crash_matrix import SIGNALS, play, promised
from tests.faults.crash_page import PAGE, WORLDS, compare, keys, read, render
from tests.faults.stage import Stage
from tests.faults.worlds import World


@pytest.mark.slow
async def test_an_effect_whose_answer_was_lost_is_in_the_world_once_whatever_its_downstream(
    stage: Stage, every_world: dict[str, World]
) -> None:
    """Half of the senders are killed, the others wake up late."""
    point = {"sql": "before commit"}
    quick = [(name, point.get(name, "after send"), SIGNALS[n % 2]) for n, name in enumerate(WORLDS)]
    compare(await play(stage, every_world, quick))


def test_the_page_has_a_line_for_each_combination_and_says_nothing_of_its_own() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = read(text)
    assert list(rows) == keys()
    assert render(rows) == text
    assert all(len(row) == 7 for row in rows.values())


def test_no_combination_of_the_page_puts_an_effect_into_the_world_twice() -> None:
    for (world, point, _), row in read(PAGE.read_text(encoding="utf-8")).items():
        promise = promised(WORLDS[world], point)
        assert row[2] in ("0 → 1", "1 → 1")
        assert row[3] == promise.sent_by
        assert ("a person" in row[4]) == promise.person
