"""`fencepost work`: a worker that runs a program, or the handlers of an app, for every task."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Group, Parameter

from fencepost import config
from fencepost.app import App as Handlers
from fencepost.cli import output
from fencepost.cli.effect import configured
from fencepost.cli.explain import hint
from fencepost.cli.session import Options, opened
from fencepost.effects.config import Downstreams
from fencepost.errors import InvalidRequest
from fencepost.wire import Refused


async def work(
    *command: str,
    app: str | None = None,
    result: Literal["json", "text", "bytes"] | None = None,
    kinds: Annotated[list[str] | None, Parameter(alias="--kind", consume_multiple=False)] = None,
    queues: Annotated[list[str] | None, Parameter(alias="--queue", consume_multiple=False)] = None,
    pool: str | None = None,
    ttl: float | None = None,
    timeout: float | None = None,
    silence: float | None = None,
    concurrency: int | None = None,
    owner: str | None = None,
    drain_timeout: float | None = None,
    on_epoch: Literal["stop", "adopt"] | None = None,
    until_idle: bool = False,
    options: Options | None = None,
) -> int:
    """Claim tasks and run a program, or Python handlers, for each: work -- python agent.py, or work --app agent:app.

    A program gets the task's input on stdin and FENCEPOST_TASK_ID, FENCEPOST_CLAIM and FENCEPOST_STORE in its
    environment; its stdout is the result. A non-zero exit is a failed attempt, with the end of its stderr. When the
    claim is lost, its process group is killed.

    Runs until SIGTERM or Ctrl-C, which lets running tasks finish within the drain time (a second one does not wait).
    Being fenced is no error: the worker drops that task and goes on. Exit code 4 when the pool's epoch was raised.

    What happens is logged on stderr. JSON, at the end: {"owner", "exit_code", "ended": {outcome: how many}}; an attempt
    that was taken away counts as "dropped".

    Parameters
    ----------
    command
        The program and its arguments, after --.
    app
        module:name of a fencepost.App; modules are found in the current folder, too.
    result
        What a program's stdout is: json, its last line; text or bytes, all of it.
    kinds
        Only tasks of this kind; may be repeated. Default: every kind, or those of the app.
    queues
        Only tasks of this queue; may be repeated. Default: default.
    pool
        The pool.
    ttl
        Seconds that a task stays with a worker that is not heard of (of a program; handlers name their own).
    timeout
        Seconds that a program may take for a task.
    silence
        Seconds that a program may go without writing to stderr, before its lease is no longer renewed.
    concurrency
        How many tasks at a time.
    owner
        Who claims, for people to read. Default: host, process and a start id.
    drain_timeout
        Seconds that running tasks get when the worker is told to stop.
    on_epoch
        When the pool's epoch was raised: stop with exit code 4, or adopt the new one once the intake is open.
    until_idle
        End when there is nothing to claim.
    """
    from fencepost.client.worker import Worker

    options = options or Options()
    given = {
        "result": result,
        "kinds": tuple(kinds) if kinds else None,
        "queues": tuple(queues) if queues else None,
        "pool": pool,
        "ttl": ttl,
        "concurrency": concurrency,
        "drain_timeout": drain_timeout,
        "on_epoch": on_epoch,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    settings = config.check_work(msgspec.structs.replace(config.load().work, **wanted))
    works = _works(command, app, settings, {"timeout": timeout, "silence": silence}, set(wanted))
    tally = _log_to_stderr()
    downstreams = configured()
    async with opened(options, create=True) as client, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(downstreams.close)
        view = await client.pool(settings.pool)
        if isinstance(view, Refused):
            return output.refused(view, json=options.as_json)
        if app is None:
            config.check_work(settings, max_ttl=view.policy["max_ttl"])
        worker = Worker(
            client,
            works,
            queues=settings.queues,
            concurrency=settings.concurrency,
            owner=owner,
            drain_timeout=settings.drain_timeout,
            on_epoch=settings.on_epoch,
            pool=settings.pool,
            renew_interval=settings.renew_interval or None,
            trust_window=settings.trust_window or None,
            downstreams=_those_that_can_be_asked(downstreams, getattr(works, "downstreams", ())),
        )
        code = await worker.run(until_idle=until_idle)
    if options.as_json:
        output.emit({"owner": worker.owner, "exit_code": code, "ended": dict(tally.ended)})
    else:
        if code == output.EPOCH_RAISED:
            output.note(f"hint: {hint('FENCED', 'EPOCH')}  [fencepost explain EPOCH]")
        output.note(", ".join(f"{count} {how}" for how, count in tally.ended.items()) or "no task was worked on")
    if worker.leftovers:
        # A handler that ignores its cancellation would keep the event loop, and so the process, from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _those_that_can_be_asked(downstreams: Downstreams, of_the_app: Iterable[Any]) -> list[Any]:
    """A worker whose programs send effects need not hold every secret itself; what it cannot make it cannot ask.

    What the app has made of the same table, to call it, is what is asked.
    """
    known = {each.declaration.downstream for each in of_the_app}
    found = []
    for name in downstreams:
        if downstreams.declaration(name).downstream in known:
            continue
        try:
            found.append(downstreams[name])
        except InvalidRequest as error:
            output.note(f"this worker does not reconcile {name}: {error}")
    return found


def _works(
    command: tuple[str, ...], app: str | None, settings: config.WorkSettings, more: dict[str, Any], wanted: set[str]
) -> Any:
    """The handlers of an app, or a program in their place. Raises InvalidRequest."""
    if (app is None) == (not command):
        raise InvalidRequest("command", "give a program after -- (work -- CMD …) or --app module:app, one of the two")
    if app is not None:
        own = wanted & {"result", "kinds", "ttl"} | {name for name, value in more.items() if value is not None}
        if own:
            raise InvalidRequest(f"--{min(own)}", "is for programs; an app's handlers name their own")
        return load_app(app)
    from fencepost.client.program import ProgramHandler

    return ProgramHandler(command, result=settings.result, kinds=list(settings.kinds) or None, ttl=settings.ttl, **more)


def load_app(name: str) -> Handlers:
    """The App that `module:attribute` names. Raises InvalidRequest; what the module itself raises passes through."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise InvalidRequest("--app", f"must read module:name, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # something that the module itself imports
        raise InvalidRequest("--app", f"there is no module {error.name!r} here or on the path") from None
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise InvalidRequest("--app", f"{module_name} has no {path!r}")
        found = getattr(found, attribute)
    if not isinstance(found, Handlers):
        raise InvalidRequest("--app", f"{name} is a {type(found).__name__}, not a fencepost.App")
    return found


class _Tally(logging.Handler):
    """Counts how attempts ended, from what the worker logs about each."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "why"):
            self.ended["dropped"] += 1
        elif hasattr(record, "outcome") and hasattr(record, "task_id"):
            self.ended[str(record.outcome)] += 1


class _Lines(logging.Formatter):
    """`14:03:22 task doc-1 committed`; text from tasks and programs cannot change the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        text = f"{self.formatTime(record, '%H:%M:%S')} {level}{record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return output.clean(text)


def _log_to_stderr() -> _Tally:
    log = logging.getLogger("fencepost")
    log.setLevel(logging.INFO)
    log.propagate = False
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_Lines())
    tally = _Tally()
    log.handlers = [stream, tally]
    return tally


def add_to(app: App, group: Group) -> None:
    app.command(work, group=group)
