"""What a downstream is: its declaration, its calls, and what they may find.

A downstream is any object with a `declaration` and, by its guarantee, these coroutines:

    execute(call)       the side effect itself; every guarantee but RESERVATION and TRANSACTIONAL
    precondition(payload)   CONDITIONAL: the version (ETag, old id, …) that the write will be conditional on
    reserve(call), confirm(call), cancel(call)   RESERVATION
    query(call)         optional: what became of this effect? Without it, UNKNOWN waits for REPEAT or for a person
    bind(payload), same(bound, payload)   optional: the payload as it is bound, where that is not what the caller gave
    earn()              optional: the declaration as this very server earns it, where that has to be tried
    check(), close()    optional

An exception out of `execute` or `confirm`, and a call that was cancelled, are UNKNOWN: the caller says so, the
downstream need not. Nothing in a downstream may repeat a call by itself or make up a key of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from fencepost.clock import elapsed
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_ID_LENGTH, check_id, check_seconds
from fencepost.kernel.records import Guarantee, Terms

__all__ = [
    "Absent",
    "Answers",
    "Binds",
    "BindsFor",
    "Call",
    "Checked",
    "Checks",
    "Closes",
    "Conditional",
    "Deadline",
    "Declaration",
    "Downstream",
    "Earns",
    "Executes",
    "Found",
    "Gone",
    "Guarantee",
    "Happened",
    "NotFound",
    "Outcome",
    "Reserves",
    "Standing",
    "StillUnknown",
    "Unknown",
    "check_downstream",
    "offers",
]

# What a downstream declares ----------------------------------------------------------------------


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What a downstream promises. Durations are seconds. Checked when it is made; raises InvalidRequest.

    `name` and `account` together say where an effect goes; they are bound to it at its first prepare, like the
    guarantee. Whatever is undeclared is NON_REPLAYABLE.

    `send_window`: how long after its prepare a call may still be sent. `settle_time`: how long after that a call may
    take to show in a query. `retention` (IDEMPOTENT, and there it must be given): how long the downstream remembers a
    key and answers from it. `margin`: what of the retention is left unused, at least the send window, which is its
    default; retention must exceed margin and send window together, or no repeat could ever be sent in time.
    `approval`: a person approves every execution beforehand.
    """

    name: str
    account: str = ""
    guarantee: Guarantee = Guarantee.NON_REPLAYABLE
    send_window: float = 10.0
    settle_time: float = 10.0
    retention: float | None = None
    margin: float | None = None
    approval: bool = False

    def __post_init__(self) -> None:
        check_id(self.name, "name")
        if "/" in self.name:
            raise InvalidRequest("name", "must not contain '/': it parts the name from the account")
        if self.account:
            check_id(self.account, "account")
        if len(self.downstream) > MAX_ID_LENGTH:
            raise InvalidRequest("account", f"with the name it must have at most {MAX_ID_LENGTH - 1} characters")
        if self.guarantee not in list(Guarantee):
            raise InvalidRequest("guarantee", f"must be one of {', '.join(Guarantee)}, got {self.guarantee!r}")
        if type(self.approval) is not bool:
            raise InvalidRequest("approval", "must be true or false")
        check_seconds(self.send_window, "send_window", above=True)
        check_seconds(self.settle_time, "settle_time")
        if self.guarantee != Guarantee.IDEMPOTENT:
            for field in ("retention", "margin"):
                if getattr(self, field) is not None:
                    raise InvalidRequest(field, f"belongs to IDEMPOTENT alone, this is {self.guarantee}")
            return
        if self.retention is None:
            raise InvalidRequest("retention", "IDEMPOTENT needs it: the seconds for which the key is remembered")
        check_seconds(self.retention, "retention", above=True)
        if self.margin is not None:
            check_seconds(self.margin, "margin")
            if self.margin < self.send_window:
                raise InvalidRequest(
                    "margin", f"must be at least send_window ({self.send_window:g} seconds), got {self.margin:g}"
                )
        least = self.send_window + (self.send_window if self.margin is None else self.margin)
        if self.retention <= least:
            raise InvalidRequest(
                "retention",
                f"must be above margin and send_window together ({least:g} seconds), got {self.retention:g}: "
                "no repeat could be sent in time",
            )

    @property
    def downstream(self) -> str:
        """Where it goes, account included: what is bound to an effect."""
        return f"{self.name}/{self.account}" if self.account else self.name

    @property
    def terms(self) -> Terms:
        """As the kernel keeps it."""
        margin = self.send_window if self.margin is None else self.margin
        idempotent = self.guarantee == Guarantee.IDEMPOTENT
        return Terms(
            downstream=self.downstream,
            guarantee=str(self.guarantee),
            send_window_us=check_seconds(self.send_window, "send_window"),
            settle_time_us=check_seconds(self.settle_time, "settle_time"),
            retention_us=check_seconds(self.retention, "retention") if self.retention is not None else 0,
            margin_us=check_seconds(margin, "margin") if idempotent else 0,
            approval=self.approval,
        )


