"""Real object stores and a stand-in for AWS, on loopback: each is started once a run, by the first test that asks."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.postgres_server import free_port

START = 60.0  # a busy machine is slow, not broken
KEYS = {"access_key": "test", "secret_key": "testtest", "region": "us-east-1"}
_bucket_numbers = itertools.count(1)


def program(name: str) -> str:
    """A program of the test environment. Not every kind of machine has all of them."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name} is not made for this kind of machine")
    return str(path)


# A server beside a shell that waits for the end of its input: it ends, too, should the tests' process be killed.
BESIDE = '("$@"; kill -KILL 0) & read -r _; kill -KILL 0'


def _run(line: list[str], folder: Path, ready: Callable[[], object]) -> None:
    """Start a server that ends with this process, and wait until `ready` raises nothing."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", BESIDE, "sh", *line],
            cwd=folder, start_new_session=True, stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip

    def close() -> None:
        assert process.stdin is not None
        process.stdin.close()  # SIGKILL: weed takes its time over anything gentler, and nothing has to be kept
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(close)
    until = time.monotonic() + START
    while True:
        try:
            ready()
            return
        except Exception as error:
            if time.monotonic() > until or process.poll() is not None:
                raise RuntimeError(f"{line[0]} did not start:\n{(folder / 'log').read_text()[-2000:]}") from error
            time.sleep(0.05)


@functools.cache
def seaweedfs() -> str:
    """The address of `weed server -s3`, which honours preconditions and keeps versions."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-seaweedfs-"))
    ports = {
        name: free_port()
        for name in (
            "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
            "s3.port", "s3.port.grpc",
        )
    }  # fmt: skip
    (folder / "identities.json").write_text(
        '{"identities": [{"name": "test", "credentials": [{"accessKey": "test", "secretKey": "testtest"}],'
        ' "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}'
    )
    line = [
        program("weed"), "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-filer", "-s3", f"-s3.config={folder}/identities.json", "-s3.iam=false", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-volume.max=200", "-master.volumeSizeLimitMB=64", "-master.telemetry=false",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    address = f"http://127.0.0.1:{ports['s3.port']}"
    _run(line, folder, lambda: boto(address).put_object(Bucket=new_bucket(address), Key="ready", Body=b""))
    return address


@functools.cache
def rclone() -> str:
    """The address of `rclone serve s3`, which ignores preconditions."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-rclone-"))
    (folder / "data").mkdir()
    address = f"http://127.0.0.1:{free_port()}"
    line = [program("rclone"), "serve", "s3", "--addr", address.removeprefix("http://"), "--auth-key", "test,testtest"]
    _run([*line, "--config", os.devnull, str(folder / "data")], folder, lambda: boto(address).list_buckets())
    return address


@functools.cache
def moto() -> str:
    """The address of moto's server, which stands in for AWS."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-moto-"))
    address = f"http://127.0.0.1:{(port := free_port())}"
    line = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    _run(line, folder, lambda: boto(address, "efs").describe_file_systems())
    return address


@functools.cache
def boto(address: str, service: str = "s3") -> Any:
    """A plain client: the third party of the tests."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        service, endpoint_url=address, region_name="us-east-1", aws_access_key_id="test",
        aws_secret_access_key="testtest",
        config=Config(
            retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, connect_timeout=2, read_timeout=10
        ),
    )  # fmt: skip


def new_bucket(address: str, *, versions: bool = False) -> str:
    name = f"bucket-{next(_bucket_numbers)}"
    boto(address).create_bucket(Bucket=name)
    if versions:
        boto(address).put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    return name


@functools.cache
def shared_bucket(address: str, *, versions: bool = False) -> str:
    """One for all tests that leave its settings alone: making one takes a while."""
    return new_bucket(address, versions=versions)


class Between:
    """An HTTP proxy that keeps requests of one method from the server, or their answers from the client; what S3 sends
    to try a server passes.

    `cut` is "request", "answer", or None. Requests of `method` wait for `hold`; the next one is late by `late` seconds,
    and reaches the server even if its client has gone by then; the next one loses its answer if `lose` says so.
    `requests` counts those that reached the server; `accepted` names the effects of those that it answered with 2xx.
    """

    def __init__(self, address: str, method: str = "PUT") -> None:
        self._to = int(address.rpartition(":")[2])
        self._method = method.encode()
        self.cut: str | None = None
        self.lose = False
        self.late = 0.0
        self.requests = 0
        self.accepted: list[str] = []
        self.hold: asyncio.Event | None = None
        self.held = asyncio.Event()
        self.address = ""
        self._serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Between:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        if self.hold is not None:
            self.hold.set()
        for writer in self._serving.values():
            writer.transport.abort()
        if self._serving:
            await asyncio.wait(self._serving, timeout=10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._serving[me] = writer
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(_header(head, "Content-Length") or 0))
            effect = _header(head, "x-amz-meta-fencepost-effect")
            acts = head.startswith(self._method + b" ") and effect != "probe"
            lost = False
            if acts:
                self.held.set()
                late, self.late = self.late, 0.0
                lost, self.lose = self.lose or self.cut == "answer", False
                if self.hold is not None:
                    await self.hold.wait()
                if self.cut == "request":
                    return
                await asyncio.sleep(late)
            answer = await self._ask(head, body)
            if acts:
                self.requests += 1
                if answer.startswith(b"HTTP/1.1 2"):
                    self.accepted.append(effect)
            if not lost:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # a client that looked for a free connection, or is gone
        finally:
            writer.close()
            del self._serving[me]

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            return await reader.read()
        finally:
            writer.transport.abort()


def _header(head: bytes, name: str) -> str:
    for line in head.decode("latin-1").split("\r\n"):
        found, _, text = line.partition(":")
        if found.lower() == name.lower():
            return text.strip()
    return ""
