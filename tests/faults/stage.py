"""Real processes on one store: started, told, stopped, woken, killed, and ended whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
import pytest_asyncio

import fencepost
from fencepost import wire
from fencepost.client.client import Client
from fencepost.service.audit_report import AuditReport
from fencepost.wire import Claim, NewTask

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds that any single event may take; far above what it takes on a busy machine


class Told(Exception):
    """What a process raised at an order."""

    def __init__(self, name: str, says: str) -> None:
        self.name = name
        super().__init__(f"{name}: {says}")


class Program:
    """One process. Its lines are read all the time, so that it never blocks on the pipe."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.seen: list[dict[str, Any]] = []  # every line that was no answer to an order
        self._process = process
        self._errors = errors
        self._next = 0
        self._news = asyncio.Condition()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._orders = 0
        self._reader = asyncio.create_task(self._read(), name=f"lines of {name}")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if said["did"] == "answered":
                future = self._answers.pop(said["id"])
                if not future.done():
                    future.set_result(said["answer"])
                continue
            self.seen.append(said)
            async with self._news:
                self._news.notify_all()
        await self._process.wait()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(self._ended())
                future.exception()  # whoever awaits it is told; nobody has to
        async with self._news:
            self._news.notify_all()

    def _ended(self) -> Exception:
        return ConnectionError(f"{self.name} ended with {self._process.returncode}\n{self.stderr()[-4000:]}")

    def stderr(self) -> str:
        return self._errors.read_text(errors="replace")

    async def reaches(
        self, did: str, within: float = PATIENCE, where: Callable[[dict[str, Any]], bool] = lambda said: True
    ) -> dict[str, Any]:
        """The next line not looked at yet that says `did`; lines before it are passed over."""

        def found() -> dict[str, Any] | None:
            while self._next < len(self.seen):
                said = self.seen[self._next]
                self._next += 1
                if said["did"] == did and where(said):
                    return said
            return None

        async with asyncio.timeout(within), self._news:
            while (said := found()) is None:
                if self._reader.done():
                    raise self._ended()
                await self._news.wait()
            return said

    def count(self, did: str) -> int:
        return sum(said["did"] == did for said in self.seen)

    def tell(self, do: str, **more: Any) -> None:
        """An order that is not answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")

    def ask(self, do: str, **more: Any) -> asyncio.Future[Any]:
        self._orders += 1
        future = self._answers[self._orders] = asyncio.get_running_loop().create_future()
        if self._reader.done():
            future.set_exception(self._ended())
        self.tell(do, id=self._orders, **more)
        return future

    @property
    def over(self) -> bool:
        return self._reader.done()

    # signals ------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)

    async def pause(self) -> None:
        """SIGSTOP, and back only when the process really stands still."""
        self.signal(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            while state_of_process(self.pid) != "T":
                await asyncio.sleep(0.002)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    async def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return await self.ended()

    async def ended(self, within: float = PATIENCE) -> int:
        """Its exit code; a negative one is the signal that ended it."""
        async with asyncio.timeout(within):
            await asyncio.shield(self._reader)
        assert self._process.returncode is not None
        return self._process.returncode

    async def close(self) -> None:
        if self._process.returncode is None:
            for number in (signal.SIGKILL, signal.SIGCONT):
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:
                    break
        await self._reader
        if self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await self._process.stdin.wait_closed()
            except (BrokenPipeError, ConnectionResetError):
                return  # an order that it did not live to read


def state_of_process(pid: int) -> str:
    """R, S, D, T (stopped), Z, …"""
    if sys.platform == "linux":
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
    found = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1]


class Hand:
    """A client in another process; answers are the values that the client there was given."""

    def __init__(self, program: Program) -> None:
        self.program = program

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        return _value(await self._ask(method, args, named))

    def start(self, method: str, *args: Any, **named: Any) -> asyncio.Task[Any]:
        """Sent now, and under way when this returns to its caller."""
        sent = self._ask(method, args, named)

        async def answer() -> Any:
            return _value(await sent)

        return asyncio.create_task(answer())

    async def together(self, *calls: tuple[str, tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        """Several calls that are asked in one go; what is raised stands in its place."""
        orders = [{"do": method, "args": _sent(args), "with": _sent(named)} for method, args, named in calls]
        answers = await self._bounded(self.program.ask("together", calls=orders))
        return [_value(each, raises=False) for each in answers["value"]]

    async def die_at(self, point: str) -> None:
        await self._bounded(self.program.ask("die_at", point=point))

    async def end(self) -> int:
        self.program.tell("end")
        return await self.program.ended()

    def _ask(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self._bounded(self.program.ask(method, args=_sent(args), **{"with": _sent(named)}))

    async def _bounded(self, answer: asyncio.Future[Any]) -> Any:
        async with asyncio.timeout(PATIENCE):
            return await answer


def _sent(value: Any) -> Any:
    if isinstance(value, Claim):
        return {"$claim": value.to_json()}
    if isinstance(value, NewTask):
        return {"$task": msgspec.to_builtins(value)}
    if isinstance(value, list | tuple):
        return [_sent(item) for item in value]
    if isinstance(value, dict):
        return {key: _sent(item) for key, item in value.items()}
    return value


def _value(answer: dict[str, Any], raises: bool = True) -> Any:
    kind, value = answer["kind"], answer["value"]
    if kind == "raised":
        told = Told(value["name"], value["says"])
        if raises:
            raise told
        return told
    if kind == "Claim":
        return Claim.from_json(value)
    if kind == "list":
        return [_value(item, raises) for item in value]
    if kind == "plain":
        return value
    return msgspec.convert(value, getattr(wire, kind))


class Stage:
    """One SQLite file and whatever runs on it. A stage on another store differs from here on."""

    store = "sqlite"

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        self.folder = folder
        self.path = path or folder / "stage.db"
        self.url = f"sqlite:///{self.path}"
        self._programs: list[Program] = []
        self._clients: list[Client] = []

    async def client(self, *, epoch: int | None = None) -> Client:
        """A client in the test's own process."""
        made = await fencepost.connect(self.url, epoch=epoch)
        self._clients.append(made)
        return made

    async def program(self, module: str, *arguments: Any, **environment: str) -> Program:
        """Start `tests.faults.programs.<module>` with these arguments; what is no text becomes JSON."""
        texts = [each if isinstance(each, str) else json.dumps(each) for each in map(_path_text, arguments)]
        return await self.command(
            module, [sys.executable, "-m", f"tests.faults.programs.{module}", *texts], environment
        )

    async def command(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> Program:
        name = f"{name}-{len(self._programs)}"
        errors = self.folder / f"{name}.stderr"
        with errors.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                process_group=0,
                limit=1 << 24,
            )
        made = Program(name, process, errors)
        self._programs.append(made)
        return made

    async def hand(self, *, epoch: int | None = None) -> Hand:
        program = await self.program("hand", self.url, *([str(epoch)] if epoch is not None else []))
        await program.reaches("connected")
        return Hand(program)

    async def worker(self, owner: str, **options: Any) -> Program:
        """A shipped `Worker` with the handlers of `tests.faults.programs.worker`, ready to claim."""
        made = await self.program("worker", self.url, owner, options)
        await made.reaches("connected")
        return made

    async def pause(self, program: Program) -> None:
        """Stop it anywhere but inside a transaction: SQLite's one write lock would stay with it, and stop everybody."""
        async with asyncio.timeout(PATIENCE):
            while True:
                await program.pause()
                try:
                    with self.sql(wait=0.5) as con:
                        con.execute("BEGIN IMMEDIATE")
                        con.execute("ROLLBACK")
                except apsw.BusyError:
                    program.wake()
                    await asyncio.sleep(0.01)  # on to another place
                else:
                    return

    def advance(self, seconds: float, *, wait: float = 30.0) -> None:
        """Move the store's clock on: it never goes below the highest time that it has stored."""
        with self.sql(wait=wait) as con:
            now = max(con.execute("SELECT at FROM clock").get, time.time_ns() // 1000)
            con.execute("UPDATE clock SET at = ?", (now + round(seconds * 1_000_000),))

    def sql(self, *, wait: float = 30.0) -> _Connection:
        """A bare connection, as another program would open the file."""
        return _Connection(str(self.path), wait)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What stands in the tables, asked past the product, in words that every store understands."""
        with self.sql() as con:
            return con.execute(query).fetchall()

    def after_now(self) -> str:
        """A condition on `event`: written after this moment."""
        [(last,)] = self.rows("SELECT coalesce(max(number), 0) FROM event")
        return f"number > {last}"

    def hold_the_lock(self, seconds: float) -> None:
        """Stand in every writer's way; an outsider's own patience must not give up in a crowd either."""
        with self.sql(wait=60.0) as con:
            con.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            con.execute("COMMIT")

    def outage(self, pause: float | None) -> None:
        """Kill the server and start it again, or make it stand still for `pause` seconds."""
        raise NotImplementedError("a file has no server")

    def snapshot(self) -> AbstractAsyncContextManager[None]:
        """A reader's transaction that stays open for the block."""

        @asynccontextmanager
        async def reading() -> AsyncIterator[None]:
            with self.sql() as con:
                con.execute("BEGIN")
                con.execute("SELECT count(*) FROM task").fetchall()
                yield
                con.execute("ROLLBACK")

        return reading()

    def integrity(self) -> str:
        with self.sql() as con:
            return str(con.execute("PRAGMA integrity_check").get)

    async def audit(self) -> AuditReport:
        """Audit, over a connection of its own; fails the test with what it finds."""
        client = await fencepost.connect(self.url)
        try:
            report: AuditReport = await client.report("audit")
        finally:
            await client.close()
        assert report.clean, report.violations[:10] or report.coverage
        return report

    async def close(self) -> None:
        for program in self._programs:
            await program.close()
        for client in self._clients:
            await client.close()


class _Connection:
    def __init__(self, path: str, wait: float) -> None:
        self._con = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
        self._con.set_busy_timeout(round(wait * 1000))

    def __enter__(self) -> apsw.Connection:
        return self._con

    def __exit__(self, *_: object) -> None:
        self._con.close()


def _path_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


STORES = ["sqlite"]
if os.environ.get("FENCEPOST_TEST_POSTGRES"):  # takes a real server
    STORES.append("postgres")
# A test that is marked so runs on each store; the others on SQLite.
on_every_store = pytest.mark.parametrize("stage", STORES, indirect=True)


@pytest_asyncio.fixture
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    if getattr(request, "param", "sqlite") == "postgres":
        from tests.postgres.stage import PostgresStage

        made: Stage = await PostgresStage.make(tmp_path)
    else:
        made = Stage(tmp_path)
    try:
        yield made
    finally:
        await made.close()


async def until(holds: Callable[[], Any], within: float = PATIENCE, look_every: float = 0.01) -> Any:
    """Wait until `holds()` (awaited where it must be) gives something true; what it gave."""
    async with asyncio.timeout(within):
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(look_every)
