"""Pauses that take no time: what `perform` would have waited for is noted, and its clock moves on by it."""

from __future__ import annotations

import asyncio

import pytest

from fencepost import clock
from fencepost.effects import performing


class Pauses(list[float]):
    """The pauses that were made. `skew` is how far the clock that counts suspended time was moved."""

    skew = 0.0

    def elapsed(self) -> float:
        return clock.elapsed() + self.skew


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()

    async def pause(seconds: float) -> None:
        made.append(seconds)
        made.skew += seconds
        await asyncio.sleep(0)

    monkeypatch.setattr(performing, "_pause", pause)
    monkeypatch.setattr(performing, "elapsed", made.elapsed)
    return made
