"""What `attempt.effect` raises where there is no receipt to return. Each names the effect and its slot."""

from __future__ import annotations

from typing import Any

from fencepost.errors import FencepostError

__all__ = [
    "ApprovalRequired",
    "EffectAbandoned",
    "EffectAbsent",
    "EffectBusy",
    "EffectDenied",
    "EffectError",
    "EffectUnknown",
    "PayloadConflict",
    "PersonRequired",
]


class EffectError(FencepostError):
    """Base of all that is raised about one effect."""

    code = "EFFECT"

    def __init__(self, effect_id: str, slot: str, says: str) -> None:
        self.effect_id = effect_id
        self.slot = slot
        self.says = says
        super().__init__(f"effect {slot!r} ({effect_id[:12]}): {says}")


class PayloadConflict(EffectError):
    """The slot is bound to another payload, or to another downstream: `payload`, `downstream` and `state` are the
    bound ones. What was asked for now can never be sent under this slot."""

    code = "PAYLOAD_CONFLICT"

    def __init__(self, effect_id: str, slot: str, payload: Any, *, state: str, downstream: str) -> None:
        self.payload = payload
        self.state = state
        self.downstream = downstream
        super().__init__(effect_id, slot, f"is bound to another payload or downstream ({downstream}), and {state}")


class EffectDenied(EffectError):
    """A person denied it, or it was withdrawn. Nothing was sent."""

    code = "DENIED"

    def __init__(self, effect_id: str, slot: str, why: str = "") -> None:
        super().__init__(effect_id, slot, "was denied" + (f": {why}" if why else ""))


class EffectAbandoned(EffectError):
    """A person gave it up. Whether it happened is not known."""

    code = "ABANDONED"

    def __init__(self, effect_id: str, slot: str, why: str = "") -> None:
        super().__init__(effect_id, slot, "was abandoned" + (f": {why}" if why else ""))


class EffectAbsent(EffectError):
    """The downstream is certain to have done nothing: `why` is REFUSED, PRECONDITION or RESERVATION_CANCELLED.

    The same payload may be asked for again in this slot; another one needs another slot.
    """

    code = "ABSENT"

    def __init__(self, effect_id: str, slot: str, why: str, detail: str | None = None) -> None:
        self.why = why
        self.detail = detail
        super().__init__(effect_id, slot, f"did not happen ({why})" + (f": {detail}" if detail else ""))


class EffectUnknown(EffectError):
    """Nobody knows whether it happened. Do not do it another way: a later attempt asks, or a person decides."""

    code = "UNKNOWN"

    def __init__(self, effect_id: str, slot: str, why: str) -> None:
        super().__init__(effect_id, slot, f"outcome unknown, do not do it another way: {why}")


class EffectBusy(EffectError):
    """It goes alone, and `busy`, other effects of this task, are under way or unknown."""

    code = "BUSY"

    def __init__(self, effect_id: str, slot: str, busy: tuple[str, ...]) -> None:
        self.busy = tuple(busy)
        super().__init__(effect_id, slot, f"waits for {', '.join(each[:12] for each in self.busy)}")


class PersonRequired(EffectError):
    """Only a person can lead it on: what became of it cannot be asked."""

    code = "PERSON"


class ApprovalRequired(PersonRequired):
    """A person has to approve exactly this payload first."""

    code = "APPROVAL_REQUIRED"
