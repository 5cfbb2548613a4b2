"""Who may do what on PostgreSQL: the grants for workers and operators, and what the user of a connection may do.

Whoever ran the migrations owns the schema. The grants name every table: one that a later migration adds is nobody's
until they are run again.
"""

from __future__ import annotations

import textwrap
from typing import Any

from fencepost.stores import codec
from fencepost.stores.postgres_apply import CHANGED, EFFECT_CHANGED
from fencepost.stores.postgres_connections import Connection
from fencepost.stores.postgres_rows import listed

WORKER = "fencepost_worker"
OPERATOR = "fencepost_operator"

_UPSERTED = {
    "checkpoint": codec.CHECKPOINT_COLUMNS[1:],
    "input": codec.INPUT_COLUMNS[1:],
    "request": codec.REQUEST_COLUMNS[1:],
}
# (privilege, its columns or all, table): beside SELECT, which is on every table. The journal (event, log), what was
# committed (result) and the payloads of effects are inserted only, and so is what an effect is bound to.
_WORK: tuple[tuple[str, tuple[str, ...], str], ...] = (
    *(
        ("INSERT", (), table)
        for table in ("task", "event", "log", "result", "request", "input", "dependency", "checkpoint", "staged")
    ),
    ("INSERT", (), "effect"),
    ("INSERT", (), "effect_payload"),
    ("UPDATE", CHANGED, "task"),
    ("UPDATE", ("state",), "staged"),
    ("UPDATE", EFFECT_CHANGED, "effect"),
    *(("UPDATE", tuple(columns), table) for table, columns in _UPSERTED.items()),
    ("DELETE", (), "checkpoint"),
)
_OPERATE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("INSERT", (), "pool"),
    ("UPDATE", ("pruned_to_version",), "task"),
    ("UPDATE", ("data",), "result"),
    ("UPDATE", ("data",), "effect_payload"),
    *(("DELETE", (), table) for table in ("event", "log", "request", "input", "staged")),
)

CLOSE_INTAKE = "fencepost.close_intake(text, bigint)"
_CLOSING = (
    "CREATE OR REPLACE FUNCTION fencepost.close_intake(pool_name text, expected_version bigint) RETURNS boolean",
    "    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$",
    "    UPDATE fencepost.pool SET intake_open = 0, state_version = state_version + 1",
    "    WHERE name = pool_name AND state_version = expected_version AND intake_open = 1 RETURNING true $$;",
    f"REVOKE ALL ON FUNCTION {CLOSE_INTAKE} FROM PUBLIC;",
    "DO $$ BEGIN EXECUTE format('ALTER FUNCTION fencepost.close_intake(text, bigint) OWNER TO %s', (SELECT",
    "    relowner::regrole FROM pg_class WHERE oid = 'fencepost.pool'::regclass)); END $$;",
)


def roles_sql() -> str:
    """SQL for psql: makes the two roles, and grants each what it needs and nothing else. May be run again."""
    lines = [
        "-- Run this in fencepost's database, as the owner of its schema, who must be allowed to create roles.",
        "-- Run it again after each migration. Users who log in become members:  GRANT fencepost_worker TO somebody;",
        "BEGIN;",
        "SET LOCAL lock_timeout = '5s';",
        *(
            f"DO $$ BEGIN IF to_regrole('{role}') IS NULL THEN CREATE ROLE {role} NOLOGIN; END IF; END $$;"
            for role in (WORKER, OPERATOR)
        ),
        f"REVOKE ALL ON SCHEMA fencepost FROM PUBLIC, {WORKER}, {OPERATOR};",
        f"REVOKE ALL ON ALL TABLES IN SCHEMA fencepost FROM PUBLIC, {WORKER}, {OPERATOR};",
        "",
        "-- Workers, and whoever submits, cancels, asks: the journal and committed results can only be added to.",
        f"GRANT USAGE ON SCHEMA fencepost TO {WORKER};",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA fencepost TO {WORKER};",
        *_grants(_WORK, WORKER),
        "",
        "-- Each batch locks the pool's row, which takes the right to update something in it. The policy lets workers",
        "-- lock it, and refuses every change.",
        f"GRANT UPDATE (stage) ON fencepost.pool TO {WORKER};",
        "ALTER TABLE fencepost.pool ENABLE ROW LEVEL SECURITY;",
        *_policy("fencepost_read", "SELECT", WORKER, "USING (true)"),
        *_policy("fencepost_lock", "UPDATE", WORKER, "USING (true) WITH CHECK (false)"),
        "",
        "-- But one: a process that finds proof that the store went back in time closes the intake. A function closes",
        "-- it, as it was seen, and does nothing else. Who may write every task's record can stop a pool without it.",
        *_CLOSING,
        f"GRANT EXECUTE ON FUNCTION {CLOSE_INTAKE} TO {WORKER};",
        "",
        "-- Operators, beside that: pools, their epochs and policies; prune.",
        f"DO $$ BEGIN IF NOT pg_has_role('{OPERATOR}', '{WORKER}', 'MEMBER') THEN",
        f"    GRANT {WORKER} TO {OPERATOR}; END IF; END $$;",
        *_grants(_OPERATE, OPERATOR),
        f"GRANT UPDATE ON fencepost.pool TO {OPERATOR};",
        *_policy("fencepost_operate", "ALL", OPERATOR, "USING (true) WITH CHECK (true)"),
        "COMMIT;",
    ]
    return "\n".join(lines) + "\n"


def _grants(rights: tuple[tuple[str, tuple[str, ...], str], ...], role: str) -> list[str]:
    lines: list[str] = []
    for what, columns, table in rights:
        line = f"GRANT {what}{f' ({listed(columns)})' if columns else ''} ON fencepost.{table} TO {role};"
        lines += textwrap.wrap(line, 110, subsequent_indent="    ", break_long_words=False)
    return lines


def _policy(name: str, command: str, role: str, rule: str) -> list[str]:
    return [
        f"DROP POLICY IF EXISTS {name} ON fencepost.pool;",
        f"CREATE POLICY {name} ON fencepost.pool FOR {command} TO {role} {rule};",
    ]


async def describe_user(con: Connection) -> dict[str, Any]:
    """`role`: owner, operator, worker, or none where rights to work are missing, which `missing_rights` names;
    `pooler`: whether something stands between, which gives this connection another server process."""
    rights = {"worker": _WORK, "operator": _OPERATE}
    missing: dict[str, list[str]] = {}
    for name, wanted in rights.items():
        missing[name] = [
            f"{what} on {table}" for what, columns, table in wanted if not await _may(con, what, columns, table)
        ]
    if not await con.fetchval("SELECT has_any_column_privilege('fencepost.pool', 'UPDATE')"):
        missing["worker"].append("UPDATE on pool")
    owner = await con.fetchval(
        "SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class c WHERE c.oid = 'fencepost.task'::regclass"
    )
    role = "owner" if owner else "none" if missing["worker"] else "worker" if missing["operator"] else "operator"
    return {
        "role": role,
        "missing_rights": missing["worker"],
        "pooler": con.get_server_pid() != await con.fetchval("SELECT pg_backend_pid()"),
    }


async def _may(con: Connection, what: str, columns: tuple[str, ...], table: str) -> bool:
    if not columns:
        return bool(await con.fetchval("SELECT has_table_privilege($1, $2)", f"fencepost.{table}", what))
    return bool(
        await con.fetchval(
            "SELECT bool_and(has_column_privilege($1, name, $2)) FROM unnest($3::text[]) name",
            f"fencepost.{table}",
            what,
            list(columns),
        )
    )