# What it is called with --------------------------------------------------------------------------


class Deadline:
    """Until when a call may be sent, by a clock that counts suspended time.

    `unix`: the same on the store's clock, in seconds since 1970, for a downstream that can check one itself (a signed
    URL, a short-lived capability); None where there is no limit.
    """

    __slots__ = ("_at", "_clock", "unix")

    def __init__(self, at: float | None, unix: float | None = None, clock: Callable[[], float] = elapsed) -> None:
        self._at = at
        self._clock = clock
        self.unix = unix

    @classmethod
    def after(cls, asked: float, now_us: int, send_by_us: int, clock: Callable[[], float] = elapsed) -> Deadline:
        """From a store's answer: it was asked at `asked` by `clock`, and said that it was `now_us` there.

        The answer's way counts against the deadline, so it is never late.
        """
        return cls(asked + (send_by_us - now_us) / 1_000_000, send_by_us / 1_000_000, clock)

    @classmethod
    def none(cls) -> Deadline:
        """No limit: queries, and what is bound to a stored reservation."""
        return cls(None)

    @classmethod
    def within(cls, seconds: float, clock: Callable[[], float] = elapsed) -> Deadline:
        """`seconds` from now; for trying a downstream out."""
        return cls(clock() + seconds, None, clock)

    @property
    def remaining(self) -> float:
        """Seconds left, infinity where there is no limit; 0 or below: nothing may be sent any more."""
        return float("inf") if self._at is None else self._at - self._clock()

    @property
    def expired(self) -> bool:
        return self.remaining <= 0

    def __repr__(self) -> str:
        return f"Deadline(remaining={self.remaining:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One execution, as a downstream gets it; a query gets the call that it asks about.

    `payload` is the bound one. `precondition` and `reservation_id` are those stored with this execution. `epoch` and
    `generation` are the fencing token: those of the claim that calls *now*. `send_by` has to be looked at immediately
    before the first byte by a downstream that does anything slow before it (a connection, a hash, a queue).
    """

    effect_id: str
    task_id: str
    slot: str
    execution: int
    epoch: int
    generation: int
    payload: Any
    precondition: str | None = None
    reservation_id: str | None = None
    send_by: Deadline

    @property
    def key(self) -> str:
        """The idempotency key: 64 hex digits, the same for every attempt and every repeat of this effect."""
        return self.effect_id

    @property
    def marks(self) -> dict[str, str]:
        """What names the effect and its sender wherever a downstream keeps text beside its object."""
        return {
            "fencepost-effect": self.effect_id,
            "fencepost-epoch": str(self.epoch),
            "fencepost-generation": str(self.generation),
        }


# What a call finds -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Happened:
    """It took effect. `receipt` is kept and given to whoever asks for this effect again (JSON, at most 256 KiB)."""

    receipt: Any = None
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """The downstream is certain to have done nothing, and this call will never take effect.

    `why`: REFUSED (a connection refused, a stored 4xx, …), PRECONDITION (it no longer held), RESERVATION_CANCELLED.
    `detail` is for people.
    """

    why: str = "REFUSED"
    detail: str | None = None

    def __post_init__(self) -> None:
        if self.why not in ABSENT_REASONS:
            raise InvalidRequest("why", f"must be one of {', '.join(ABSENT_REASONS)}, got {self.why!r}")


ABSENT_REASONS = ("REFUSED", "PRECONDITION", "RESERVATION_CANCELLED")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody knows: a time-out, a dropped connection, a 5xx.

    `stored`: the downstream keeps this failure under the key, so that a repeat would only bring it back: it closes
    REPEAT for this effect. `retry_after`: seconds after which asking again makes sense, where the downstream said so.
    """

    why: str
    stored: bool = False
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class NotFound:
    """Asked, and there is no trace of it. Counts only once nothing can still be under way."""


GROUNDS = ("MOVED_ON", "NO_RESERVATION", "RESERVATION_CANCELLED", "RESERVATION_LAPSED")


@dataclass(frozen=True, slots=True)
class Gone:
    """It has not happened and never will.

    MOVED_ON (CONDITIONAL): the bound precondition is gone for good, and the resource's own *complete* history lacks
    the effect id. RESERVATION_CANCELLED, RESERVATION_LAPSED: the stored reservation can never be confirmed.
    NO_RESERVATION: the caller's own finding where none was stored.
    """

    ground: str
    detail: str | None = None

    def __post_init__(self) -> None:
        if self.ground not in GROUNDS:
            raise InvalidRequest("ground", f"must be one of {', '.join(GROUNDS)}, got {self.ground!r}")


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """Asked, and nothing is known. `in_progress`: the downstream has the key and is still at work on it.

    `moved_on` (CONDITIONAL): the bound precondition is gone for good and the history is not complete enough to tell,
    now or ever: from then on it is a person's.
    """

    why: str
    in_progress: bool = False
    retry_after: float | None = None
    moved_on: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """CONDITIONAL: the resource still stands at the bound precondition, so the same write may be sent again."""


