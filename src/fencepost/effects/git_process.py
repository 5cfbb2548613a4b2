"""Git as a child process: nobody's configuration, nobody's hooks, no questions asked, and an end that is enforced.

What stands in the caller's environment or home folder changes nothing here: no user or system configuration, no
aliases, hooks, signing, credential helpers, prompts, replaced objects or URL rewriting. Secrets travel in the
environment, so that they show in no list of processes.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fencepost.errors import InvalidRequest, Unavailable

SCHEMES = ("https", "http", "ssh", "git", "file")
# What a corporate network needs to be reached at all; they hold no identity of the user's.
PASSED_ON = (
    "PATH", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "http_proxy", "https_proxy",
    "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY",
)  # fmt: skip
LAST_WORDS = 2.0  # seconds between SIGTERM, at which git takes its lock files away, and SIGKILL


class TookTooLong(Exception):
    """The command was ended: it had not finished within its time."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a finished command said."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace").strip()

    @property
    def why(self) -> str:
        """The last line that says something about why it failed, for people."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith(("fatal:", "error:", "remote:", "ssh:"))]
        return ((told or lines or [f"git ended with code {self.code}"])[-1])[:500]


def check_url(url: object, field: str) -> str:
    """`url` as it is, or InvalidRequest: a known scheme, an absolute path or host:path, and no password in it."""
    if not isinstance(url, str) or not url or any(ord(sign) < 33 for sign in url):
        raise InvalidRequest(field, "must be a repository's URL or absolute path, without spaces")
    scheme, found, _ = url.partition("://")
    if found:
        if scheme not in SCHEMES:
            raise InvalidRequest(field, f"must begin with one of {', '.join(SCHEMES)}, got {scheme}://")
        if urlsplit(url).password is not None:
            raise InvalidRequest(field, "must not contain a password: name it with token_env or token_file")
    elif not url.startswith("/") and ("::" in url or ":" not in url or url.startswith("-")):
        raise InvalidRequest(field, "must be a URL, an absolute path, or host:path for ssh")
    return url


class Runner:
    """Runs git on one bare repository of ours, made when it is first needed."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        user: str = "fencepost",
        token: str | None = None,
        ssh_key: Path | None = None,
        ssh_known_hosts: Path | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.folder = folder
        self.timeout = timeout
        self._made = False
        self._making = asyncio.Lock()
        settings = {
            "core.hooksPath": os.devnull,
            "core.protectHFS": "true",
            "core.protectNTFS": "true",
            "core.fsync": "none",  # all of this is a copy: what counts is what the remote keeps
            "gc.auto": "0",
            "maintenance.auto": "false",
            "http.followRedirects": "false",  # the token is for this host alone
            "credential.helper": "",
            "push.gpgSign": "false",
        }
        if token is not None:
            basic = base64.b64encode(f"{user}:{token}".encode()).decode()
            settings[f"http.{url}.extraHeader"] = f"Authorization: Basic {basic}"
        self._environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "true",
            "SSH_ASKPASS": "true",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
            "GIT_PROTOCOL_FROM_USER": "0",
            "GIT_SSH_COMMAND": _ssh(ssh_key, ssh_known_hosts),
            "LC_ALL": "C",  # what git says is read
            "GIT_CONFIG_COUNT": str(len(settings)),
        }
        for number, (key, value) in enumerate(settings.items()):
            self._environment[f"GIT_CONFIG_KEY_{number}"] = key
            self._environment[f"GIT_CONFIG_VALUE_{number}"] = value

    async def run(
        self,
        *arguments: str,
        feed: bytes = b"",
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Said:
        """Run `git arguments…` to its end. Raises TookTooLong, and Unavailable where there is no git.

        When the caller is cancelled or the time is over, the command and what it started are ended: SIGTERM first,
        because a git that is killed at once leaves its lock files where they are.
        """
        await self._make()
        return await self._run(arguments, feed, self.timeout if timeout is None else timeout, environment or {})

    async def _make(self) -> None:
        async with self._making:
            if self._made:
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.folder / "HEAD").exists():
                said = await self._run(("init", "--quiet", "--bare", "--template="), b"", self.timeout, {})
                if said.code:
                    raise Unavailable(f"git cannot make a repository in {self.folder}: {said.why}")
            self._made = True

    async def _run(
        self, arguments: tuple[str, ...], feed: bytes, timeout: float, environment: Mapping[str, str]
    ) -> Said:
        try:
            process = await asyncio.create_subprocess_exec(
                "git",
                *arguments,
                cwd=self.folder,
                env=self._environment | {"GIT_DIR": str(self.folder)} | dict(environment),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a group of its own, so that its helpers (ssh, https) end with it
            )
        except FileNotFoundError:
            raise Unavailable("there is no git on PATH") from None
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                out, err = await process.communicate(feed)
        except TimeoutError:
            raise TookTooLong(f"git {arguments[0]} did not end within {timeout:.3g} s") from None
        finally:
            if process.returncode is None:
                await _end(process)
        return Said(process.returncode or 0, out, err.decode("utf-8", "replace"))


def _ssh(key: Path | None, known_hosts: Path | None) -> str:
    words = ["ssh", "-F", os.devnull, "-o", "BatchMode=yes"]
    if key is not None:
        words += ["-i", str(key), "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none"]
    if known_hosts is not None:
        words += ["-o", f"UserKnownHostsFile={known_hosts}", "-o", "StrictHostKeyChecking=yes"]
    return shlex.join(words)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process's group, whatever happens to the caller meanwhile."""
    waiting = asyncio.ensure_future(process.wait())
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS says the second of a group of zombies
            break
        try:
            await asyncio.wait({waiting}, timeout=LAST_WORDS)
        except asyncio.CancelledError:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if waiting.done():
            break
