"""Side effects in the memory store. Whoever calls here holds the store's lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from fencepost.errors import Inconsistent
from fencepost.kernel.records import Content, Effect, EffectState
from fencepost.kernel.writes import Keys, Snapshot, WriteSet
from fencepost.stores import codec
from fencepost.stores.base import EffectFilter

_replace = msgspec.structs.replace
_OPEN = (EffectState.AWAITING_APPROVAL, EffectState.UNKNOWN)

Place = tuple[str, int]  # (task id, number)


class MemoryEffects:
    def __init__(self) -> None:
        self.rows: dict[str, dict[int, Effect]] = {}  # by task id and number
        self.bound: dict[Place, Content] = {}  # payloads; `codec.pruned` once they were

    def load(self, keys: Keys, into: Snapshot) -> None:
        for task_id in keys.effects:
            into.effects[task_id] = self.of(task_id)
        if keys.payloads:
            into.payloads.update(self.payloads(list(keys.payloads)))

    def check(self, writes: WriteSet) -> None:
        """Before anything of `writes` is written: a payload is bound once, for good."""
        for task_id, number, _ in writes.payloads if "payloads" in writes.made else ():
            if (task_id, number) in self.bound:
                raise Inconsistent(f"effect {number} of task {task_id!r} has its payload already; run fencepost audit")

    def apply(self, writes: WriteSet) -> None:
        for effect in writes.effects if "effects" in writes.made else ():
            self.rows.setdefault(effect.task_id, {})[effect.number] = effect
        for task_id, number, payload in writes.payloads if "payloads" in writes.made else ():
            self.bound[(task_id, number)] = payload

    def of(self, task_id: str) -> list[Effect]:
        found = self.rows.get(task_id)
        return [] if found is None else [found[number] for number in sorted(found)]

    def payloads(self, places: Sequence[Place]) -> dict[Place, Content]:
        found = {place: self.bound[place] for place in places if place in self.bound}
        return {place: payload for place, payload in found.items() if not codec.is_pruned(payload)}

    def digests(self, effects: Sequence[Effect]) -> dict[int, str]:
        places = [(effect.task_id, effect.number) for effect in effects]
        return {place[1]: self.bound[place].digest for place in places if place in self.bound}

    def listed(self, where: EffectFilter, after: Place | None, limit: int) -> list[Effect]:
        return [
            effect
            for effect in (self._all() if where.task_id is None else self.of(where.task_id))
            if (after is None or (effect.task_id, effect.number) > after)
            and (where.pool is None or effect.pool == where.pool)
            and (not where.states or effect.state in where.states)
            and (where.guarantee is None or effect.terms.guarantee == where.guarantee)
            and (where.downstream is None or effect.terms.downstream == where.downstream)
        ][:limit]

    def _all(self) -> Iterator[Effect]:
        for task_id in sorted(self.rows):
            yield from self.of(task_id)

    def backlog(self) -> list[tuple[str, str, int, int, int]]:
        since: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for effect in self._all():
            if effect.state in _OPEN:
                key = (effect.pool, effect.terms.guarantee, int(effect.state))
                since[key].append(effect.first_prepared_at)
        return [(*key, len(times), min(times)) for key, times in sorted(since.items())]

    def prune(self, task_id: str, removed: dict[str, int]) -> None:
        for effect in self.of(task_id):
            if effect.state in _OPEN:
                continue
            place = (task_id, effect.number)
            payload, receipt = self.bound.get(place), effect.receipt
            if payload is not None and not codec.is_pruned(payload):
                self.bound[place] = codec.pruned(payload)
                removed["payloads"] += 1
            if receipt is not None and not codec.is_pruned(receipt):
                receipt = codec.pruned(receipt)
                removed["receipts"] += 1
            evidence = tuple(_replace(one, receipt=None) for one in effect.evidence)
            self.rows[task_id][effect.number] = _replace(effect, receipt=receipt, evidence=evidence)
