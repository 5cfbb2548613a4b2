"""The command line on a PostgreSQL URL: the same commands."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from fencepost.stores.postgres_migrations import shipped
from tests.postgres.server import Server


async def run(*arguments: str, code: int = 0) -> Any:
    """What the command prints with --json."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fencepost",
        *arguments,
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code, (process.returncode, out, err)
    return json.loads(out) if out else None


async def test_migrate_doctor_submit_and_audit(server: Server) -> None:
    name = await server.new_database()
    url = server.url(name)
    try:
        steps = await run("migrate", "--dry-run", "--store", url)
        assert "CREATE TABLE fencepost.task" in steps["applied"][0]["sql"]
        assert (await run("migrate", "status", "--store", url))["pending"] == len(shipped())
        await run("migrate", "--store", url, code=3)  # makes no schema where there is none
        await run("submit", "--input", '{"n": 1}', "--store", url)
        assert (await run("migrate", "--store", url))["applied"] == []
        found = {check["name"]: check for check in (await run("doctor", "--store", url))["checks"]}
        assert all(check["verdict"] == "ok" for check in found.values()), found
        assert {"server", "durability", "connections", "vacuum", "schema", "clock"} <= set(found)
        assert (await run("audit", "--store", url))["clean"] is True
    finally:
        await server.drop_database(name)
