"""How a claim's work is done: the interface between the worker and what it runs, and the handlers of an `App`.

`async def` handlers run in the worker's loop, `def` handlers each in a thread of their own. These threads are daemons:
one that never ends cannot keep the process from ending. The first of them lowers the interpreter's switch interval to
1 ms, for the whole process, so that handlers that compute do not starve the renewal of their own leases.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from fencepost.app import App, Final, Handler
from fencepost.client.attempt import Attempt, SyncAttempt
from fencepost.errors import InvalidRequest

__all__ = ["AppWorks", "PlainFailure", "Run", "Work", "Works"]

# Threads that compute pass the interpreter on after this long, each in turn. A renewal has to take it some dozen times
# (every SQLite statement lets go of it), so at CPython's own 5 ms eight busy handlers would starve a lease of 3 s.
SWITCH_INTERVAL = 0.001


class PlainFailure(Exception):
    """A failure that may be retried and whose text says it all; without a traceback, because it is not ours."""


class Run(Protocol):
    """One claim that is being worked on, as its work sees it."""

    attempt: Attempt
    store_url: str  # without a password
    thread: threading.Thread | None  # set by a work that cannot be interrupted; its slot is taken until it ends

    def thread_ended(self) -> None: ...


class Work(Protocol):
    """How tasks of one kind are done. Durations in seconds; `timeout` and `silence` None: unbounded."""

    @property
    def ttl(self) -> float: ...

    @property
    def timeout(self) -> float | None: ...

    @property
    def silence(self) -> float | None: ...

    async def run(self, run: Run) -> Any:
        """Do it; the result. Cancelled when the claim is lost or the worker's drain time is over."""


class Works(Protocol):
    """All that a worker can do. `kinds` None: any kind."""

    @property
    def kinds(self) -> list[str] | None: ...

    def of(self, kind: str) -> Work: ...

    def all(self) -> list[Work]: ...


class AppWorks:
    """The handlers of an app. Raises InvalidRequest where it has none, or one whose annotation names nothing."""

    def __init__(self, app: App) -> None:
        if not len(app):
            raise InvalidRequest("app", "has no handlers, so there is nothing that this worker could claim")
        self._works = {handler.name: HandlerWork(handler) for handler in app}

    @property
    def kinds(self) -> list[str] | None:
        return list(self._works)

    def of(self, kind: str) -> Work:
        return self._works[kind]

    def all(self) -> list[Work]:
        return list(self._works.values())


class HandlerWork:
    def __init__(self, handler: Handler[..., Any]) -> None:
        handler.input_type()  # now rather than at the first task
        self._handler = handler
        self.ttl = handler.ttl
        self.timeout = handler.timeout
        self.silence = handler.silence

    async def run(self, run: Run) -> Any:
        handler, attempt = self._handler, run.attempt
        attempt.input = handler.accept(attempt.claim.input)
        if handler.is_async:
            arguments: tuple[Any, ...] = (attempt, attempt.input) if handler.takes_input else (attempt,)
            return await handler.function(*arguments)
        twin = SyncAttempt(attempt, asyncio.get_running_loop())
        arguments = (twin, attempt.input) if handler.takes_input else (twin,)
        result = await _in_thread(run, handler.function, arguments, f"fencepost-{handler.name}")
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise Final(f"handler {handler.name!r} is a plain function that returned a coroutine; make it `async def`")
        return result


async def _in_thread(run: Run, function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        run.thread_ended()
        if not future.done():  # done: nobody waits any more; what came too late is dropped
            future.set_result((result, error))

    def main() -> None:
        result, error = None, None
        try:
            result = context.run(function, *arguments)
        except BaseException as raised:  # noqa: BLE001 - it is handed on to the loop
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: the worker is gone, and nobody waits
            return

    if sys.getswitchinterval() > SWITCH_INTERVAL:
        sys.setswitchinterval(SWITCH_INTERVAL)
    run.thread = threading.Thread(target=main, name=name, daemon=True)
    run.thread.start()
    result, error = await future
    if error is not None:
        raise error
    return result
