"""An app: the handlers of a program, by name. Making one does no I/O, so it is safe to import anywhere.

    app = App()

    @app.task("summarise", ttl=60.0)
    async def summarise(attempt: Attempt, input: Doc) -> Summary: ...

    await client.submit(summarise.task(Doc(...), task_id="doc-17"))

`async def` runs in the worker's event loop, `def` in a thread of its own (and gets a `SyncAttempt`).
What the handler returns is committed. An exception is a failure that may be retried; `Final` one that
may not; `Snooze` gives the task back and charges nothing.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import DEFAULT_TTL, MAX_ATTEMPTS_LIMIT, check_id, check_integer, check_seconds
from fencepost.kernel.digests import flatten
from fencepost.wire import NewTask

__all__ = ["App", "Final", "Handler", "Snooze"]

P = ParamSpec("P")
R = TypeVar("R")


class Final(Exception):
    """Raised by a handler: this task fails for good. It is PARKED with the message, and not tried again by itself."""


class Snooze(Exception):
    """Raised by a handler: give the task back and offer it again in `seconds`. Nothing is charged."""

    def __init__(self, seconds: float) -> None:
        check_seconds(seconds, "seconds")
        self.seconds = float(seconds)
        super().__init__(f"asked for again in {seconds:g} s")


class Handler(Generic[P, R]):
    """A function with a name that tasks are submitted for. Calling it calls the function, as a test would.

    `ttl` is the lease that the worker asks for, renewed while the handler runs. `timeout` bounds the handler itself;
    past it the attempt fails, and may be retried. `silence`, where given, is how long the handler may go without a
    sign of life (`alive`, `checkpoint`, `stage`, `usage`) before its lease is no longer renewed. All in seconds.
    """

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        ttl: float,
        max_attempts: int | None,
        timeout: float | None,
        silence: float | None,
        localns: dict[str, Any] | None = None,
    ) -> None:
        self.function = function
        self.name = name
        self.ttl = ttl
        self.max_attempts = max_attempts
        self.timeout = timeout
        self.silence = silence
        self.is_async = inspect.iscoroutinefunction(function)
        self.__name__: str = getattr(function, "__name__", name)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.takes_input, self._annotation = _second_parameter(function, name)
        self._type: Any = _UNRESOLVED
        # Classes that a function defines beside its handler are seen here and never again.
        self._try_resolve(localns)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Handler {self.name!r}: {self.__name__}>"

    def task(
        self,
        input: Any = None,
        *,
        task_id: str | None = None,
        queue: str = "default",
        pool: str = "default",
        priority: int = 0,
        depends_on: Sequence[str] = (),
        delay: float | None = None,
        available_at: datetime | None = None,
        max_attempts: int | None = None,
        node_id: str = "main",
        graph_id: str | None = None,
        on_failure: str = "keep",
        trace_context: str | None = None,
    ) -> NewTask:
        """A task for this handler, to be submitted. Structs and dataclasses become plain JSON values here.

        Raises InvalidRequest where `input` has no JSON form. `max_attempts` None: the handler's, else the pool's.
        """
        if isinstance(input, (bytes, bytearray, memoryview)):
            plain: Any = bytes(input)
        else:
            plain = flatten(input, "input")
        return NewTask(
            plain,
            task_id=task_id,
            kind=self.name,
            queue=queue,
            pool=pool,
            priority=priority,
            depends_on=depends_on,
            delay=delay,
            available_at=available_at,
            max_attempts=self.max_attempts if max_attempts is None else max_attempts,
            node_id=node_id,
            graph_id=graph_id,
            on_failure=on_failure,
            trace_context=trace_context,
        )

    def accept(self, value: Any) -> Any:
        """`value` as the annotated type of the handler's second parameter; raises Final where it does not fit.

        Final, because the same input would not fit the next time either.
        """
        wanted = self.input_type()
        if wanted is Any:
            return value
        try:
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            raise Final(f"the input does not fit handler {self.name!r} ({_spell(wanted)}): {error}") from None
        except TypeError as error:
            raise Final(f"handler {self.name!r} has an input annotation that cannot be converted to: {error}") from None

    def input_type(self) -> Any:
        """What the input is converted to; `Any` without an annotation. Raises InvalidRequest where it names nothing."""
        if self._type is _UNRESOLVED:
            problem = self._try_resolve(None)
            if problem is not None:
                raise InvalidRequest("input", f"handler {self.name!r}: its annotation does not resolve ({problem})")
        return self._type

    def _try_resolve(self, localns: dict[str, Any] | None) -> Exception | None:
        if not self.takes_input or self._annotation is inspect.Parameter.empty:
            self._type = Any
            return None

        # Only this annotation: those of the attempt and of the result often name what is imported for type checkers.
        def stub() -> None: ...

        stub.__annotations__ = {"input": self._annotation}
        globalns = getattr(inspect.unwrap(self.function), "__globals__", {})
        try:
            self._type = typing.get_type_hints(stub, globalns, localns, include_extras=True)["input"]
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            return error
        return None


_UNRESOLVED: Any = object()


class App:
    """The handlers of a program, by the kind of task that they serve. A worker claims these kinds and no others.

    `downstreams` are what its handlers send effects to: its workers reconcile with them whatever is UNKNOWN and held by
    nobody.
    """

    def __init__(self, *, downstreams: Iterable[Any] = ()) -> None:
        self.downstreams: tuple[Any, ...] = tuple(downstreams)
        self._handlers: dict[str, Handler[..., Any]] = {}

    def task(
        self,
        name: str,
        *,
        ttl: float = 2 * DEFAULT_TTL,
        max_attempts: int | None = None,
        timeout: float | None = None,
        silence: float | None = None,
    ) -> Callable[[Callable[P, R]], Handler[P, R]]:
        """Decorates a handler of one or two parameters: the attempt, and the input (converted to its annotation).

        Raises InvalidRequest for a name that stands already, for bad numbers, and for a function that is no handler.
        """
        check_id(name, "name")
        if name in self._handlers:
            raise InvalidRequest("name", f"{name!r} has a handler already; a kind has one handler in an app")
        check_seconds(ttl, "ttl", above=True)
        if max_attempts is not None:
            check_integer(max_attempts, "max_attempts", 1, MAX_ATTEMPTS_LIMIT)
        if timeout is not None:
            check_seconds(timeout, "timeout", above=True)
        if silence is not None:
            check_seconds(silence, "silence", above=True)

        def decorate(function: Callable[P, R]) -> Handler[P, R]:
            if name in self._handlers:
                raise InvalidRequest("name", f"{name!r} has a handler already; a kind has one handler in an app")
            localns = sys._getframe(1).f_locals
            handler = Handler(function, name, float(ttl), max_attempts, timeout, silence, localns)
            self._handlers[name] = handler
            return handler

        return decorate

    def __getitem__(self, name: str) -> Handler[..., Any]:
        return self._handlers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._handlers

    def __iter__(self) -> Iterator[Handler[..., Any]]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)

    @property
    def kinds(self) -> list[str]:
        """The names of the handlers, in the order in which they were declared."""
        return list(self._handlers)


def _second_parameter(function: Callable[..., Any], name: str) -> tuple[bool, Any]:
    """Whether the handler takes the input, and that parameter's annotation as it was written."""
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidRequest("handler", f"{name!r} is a generator; a handler returns its result")
    if not callable(function):
        raise InvalidRequest("handler", f"{name!r} is not a function")
    positional = []
    for parameter in _signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter)
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise InvalidRequest("handler", f"{name!r}: nobody gives it its keyword {parameter.name!r}")
    needed = [parameter for parameter in positional if parameter.default is parameter.empty]
    if not positional or len(needed) > 2:
        raise InvalidRequest("handler", f"{name!r} must take the attempt, or the attempt and the input")
    if len(positional) < 2:
        return False, inspect.Parameter.empty
    return True, positional[1].annotation


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # there annotations are evaluated when asked for, and may name nothing yet
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _spell(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)
