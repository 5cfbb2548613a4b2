"""`fencepost work -- CMD …`: runs a program for every task.

What the program gets: its input on stdin (JSON, or the raw bytes of a binary), and in its environment
`FENCEPOST_TASK_ID`, `FENCEPOST_CLAIM` (the claim as JSON) and `FENCEPOST_STORE` (the store's URL, never a password;
a relative SQLite path made absolute). Environments are limited, so a claim of more than 64 KiB travels without its
input, checkpoint and parents: no door needs them.

What is made of it: the result comes from stdout, as `result` says. A non-zero exit is a failure that may be retried,
with the end of stderr. Output that cannot be kept is a final failure that says why: the program would write it again.

It runs in a process group of its own. When the claim is lost, the time is over or the worker ends, the group gets
SIGTERM and, `grace` seconds later, SIGKILL; what is left of the group when the program has ended is killed as well.
What leaves its group (a daemon) is not found. If the worker itself is killed with SIGKILL, the program runs on; its
claim runs out, and what it then writes through the claim is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from fencepost.app import Final
from fencepost.client.handling import PlainFailure, Run, Work
from fencepost.client.serving import keep_tail
from fencepost.errors import GiveBack, InvalidRequest
from fencepost.kernel.commands import DEFAULT_TTL, MAX_ERROR_BYTES, check_id, check_seconds
from fencepost.kernel.digests import MAX_CONTENT_BYTES, parse
from fencepost.wire import Claim

__all__ = ["ProgramFailed", "ProgramHandler"]

log = logging.getLogger("fencepost.worker")

# Linux takes at most 128 KiB for one variable; the environment as a whole shares its room with the arguments.
MAX_CLAIM_IN_ENVIRONMENT = 64 << 10
# After the program itself has ended: how long what it started may still write into its pipes.
LAST_WORDS = 1.0
# With this exit code a program gives its task back until a person has decided about its effects (EX_TEMPFAIL).
GIVE_BACK = 75


class ProgramFailed(PlainFailure):
    """The program ended otherwise than with exit code 0, or could not be started."""


class ProgramHandler:
    """Runs `command` for every task of `kinds` (None: any kind). Give it to a `Worker` in an app's place.

    `result`: "json", the last non-empty line of stdout (none: null); "text", all of it, as UTF-8; "bytes", all of it.
    `ttl`, `timeout`, `silence`: as for an app's handler; whatever it writes counts as a sign of life. Raises
    InvalidRequest where the program is not found.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        result: Literal["json", "text", "bytes"] = "json",
        kinds: Sequence[str] | None = None,
        ttl: float = DEFAULT_TTL,
        timeout: float | None = None,
        silence: float | None = None,
        grace: float = 2.0,
    ) -> None:
        if isinstance(command, str) or not command:
            raise InvalidRequest("command", "must be a program and its arguments, as a list")
        if shutil.which(command[0]) is None:
            raise InvalidRequest("command", f"there is no program {command[0]!r}")
        if result not in ("json", "text", "bytes"):
            raise InvalidRequest("result", f"must be 'json', 'text' or 'bytes', got {result!r}")
        if isinstance(kinds, str) or (kinds is not None and not kinds):
            raise InvalidRequest("kinds", "must be a list of at least one name, or None for any kind")
        check_seconds(ttl, "ttl", above=True)
        for name, value in (("timeout", timeout), ("silence", silence)):
            if value is not None:
                check_seconds(value, name, above=True)
        check_seconds(grace, "grace")
        self.command = list(command)
        self.result = result
        self.ttl = ttl
        self.timeout = timeout
        self.silence = silence
        self.grace = grace
        self._kinds = None if kinds is None else [check_id(kind, "kinds") for kind in kinds]

    @property
    def kinds(self) -> list[str] | None:
        return self._kinds

    def of(self, kind: str) -> Work:
        return self

    def all(self) -> list[Work]:
        return [self]

    async def run(self, run: Run) -> Any:
        claim = run.attempt.claim
        program = _Program(self.result, run.attempt.alive)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.subprocess_exec(
                lambda: program,
                *self.command,
                env={**os.environ, **environment(claim, run.store_url)},
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramFailed(f"{self.command[0]} could not be started: {error}") from None
        try:
            program.feed(claim.input)
            await program.ended.wait()
        finally:
            try:
                await self._end(program, transport)
            finally:
                transport.close()
        return self._outcome(program, transport.get_returncode())

    async def _end(self, program: _Program, transport: asyncio.SubprocessTransport) -> None:
        """Nothing of the group is left afterwards, however the waiting ended."""
        group = transport.get_pid()
        try:
            if not program.exited.is_set():
                _signal(group, signal.SIGTERM)
                await _within(self.grace, program.exited)
            await _within(LAST_WORDS if program.too_large is None else 0.0, program.ended)
        finally:
            _signal(group, signal.SIGKILL)
        if not program.exited.is_set():
            await _within(LAST_WORDS, program.exited)  # the kernel takes it away; nothing can hold it but a dead disk

    def _outcome(self, program: _Program, code: int | None) -> Any:
        if program.too_large is not None:
            raise Final(f"{program.too_large}: over the limit of {MAX_CONTENT_BYTES} bytes for a result")
        if code == GIVE_BACK:
            raise GiveBack("", "the program ended with exit code 75")
        if code != 0:
            raise ProgramFailed(_how_it_ended(code, *program.said()))
        output = program.output()
        if self.result == "bytes":
            return output
        if self.result == "text":
            try:
                return output.decode("utf-8")
            except UnicodeDecodeError as error:
                raise Final(f"stdout is not UTF-8 ({error.reason} at byte {error.start}); use --result bytes") from None
        if not output:
            return None
        try:
            return parse(output, "the last line of stdout")
        except InvalidRequest as error:
            raise Final(f"{error}; it must be one line of JSON. It reads: {_excerpt(output)}") from None


class _Program(asyncio.SubprocessProtocol):
    """What a running program says. Keeps no more than a result may have, and the end of stderr."""

    def __init__(self, result: str, alive: Callable[[], None]) -> None:
        self.exited = asyncio.Event()
        self.ended = asyncio.Event()  # exited, and its pipes are closed; or it said more than can be kept
        self.too_large: str | None = None
        self._lines = result == "json"
        self._alive = alive
        self._output = bytearray()
        self._last_line = b""
        self._stderr = bytearray()
        self._said = 0
        self._open = {1, 2}
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def feed(self, input: Any) -> None:
        """Write the input and close stdin. A program that does not read it is not thereby wrong."""
        pipe = self._transport.get_pipe_transport(0)
        data = bytes(input) if isinstance(input, (bytes, bytearray, memoryview)) else msgspec.json.encode(input) + b"\n"
        pipe.write(data)
        pipe.close()  # after what is buffered is written

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        chunk = data if isinstance(data, bytes) else data.encode()
        if fd == 2:
            self._alive()
            self._say(chunk)
        elif self.too_large is None:
            self._alive()
            self._output += chunk
            if self._lines:
                self._keep_last_line()
            if len(self._output) > MAX_CONTENT_BYTES:
                self.too_large = "a line of stdout" if self._lines else "stdout"
                self._output.clear()
                self.ended.set()

    def _keep_last_line(self) -> None:
        end = self._output.rfind(b"\n")
        if end < 0:
            return
        complete = self._output[:end].rstrip()
        del self._output[: end + 1]
        if complete:
            self._last_line = bytes(complete[complete.rfind(b"\n") + 1 :])

    def _say(self, chunk: bytes) -> None:
        self._said += len(chunk)
        self._stderr += chunk
        del self._stderr[: -2 * MAX_ERROR_BYTES]
        try:
            # Passed on as it comes, so that a person who watches the worker sees what its programs say.
            stream = getattr(sys.stderr, "buffer", None)
            if stream is not None:
                stream.write(chunk)
                stream.flush()
            elif sys.stderr is not None:
                sys.stderr.write(chunk.decode("utf-8", "replace"))
        except (OSError, ValueError) as error:  # nobody listens on our stderr: no reason to stop the program
            log.debug("stderr of a program could not be passed on: %s", error)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        self._look()

    def process_exited(self) -> None:
        self.exited.set()
        self._look()
        if self._open:
            # Something that it started still holds its pipes. It is given a moment, then killed with the group.
            asyncio.get_running_loop().call_later(LAST_WORDS, self.ended.set)

    def _look(self) -> None:
        if self.exited.is_set() and not self._open:
            self.ended.set()

    def output(self) -> bytes:
        """All of stdout; for JSON, its last non-empty line."""
        if not self._lines:
            return bytes(self._output)
        return bytes(self._output).strip() or self._last_line.strip()

    def said(self) -> tuple[str, int]:
        """The end of stderr, and how many bytes there were before it."""
        return bytes(self._stderr).decode("utf-8", "replace"), self._said - len(self._stderr)


def environment(claim: Claim, store_url: str) -> dict[str, str]:
    """What a program needs to use its claim through the SDK or the command line."""
    text = claim.to_json()
    if len(text) > MAX_CLAIM_IN_ENVIRONMENT:
        text = msgspec.structs.replace(claim, input=None, checkpoint_data=None, parents={}).to_json()
    return {
        "FENCEPOST_TASK_ID": claim.task_id,
        "FENCEPOST_CLAIM": text,
        "FENCEPOST_STORE": absolute(store_url),
    }


def absolute(url: str) -> str:
    """A SQLite URL that means the same file in another folder; any other URL as it is."""
    prefix = "sqlite:///"
    if url.startswith(prefix) and not url.startswith(prefix + "/"):
        return f"{prefix}{os.path.abspath(url.removeprefix(prefix))}"
    return url


def _how_it_ended(code: int | None, said: str, before: int) -> str:
    if code is not None and code < 0:
        try:
            how = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"killed by signal {-code}"
    else:
        how = f"exit code {code}"
    room = MAX_ERROR_BYTES - len(how) - 1
    return f"{how}\n{keep_tail(said, room, before)}" if said.strip() else f"{how}, and nothing on stderr"


def _excerpt(output: bytes) -> str:
    text = output.decode("utf-8", "backslashreplace")
    return json.dumps(text if len(text) <= 200 else text[:200] + "…", ensure_ascii=False)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # all of it has ended already
        return
    except PermissionError as error:  # macOS says this of a group of which only zombies are left
        log.debug("process group %d could not be signalled: %s", group, error)


async def _within(seconds: float, event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
