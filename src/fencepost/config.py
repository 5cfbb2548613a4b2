"""Settings from `fencepost.toml` and the environment. Unknown keys are refused, and so are combinations that cannot
be safe (renew interval < trust window < ttl ≤ max_ttl).

Order: what a caller says, then the environment (`FENCEPOST_STORE`, `FENCEPOST_WORK_TTL`, …), then the file in the
current folder, then the defaults. Relative paths in a URL are relative to the current folder.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import DEFAULT_TTL, check_id, check_integer, check_seconds

FILE_NAME = "fencepost.toml"
DEFAULT_URL = "sqlite:///fencepost.db"
MAX_CONCURRENCY = 1000
# The most that a pool's policy may allow. What this pool allows is known, and compared, once its store is open.
LARGEST_MAX_TTL = 7 * 86400.0
_PREFIX = "FENCEPOST_WORK_"


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[store]`: where the tasks are kept. `sqlite:///relative.db` or `sqlite:////absolute.db`."""

    url: str = DEFAULT_URL


class WorkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[work]`: what `fencepost work` does unless its options say otherwise. Durations are seconds.

    An empty `kinds` means every kind. `renew_interval` and `trust_window` 0 mean: derived from the ttl. A lease is
    trusted for `trust_window` seconds after the *sending* of its last successful renewal, then the handler is stopped.
    """

    queues: tuple[str, ...] = ("default",)
    kinds: tuple[str, ...] = ()
    pool: str = "default"
    ttl: float = DEFAULT_TTL
    renew_interval: float = 0.0
    trust_window: float = 0.0
    concurrency: int = 1
    drain_timeout: float = 30.0
    on_epoch: Literal["stop", "adopt"] = "stop"
    result: Literal["json", "text", "bytes"] = "json"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set. `downstreams` are raw tables: `fencepost.effects.config` checks them and makes of
    them what effects are sent to."""

    store: StoreSettings = StoreSettings()
    work: WorkSettings = WorkSettings()
    downstreams: dict[str, dict[str, Any]] = {}


def load(folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of `folder` (default: the current one) and the environment.

    Raises InvalidRequest naming the key where one is unknown, of the wrong type, out of bounds, or where the
    combination cannot be safe. A missing file is no error. Opens nothing.
    """
    environment = os.environ if environment is None else environment
    path = (folder or Path()) / FILE_NAME
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InvalidRequest(FILE_NAME, f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(FILE_NAME, f"is not TOML ({error})") from None
    _refuse_unknown(found)
    settings: Settings = _convert(found, Settings, FILE_NAME, strict=True)

    if url := environment.get("FENCEPOST_STORE"):
        settings = msgspec.structs.replace(settings, store=StoreSettings(url))
    known = WorkSettings.__struct_fields__
    changes: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(_PREFIX):
            continue
        field = name.removeprefix(_PREFIX).lower()
        if field not in known:
            raise InvalidRequest(name, f"is no setting{_meant(field, known)}")
        changes[field] = [part for part in text.split(",") if part] if field in ("queues", "kinds") else text
    if changes:
        plain = msgspec.to_builtins(settings.work) | changes
        names = ", ".join(_PREFIX + field.upper() for field in changes)
        settings = msgspec.structs.replace(settings, work=_convert(plain, WorkSettings, names, strict=False))
    check_work(settings.work)
    return settings


def check_work(work: WorkSettings, *, max_ttl: float = LARGEST_MAX_TTL) -> WorkSettings:
    """`work` as it is, or InvalidRequest naming the field and the limit. `max_ttl` is the pool's."""
    if not work.queues:
        raise InvalidRequest("work.queues", "must name at least one queue")
    for queue in work.queues:
        check_id(queue, "work.queues")
    for kind in work.kinds:
        check_id(kind, "work.kinds")
    check_id(work.pool, "work.pool")
    check_integer(work.concurrency, "work.concurrency", 1, MAX_CONCURRENCY)
    check_seconds(work.drain_timeout, "work.drain_timeout")
    check_lease(work.ttl, renew_interval=work.renew_interval, trust_window=work.trust_window, max_ttl=max_ttl)
    return work


def check_lease(ttl: float, *, renew_interval: float = 0.0, trust_window: float = 0.0, max_ttl: float) -> None:
    """Refuses what cannot be safe: renew interval < trust window < ttl ≤ max_ttl. 0 means: derived from the ttl."""
    check_seconds(ttl, "work.ttl", above=True)
    check_seconds(renew_interval, "work.renew_interval")
    check_seconds(trust_window, "work.trust_window")
    if ttl > max_ttl:
        raise InvalidRequest("work.ttl", f"must be at most the pool's max_ttl of {max_ttl:g} seconds, got {ttl:g}")
    if trust_window and trust_window >= ttl:
        raise InvalidRequest(
            "work.trust_window",
            f"must be below work.ttl ({ttl:g} seconds), got {trust_window:g}: "
            "a worker would go on while another may hold its task",
        )
    if renew_interval and renew_interval >= (trust_window or ttl):
        limit = f"work.trust_window ({trust_window:g}" if trust_window else f"work.ttl ({ttl:g}"
        raise InvalidRequest(
            "work.renew_interval",
            f"must be below {limit} seconds), got {renew_interval:g}: every lease would lapse between two renewals",
        )


def without_password(url: str) -> str:
    """The URL as it may be printed, put into a journal or handed to a program."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = f"{parts.username}@" if parts.username else ""
    where = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    return urlunsplit(parts._replace(netloc=user + where))


def _refuse_unknown(found: dict[str, Any]) -> None:
    """Names every key that means nothing, rather than the first."""
    sections = {"store": StoreSettings.__struct_fields__, "work": WorkSettings.__struct_fields__}
    names = (*sections, "downstreams")
    unknown = [f"[{name}]{_meant(name, names)}" for name in found if name not in names]
    for section, known in sections.items():
        table = found.get(section)
        if isinstance(table, dict):
            unknown += [f"{section}.{key}{_meant(key, known)}" for key in table if key not in known]
    if unknown:
        raise InvalidRequest(FILE_NAME, f"unknown: {', '.join(unknown)}")


def _meant(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _convert(value: Any, into: Any, where: str, *, strict: bool) -> Any:
    try:
        return msgspec.convert(value, into, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidRequest(where, str(error).replace("`", "").replace("$.", "")) from None