Outcome = Happened | Absent | Unknown
"""What `execute` and `confirm` give."""
Found = Happened | NotFound | Gone | StillUnknown | Standing
"""What `query` and `cancel` give; `cancel` gives Gone, Happened (it was confirmed before) or StillUnknown."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check` found: the guarantee that this downstream earns, and sentences for people.

    `ok` False: it cannot be used as it is configured.
    """

    guarantee: Guarantee
    ok: bool = True
    says: tuple[str, ...] = ()


# The protocol ------------------------------------------------------------------------------------


@runtime_checkable
class Downstream(Protocol):
    """The least that a downstream has. Which of the following it needs besides follows from its guarantee."""

    @property
    def declaration(self) -> Declaration: ...


@runtime_checkable
class Executes(Downstream, Protocol):
    async def execute(self, call: Call) -> Outcome:
        """The side effect. May be called again for the same effect id, where its guarantee allows."""


@runtime_checkable
class Answers(Downstream, Protocol):
    async def query(self, call: Call) -> Found:
        """What became of this effect? Changes nothing. An exception is StillUnknown."""


@runtime_checkable
class Conditional(Downstream, Protocol):
    async def precondition(self, payload: Any) -> str:
        """What the write will be conditional on; asked before each prepare, bound by the one that is granted."""


@runtime_checkable
class Reserves(Downstream, Protocol):
    async def reserve(self, call: Call) -> str | Absent:
        """Reserve; the reservation's id. It must lapse by itself if nobody ever confirms it."""

    async def confirm(self, call: Call) -> Outcome:
        """Confirm `call.reservation_id`; however often it is asked, it takes effect once at most."""

    async def cancel(self, call: Call) -> Found:
        """Cancel `call.reservation_id`, for good: Gone only if it can never be confirmed any more."""


@runtime_checkable
class Binds(Downstream, Protocol):
    async def bind(self, payload: Any) -> Any:
        """The payload as it is bound, digested and sent: whatever has to be the same in every execution is fixed here.

        Raises InvalidRequest naming the field where the payload cannot be sent: nothing is prepared then."""

    async def same(self, bound: Any, payload: Any) -> bool:
        """Whether `bound` is what `payload` was bound to, apart from what `bind` made up (a date, a random id)."""


@runtime_checkable
class BindsFor(Binds, Protocol):
    async def bind_for(self, payload: Any, generation: int) -> Any:
        """`bind`, called in its place where what is sent names the generation and yet has to be the same in every
        execution (a commit's id covers its message): that of the claim which bound it first is fixed here."""


@runtime_checkable
class Earns(Downstream, Protocol):
    async def earn(self) -> Declaration:
        """The declaration as this server earns it; tried once and kept. Asked before each prepare."""


@runtime_checkable
class Checks(Downstream, Protocol):
    async def check(self) -> Checked:
        """Is it there, and what does it earn? Has no side effect that anybody could mind."""


@runtime_checkable
class Closes(Downstream, Protocol):
    async def close(self) -> None: ...


_NEEDS: dict[Guarantee, tuple[str, ...]] = {
    Guarantee.TRANSACTIONAL: (),
    Guarantee.RESERVATION: ("reserve", "confirm", "cancel"),
    Guarantee.CONDITIONAL: ("execute", "precondition"),
    Guarantee.IDEMPOTENT: ("execute",),
    Guarantee.READ_ONLY: ("execute",),
    Guarantee.NON_REPLAYABLE: ("execute",),
}
_OPTIONAL = ("query", "bind", "bind_for", "same", "earn", "check", "close")


def offers(downstream: Any, method: str) -> bool:
    """Whether it has that method: what isinstance with a protocol says too, at a fiftieth of the price."""
    return callable(getattr(downstream, method, None))


def check_downstream(downstream: Any, declaration: Declaration | None = None) -> Declaration:
    """Its declaration, or InvalidRequest naming what is missing or wrong. Calls nothing.

    `declaration`: the one that it earned, where that is not what it declares of itself.
    """
    declared = getattr(downstream, "declaration", None) if declaration is None else declaration
    if not isinstance(declared, Declaration):
        raise InvalidRequest("using", f"{type(downstream).__name__} has no `declaration`: it is not a downstream")
    where = f"downstream {declared.downstream!r}"
    for method in _NEEDS[declared.guarantee]:
        if not offers(downstream, method):
            raise InvalidRequest(where, f"declares {declared.guarantee}, which needs `{method}`")
    for method in (*_NEEDS[declared.guarantee], *_OPTIONAL):
        found = getattr(downstream, method, None)
        if found is not None and not inspect.iscoroutinefunction(found):
            raise InvalidRequest(where, f"`{method}` must be an `async def`")
    if offers(downstream, "bind") and not offers(downstream, "same"):
        raise InvalidRequest(where, "`bind` needs `same`: a successor binds anew and has to know its own payload again")
    return declared
