"""`python -m tests.model` searches within the bounds of CI, `python -m tests.model --large` within larger ones.

`--effects` searches effects alone: each guarantee against a modelled downstream.
"""

from __future__ import annotations

import argparse
import resource
import sys
from typing import Any

from tests.model import effects, stuck
from tests.model.calls import CI, LARGE
from tests.model.graph import GraphSearch
from tests.model.mutants import caught, caught_by_the_search, mutants, searched
from tests.model.oracle import Violation
from tests.model.rows import ROWS
from tests.model.single import Search


def megabytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20 if sys.platform == "darwin" else 1 << 10)


def progress(depth: int, states: int, transitions: int) -> None:
    if sys.stderr.isatty():
        print(f"  depth {depth}: {states:,} states, {transitions:,} transitions", end="\r", file=sys.stderr, flush=True)


def say_mutants() -> int:
    missed = 0
    alone = set(searched())
    for mutant in mutants():
        by = [caught(*mutant)]
        if mutant in alone:
            by.append(caught_by_the_search(*mutant, coverage=False))
        missed += None in by
        print(f"{mutant[0].__name__:15} {mutant[1]}")
        for line in by:
            print(f"{'':15}   {line or 'NOTHING NOTICES'}")
    return 1 if missed else 0


def say_effects(large: bool) -> tuple[int, set[Any]]:
    """1 where the search found what must not be; and the rows of the tasks' table that it went through."""
    rows: set[Any] = set()
    totals = [0, 0, 0.0]
    wrong = 0
    for scenario in effects.LARGE if large else (*effects.CI, *effects.LATE, *effects.UNTRUE):
        untrue = scenario in effects.UNTRUE
        # While a sender may still come, nobody who is right can say ABSENT; the largest are left out for their memory.
        judged = untrue or (scenario.in_time and not scenario.every and scenario.executions < 3)
        found = effects.Search(scenario, truth=None if untrue else True).run(stuck=judged)
        rows |= found.rows
        totals = [totals[0] + found.states, totals[1] + found.transitions, totals[2] + found.seconds]
        print(
            f"effects, {effects.says(scenario)}:\n  {found.states:,} states, {found.transitions:,} transitions, "
            f"depth {found.depth}, {found.decisions:,} decisions, {found.seconds:.1f} s"
            + (f", {len(found.stuck)} stuck" if judged else ""),
            flush=True,
        )
        wrong |= bool(found.stuck)
    states, transitions, seconds = totals
    print(f"effects in all: {states:,} states, {transitions:,} transitions, {seconds:.1f} s; peak {megabytes():,} MB")
    return wrong, rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--large", action="store_true", help="larger bounds: a quarter of an hour or more, 2 GB")
    parser.add_argument("--mutants", action="store_true", help="for each guard: what catches the kernel without it")
    parser.add_argument("--effects", action="store_true", help="effects alone")
    parser.add_argument(
        "--remember", action="store_true", default=None, help="request ids of every checkpoint, for ever"
    )
    for name, default in CI._asdict().items():
        if type(default) is int:
            parser.add_argument(
                f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{default} within CI's bounds"
            )
    asked = vars(parser.parse_args())
    if asked.pop("mutants"):
        return say_mutants()
    large, alone = asked.pop("large"), asked.pop("effects")
    if alone:
        try:
            return say_effects(large)[0]
        except Violation as violation:
            print(f"VIOLATION of {violation}")
            return 1
    searches = LARGE if large else (CI,)
    given = {name: value for name, value in asked.items() if value is not None}
    seen = set()
    try:
        for bounds in (search._replace(**given) for search in searches):
            print("one task:", ", ".join(f"{name} {value}" for name, value in bounds._asdict().items()), flush=True)
            found = Search(bounds).run(progress)
            seen |= found.rows
            print(
                f"  {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}\n"
                f"  {found.changes:,} change something; {found.decisions:,} distinct decisions, {found.seconds:.1f} s",
                flush=True,
            )
        for says, options in (
            ("two parents and a child", {}),
            ("the same, on_failure: cancel", {"cancel_with_parent": True}),
            ("the same, and a commit that spawns a successor of the child", {"spawn": True}),
        ):
            graph = GraphSearch(**options).run()
            seen |= graph.rows
            print(
                f"{says}:\n  {graph.states:,} states, {graph.transitions:,} transitions, depth {graph.depth}, "
                f"{graph.lost:,} lost swaps, {graph.stuck} stuck, {graph.seconds:.1f} s"
            )
            if graph.stuck:
                return 1
        leads_on = stuck.search()
        print(
            f"nothing stuck, without bounds:\n  {leads_on.states:,} states, {leads_on.changes:,} changes between them"
        )
        for node in leads_on.stuck:
            print("  STUCK", node)
        wrong, through_effects = say_effects(large)
    except Violation as violation:
        print(f"VIOLATION of {violation}")
        return 1
    seen |= through_effects
    print(f"rows of the transition table seen: {len(seen)} of {len(ROWS)}; peak {megabytes():,} MB")
    for key in [key for key in ROWS if key not in seen]:
        before, after = (state.name if state else "none" for state in key[1:3])
        print(f"  not reached within these searches (the row test drives it): {key[0]}, {before} to {after}, {key[3]}")
    return 1 if leads_on.stuck or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
