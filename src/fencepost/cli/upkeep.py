"""Looking after a store: `migrate`, `prune`, `doctor`."""

from __future__ import annotations

from typing import Any

from cyclopts import App, Group

from fencepost import clock
from fencepost.cli import output
from fencepost.cli.checkup import Check, examine
from fencepost.cli.session import Options, database, is_postgres, opened, require_database
from fencepost.errors import InvalidRequest


async def migrate(
    *, dry_run: bool = False, create: bool = False, roles: bool = False, options: Options | None = None
) -> int:
    """Bring the database's schema to this release's. `migrate status` only looks.

    Every step is a transaction of its own. A database that is missing, or has no fencepost schema, is exit code 3.

    JSON: {"applied": [{"version", "step", "name", "sql"}], "dry_run"}; with --dry-run, what would be applied;
    with --roles {"sql"}.

    Parameters
    ----------
    dry_run
        Print what would be done, with its SQL, and change nothing.
    create
        PostgreSQL: make the schema in a database that has none.
    roles
        PostgreSQL: print the SQL that makes the roles for workers and operators, and do nothing else.
    """
    options = options or Options()
    if roles or create:
        if not is_postgres(options.url):
            raise InvalidRequest("--roles" if roles else "--create", "is for PostgreSQL")
    if roles:
        from fencepost.stores.postgres_roles import roles_sql

        if options.as_json:
            output.emit({"sql": roles_sql()})
        else:
            output.say(roles_sql().rstrip())
        return output.DONE
    store, where = _schema_of(options)
    done = await store.migrate(where, dry_run, **({"create": True} if create else {}))
    if options.as_json:
        output.emit({"applied": done, "dry_run": dry_run})
        return output.DONE
    for step in done:
        output.say(f"{'would apply' if dry_run else 'applied'} {step.version:04} {step.step} {step.name}")
        if dry_run:
            output.say(step.sql.rstrip())
    if not done:
        output.say("nothing to do: the schema is this release's")
    return output.DONE


async def migrate_status(*, options: Options | None = None) -> int:
    """Which steps of the schema are applied, and which are pending.

    JSON: {"items": [{"version", "step", "name", "applied_at"}], "pending": how many}.
    """
    options = options or Options()
    store, where = _schema_of(options)
    steps = await store.migration_status(where)
    pending = sum(step.applied_at is None for step in steps)
    if options.as_json:
        items = [
            {
                "version": step.version,
                "step": step.step,
                "name": step.name,
                "applied_at": None if step.applied_at is None else clock.to_datetime(step.applied_at),
            }
            for step in steps
        ]
        output.emit({"items": items, "pending": pending})
        return output.DONE
    output.show_table(
        ("version", "step", "name", "applied"),
        [
            (
                f"{step.version:04}",
                step.step,
                step.name,
                "pending" if step.applied_at is None else clock.to_datetime(step.applied_at),
            )
            for step in steps
        ],
    )
    if pending:
        output.note(f"{pending} pending: run `fencepost migrate`", style="yellow")
    return output.DONE


def _schema_of(options: Options) -> tuple[Any, str]:
    """The module that knows the store's schema, and how it is called where that stands."""
    if is_postgres(options.url):
        from fencepost.stores import postgres

        return postgres, options.url
    path = database(options.url)
    if path is None:
        raise InvalidRequest("store", "has no schema to migrate: only SQLite files and PostgreSQL have one")
    require_database(options.url)
    from fencepost.stores import sqlite

    return sqlite, str(path)


async def prune(*, older_than: float | None = None, options: Options | None = None) -> int:
    """Remove bodies and journal entries of tasks that ended long ago. Ids, digests, generations and result commits
    stay for ever, so that a late caller is still refused.

    JSON: {"removed": {what: how many}}.

    Parameters
    ----------
    older_than
        Seconds since their end. Default: the pools' longest retention.
    """
    options = options or Options()
    async with opened(options) as client:
        with output.busy("pruning …"):
            removed: dict[str, int] = await client.report("prune", older_than=older_than)
    if options.as_json:
        output.emit({"removed": removed})
        return output.DONE
    for what, count in removed.items():
        output.say(f"{what.replace('_', ' '):<16} {count}")
    if not any(removed.values()):
        output.say("nothing to prune")
    return output.DONE


async def doctor(*, options: Options | None = None) -> int:
    """Look at everything that fencepost stands on: Python, SQLite, file system, clock, schema, epochs.

    Exit code 1 when something fails, 3 when there is no database to look at. Changes nothing.

    JSON: {"ok", "checks": [{"name", "verdict", "says"}]}; a verdict is ok, warn or fail.
    """
    options = options or Options()
    with output.busy("looking …"):
        found, code = await examine(options.url)
    if options.as_json:
        output.emit({"ok": code == output.DONE, "checks": found})
        return code
    for check in found:
        _print(check)
    return code


def _print(check: Check) -> None:
    line: Any = output.word(f"{check.verdict:<5}")
    line.stylize(output.STYLES.get(check.verdict, ""))
    line.append(f"{check.name:<12} {output.clean(check.says)}", style="default")
    output.say(line)


def add_to(app: App, group: Group) -> None:
    schema = App(name="migrate", help="Bring the database's schema to this release's.", group=group)
    schema.default(migrate)
    schema.command(migrate, name="up")
    schema.command(migrate_status, name="status")
    app.command(schema)
    app.command(prune, group=group)
    app.command(doctor, group=group)
