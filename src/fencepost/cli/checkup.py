"""What `fencepost doctor` looks at, one thing after another; what a later check needs and an earlier one found broken
is left out."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import apsw
import msgspec

from fencepost import clock, config
from fencepost.cli import output
from fencepost.cli.session import database, is_postgres
from fencepost.errors import FencepostError, StoreRefused
from fencepost.kernel.records import PROTOCOL

OK, WARN, FAIL = "ok", "warn", "fail"
LEAST_PYTHON = (3, 11)
# Two connections that write one WAL could corrupt it in these releases of SQLite.
BROKEN_WAL = ((3, 7, 0), (3, 51, 2))
CLOCK_TOLERANCE = 1.0  # seconds
LEAST_FREE_BYTES = 256 << 20
LEAST_POSTGRES = 15
LONG_TRANSACTION = 300.0  # seconds


class Check(msgspec.Struct, frozen=True):
    name: str
    verdict: str
    says: str


async def examine(url: str) -> tuple[list[Check], int]:
    """Every check in order, and the exit code: 1 where one fails, 3 where there is no database, else 0."""
    found = [_python(), _sqlite()]
    path = database(url)
    if path is not None and not path.exists():
        found.append(Check("database", FAIL, f"no database at {path}; run `fencepost init` or `fencepost submit`"))
        return found, output.UNAVAILABLE
    if path is not None:
        found += [_file_system(path), _free_space(path), await _schema(path)]
    if is_postgres(url):
        found.append(await _schema(url))
    found += await _store(url)
    failed = any(check.verdict == FAIL for check in found)
    return found, output.REFUSED if failed else output.DONE


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < LEAST_PYTHON:
        return Check("python", FAIL, f"{version}; 3.11 or newer is needed")
    return Check("python", OK, f"{version} on {platform.system()}")


def _sqlite() -> Check:
    version = apsw.sqlite_lib_version()
    number = tuple(int(part) for part in version.split(".")[:3])
    if BROKEN_WAL[0] <= number <= BROKEN_WAL[1]:
        return Check("sqlite", FAIL, f"{version} can corrupt a WAL that two connections write; upgrade apsw")
    return Check("sqlite", OK, f"{version} (apsw {apsw.apsw_version()})")


def _file_system(path: Path) -> Check:
    from fencepost.stores.sqlite_file import file_system_of, is_shared, locate

    name = file_system_of(locate(path))
    if name is None:
        return Check("file system", WARN, "cannot be found out; WAL is safe on local disks only")
    if is_shared(name):
        return Check("file system", FAIL, f"{name} is shared between hosts: WAL is not safe there; use a local disk")
    if name in ("tmpfs", "ramfs"):
        return Check("file system", WARN, f"{name}: nothing on it survives a restart of the machine")
    return Check("file system", OK, name)


def _free_space(path: Path) -> Check:
    free = shutil.disk_usage(path.resolve().parent).free
    return Check("disk", OK if free >= LEAST_FREE_BYTES else WARN, f"{free / (1 << 30):.1f} GiB free")


async def _schema(where: Path | str) -> Check:
    try:
        if isinstance(where, str):
            from fencepost.stores import postgres

            steps = await postgres.migration_status(where)
        else:
            from fencepost.stores import sqlite

            steps = await sqlite.migration_status(where)
    except FencepostError as error:
        return Check("schema", FAIL, str(error))
    have = max((step.version for step in steps if step.applied_at is not None), default=0)
    pending = [step for step in steps if step.applied_at is None]
    if any(step.step == "pre" for step in pending):
        return Check("schema", FAIL, f"{have}, {len(pending)} steps pending: run `fencepost migrate`")
    if pending:
        return Check("schema", WARN, f"{have}, {len(pending)} later steps pending: run `fencepost migrate` when no "
                     "older fencepost uses this database")  # fmt: skip
    return Check("schema", OK, str(have))


async def _store(url: str) -> list[Check]:
    from fencepost.connect import connect

    try:
        client = await connect(url, create=False)
    except StoreRefused as error:
        return [Check("store", FAIL, str(error))]
    except FencepostError as error:
        return [Check("store", FAIL, f"cannot be opened: {error}")]
    try:
        report: dict[str, Any] = await client.report("doctor")
    except FencepostError as error:
        return [Check("store", FAIL, f"cannot be read: {error}")]
    finally:
        await client.close()
    found = [Check("store", OK, f"{config.without_password(url)} opens")]
    if (integrity := report.get("quick_check")) is not None:
        sound = integrity == "ok"
        found.append(
            Check("integrity", OK if sound else FAIL, "sound" if sound else "; ".join(map(str, integrity))[:500])
        )
    if (mode := report.get("journal_mode")) is not None:
        durable = mode == "wal" and report.get("synchronous") == 2
        found.append(Check("durability", OK if durable else WARN, f"{mode}, synchronous {report.get('synchronous')}"))
    if report["store"] == "postgres":
        found += _postgres(report)
    found.append(_clock(report["clock"]))
    found += [_pool(pool) for pool in report["pools"]]
    return found


def _postgres(report: dict[str, Any]) -> list[Check]:
    """The server's version, what durability rests on, the pooler, and who keeps dead rows from being removed."""
    version = str(report["server_version"])
    newest = int(version.partition(".")[0].partition(" ")[0])
    found = [
        Check("server", OK, f"PostgreSQL {version}")
        if newest >= LEAST_POSTGRES
        else Check("server", FAIL, f"PostgreSQL {version}; {LEAST_POSTGRES} or newer is needed")
    ]
    settings = ", ".join(f"{name} {report[name]}" for name in ("fsync", "synchronous_commit", "full_page_writes"))
    found.append(Check("durability", OK if report["durable"] else WARN, settings))
    counts = report["track_counts"] == "on"
    says = "is on" if counts else "is off: commits that bring statements are refused, and autovacuum is told of nothing"
    found.append(Check("statements", OK if counts else WARN, f"track_counts {says}"))
    found.append(Check("connections", OK, f"{report['pool_size']} for work"))
    found += [_pooler(report), _role(report)]
    oldest = report["oldest_transaction_seconds"] or 0.0
    dead = sum(table["dead_rows"] for table in report["tables"].values())
    says = f"{dead} dead rows, oldest transaction {oldest:.0f} s"
    found.append(
        Check("vacuum", OK, says)
        if oldest < LONG_TRANSACTION
        else Check("vacuum", WARN, f"{says}: while it is open, nothing that died since can be removed")
    )
    return found


