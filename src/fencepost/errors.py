"""What is raised: wrong calls and unreachable stores. A refusal is never raised, it is an answer.

`Fenced` is the one exception: it stops a *handler*, from inside, and derives from `BaseException`
so that the `except Exception` of an agent loop cannot swallow it.
"""

from __future__ import annotations

from collections.abc import Sequence


class FencepostError(Exception):
    """Base of everything that a wrong call or an unreachable store raises."""


class InvalidRequest(FencepostError):
    """The call itself is wrong: nothing was read or written. Names the field and the limit."""

    code = "INVALID"

    def __init__(self, field: str, limit: str) -> None:
        self.field = field
        self.limit = limit
        super().__init__(f"{field}: {limit}")


class NotStaged(FencepostError):
    """Commit named a digest that this attempt never staged and did not send along; nothing was written."""

    code = "NOT_STAGED"

    def __init__(self, task_id: str, result_digest: str) -> None:
        self.task_id = task_id
        self.result_digest = result_digest
        super().__init__(f"task {task_id!r}: no staged result of this attempt has the digest {result_digest}")


class Unsettled(FencepostError):
    """Commit came while effects of this revision are open; the worker is simply not done."""

    code = "UNSETTLED"

    def __init__(self, effects: Sequence[str]) -> None:
        self.effects = tuple(effects)
        super().__init__(f"settle these effects before commit: {', '.join(self.effects)}")


class SpawnConflict(FencepostError):
    """A spawned task's id stands already for something else; the whole commit wrote nothing."""

    code = "SPAWN_CONFLICT"

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        super().__init__(f"spawned task {task_id!r} already stands with another input, pool, node or dependencies")


class StatementFailed(FencepostError):
    """A statement that came with a commit was refused by the database; the whole commit wrote nothing.

    `slot` is the statement's, `says` what the database said about it.
    """

    code = "STATEMENT_FAILED"

    def __init__(self, slot: str, says: str) -> None:
        self.slot = slot
        self.says = says
        super().__init__(f"statement {slot!r}: {says}")


class Unavailable(FencepostError):
    """The store could not be asked, or its answer was lost: nothing is known.

    Ask again with the same request id. It never means that nothing was written.
    """

    code = "UNAVAILABLE"


class InTheWay(Unavailable):
    """Others were still at work on a pool when the time to wait for them was over; nothing was written.

    `sessions` names them to the report `end_sessions`.
    """

    def __init__(self, says: str, sessions: Sequence[tuple[int, str]]) -> None:
        self.sessions = tuple(sessions)
        super().__init__(says)


class StoreRefused(Unavailable):
    """Opening the store was refused for a reason that asking again does not cure (schema, file system, …)."""


class Inconsistent(FencepostError):
    """The store holds what no accepted operation can have written. Run `fencepost audit`."""

    code = "INCONSISTENT"


class GiveBack(BaseException):
    """Stops a handler whose next step is a person's: the worker gives the task back until one has decided.

    A `BaseException`, as `Fenced` is and for the same reason.
    """

    def __init__(self, effect_id: str, why: str) -> None:
        self.effect_id = effect_id
        self.why = why
        super().__init__(f"effect {effect_id[:12]}: {why}" if effect_id else why)


class Fenced(BaseException):
    """Stops a handler whose claim no longer counts: its lease is not trusted any more, or a door refused it.

    A `BaseException` on purpose: `except Exception` inside an agent must not swallow it.
    """

    def __init__(self, reason: str, refused: object = None) -> None:
        self.reason = reason
        self.refused = refused
        super().__init__(reason)
