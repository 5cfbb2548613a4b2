"""For each guard, from the kernel's own list: without it something must go red."""

from __future__ import annotations

import pytest

from tests.model.mutants import caught, caught_by_the_search, guard_of, mutants, searched


def name(mutant: tuple[type, str]) -> str:
    return f"{mutant[0].__name__}-{mutant[1]}"


@pytest.mark.parametrize("mutant", mutants(), ids=name)
def test_the_kernel_without_this_guard_is_caught(mutant: tuple[type, str], record_property: pytest.Function) -> None:
    by = caught(*mutant)
    record_property("caught_by", by)  # type: ignore[operator]
    print(f"{name(mutant)}: {by}")
    assert by is not None, f"nothing notices that {mutant[0].__name__} no longer asks whether {guard_of(*mutant).says}"


@pytest.mark.parametrize("mutant", searched(), ids=name)
def test_the_search_alone_notices_that_this_comparison_is_gone(mutant: tuple[type, str]) -> None:
    by = caught_by_the_search(*mutant, coverage=False)
    print(f"{name(mutant)}: {by}")
    assert by is not None
