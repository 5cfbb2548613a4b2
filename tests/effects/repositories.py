"""Real git servers: a bare repository, `git daemon` before it, and a proxy that cuts a push where it is told to."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from fencepost.effects.base import Call, Deadline, Declaration, Guarantee
from fencepost.effects.git import Git
from tests.effects.object_stores import BESIDE
from tools.postgres_server import free_port

MAIN = "refs/heads/main"
EFFECT = "e" * 64
PAYLOAD = {"files": {"a.txt": "A\n"}, "message": "Say A"}
_PLAIN = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "T",
    "GIT_AUTHOR_EMAIL": "t@localhost",
    "GIT_COMMITTER_NAME": "T",
    "GIT_COMMITTER_EMAIL": "t@localhost",
}


class Remote:
    """A bare repository, and a third party (`somebody`) that pushes to it besides."""

    def __init__(self, folder: Path, *, empty: bool = False) -> None:
        self.path = folder / "remote.git"
        self._work = folder / "somebody"
        if not empty:
            shutil.copytree(_template(), folder, dirs_exist_ok=True)
            return
        self.git("init", "-q", "--bare", "--template=", "-b", "main", str(self.path), inside=folder)
        self.git("init", "-q", "--template=", "-b", "main", str(self._work), inside=folder)
        self.somebody("remote", "add", "origin", "../remote.git")

    def git(self, *arguments: str, inside: Path | None = None) -> str:
        run = subprocess.run(
            ["git", *arguments], cwd=inside or self.path, env=_PLAIN, check=True, capture_output=True, text=True,
            timeout=20,
        )  # fmt: skip
        return run.stdout.strip()

    def somebody(self, *arguments: str) -> str:
        return self.git(*arguments, inside=self._work)

    def push(self, name: str, text: str, *, message: str = "x", force: bool = False, ref: str = MAIN) -> str:
        """Somebody else's commit on top of what they have."""
        (self._work / name).parent.mkdir(exist_ok=True)
        (self._work / name).write_text(text)
        self.somebody("add", "-A")
        self.somebody("commit", "-q", "-m", message)
        self.somebody("push", "-q", *(["-f"] if force else []), "origin", f"HEAD:{ref}")
        return self.somebody("rev-parse", "HEAD")

    def make_executable(self, name: str) -> None:
        (self._work / name).chmod(0o755)

    def pull(self, ref: str = MAIN) -> None:
        self.somebody("fetch", "-q", "origin", ref)
        self.somebody("reset", "-q", "--hard", "FETCH_HEAD")

    def tip(self, ref: str = MAIN) -> str:
        return self.git("rev-parse", ref)

    def commits(self, ref: str = MAIN) -> int:
        return int(self.git("rev-list", "--count", ref))

    def message(self, commit: str = MAIN) -> str:
        return self.git("log", "-1", "--format=%B", commit)

    def file(self, path: str, ref: str = MAIN) -> str:
        return self.git("show", f"{ref}:{path}")


@functools.cache
def _template() -> Path:
    """A repository with one commit, made once."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-repository-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Remote(folder, empty=True).push("README", "hello\n")
    return folder


class Daemon:
    """`git daemon`, which serves `remote` to anybody on loopback, pushes included."""

    def __init__(self, remote: Remote) -> None:
        self.port = free_port()
        line = [
            "git", "daemon", "--reuseaddr", "--listen=127.0.0.1", f"--port={self.port}", "--export-all",
            "--enable=receive-pack", f"--base-path={remote.path.parent}", str(remote.path.parent),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["sh", "-c", BESIDE, "sh", *line],
            env=_PLAIN,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until:
                    self.close()
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class CuttingProxy:
    """Passes everything on but pushes, of which it cuts `cut`: "request" before the server saw it, "answer" after the
    server acted; None passes them, too. `pushes` counts those that the server got."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self.cut: str | None = None
        self.pushes = 0
        self.lose = False  # the answer of the next push
        self.late = 0.0  # seconds by which the next push comes late; the server gets it even if its client has gone
        self.hold: asyncio.Event | None = None  # a push waits for it before the server sees it
        self.held = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        if self.hold is not None:
            self.hold.set()
        for writer in self._serving.values():
            writer.transport.abort()
        if self._serving:
            await asyncio.wait(self._serving, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._serving[me] = writer
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            size = await reader.readexactly(4)
            first = size + await reader.readexactly(int(size, 16) - 4)
            far_writer.write(first)
            if b"git-receive-pack" not in first:
                await self._both(reader, writer, far_reader, far_writer)
                return
            while True:  # the refs, up to their end; from here on it is about the push itself
                refs = await far_reader.read(65536)
                writer.write(refs)
                if refs.endswith(b"0000") or not refs:
                    break
            # An up-to-date client says 0000 and goes; one that pushes says what.
            push = await reader.read(65536)
            lost = False
            if push and push != b"0000":
                self.held.set()
                lost, self.lose = self.lose or self.cut == "answer", False
                late, self.late = self.late, 0.0
                if late:
                    push += await _all(reader, late)
                if self.hold is not None:
                    await self.hold.wait()
                if self.cut == "request":
                    return
                self.pushes += 1
                lost = lost or bool(late)
            far_writer.write(push)
            if lost:
                await self._drain(reader, far_reader, far_writer)
                return
            await self._both(reader, writer, far_reader, far_writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # either side may leave at any time
        finally:
            del self._serving[me]
            writer.transport.abort()
            far_writer.transport.abort()

    async def _drain(self, reader: asyncio.StreamReader, far: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        """Let the server have all of it, and keep its answer."""
        up = asyncio.ensure_future(_pass(reader, to))
        await far.read(1)
        up.cancel()
        await asyncio.gather(up, return_exceptions=True)

    async def _both(self, reader: Any, writer: Any, far_reader: Any, far_writer: Any) -> None:
        ways = [asyncio.ensure_future(_pass(reader, far_writer)), asyncio.ensure_future(_pass(far_reader, writer))]
        try:
            await asyncio.wait(ways)
        finally:
            for way in ways:
                way.cancel()


async def _all(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """What comes within `seconds`, waited for to their end."""
    collected = bytearray()

    async def collect() -> None:
        while data := await reader.read(65536):
            collected.extend(data)

    await asyncio.gather(_for(collect(), seconds), asyncio.sleep(seconds))
    return bytes(collected)


async def _for(collecting: Coroutine[Any, Any, None], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await collecting
    except (TimeoutError, ConnectionError):
        return


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except ConnectionError:
        return


def git_to(url: str, *, timeout: float = 20.0, **more: Any) -> Git:
    more = more if "refs" in more else {"ref": MAIN, **more}
    declaration = Declaration(name="repo", guarantee=Guarantee.CONDITIONAL)
    return Git(declaration, url, timeout=timeout, **more)


def call(bound: Any, precondition: str, *, execution: int = 1, generation: int = 1, within: float = 10.0) -> Call:
    return Call(
        effect_id=EFFECT, task_id="t", slot="publish", execution=execution, epoch=1, generation=generation,
        payload=bound, precondition=precondition, send_by=Deadline.within(within),
    )  # fmt: skip
