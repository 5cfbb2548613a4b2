"""What performing an effect needs of its surroundings: one attempt's doors, and what a prepare answers."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from fencepost.kernel.records import Terms

__all__ = ["ROWS", "Port", "PreparedAnswer"]


class PreparedAnswer(Protocol):
    """What a prepare answers, whatever the row. `now_us` is the store's time: `asked_at` of a later reconcile."""

    @property
    def outcome(self) -> str: ...
    @property
    def effect_id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def execution(self) -> int: ...
    @property
    def send_by_us(self) -> int | None: ...
    @property
    def now_us(self) -> int: ...
    @property
    def open(self) -> tuple[str, ...]: ...
    @property
    def payload(self) -> Any: ...
    @property
    def downstream(self) -> str: ...
    @property
    def guarantee(self) -> str: ...
    @property
    def receipt(self) -> Any: ...
    @property
    def precondition(self) -> str | None: ...
    @property
    def reservation_id(self) -> str | None: ...
    @property
    def busy(self) -> tuple[str, ...]: ...
    @property
    def reason(self) -> str | None: ...


class Port(Protocol):
    """The claim-side doors of one attempt. Answers are values; Unavailable is raised where the store was not reached,
    and then asked again with the same request id. A port may raise Fenced itself where a door refused the claim."""

    task_id: str
    generation: int
    epoch: int

    def trusted(self) -> float:
        """Seconds for which the lease is still trusted; 0 and below: nothing new is sent."""

    async def prepare(
        self, slot: str, payload: Any, terms: Terms, *, node_id: str | None, precondition: str | None,
        repeat: bool, request_id: str,
    ) -> Any: ...  # fmt: skip

    async def reserve(self, effect_id: str, execution: int, reservation_id: str, *, request_id: str) -> Any: ...

    async def settle(
        self, effect_id: str, execution: int, finding: str, *, why: str | None, receipt: Any, etag: str | None,
        note: str | None, request_id: str,
    ) -> Any: ...  # fmt: skip

    async def reconcile(
        self, effect_id: str, execution: int, finding: str, *, asked_at: int, ground: str | None, receipt: Any,
        etag: str | None, note: str | None, request_id: str,
    ) -> Any: ...  # fmt: skip

    async def defer(self, slot: str, payload: Any, downstream: str, *, node_id: str | None) -> Any:
        """TRANSACTIONAL: bind a statement that comes with the commit."""

    async def give_back(self, why: str, effect_id: str) -> NoReturn:
        """Stop the handler and give the task back until a person has decided."""


# The rows of the prepare table; everything else that a prepare answers refuses the claim itself.
ROWS = frozenset(
    {
        "EXECUTE", "REPLAY", "RECONCILE", "IN_FLIGHT", "APPROVAL_REQUIRED", "BUSY", "PAYLOAD_CONFLICT", "DENIED",
        "ABANDONED",
    }
)  # fmt: skip
