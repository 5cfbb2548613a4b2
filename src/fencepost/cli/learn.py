"""Learning what fencepost does, and how fast: `explain`, `demo`, `bench`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from cyclopts import App, Group

from fencepost.cli import explain as texts
from fencepost.cli import output
from fencepost.cli.session import Options
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_seconds


def explain(*code: str, options: Options | None = None) -> int:
    """What a code means and what to do about it. Without CODE: all of them.

    JSON: {"items": [{"code", "kind", "what", "todo"}]}.

    Parameters
    ----------
    code
        A word that fencepost printed: FENCED, FENCED/EPOCH, PARKED, attempt_ended, UNAVAILABLE.
    """
    options = options or Options()
    wanted = " ".join(code)
    found = texts.explain(wanted) if wanted else list(texts.EXPLANATIONS.values())
    if not found:
        near = texts.suggest(wanted)
        raise InvalidRequest(
            "code", f"nothing is known about {wanted!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    if options.as_json:
        output.emit({"items": found})
    elif wanted:
        for number, text in enumerate(found):
            if number:
                output.say()
            output.say(text.code, style="bold")
            output.say(f"  ({text.kind})", style="dim")
            for paragraph in (text.what, text.todo):
                output.say(textwrap.fill(paragraph, 100, initial_indent="  ", subsequent_indent="  "))
    else:
        output.show_table(("code", "where", "what to do"), [(text.code, text.kind, text.hint) for text in found])
    return output.DONE


def demo(folder: Path | None = None, /, *, svg: Path | None = None, options: Options | None = None) -> int:
    """A worker is paused in mid-task, another takes over, the first wakes up and goes on. Well under a minute.

    Played with real processes before the usual queue and before fencepost: with a result that comes late, and with a
    mail whose answer was lost.

    JSON: {"as_promised", "seconds", "usual_queue", "fencepost", "mails": {"usual_queue", "mail_api", "plain_smtp"}}.

    Parameters
    ----------
    folder
        Whose text files are processed. Default: the project's own docs.
    svg
        Write a picture of what was printed to this file.
    """
    from fencepost.demo import run

    options = options or Options()
    return int(run(folder, svg=svg, json=options.as_json))


async def bench(*, seconds: float = 1.0, folder: str | None = None, options: Options | None = None) -> int:
    """Measure claim + commit on this machine, on a temporary SQLite file: durable, 100-byte input and result.

    JSON: {"cycles_per_s": {"1", "16", "128"}, "submits_per_s", "seconds", "store"}.

    Parameters
    ----------
    seconds
        How long each number is measured.
    folder
        Where the temporary file is made: a folder on the disk that you want to know about.
    """
    from fencepost.cli.bench import measure

    options = options or Options()
    check_seconds(seconds, "seconds", above=True, most=60.0)
    if folder is not None and not Path(folder).is_dir():  # noqa: ASYNC240 (nothing else runs yet)
        raise InvalidRequest("folder", f"{folder} is no folder")
    if not options.as_json:
        output.note(f"measuring 1, 16 and 128 callers for {seconds:g} s each …")
    found = await measure(seconds, None if folder is None else str(Path(folder).resolve()))  # noqa: ASYNC240
    if options.as_json:
        output.emit(found)
        return output.DONE
    output.show_table(
        ("callers", "claim + commit a second"),
        [(callers, f"{cycles:,.0f}") for callers, cycles in found["cycles_per_s"].items()],
        right=("callers", "claim + commit a second"),
    )
    output.say(f"submit: {found['submits_per_s']:,.0f} tasks a second, in batches of 1000  ({found['store']})")
    return output.DONE


def add_to(app: App, group: Group) -> None:
    app.command(explain, group=group)
    app.command(demo, group=group)
    app.command(bench, group=group)
