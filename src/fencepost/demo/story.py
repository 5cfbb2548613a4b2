"""The one story, played twice: a worker is stopped in mid-task, another takes over, the first wakes and goes on.

The same three processes, the same documents, the same signals. Only the queue between them differs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fencepost import sync
from fencepost.demo import documents
from fencepost.demo.documents import Document, Findings
from fencepost.demo.processes import PATIENCE, Cast, Line, NotAsExpected
from fencepost.demo.usual_queue import UsualQueue
from fencepost.wire import NewTask, Refused

NAMES = ("A", "B", "C")
CHOSEN = "doc-000"  # the longest document; `documents.copy` puts it first
STOP_AT = 70  # per cent: after the last heartbeat, so that no heartbeat stands between waking and the finish
FIRST, OTHERS = -1, 0  # priorities: smaller first


class Ending(msgspec.Struct, frozen=True):
    """What is true of the chosen document after an act."""

    queue: str
    canonical: Findings  # what the queue now says about it
    taken_over_by: str
    late_answer: str  # what the late worker was told
    late_reason: str
    attempts: int
    refusals: int
    discarded_seconds: float | None  # None: nobody counted
    audit: str
    audit_clean: bool | None  # None: there is none
    stands: bool  # whether the canonical result is about the document as it stands
    documents: int
    seconds: float


class Stage(Protocol):
    """A queue, as the story needs it."""

    kind: str  # what the worker processes are told
    where: str
    file: str

    def put(self, tasks: dict[str, Document]) -> None: ...

    def await_takeover(self, cast: Cast, seen: Callable[[Line], None]) -> None:
        """Back when the second worker's result is the canonical one."""

    def await_all(self, cast: Cast, tasks: Sequence[str], finished: set[str], seen: Callable[[Line], None]) -> None:
        """Back when every task has a result."""

    def await_late_answer(self, cast: Cast, seen: Callable[[Line], None]) -> Line:
        """What the late worker was told when it finished."""

    def outcome(self) -> dict[str, Any]:
        """The fields of `Ending` that only the queue can tell."""

    def close(self) -> None: ...


class UsualStage:
    kind = "usual"

    def __init__(self, folder: Path) -> None:
        self.where = self.file = str(folder / "usual.db")
        self._queue = UsualQueue(self.where)

    def put(self, tasks: dict[str, Document]) -> None:
        for task_id, document in tasks.items():
            self._queue.put(task_id, documents.plain(document), FIRST if task_id == CHOSEN else OTHERS)

    def await_takeover(self, cast: Cast, seen: Callable[[Line], None]) -> None:
        cast.expect("the second worker finishes", lambda line: line.did == "finished" and line.task == CHOSEN, seen)

    def await_all(self, cast: Cast, tasks: Sequence[str], finished: set[str], seen: Callable[[Line], None]) -> None:
        while not finished.issuperset(tasks):
            cast.expect("every document is finished", lambda line: line.did == "finished", seen)

    def await_late_answer(self, cast: Cast, seen: Callable[[Line], None]) -> Line:
        return cast.expect(
            "the late worker finishes",
            lambda line: line.did in ("finished", "gave up") and (line.task, line.attempt) == (CHOSEN, 1),
            seen,
        )

    def outcome(self) -> dict[str, Any]:
        result, attempts = self._queue.result(CHOSEN)
        return {
            "queue": "the usual queue",
            "canonical": msgspec.convert(result, Findings),
            "attempts": attempts,
            "refusals": 0,  # it has no way to refuse a finish
            "discarded_seconds": None,
            "audit": "none: the row says done",
            "audit_clean": None,
        }

    def close(self) -> None:
        self._queue.db.close()


