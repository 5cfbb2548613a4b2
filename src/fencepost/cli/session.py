"""What every command shares: its options, and the store that it opens."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from fencepost import config
from fencepost.errors import StoreRefused

if TYPE_CHECKING:
    from fencepost.client.client import Client

COMMON = Group("Common options", sort_key=100)


class Presets:
    """Options that stood before the command's name: `fencepost --store URL --json tasks`."""

    store: str | None = None
    json: bool = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command."""

    store: Annotated[
        str | None,
        Parameter(
            group=COMMON,
            help="Where the tasks are kept: sqlite:///relative.db, sqlite:////absolute.db or"
            " postgresql://user@host/database. Otherwise FENCEPOST_STORE, then fencepost.toml in the current folder,"
            " then sqlite:///fencepost.db.",
        ),
    ] = None
    json: Annotated[
        bool, Parameter(group=COMMON, help="Print one JSON document on stdout, and nothing else there.")
    ] = False

    @property
    def url(self) -> str:
        return self.store or Presets.store or config.load().store.url

    @property
    def as_json(self) -> bool:
        return self.json or Presets.json


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PersonOptions(Options):
    """Options of the commands that change something in a person's name."""

    who: Annotated[str | None, Parameter(group=COMMON, help="Who does this, for the journal. Default: user@host.")] = (
        None
    )

    @property
    def person(self) -> str:
        return self.who if self.who is not None else whoami()


def whoami() -> str:
    """`user@host`, as it is written into the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def database(url: str) -> Path | None:
    """The file of an SQLite URL; None for other stores. Raises InvalidRequest where it names none."""
    from fencepost.connect import sqlite_path

    return Path(sqlite_path(url)) if urlsplit(url).scheme == "sqlite" else None


def is_postgres(url: str) -> bool:
    return urlsplit(url).scheme in ("postgresql", "postgres")


def require_database(url: str) -> None:
    """Refuses, rather than creates, a database that is not there. Raises StoreRefused."""
    path = database(url)
    if path is not None and not path.exists():
        raise StoreRefused(f"no database at {path}; run `fencepost init` or `fencepost submit`")


@asynccontextmanager
async def opened(options: Options, *, create: bool = False) -> AsyncIterator[Client]:
    """A client of the store that the options name. Only with `create` is a missing database made."""
    from fencepost.connect import connect

    url = options.url
    if not create:
        require_database(url)
    client = await connect(url, create=create)
    try:
        yield client
    finally:
        await client.close()
