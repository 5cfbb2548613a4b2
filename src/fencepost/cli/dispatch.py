"""The command line: which commands there are, and how their ends become exit codes.

0 done · 1 refused (or a check that found something) · 2 wrong usage · 3 the store is unavailable · 4 the epoch was
raised over the caller · 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from cyclopts import App, CycloptsError, Group, Parameter

from fencepost.cli import (
    effect,
    effects,
    journal,
    learn,
    output,
    people,
    pools,
    project,
    reports,
    submit,
    tasks,
    upkeep,
    work,
)
from fencepost.cli.session import Presets
from fencepost.errors import Fenced, FencepostError, InvalidRequest, Unavailable


def build() -> App:
    """The commands as one app, in the order in which the help lists them."""
    app = App(
        name="fencepost",
        help="Claims with a fence: a worker that lost its task cannot commit it.",
        help_epilogue="Exit codes: 0 done, 1 refused, 2 wrong usage, 3 store unavailable, 4 epoch raised.",
        version=f"fencepost {metadata.version('fencepost')}",
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    families = (
        ("Start", (project, submit, work, effect)),
        ("Look", (tasks, reports, journal)),
        ("Decide", (people, effects, pools)),
        ("Look after", (upkeep, learn)),
    )
    for position, (title, modules) in enumerate(families):
        group = Group(title, sort_key=position)
        for module in modules:
            module.add_to(app, group)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Ctrl-C is left to the caller, as KeyboardInterrupt."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show ends no command
    json = "--json" in (tokens[: tokens.index("--")] if "--" in tokens else tokens)
    try:
        _take_presets(tokens)
        code = build()(tokens)
        sys.stdout.flush()
        return code if isinstance(code, int) else output.DONE
    except CycloptsError as error:
        output.failed("INVALID", str(error), json=json, field=_field_of(error), limit=str(error))
        return output.USAGE
    except InvalidRequest as error:
        output.failed("INVALID", str(error), json=json, field=error.field, limit=error.limit)
        return output.USAGE
    except Unavailable as error:
        output.failed("UNAVAILABLE", str(error), json=json)
        return output.UNAVAILABLE
    except FencepostError as error:
        output.failed(getattr(error, "code", "INVALID"), str(error), json=json)
        return output.REFUSED
    except Fenced as error:
        return output.EPOCH_RAISED if error.reason == "EPOCH" else output.REFUSED
    except BrokenPipeError:
        # Whoever read has seen enough. Python would complain again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return output.DONE


def _take_presets(tokens: list[str]) -> None:
    """Takes `--store URL` and `--json` that stand before the command's name out of `tokens`."""
    Presets.store, Presets.json = None, False
    while tokens:
        if tokens[0] == "--json":
            Presets.json = True
            del tokens[0]
        elif tokens[0].startswith("--store="):
            Presets.store = tokens.pop(0).removeprefix("--store=")
        elif tokens[0] == "--store":
            if len(tokens) < 2:
                raise InvalidRequest("--store", "needs a URL")
            Presets.store = tokens[1]
            del tokens[:2]
        else:
            return


def _field_of(error: CycloptsError) -> str | None:
    return error.argument.name if error.argument is not None else None
