"""The demo's worker processes: started, listened to, stopped and woken, and ended whatever happens.

None outlives the demo. On any exception, Ctrl-C included, each is killed and waited for; SIGKILL ends a stopped
process too. If the demo itself is killed, its children notice: see `fencepost.demo.worker`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any

import apsw
import msgspec

PATIENCE = 20.0  # seconds that any single event may take before the demo gives up
TICK = 0.2  # seconds between two looks at whether the workers still live


class Line(msgspec.Struct, frozen=True):
    """What a worker says it did, one JSON line on its standard output."""

    worker: str
    did: str
    task: str = ""
    attempt: int = 0
    percent: int = 0
    detail: dict[str, Any] = {}


class NotAsExpected(Exception):
    """The demo cannot go on: a worker ended, or what had to happen did not."""


class Cast:
    """The worker processes of one act, by name. A context manager: no process is left behind it."""

    def __init__(
        self, names: Sequence[str], arguments: Callable[[str], list[str]], module: str = "fencepost.demo.worker"
    ) -> None:
        self._lines: queue.Queue[Line] = queue.Queue()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._errors: dict[str, IO[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._asked_to_leave: set[str] = set()
        try:
            for name in names:
                self._start(name, [sys.executable, "-m", module, *arguments(name)])
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, command: list[str]) -> None:
        errors = self._errors[name] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        # A process group of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
        process = self._processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0
        )
        thread = threading.Thread(target=self._listen, args=(process,), name=f"demo-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(msgspec.json.decode(line, type=Line))

    def expect(
        self,
        what: str,
        wanted: Callable[[Line], bool],
        seen: Callable[[Line], None] | None = None,
        otherwise: Callable[[], Line | None] = lambda: None,
    ) -> Line:
        """The first line that is wanted; `seen` is shown every line on the way, this one included.

        `otherwise` is asked again and again while no worker says anything: what it gives is as good as the line.
        """
        waited = 0.0
        while waited < PATIENCE:
            try:
                line = self._lines.get(timeout=TICK)
            except queue.Empty:
                waited += TICK
                found = otherwise()
                if found is not None:
                    return found
                self._check_alive(what)
                continue
            if seen is not None:
                seen(line)
            if wanted(line):
                return line
        raise NotAsExpected(f"waited {PATIENCE:.0f} s in vain for this: {what}")

    def _check_alive(self, what: str) -> None:
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and not (code == 0 and name in self._asked_to_leave):
                raise NotAsExpected(
                    f"worker {name} ended with {code} while the demo waited for this: {what}\n" + self._said(name)
                )

    def _said(self, name: str) -> str:
        self._errors[name].seek(0)
        return self._errors[name].read().decode(errors="replace")[-4_000:]

    def start(self, name: str) -> None:
        pipe = self._processes[name].stdin
        assert pipe is not None
        pipe.write(b"go\n")
        pipe.flush()

    def pause(self, name: str, file: str) -> None:
        """SIGSTOP, and back only when the process really stands still.

        Anywhere but inside a transaction on `file`: SQLite's one write lock would stay with it, in either queue, and
        nobody could take over before it wakes.
        """
        process = self._processes[name]
        while True:
            process.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                process.returncode = os.waitstatus_to_exitcode(status)
                raise NotAsExpected(f"worker {name} ended before it could be stopped\n{self._said(name)}")
            if _can_be_written(file):
                return
            self.wake(name)
            time.sleep(TICK / 10)

    def wake(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def ask_to_leave(self, name: str) -> None:
        """SIGTERM, as a process manager sends it: finish what you have, take nothing more."""
        if name not in self._asked_to_leave:
            self._asked_to_leave.add(name)
            self._processes[name].send_signal(signal.SIGTERM)

    def dismiss(self) -> None:
        """Ask all to leave, and wait for them. Having been refused is no failure: each ends with exit code 0."""
        for name in self._processes:
            self.ask_to_leave(name)
        for name, process in self._processes.items():
            try:
                code = process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                raise NotAsExpected(f"worker {name} did not leave when asked\n{self._said(name)}") from None
            if code != 0:
                raise NotAsExpected(f"worker {name} ended with {code}\n{self._said(name)}")

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.send_signal(signal.SIGCONT)
        for process in self._processes.values():
            process.wait()
        for thread in self._threads:
            thread.join(timeout=PATIENCE)
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)
        for file in self._errors.values():
            file.close()

    def __enter__(self) -> Cast:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _can_be_written(file: str) -> bool:
    db = apsw.Connection(file)
    try:
        db.set_busy_timeout(500)
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")
    except apsw.BusyError:
        return False
    finally:
        db.close()
    return True


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return  # what its reader did not live to read
