"""One task's journal, replayed: what its record must say if nothing but accepted operations touched it.

Written from the contract and not from the operations, so that a rule that is missing there shows here.
Each thing found is reported with the number of the invariant (claim.v1, section 9) that it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.kernel.fence import DOORS
from fencepost.kernel.records import End, Event, State
from fencepost.service.coverage import lacks
from fencepost.service.journal import compared_names
from fencepost.stores.base import TaskHistory

Report = Callable[[int, str], None]
UNKNOWN: Any = object()  # not said by the events that are left: compared with nothing

# What each event may start from, and where it may lead. Events that are not listed leave the state as it is.
_MOVES: dict[str, tuple[tuple[State, ...], tuple[State, ...]]] = {
    "attempt_started": ((State.READY,), (State.CLAIMED,)),
    "attempt_renewed": ((State.CLAIMED,), (State.CLAIMED,)),
    "checkpoint_saved": ((State.CLAIMED,), (State.CLAIMED,)),
    "result_committed": ((State.CLAIMED,), (State.COMMITTED,)),
    "attempt_ended": ((State.CLAIMED,), (State.READY, State.PARKED, State.CANCELLED)),
    "task_cancelled": ((State.BLOCKED, State.READY, State.PARKED, State.CANCELLED), (State.CANCELLED,)),
    "task_reopened": ((State.CANCELLED, State.PARKED), (State.READY, State.BLOCKED)),
    "input_revised": ((State.BLOCKED, State.READY, State.PARKED), (State.READY, State.BLOCKED)),
}
_DECIDING = ("approve", "deny", "resolve")
_RUNNABLE = (State.READY, State.CLAIMED, State.COMMITTED)


class Replay:
    """The task's fields as the events tell them. `report` is called for each thing that does not fit."""

    def __init__(self, history: TaskHistory, report: Report) -> None:
        self.task = history.task
        self._report = report
        self._events = history.events
        self.starts: dict[int, str | None] = {}  # generation → attempt id
        self.commits: list[Event] = []
        self.released_by: dict[str, int] = {}  # parent → when its commit counted this task down
        self._seen: set[str] = set()
        self._last: Event | None = None
        self._fields: dict[str, Any] = {}
        counted = sum(1 for event in history.events if event.name == "parent_committed")
        self._open_parents = self.task.deps_remaining + counted

    def run(self) -> None:
        task = self.task
        if not self._events:
            if task.pruned_to_version != task.state_version:
                self._report(7, f"has no event, though its state version is {task.state_version}")
            return
        if task.pruned_to_version:
            self._forget(self._events[0])
            if self._events[0].state_version != task.pruned_to_version + 1:
                self._gap(task.pruned_to_version + 1, self._events[0].state_version - 1)
        elif self._events[0].state_version != 1:
            self._gap(1, self._events[0].state_version - 1)
            self._forget(self._events[0])
        for event in self._events:
            self._follow(event)
            self._last = event
        if self._events[-1].state_version < task.state_version:
            self._gap(self._events[-1].state_version + 1, task.state_version)
        self._compare()

    def _gap(self, first: int, last: int) -> None:
        which = f"state version {first}" if first == last else f"state versions {first} to {last}"
        self._report(7, f"the journal has no event of {which}")

    def _forget(self, event: Event) -> None:
        """Take the numbers from `event` as they are: what came before it is not known."""
        self._fields = dict.fromkeys(
            ("lease", "owner", "claimed_at", "charged", "end", "checkpoint", "checkpoint_of", "successors", "digest"),
            UNKNOWN,
        )
        started = event.name == "attempt_started"
        self._fields.update(
            version=event.state_version - 1,
            state=UNKNOWN,
            generation=event.generation - started,
            epoch=0 if started else event.epoch,
            attempt=UNKNOWN if started else event.attempt_id,
            cancel=event.cancel_generation - (event.name == "task_cancelled"),
            revision=event.revision - (event.name == "input_revised"),
        )

    # one event ----------------------------------------------------------------------------------

    def _follow(self, event: Event) -> None:
        name, fields = event.name, self._fields
        self._check_door(event)
        if not fields:
            if name != "submitted":
                self._report(7, f"its first event is {name}, not submitted")
                self._forget(event)
            else:
                fields = self._begin(event)
                self._check_graph(event)
                return
        fields = self._fields
        if event.state_version != fields["version"] + 1:
            if event.state_version <= fields["version"]:
                self._report(2, f"state version {event.state_version} comes after {fields['version']}")
            else:
                self._gap(fields["version"] + 1, event.state_version - 1)
            self._forget(event)
            fields = self._fields
        fields["version"] = event.state_version
        self._check_move(event)
        step = getattr(self, f"_on_{name}", None)
        if step is not None:
            step(event, event.detail or {})
        self._check_numbers(event)
        fields["state"] = event.state
        self._check_graph(event)

    def _begin(self, event: Event) -> dict[str, Any]:
        self._fields = {
            "version": event.state_version,
            "state": event.state,
            "generation": 0,
            "epoch": 0,
            "attempt": None,
            "cancel": 0,
            "revision": 1,
            "lease": None,
            "owner": None,
            "claimed_at": None,
            "charged": 0,
            "end": 0,
            "checkpoint": 0,
            "checkpoint_of": 0,
            "successors": UNKNOWN,  # those of the same batch are not in the event
            "digest": UNKNOWN,
        }
        self._check_numbers(event)
        if event.state not in (State.READY, State.BLOCKED):
            self._report(7, f"was submitted as {_state_name(event.state)}")
        return self._fields

    def _check_door(self, event: Event) -> None:
        door = DOORS.get(event.door)
        at = f"event {event.name} of state version {event.state_version}"
        if door is None:
            self._report(3, f"{at} came through {event.door!r}, which is no door")
        elif event.name not in door.events:
            self._report(3, f"{at} is none that the door {event.door} may write")
        else:
            missing = lacks(event)
            if missing:
                names = ", ".join(compared_names(missing))
                self._report(3, f"{at} came through {event.door} without comparing {names}")

    def _check_move(self, event: Event) -> None:
        before, after = self._fields["state"], event.state
        allowed = _MOVES.get(event.name)
        if allowed is None:
            if before is not UNKNOWN and after != before and not self._released(event, before):
                self._wrong_move(event, before)
            return
        if after not in allowed[1] or (before is not UNKNOWN and before not in allowed[0]):
            self._wrong_move(event, before)
        elif event.name == "task_cancelled" and before == State.CANCELLED:
            if self._last is None or self._last.name != "attempt_ended" or self._last.door != event.door:
                self._wrong_move(event, before)

    def _released(self, event: Event, before: int) -> bool:
        if event.name in ("effect_approved", "effect_denied", "effect_committed", "effect_absent", "effect_abandoned"):
            # What was decided was the last that the task waited for.
            return event.door in _DECIDING and before == State.PARKED and event.state == State.READY
        left = (event.detail or {}).get("left")
        return event.name == "parent_committed" and left == 0 and before == State.BLOCKED and event.state == State.READY

    def _wrong_move(self, event: Event, before: Any) -> None:
        came = "" if before is UNKNOWN else f" from {_state_name(before)}"
        self._report(7, f"{event.name} (state version {event.state_version}) leads{came} to {_state_name(event.state)}")

    def _check_numbers(self, event: Event) -> None:
        """Presented equals current: each number of the event is the one that the replayed record holds."""
        fields = self._fields
        for field, shown, says in (
            ("generation", event.generation, "generation"),
            ("epoch", event.epoch, "granted epoch"),
            ("cancel", event.cancel_generation, "cancel generation"),
            ("revision", event.revision, "revision"),
        ):
            if shown != fields[field]:
                broken = 2 if shown < fields[field] else 3
                self._report(
                    broken,
                    f"{event.name} (state version {event.state_version}) shows {says} {shown},"
                    f" the record stood at {fields[field]}",
                )
                fields[field] = shown
        if fields["attempt"] is not UNKNOWN and event.attempt_id != fields["attempt"]:
            self._report(
                3, f"{event.name} (state version {event.state_version}) is of another attempt than held the task"
            )
            fields["attempt"] = event.attempt_id

    def _check_graph(self, event: Event) -> None:
        left = self._open_parents
        if left > 0 and event.state in _RUNNABLE:
            self._report(
                5,
                f"was {_state_name(event.state)} at state version {event.state_version} with {left} parent(s) open",
            )
        elif left == 0 and event.state == State.BLOCKED:
            self._report(5, f"was BLOCKED at state version {event.state_version} with no parent open")

    # what each event changes --------------------------------------------------------------------

    def _on_submitted(self, event: Event, detail: dict[str, Any]) -> None:
        self._report(7, f"was submitted again at state version {event.state_version}")

    def _on_successor_added(self, event: Event, detail: dict[str, Any]) -> None:
        before, after = self._fields["successors"], detail.get("successors")
        if before is not UNKNOWN and isinstance(after, int) and after <= before:
            self._report(7, f"successors went from {before} to {after} at state version {event.state_version}")
        self._fields["successors"] = after if isinstance(after, int) else UNKNOWN

    def _on_attempt_started(self, event: Event, detail: dict[str, Any]) -> None:
        fields = self._fields
        if event.generation != fields["generation"] + 1:
            self._report(2, f"the generation steps from {fields['generation']} to {event.generation}")
        if event.epoch < max(1, fields["epoch"]):
            self._report(2, f"generation {event.generation} was granted under epoch {event.epoch} after a newer one")
        if event.attempt_id is None or event.attempt_id in self._seen or event.attempt_id == fields["attempt"]:
            self._report(2, f"generation {event.generation} has no attempt of its own")
        if event.attempt_id is not None:
            self._seen.add(event.attempt_id)
        self.starts[event.generation] = event.attempt_id
        fields.update(
            generation=event.generation,
            epoch=event.epoch,
            attempt=event.attempt_id,
            owner=detail.get("owner"),
            claimed_at=event.at,
            lease=detail.get("lease_us"),
            end=0,
            checkpoint=0,
        )

    def _on_attempt_renewed(self, event: Event, detail: dict[str, Any]) -> None:
        before, after = self._fields["lease"], detail.get("lease_us")
        if isinstance(before, int) and isinstance(after, int) and after < before:
            self._report(7, f"a renewal moved the lease's end back at state version {event.state_version}")
        self._fields["lease"] = after

    def _on_checkpoint_saved(self, event: Event, detail: dict[str, Any]) -> None:
        before, number = self._fields["checkpoint"], detail.get("number")
        if isinstance(before, int) and isinstance(number, int) and number <= before:
            self._report(7, f"checkpoint {number} was saved over {before} at state version {event.state_version}")
        self._fields.update(checkpoint=number, checkpoint_of=event.generation)

    def _on_result_committed(self, event: Event, detail: dict[str, Any]) -> None:
        self.commits.append(event)
        self._fields.update(lease=None, end=int(End.COMMITTED))

    def _on_attempt_ended(self, event: Event, detail: dict[str, Any]) -> None:
        fields = self._fields
        end = str(detail.get("end"))
        if end not in End.__members__ or end in ("NONE", "COMMITTED"):
            self._report(7, f"an attempt ended {end!r} at state version {event.state_version}")
            fields["end"] = UNKNOWN
        else:
            fields["end"] = int(End[end])
        if fields["charged"] is not UNKNOWN:
            fields["charged"] += bool(detail.get("charged"))
        fields["lease"] = None

    def _on_parent_committed(self, event: Event, detail: dict[str, Any]) -> None:
        self._open_parents -= 1
        parent, left = detail.get("parent"), detail.get("left")
        if not isinstance(parent, str) or parent in self.released_by:
            self._report(5, f"was counted down twice, or by nobody, for {parent!r}")
        else:
            self.released_by[parent] = event.at
        if left != self._open_parents:
            here = f"at state version {event.state_version}"
            self._report(5, f"{left} parent(s) are said to be open {here}, not {self._open_parents}")

    def _on_task_cancelled(self, event: Event, detail: dict[str, Any]) -> None:
        self._fields["cancel"] += 1
        self._fields["lease"] = None

    def _on_task_reopened(self, event: Event, detail: dict[str, Any]) -> None:
        self._fields["charged"] = 0

    def _on_input_revised(self, event: Event, detail: dict[str, Any]) -> None:
        self._fields["revision"] += 1
        self._fields.update(charged=0, checkpoint=0, checkpoint_of=0, digest=detail.get("input_digest", UNKNOWN))

    # the record ---------------------------------------------------------------------------------

    def _compare(self) -> None:
        """The record, field by field, against what the events say."""
        task, fields = self.task, self._fields
        if fields["state"] != task.state:
            self._report(
                7, f"the record is {_state_name(task.state)}, its journal ends with {_state_name(fields['state'])}"
            )
        for field, shown, says in (
            ("generation", task.claim_generation, "claim generation"),
            ("cancel", task.cancel_generation, "cancel generation"),
            ("revision", task.revision, "revision"),
            ("epoch", task.scheduler_epoch, "scheduler epoch"),
            ("owner", task.owner_id, "owner"),
            ("claimed_at", task.claimed_at, "time of the claim"),
            ("lease", task.lease_expires_at, "lease's end"),
            ("charged", task.charged_attempts, "charged attempts"),
            ("end", task.end, "end of the latest attempt"),
            ("checkpoint", task.checkpoint_number, "checkpoint number"),
            ("checkpoint_of", task.checkpoint_generation, "checkpoint's generation"),
            ("successors", task.successors, "successors"),
            ("digest", task.input_digest, "input digest"),
        ):
            expected = fields[field]
            if expected is not UNKNOWN and expected != shown:
                self._report(7, f"the record's {says} is {shown!r}, its journal says {expected!r}")
        if fields["attempt"] is not UNKNOWN and fields["attempt"] != task.attempt_id:
            self._report(7, "the record's attempt is not the one that its journal names")


def _state_name(state: Any) -> str:
    return State(state).name if state in State._value2member_map_ else f"state {state!r}"
