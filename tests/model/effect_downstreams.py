"""The world outside, as the search of effects sees it: what took place, and what each sender knows of it.

A downstream does exactly what its guarantee promises, or, where a scenario takes an assumption away, less. Times are
ticks from now. Nobody lies: who speaks says what it saw, at once or much later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WINDOW, SETTLE = 1, 1  # ticks

# What the sender of an execution knows of its call. LAST: this is the last tick in which it may send.
PENDING, TOOK, REFUSED, FALSE, CANCELLED, STORED, GIVEN_UP, LAST = range(8)
UNSENT = (PENDING, LAST)
# A reservation: its id was not accepted; stored, so that it may be confirmed; confirmed; gone for good.
NONE, HELD, CONFIRMED, GONE = range(4)


class Scenario(NamedTuple):
    """One search: a guarantee, the assumptions that hold, and how much may happen."""

    guarantee: str
    attempts: int = 2
    executions: int = 2
    disturbances: int = 1  # cancels and raises together; with `every`, otherwise as many as anybody likes
    revisions: int = 1
    third_party: int = 1  # writes of T
    retention: int = 4
    complete: bool = True  # the resource's history
    approval: bool = False  # every execution needs one
    failures: bool = False  # a failure that the downstream keeps under the key
    second: str = ""  # another slot of the task, of this guarantee
    every: bool = False  # calls that the fence refuses whatever the effect is, too: by ended attempts, under other
    # names, epochs, versions and payloads
    # assumptions
    in_time: bool = True  # no call reaches the downstream after its send_by
    person: str = "looks"  # who says ABSENT: one who looks; one who is "right" about what is under way, too; "wrong"
    forgets_early: bool = False  # the key is remembered for less than the stated time
    lags: bool = False  # a query may miss what is older than the settle time
    returns: bool = False  # T may bring an old version back


class Outside(NamedTuple):
    calls: tuple[int, ...] = ()  # by execution
    took: int = 0  # how often it took place
    more: tuple[int, ...] = ()  # IDEMPOTENT: ticks of memory left (-1: none), age of the last arrival, a kept failure;
    # CONDITIONAL: version, whether it is ours, what T wrote; RESERVATION: by execution


class View(NamedTuple):
    """What of the records matters outside."""

    preconditions: tuple[int, ...]
    stored: int  # the latest execution's stored reservation; 0: none
    unknown: bool
    late: bool  # nothing that was sent in time can still be under way


def start(s: Scenario) -> Outside:
    return Outside(more={"IDEMPOTENT": (-1, 0, 0), "CONDITIONAL": (0, 0, 0)}.get(s.guarantee, ()))


def extended(s: Scenario, outside: Outside, executions: int) -> Outside:
    """The records hold further executions: their calls are in their senders' hands."""
    calls = outside.calls + (PENDING,) * (executions - len(outside.calls))
    more = outside.more
    if s.guarantee == "RESERVATION":
        more += (NONE,) * (executions - len(more))
    return Outside(calls, outside.took, more)


def put(items: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*items[:at], value, *items[at + 1 :])


def could_act(s: Scenario, view: View, outside: Outside, n: int) -> bool:
    """Whether call `n`, which is under way, can still take effect."""
    if outside.calls[n] not in UNSENT:
        return False
    if s.guarantee == "CONDITIONAL":
        return view.preconditions[n] == outside.more[0] or s.returns
    if s.guarantee == "RESERVATION":
        return outside.more[n] == HELD
    return True


def moves(s: Scenario, view: View, outside: Outside) -> Iterator[Outside]:
    """All that may happen outside within this tick."""
    calls, took, more = outside
    for n, status in enumerate(calls):
        if status not in UNSENT:
            continue
        # Refused for certain: this call does nothing, now and later.
        yield outside._replace(calls=put(calls, n, REFUSED))
        if s.guarantee != "RESERVATION" or more[n] != NONE:
            yield from _arrives(s, view, outside, n)
    if s.guarantee == "CONDITIONAL" and more[2] < s.third_party:
        yield outside._replace(more=(more[0] + 1, 0, more[2] + 1))
        if s.returns:
            for version in range(more[0]):
                yield outside._replace(more=(version, 0, more[2] + 1))
    if s.guarantee == "RESERVATION":
        for n, status in enumerate(more):
            if status == HELD:
                yield outside._replace(more=put(more, n, GONE))  # cancelled by who finds it stored, or lapsed
        if view.unknown and view.stored and more[view.stored - 1] == HELD:
            # A successor confirms what is stored.
            yield Outside(calls, took + 1, put(more, view.stored - 1, CONFIRMED))