class FencepostStage:
    kind = "fencepost"

    def __init__(self, folder: Path) -> None:
        self.file = str(folder / "fencepost.db")
        self.where = f"sqlite:///{self.file}"
        self._client = sync.connect(self.where)

    def put(self, tasks: dict[str, Document]) -> None:
        self._client.submit_many(
            [
                NewTask(
                    documents.plain(document),
                    task_id=task_id,
                    kind="read",
                    priority=FIRST if task_id == CHOSEN else OTHERS,
                )
                for task_id, document in tasks.items()
            ]
        )

    def await_takeover(self, cast: Cast, seen: Callable[[Line], None]) -> None:
        self._await_result(CHOSEN)

    def await_all(self, cast: Cast, tasks: Sequence[str], finished: set[str], seen: Callable[[Line], None]) -> None:
        for task_id in tasks:
            self._await_result(task_id)

    def _await_result(self, task_id: str) -> Any:
        result = self._client.result(task_id, wait=PATIENCE)
        if isinstance(result, Refused):
            raise NotAsExpected(f"{task_id} has no result after {PATIENCE:.0f} s: {result.outcome}")
        return result

    def await_late_answer(self, cast: Cast, seen: Callable[[Line], None]) -> Line:
        """From its own mouth; or from the journal, where it committed before its worker saw that the lease is over."""
        return cast.expect(
            "the late worker tries to commit", lambda line: line.did == "insisted", seen, self._refused_commit
        )

    def _refused_commit(self) -> Line | None:
        for event in self._commit_refusals():
            return Line("A", "insisted", CHOSEN, 1, detail={"answer": event.outcome, "reason": event.reason})
        return None

    def _commit_refusals(self) -> list[Any]:
        events = self._client.events(task_id=CHOSEN).items
        return [event for event in events if event.door == "commit" and not event.accepted]

    def outcome(self) -> dict[str, Any]:
        attempts = self._client.attempts(CHOSEN)
        audit = self._client.report("audit")
        discarded = self._client.report("status")["discarded_compute"]
        return {
            "queue": "fencepost",
            "canonical": msgspec.convert(self._await_result(CHOSEN).value, Findings),
            "attempts": len(attempts),
            "refusals": sum(event.count for event in self._commit_refusals()),
            "discarded_seconds": discarded["usage"].get("seconds", 0.0) + discarded["wall"],
            "audit": f"clean: {audit.events} events of {audit.tasks} tasks" if audit.clean else "violations",
            "audit_clean": audit.clean,
        }

    def close(self) -> None:
        self._client.close()


def play(
    stage: Stage, texts: list[Document], say: Callable[[float, str], None], names: Sequence[str] = NAMES
) -> Ending:
    """Play the story on one stage. `say` is given the seconds since the start and one line for a reader.

    Raises NotAsExpected where the story cannot be told to its end. Leaves no process behind.
    """
    began = time.monotonic()
    tasks = {f"doc-{number:03}": document for number, document in enumerate(texts)}
    chosen = tasks[CHOSEN]
    stage.put(tasks)
    finished: set[str] = set()
    successor: list[str] = []

    def tell(line: str) -> None:
        say(time.monotonic() - began, line)

    def seen(line: Line) -> None:
        if line.did == "finished":
            finished.add(line.task)
        if line.did == "claimed" and line.task == CHOSEN and line.attempt == 2:
            successor.append(line.worker)
            tell(f"A's lease ran out unrenewed. {line.worker} takes {chosen.title}: attempt 2")

    with Cast(names, lambda name: [stage.kind, name, stage.where, str(os.getpid())]) as cast:
        for _ in names:
            cast.expect("every worker is ready", lambda line: line.did == "ready", seen)
        began = time.monotonic()

        cast.start("A")
        cast.expect("A takes the longest document", lambda line: line.did == "claimed", seen)
        tell(f"A takes {chosen.title} and reads it at {chosen.bytes_per_second:,.0f} bytes a second")
        for name in names[1:]:
            cast.start(name)
        if len(tasks) > 1:
            tell(f"B and C take the other {len(tasks) - 1} documents, one after the other")

        half_way = ("A", "read", CHOSEN, STOP_AT)
        cast.expect("A is in mid-task", lambda line: (line.worker, line.did, line.task, line.percent) == half_way, seen)
        cast.pause("A", stage.file)
        tell(f"A is stopped (SIGSTOP) at {STOP_AT} % of {chosen.title}. Seen from outside it is dead")
        documents.correct(chosen)
        tell(f"{chosen.title} is corrected meanwhile: a paragraph is added")
        # Which leaves one worker that can take over, so that the story is the same every time.
        cast.ask_to_leave("C")
        tell("C is asked to leave (SIGTERM), finishes its document, and leaves. That is the easy case")

        cast.expect("another worker takes over", lambda line: bool(successor), seen)
        stage.await_takeover(cast, seen)
        tell(f"{successor[0]} has read the corrected {chosen.title} and delivers its result")
        stage.await_all(cast, list(tasks), finished, seen)
        cast.wake("A")
        tell("A is woken (SIGCONT). It does not know that it slept, reads on, and delivers its own result")
        late = stage.await_late_answer(cast, seen)
        cast.dismiss()

    outcome = stage.outcome()
    return Ending(
        **outcome,
        taken_over_by=successor[0],
        late_answer=str(late.detail.get("answer", late.did)),
        late_reason=str(late.detail.get("reason", "")),
        stands=outcome["canonical"].digest == documents.digest(chosen),
        documents=len(tasks),
        seconds=time.monotonic() - began,
    )
