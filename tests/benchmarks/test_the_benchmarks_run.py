"""Each script runs, says in JSON what it promises, and measures what its name says."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import backlog
import backlog_postgres
import kernel
import pytest

import fencepost
from tests.postgres.databases import running_or_skip

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60  # seconds for one script


def run(script: str, *arguments: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--json", "--repeat", "1", "--folder", str(folder)]
    found = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=BOUND, check=False)
    assert found.returncode == 0, found.stderr
    said: dict[str, Any] = json.loads(found.stdout)
    return said


def test_cycle_says_cycles_and_the_ratio_to_the_bare_loop_by_callers(tmp_path: Path) -> None:
    found = run("cycle.py", "--store", "sqlite", "--callers", "1,16", "--cycles", "64", folder=tmp_path)

    for kind in ("cycles_per_s", "ratio_to_bare", "bare_cycles_per_s", "cpu_us_per_cycle"):
        assert set(found[kind]) == {"1", "16"}
        assert all(value > 0 for value in found[kind].values())
    assert found["durable"] == "WAL, synchronous=FULL"
    assert {"cores", "processor", "python", "sqlite", "file_system"} <= set(found["machine"])
    assert list(tmp_path.iterdir()) == []


def test_cycle_measures_the_memory_store_without_a_yardstick(tmp_path: Path) -> None:
    found = run("cycle.py", "--store", "memory", "--callers", "16", "--cycles", "64", folder=tmp_path)

    assert found["cycles_per_s"]["16"] > 0
    assert "ratio_to_bare" not in found


def test_effects_says_what_one_costs_in_cycles(tmp_path: Path) -> None:
    found = run("effects.py", "--callers", "16", "--cycles", "64", folder=tmp_path)

    assert set(found["cycle_us"]) == set(found["effect_us"]) == set(found["ratio_to_cycle"]) == {"16"}
    assert found["cycle_us"]["16"] > 0
    assert found["goal"] == 1.5
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that another user may enter, as a server that root starts has to; pytest's own it may not."""
    running_or_skip()
    with tempfile.TemporaryDirectory(prefix="fencepost-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.slow
def test_cycle_on_postgresql_says_cycles_and_the_ratios_to_pgbench_by_callers(open_folder: Path) -> None:
    arguments = ("--store", "postgres", "--with-pgbench", "--callers", "2,16", "--cycles", "512")
    found = run("cycle.py", *arguments, folder=open_folder)

    shown = ("cycles_per_s", "ratio_to_pgbench_single", "ratio_to_pgbench_batched", "cpu_us_per_cycle", "p99_ms")
    for kind in (*shown, "wal_bytes_per_cycle"):
        assert set(found[kind]) == {"2", "16"}
        assert all(value > 0 for value in found[kind].values())
    assert found["server"]["fsync"] == found["server"]["synchronous_commit"] == "on"
    assert list(open_folder.iterdir()) == []


@pytest.mark.slow
def test_submit_on_postgresql_says_tasks_per_second_and_the_share_of_hashing(open_folder: Path) -> None:
    found = run("submit.py", "--store", "postgres", "--tasks", "200", "--batch", "100", folder=open_folder)

    assert found["tasks_per_s"] > 0
    assert 0 < found["share_of_hashing"] < 1


@pytest.mark.soak
def test_idle_says_what_idle_workers_cost_what_a_new_task_wakes_and_how_soon_it_begins(open_folder: Path) -> None:
    crowd = ("--processes", "2", "--workers", "3", "--seconds", "2", "--tasks", "5")
    found = run("idle.py", "--store", "postgres", *crowd, folder=open_folder)

    assert 0 < found["statements_per_s_per_process"] < 5
    assert found["looks_per_new_task"]["median"] >= 1
    for one in ("latency", "latency_of_one_worker"):
        assert 0 < found[one]["p50_ms"] <= found[one]["p95_ms"]
    assert list(open_folder.iterdir()) == []


def test_submit_says_tasks_per_second(tmp_path: Path) -> None:
    found = run("submit.py", "--tasks", "200", "--batch", "100", folder=tmp_path)

    assert found["tasks_per_s"] > 0
    assert found["batch"] == 100


def test_a_decision_of_the_kernel_is_timed_for_each_kind_of_answer(tmp_path: Path) -> None:
    found = run("kernel.py", "--times", "100", folder=tmp_path)

    assert set(found["median_us"]) == {"claim", "renew", "commit", "refusal"}
    assert set(kernel.decisions()) == set(found["median_us"])


def test_backlog_says_what_a_cycle_costs_beside_each(tmp_path: Path) -> None:
    found = run("backlog.py", "--rows", "500", "--cycles", "32", folder=tmp_path)

    assert set(found["ratio_to_empty"]) == {"finished", "ready", "other_kind"}
    assert found["rows"] == {"finished": 500, "ready": 500, "other_kind": 500}


@pytest.mark.parametrize(
    ("name", "state", "kind", "records"),
    [("finished", 6, "default", 3), ("ready", 1, "default", 1), ("other_kind", 1, "nobody", 1)],
)
async def test_a_backlog_is_of_whole_tasks_in_the_state_that_it_names(
    tmp_path: Path, name: str, state: int, kind: str, records: int
) -> None:
    path = tmp_path / "full.db"
    await backlog.prepare(path, name, 50, 10)
    con = apsw.Connection(str(path))
    copies = "FROM task WHERE task_id GLOB '????????-????????????'"

    assert con.execute(f"SELECT count(*), min(state), max(state), min(kind), max(kind) {copies}").get == (
        (50, state, state, kind, kind)
    )
    assert con.execute(f"SELECT count(*) FROM input WHERE task_id IN (SELECT task_id {copies})").get == 50
    assert con.execute(f"SELECT count(*) FROM event WHERE task_id IN (SELECT task_id {copies})").get == 50 * records
    last = con.execute("SELECT number FROM clock").get
    assert last == con.execute("SELECT max(number) FROM event").get == con.execute("SELECT count(*) FROM event").get
    order = "ORDER BY priority, available_at, task_id LIMIT 1"
    first = con.execute(f"SELECT task_id, kind FROM task WHERE state = 1 {order}").get
    assert first[1] == kind if name == "other_kind" else len(first[0]) != 21
    con.close()


@pytest.mark.slow
def test_backlog_on_postgresql_says_what_a_cycle_costs_beside_each_and_beside_a_snapshot(open_folder: Path) -> None:
    arguments = ("--store", "postgres", "--rows", "300", "--cycles", "32", "--snapshot-cycles", "160")
    arguments += ("--backlogs", "both,snapshot")
    found = run("backlog.py", *arguments, folder=open_folder)

    assert set(found["ratio_to_empty"]) == {"both"}
    assert found["server"]["fsync"] == "on"
    snapshot = found["snapshot"]
    assert snapshot["cycles"] == 160
    assert set(snapshot["ratio_to_none"]) == {"early", "late"}
    assert len(snapshot["open"]["cpu_us_per_cycle"]) == len(snapshot["none"]["cpu_us_per_cycle"]) == 2
    # Each task had an entry of what is ready; none may go while somebody looks on who still sees it.
    assert snapshot["open"]["dead_ready_index_entries"] >= 160
    assert list(open_folder.iterdir()) == []


@pytest.mark.slow
async def test_a_backlog_on_postgresql_is_of_whole_tasks_behind_and_before_those_that_are_claimed() -> None:
    made = running_or_skip()
    for name, state, records in (("finished", 6, 3), ("ready", 1, 1), ("other_kind", 1, 1)):
        database = await backlog_postgres.prepare(made, name, 50, 10)
        con = await asyncpg.connect(made.url(database))
        copies = "fencepost.task WHERE task_id LIKE '________---%'"
        assert tuple(await con.fetchrow(f"SELECT count(*), min(state), max(state) FROM {copies}")) == (50, state, state)
        for table, count in (("input", 50), ("event", 50 * records), ("result", 50 if name == "finished" else 0)):
            counted = f"SELECT count(*) FROM fencepost.{table} WHERE task_id IN (SELECT task_id FROM {copies})"
            assert await con.fetchval(counted) == count, (name, table)
        assert await con.fetchval("SELECT count(DISTINCT number) = count(*) FROM fencepost.event")
        order = "WHERE state = 1 ORDER BY priority, available_at, task_id LIMIT 1"
        first = await con.fetchrow(f"SELECT task_id LIKE '________---%', kind FROM fencepost.task {order}")
        await con.close()
        assert tuple(first) in ([(True, "nobody"), (False, "nobody")] if name == "other_kind" else [(False, "default")])
        async with fencepost.connect(made.url(database)) as client:
            claims = await client.claim_next(owner="w", limit=12, kinds=["default"])
            assert all("---" not in claim.task_id for claim in claims[:10])  # type: ignore[index]
        await made.drop_database(database)


def test_a_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import measuring

    monkeypatch.setattr(measuring, "file_system_of", lambda path: "tmpfs")
    with pytest.raises(SystemExit, match="lies in memory"), measuring.scratch(tmp_path):
        pass