def _arrives(s: Scenario, view: View, outside: Outside, n: int) -> Iterator[Outside]:
    calls, took, more = outside
    happened = put(calls, n, TOOK)
    if s.guarantee == "CONDITIONAL":
        if view.preconditions[n] == more[0]:
            yield Outside(happened, took + 1, (more[0] + 1, 1, more[2]))
        else:
            yield outside._replace(calls=put(calls, n, FALSE))
    elif s.guarantee == "RESERVATION":
        if more[n] == HELD:
            yield Outside(happened, took + 1, put(more, n, CONFIRMED))
        else:
            yield outside._replace(calls=put(calls, n, TOOK if more[n] == CONFIRMED else CANCELLED))
    elif s.guarantee == "IDEMPOTENT":
        memory, _, failed = more
        if memory >= 0:
            yield outside._replace(calls=put(calls, n, STORED if failed else TOOK))
            return
        kept = s.retention - (1 if s.forgets_early else 0)
        yield Outside(happened, took + 1, (kept, 0, 0))
        if s.failures:
            yield Outside(put(calls, n, STORED), took, (kept, 0, 1))
    else:
        yield Outside(happened, took + 1, more)


# Whoever wakes after its send_by looks at the clock and sends nothing.
_LATER = {PENDING: LAST, LAST: GIVEN_UP}


def tick(s: Scenario, outside: Outside) -> Outside:
    if s.in_time:
        outside = outside._replace(calls=tuple([_LATER.get(status, status) for status in outside.calls]))
    if s.guarantee != "IDEMPOTENT":
        return outside
    memory, age, failed = outside.more
    memory = max(memory - 1, -1)
    return outside._replace(more=(memory, 0 if memory < 0 else min(age + 1, SETTLE), failed if memory >= 0 else 0))


def facts(s: Scenario, view: View, outside: Outside) -> list[tuple[object, ...]]:
    """What somebody may truly say now: of its own call, by asking the downstream, or as a person who looks.

    What is true for good once it is true (HAPPENED, a version that moved on, a reservation that is gone) may be said
    at any later time, and is; what was seen too early may always have been seen, so it is no fact but a call that
    anybody may make at any time (`effect_calls`).
    """
    calls, took, more = outside
    found: list[tuple[object, ...]] = []
    for n, status in enumerate(calls):
        if status in (TOOK, REFUSED, FALSE, CANCELLED, STORED):
            found.append(("settle", n + 1, status))
    guarantee = s.guarantee
    if guarantee == "IDEMPOTENT":
        if more[0] >= 0 and not more[2]:
            found.append(("happened",))
        if view.late and (more[0] < 0 or more[1] < SETTLE or s.lags):
            found.append(("not-found",))
    elif guarantee == "CONDITIONAL":
        if took and (s.complete or more[1]):
            found.append(("happened",))
        for n, precondition in enumerate(view.preconditions):
            if precondition != more[0] and not (took and s.complete) and not more[1]:
                found.append(("moved-on" if s.complete else "cannot-tell", n + 1))
        found += [("version", version) for version in range(more[0] + 1)]
    elif guarantee == "RESERVATION":
        if CONFIRMED in more:
            found.append(("happened",))
        if view.stored and more[view.stored - 1] == GONE:
            found.append(("gone",))
        found += [("gone-earlier", n + 1) for n, status in enumerate(more) if status == GONE and n + 1 != view.stored]
    elif guarantee == "READ_ONLY":
        found += [("not-found",), ("happened",)]
    elif guarantee == "NON_REPLAYABLE":
        found.append(("happened",) if took else ("not-found",))  # a look, which lifts nothing out of it
    wrong = s.person == "wrong"
    if took or wrong:
        found.append(("person", "HAPPENED"))
    surprised = s.person == "right" and any(could_act(s, view, outside, n) for n in range(len(calls)))
    if wrong or not (took or surprised):
        found.append(("person", "ABSENT"))
    return found
