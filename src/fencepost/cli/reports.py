"""Reports over the whole store: `status` (what is going on, in numbers) and `audit` (whether all of it is true)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyclopts import App, Group
from rich.text import Text

from fencepost.cli import output
from fencepost.cli.session import Options, opened
from fencepost.wire import Refused

STATES = ("READY", "CLAIMED", "BLOCKED", "PARKED", "CANCELLED", "COMMITTED")


async def status(*, pool: str | None = None, options: Options | None = None) -> int:
    """Every number that the contract publishes: tasks by state, contention, reclaim delay, fenced, coverage, …

    JSON: the numbers by name, as `fencepost.service.numbers.numbers` documents them. Durations are seconds.

    Parameters
    ----------
    pool
        Only of this pool.
    """
    options = options or Options()
    async with opened(options) as client:
        if pool is not None and isinstance(missing := await client.pool(pool), Refused):
            return output.refused(missing, json=options.as_json)
        with output.busy("reading records and journal …"):
            found: dict[str, Any] = await client.report("status", pool=pool)
        pools = [view for view in await client.pools() if pool in (None, view.name)]
    if options.as_json:
        output.emit(found)
        return output.DONE
    left = dict(found)
    output.say(f"at {output.at(left.pop('at'))} UTC", style="dim")
    left.pop("pool")
    output.show_table(
        ("pool", "epoch", "intake"), [(view.name, view.epoch, output.word(view.intake)) for view in pools]
    )
    _backlog(left.pop("backlog"))
    if unserved := left.pop("unserved", None):
        output.say(f"nobody serves: {_line(unserved)}", style="yellow")
    coverage = left.pop("coverage", None)
    fenced, waiting = left.pop("fenced"), left.pop("effects")
    for name, value in left.items():
        _section(name.replace("_", " "), value)
    if fenced:
        _table("fenced", fenced)
    else:
        output.say(f"{'fenced':<20} 0")
    _effects(waiting)
    if coverage is not None:
        _coverage(coverage)
    return output.DONE


def _backlog(lanes: list[dict[str, Any]]) -> None:
    output.say()
    if not lanes:
        output.say("no tasks")
        return
    rows = []
    for lane in lanes:
        age = lane.get("oldest_ready_age")
        counts = [
            Text(str(count), style=output.STYLES[state]) if (count := lane["states"].get(state, 0)) else Text("·")
            for state in STATES
        ]
        rows.append((lane["pool"], lane["queue"], lane["kind"], *counts, None if age is None else output.span(age)))
    output.show_table(
        ("pool", "queue", "kind", *(state.lower() for state in STATES), "waiting for"),
        rows,
        right=[state.lower() for state in STATES],
    )
    output.say()


def _effects(rows: list[dict[str, Any]]) -> None:
    """Those that are UNKNOWN, or wait for an approval: what somebody has to ask about, or to decide."""
    if not rows:
        output.say(f"{'effects':<20} 0")
        return
    output.say("effects", style="bold")
    output.show_table(
        ("pool", "guarantee", "state", "count", "oldest"),
        [
            (row["pool"], row["guarantee"], output.word(row["state"]), row["count"], output.span(row["oldest_age"]))
            for row in rows
        ],
        right=("count",),
    )
    output.note("`fencepost effects` lists them, with what is open for each")


def _section(title: str, value: Any) -> None:
    """One number, or several in a line; a histogram only where it counted something."""
    if isinstance(value, Mapping):
        parts = [f"{name.replace('_', ' ')} {_line(item)}" for name, item in value.items() if not _empty(item)]
        output.say(f"{title:<20} {', '.join(parts) or '–'}")
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        _table(title, value)
    else:
        output.say(f"{title:<20} {_line(value)}")


def _empty(value: Any) -> bool:
    if isinstance(value, list):
        return not any(item.get("count") for item in value if isinstance(item, Mapping))
    return value is None or value == {}


def _line(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Mapping):
        if value.keys() == {"le", "count"}:  # a histogram's bucket
            bound = "more" if value["le"] is None else f"≤ {value['le']:g} s"
            return f"{bound}: {value['count']}" if value["count"] else ""
        return ", ".join(f"{name}: {_line(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(text for item in value if (text := _line(item)))
    return output.cell_text(value)


def _table(title: str, rows: list[Any]) -> None:
    output.say(title, style="bold")
    plain = [output.plain(row) for row in rows]
    columns = list(plain[0])
    output.show_table(
        [column.replace("_", " ") for column in columns],
        [[_line(row[column]) for column in columns] for row in plain],
    )


def _coverage(rows: list[Any]) -> None:
    """Acceptance coverage per door: what the journal shows of what the records show."""
    output.say()
    output.show_table(
        ("coverage of", "compared in full", "changes", "share"),
        [
            (
                row["door"],
                row["accepted"],
                row["changes"],
                "–" if row["ratio"] is None else Text(f"{row['ratio']:.2%}", style="" if row["ratio"] >= 1 else "red"),
            )
            for row in map(output.plain, rows)
        ],
        right=("compared in full", "changes", "share"),
    )


async def audit(*, options: Options | None = None) -> int:
    """Re-check the invariants of the contract over the whole journal and all records. Exit code 1 on any violation.

    JSON: {"clean", "at", "tasks", "events", "attempts", "results", "staged", "pools", "pruned_tasks", "checks":
    [{"invariant", "says", "checked", "unit", "violations"}], "coverage": [{"door", "accepted", "changes", "ratio",
    "incomplete"}], "violations": [{"invariant", "task_id", "says"}], "violation_count"}.
    """
    options = options or Options()
    async with opened(options) as client:
        with output.busy("checking every record against the journal …"):
            report = await client.report("audit")
    code = output.DONE if report.clean else output.REFUSED
    if options.as_json:
        output.emit(report)
        return code
    counts = ("tasks", "events", "attempts", "results", "staged", "pools", "pruned_tasks")
    output.say("read " + ", ".join(f"{getattr(report, name)} {name.replace('_', ' ')}" for name in counts))
    output.say()
    output.show_table(
        ("", "invariant", "checked", ""),
        [
            (
                output.word("fail" if check.violations else "ok"),
                f"{check.invariant}. {check.says}",
                check.checked,
                f"{check.unit}{f', {check.violations} violations' if check.violations else ''}",
            )
            for check in report.checks
        ],
        right=("checked",),
    )
    _coverage(report.coverage)
    output.say()
    if report.violations:
        output.show_table(
            ("violates", "task", "how"), [(found.invariant, found.task_id, found.says) for found in report.violations]
        )
    if report.violation_count > len(report.violations):
        output.say(f"… and {report.violation_count - len(report.violations)} more")
    if report.clean:
        output.say("clean", style="bold green")
    else:
        output.say(f"{report.violation_count} violations: look at the tasks with `fencepost show`", style="bold red")
    return code


def add_to(app: App, group: Group) -> None:
    app.command(status, group=group)
    app.command(audit, group=group)