def _pooler(report: dict[str, Any]) -> Check:
    if report["pgbouncer"] and not report["pooler"]:
        return Check("pooler", WARN, "pgbouncer=true, but none stands between: without it every statement costs less")
    if report["pooler"] and not report["pgbouncer"]:
        return Check("pooler", FAIL, "something hands out server processes: say pgbouncer=true in the URL")
    return Check("pooler", OK, "in transaction mode" if report["pooler"] else "none")


def _role(report: dict[str, Any]) -> Check:
    user, role = report["user"], report["role"]
    if role == "none":
        missing = ", ".join(report["missing_rights"])
        return Check("role", FAIL, f"{user} lacks {missing}; see `fencepost migrate --roles`")
    says = {
        "owner": "owns the schema: it may migrate, operate and work; workers need less (fencepost migrate --roles)",
        "operator": "may work, change pools and prune; not migrate",
        "worker": "may work; not change pools, prune or migrate",
    }
    return Check("role", OK, f"{user} {says[role]}")


def _clock(store_us: int) -> Check:
    ahead = (store_us - clock.wall_us()) / clock.MICROSECOND
    if ahead > CLOCK_TOLERANCE:
        return Check(
            "clock",
            WARN,
            f"this machine's clock is {output.span(ahead)} behind the newest time stored: it was set back, or was once "
            "set ahead. Leases go by the stored time until it catches up",
        )
    return Check("clock", OK, f"{output.at(clock.to_datetime(store_us))} UTC")


def _pool(pool: Any) -> Check:
    says = f"pool {pool.name}: epoch {pool.epoch}, intake {pool.intake}"
    if pool.min_protocol > PROTOCOL:
        return Check("epoch", FAIL, f"{says}; wants protocol {pool.min_protocol}, this release speaks {PROTOCOL}")
    if pool.intake != "OPEN":
        return Check("epoch", WARN, f"{says}: nothing can be claimed; `fencepost pool open-intake {pool.name}`")
    return Check("epoch", OK, says)
