"""A pool's commands: intake, epoch, policy. Compare-and-swap on the pool's own record (claim.v1, sections 4 and 7)."""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.kernel import commands as k
from fencepost.kernel.fence import FOUND_POOL, Compare, Context, Guard, refuse_epoch
from fencepost.kernel.operations import Accepted, Operation, guarded, remember, repeat_guard, speaker
from fencepost.kernel.outcomes import Outcome, Problem, Reason, Refusal
from fencepost.kernel.records import LogEntry, Pool
from fencepost.kernel.writes import Decision, Proof, WriteSet

_replace = msgspec.structs.replace


def _protocol(c: Context) -> Any:
    if c.command.expected_epoch is None:
        return Refusal(Outcome.PROTOCOL, Reason.MISSING_EPOCH, {"min_protocol": c.pool.min_protocol})
    if c.command.protocol < c.pool.min_protocol:
        return Refusal(
            Outcome.PROTOCOL, Reason.OLD_PROTOCOL, {"min_protocol": c.pool.min_protocol, "protocol": c.command.protocol}
        )
    return None


def _epoch(c: Context) -> Any:
    if c.command.expected_epoch != c.pool.epoch:
        return refuse_epoch(c.command.expected_epoch, c.pool.epoch)
    return None


_said_before = repeat_guard("pool")


def _repeated(c: Context) -> Any:
    """What was done is said again, with the pool as it stands now."""
    found = _said_before(c)
    if isinstance(found, Decision):
        return _replace(found, answer=_replace(found.answer, info={"pool": c.pool}))
    return found


def _version(c: Context) -> Any:
    expected = c.command.expected_state_version
    if expected is None and isinstance(c.command, k.CloseIntake):
        return None  # closing gives nobody a right, and must not fail because somebody else was quicker
    if expected != c.pool.state_version:
        return Refusal(
            Outcome.CONFLICT, Reason.VERSION, {"state_version": c.pool.state_version, "intake_open": c.pool.intake_open}
        )
    return None


def _raise_to(c: Context) -> Any:
    if c.command.to is not None and c.command.to <= c.pool.epoch:
        return Problem("INVALID", "to", f"must be above the current epoch {c.pool.epoch}")
    return None


def _write(c: Context, proof: Proof, outcome: Outcome, **fields: Any) -> Decision:
    pool = _replace(c.pool, state_version=c.pool.state_version + 1, **fields)
    writes = guarded(c, proof)
    writes.pool_write = (c.pool.state_version, pool)
    detail = {
        "who": c.command.who,
        "epoch": pool.epoch,
        "state_version": pool.state_version,
        "compared": proof.compared,
    }
    writes.log.append(LogEntry("pool", c.now, pool.name, None, "pool", outcome.value, None, None, None, detail))
    remember(c, writes, "pool", speaker(c), {"outcome": outcome.value, "info": {}})
    return Decision(Accepted(outcome, None, {"pool": pool}), writes)


def _close_act(c: Context, proof: Proof) -> Decision:
    if not c.pool.intake_open:
        return Decision(Accepted(Outcome.INTAKE_CLOSED, None, {"pool": c.pool}, changed=False))
    return _write(c, proof, Outcome.INTAKE_CLOSED, intake_open=False)


def _open_act(c: Context, proof: Proof) -> Decision:
    if c.pool.intake_open:
        return Decision(Accepted(Outcome.INTAKE_OPENED, None, {"pool": c.pool}, changed=False))
    return _write(c, proof, Outcome.INTAKE_OPENED, intake_open=True)


def _raise_act(c: Context, proof: Proof) -> Decision:
    to = c.command.to if c.command.to is not None else c.pool.epoch + 1
    return _write(c, proof, Outcome.EPOCH_RAISED, epoch=to)


def _policy_act(c: Context, proof: Proof) -> Decision:
    return _write(c, proof, Outcome.POLICY_SET, policy=c.command.policy)


def _create_act(c: Context, proof: Proof) -> Decision:
    if c.pool is not None:
        return Decision(Accepted(Outcome.POOL_CREATED, None, {"pool": c.pool}, changed=False))
    pool = Pool(c.command.pool, policy=c.command.policy)
    writes = WriteSet(proof, pool.name, None)
    writes.pool_write = (0, pool)
    detail = {"who": c.command.who, "epoch": pool.epoch, "state_version": pool.state_version}
    writes.log.append(
        LogEntry("pool", c.now, pool.name, None, "pool", Outcome.POOL_CREATED.value, None, None, None, detail)
    )
    return Decision(Accepted(Outcome.POOL_CREATED, None, {"pool": pool}), writes)


POOL_GUARDS = (
    FOUND_POOL,
    Guard(
        "pool:no-epoch-or-old-protocol:protocol",
        Compare.PROTOCOL,
        _protocol,
        "an epoch is presented, and the protocol is at least the pool's minimum",
    ),
    Guard("pool:other-epoch:fenced", Compare.EPOCH, _epoch, "presented epoch = the pool's"),
    Guard("pool:repeated:said-again", 0, _repeated, "the request id is new"),
    Guard("pool:other-version:conflict", Compare.VERSION, _version, "the pool stands at the expected state version"),
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(k.CloseIntake, "pool", POOL_GUARDS, _close_act),
    Operation(k.OpenIntake, "pool", POOL_GUARDS, _open_act),
    Operation(
        k.RaiseEpoch,
        "pool",
        (*POOL_GUARDS, Guard("pool:raise-not-above:invalid", 0, _raise_to, "the new epoch is above the current one")),
        _raise_act,
    ),
    Operation(k.SetPolicy, "pool", POOL_GUARDS, _policy_act),
    Operation(k.CreatePool, "pool", (), _create_act),
)
