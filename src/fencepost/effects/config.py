"""`[downstreams.NAME]` of fencepost.toml as downstream objects.

    [downstreams.mail]
    type = "http"                      # http, smtp, git, s3, aws, sql, or "package.module:Class" for one's own
    guarantee = "IDEMPOTENT"
    retention = 86400
    url = "https://mail.example.org/send"
    token_env = "MAIL_TOKEN"           # or token_file = "/run/secrets/mail"

NAME and `account` are what an effect is bound to. The declaration's settings are `guarantee`, `account`, `send_window`,
`settle_time`, `retention`, `margin` and `approval`; all others are the parameters of the type. Every setting that is
text may be given as `…_env` (the name of an environment variable) or `…_file` (a file that holds it) instead; a secret
must be. One's own class is called with its Declaration and the settings.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from fencepost.effects.base import Closes, Declaration, Guarantee, check_downstream
from fencepost.errors import InvalidRequest

__all__ = ["TYPES", "Downstreams"]


class Type(NamedTuple):
    """Where a type is, what its guarantee is unless the table says otherwise, and which of its settings are secret."""

    where: str
    guarantee: Guarantee
    secrets: tuple[str, ...] = ()


TYPES: dict[str, Type] = {
    "http": Type("fencepost.effects.http:Http", Guarantee.NON_REPLAYABLE, ("token",)),
    "smtp": Type("fencepost.effects.smtp:Smtp", Guarantee.NON_REPLAYABLE, ("password",)),
    "git": Type("fencepost.effects.git:Git", Guarantee.CONDITIONAL, ("token",)),
    "s3": Type("fencepost.effects.s3:S3", Guarantee.CONDITIONAL, ("access_key", "secret_key", "session_token")),
    "aws": Type("fencepost.effects.aws:Aws", Guarantee.IDEMPOTENT, ("access_key", "secret_key", "session_token")),
    "sql": Type("fencepost.effects.sql:Sql", Guarantee.TRANSACTIONAL),
}
OWN_SECRETS = ("password", "token", "secret", "secret_key", "access_key", "session_token", "api_key", "private_key")
DECLARED = ("guarantee", "account", "send_window", "settle_time", "retention", "margin", "approval")
_SECRET_HEADERS = ("authorization", "cookie", "token", "secret", "password", "api-key", "apikey")
_FROM = ("_env", "_file")


class _Table(NamedTuple):
    """One checked table: what it becomes, and where its secrets are to be read from."""

    factory: Any
    declaration: Declaration
    settings: dict[str, Any]
    elsewhere: dict[str, tuple[str, str]]  # setting → "_env" or "_file", and which
    headers: dict[str, tuple[str, str]]  # the same for http's headers


class Downstreams(Mapping[str, Any]):
    """The downstreams of a configuration, by name. Each is made when it is first asked for, and kept.

    Everything that can be known without opening anything is checked at once: raises InvalidRequest naming
    `downstreams.NAME.KEY` for an unknown type or key, a literal secret, or a value that cannot be. Secrets are read,
    and what only the type itself can know is checked, when a downstream is made.

    `folder`: what relative paths are relative to. `environment`: default `os.environ`.
    """

    def __init__(
        self, tables: Mapping[str, Any], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder or Path()
        self._environment = os.environ if environment is None else environment
        self._tables = {name: self._checked(name, table) for name, table in tables.items()}
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._tables:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._make(name, self._tables[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tables  # Mapping's own would make it

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def named(self, name: str) -> Any:
        """The downstream of that name; InvalidRequest, with the name that was probably meant, where there is none."""
        if name in self._tables:
            return self[name]
        there = f"; there are {', '.join(self._tables)}" if self._tables else "; none is configured"
        raise InvalidRequest("using", f"no [downstreams.{name}]{_meant(name, tuple(self._tables))}{there}")

    def declaration(self, name: str) -> Declaration:
        """What the table declares; nothing is made for that, and no secret read."""
        return self._tables[name].declaration

    async def close(self) -> None:
        """Close what was made. They may be asked for again."""
        made, self._made = self._made, {}
        for downstream in made.values():
            if isinstance(downstream, Closes):
                await downstream.close()

    # checking -------------------------------------------------------------------------------------

    def _checked(self, name: str, table: Any) -> _Table:
        at = f"downstreams.{name}"
        if not isinstance(table, Mapping):
            raise InvalidRequest(at, "must be a table")
        kind = table.get("type")
        if kind is None:
            raise InvalidRequest(f"{at}.type", f"is missing; there are {', '.join(TYPES)}")
        factory, guarantee, secrets = _type(kind, f"{at}.type")
        parameters = _parameters(factory)
        headers = kind == "http"
        known = {*parameters, *secrets}
        fields: dict[str, Any] = {"name": name, "guarantee": guarantee}
        settings: dict[str, Any] = {}
        elsewhere: dict[str, tuple[str, str]] = {}
        header_sources: dict[str, tuple[str, str]] = {}
        for key, value in table.items():
            if key == "type":
                continue
            if headers and key in ("headers_env", "headers_file"):
                for header, source in _convert(value, dict[str, str], f"{at}.{key}").items():
                    header_sources[header] = (key.removeprefix("headers"), source)
            elif key in DECLARED:
                fields[key] = value
            elif key in secrets:
                raise InvalidRequest(f"{at}.{key}", f"is a secret: give {key}_env or {key}_file instead")
            elif key in parameters:
                settings[key] = self._setting(value, parameters[key], f"{at}.{key}")
            else:
                setting, source = _source(key, known)
                if setting is None:
                    raise InvalidRequest(f"{at}.{key}", f"is unknown{_meant(key, (*DECLARED, *sorted(known)))}")
                elsewhere[setting] = (source, _convert(value, str, f"{at}.{key}"))
        for setting in elsewhere:
            if setting in settings:
                raise InvalidRequest(f"{at}.{setting}", "is given twice")
        if headers:
            _refuse_secret_headers(settings.get("headers", {}), at)
        try:
            declaration = msgspec.convert(fields, Declaration)
        except InvalidRequest as error:
            raise InvalidRequest(f"{at}.{error.field}", error.limit) from None
        except msgspec.ValidationError as error:
            raise InvalidRequest(at, str(error).replace("`", "").replace("$.", "")) from None
        if isinstance(getattr(factory, "declaration", None), Declaration):
            self._refuse_changed(factory.declaration, fields, at)
        return _Table(factory, declaration, settings, elsewhere, header_sources)

    def _setting(self, value: Any, annotation: Any, at: str) -> Any:
        if annotation is Path or Path in typing.get_args(annotation):
            return self._folder / _convert(value, str, at)
        _refuse_password(value, at)
        return _convert(value, annotation, at)

    @staticmethod
    def _refuse_changed(fixed: Declaration, fields: dict[str, Any], at: str) -> None:
        """A type that is declared once and for all, the store's own database."""
        for key in DECLARED:
            if key in fields and fields[key] != getattr(fixed, key):
                raise InvalidRequest(f"{at}.{key}", f"is {getattr(fixed, key)!r} for this type, and nothing else")

    # making ---------------------------------------------------------------------------------------

    def _make(self, name: str, table: _Table) -> Any:
        at = f"downstreams.{name}"
        settings = dict(table.settings)
        for setting, (source, where) in table.elsewhere.items():
            settings[setting] = self._read(where, source, f"{at}.{setting}{source}")
        headers = dict(settings.get("headers", {}))
        for header, (source, where) in table.headers.items():
            headers[header] = _literal(self._read(where, source, f"{at}.headers{source}.{header}"))
        if table.factory is _load(TYPES["http"].where) and "token" in settings:
            headers["Authorization"] = _literal(f"Bearer {settings.pop('token')}")
        if headers:
            settings["headers"] = headers
        try:
            if isinstance(getattr(table.factory, "declaration", None), Declaration):
                made = table.factory(**settings)
            else:
                made = table.factory(table.declaration, **settings)
            check_downstream(made)
        except InvalidRequest as error:
            raise InvalidRequest(f"{at}.{error.field}", error.limit) from None
        except TypeError as error:
            raise InvalidRequest(at, str(error)) from None
        return made

    def _read(self, where: str, source: str, at: str) -> str:
        if source == "_env":
            value = self._environment.get(where)
            if not value:
                raise InvalidRequest(at, f"the environment variable {where} is not set")
            return value
        path = self._folder / where
        try:
            value = path.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            raise InvalidRequest(at, f"{where} cannot be read ({reason})") from None
        if not value:
            raise InvalidRequest(at, f"{where} is empty")
        return value


def _type(kind: Any, at: str) -> tuple[Any, Guarantee, tuple[str, ...]]:
    if type(kind) is not str:
        raise InvalidRequest(at, "must be text")
    if kind in TYPES:
        found = TYPES[kind]
        return _load(found.where), found.guarantee, found.secrets
    if ":" not in kind:
        raise InvalidRequest(at, f"{kind!r} is unknown{_meant(kind, tuple(TYPES))}; there are {', '.join(TYPES)}")
    try:
        factory = _load(kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(at, f"{kind!r} cannot be imported ({error})") from None
    if not callable(factory):
        raise InvalidRequest(at, f"{kind!r} is nothing that can be called")
    return factory, Guarantee.NON_REPLAYABLE, tuple(name for name in OWN_SECRETS if name in _parameters(factory))


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _parameters(factory: Any) -> dict[str, Any]:
    """The settings that a type takes, with what they have to be."""
    signature = inspect.signature(factory)
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except NameError:
        hints = {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: hints.get(name, Any)
        for name, parameter in signature.parameters.items()
        if parameter.kind in kinds and name != "declaration"
    }


def _source(key: str, known: set[str]) -> tuple[str | None, str]:
    for ending in _FROM:
        setting = key.removesuffix(ending)
        if setting != key and setting in known:
            return setting, ending
    return None, ""


def _convert(value: Any, into: Any, at: str) -> Any:
    try:
        return msgspec.convert(value, into, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(at, str(error).replace("`", "").replace(" - at $", " at ")) from None


def _refuse_secret_headers(headers: Mapping[str, str], at: str) -> None:
    for header in headers:
        if any(word in header.lower() for word in _SECRET_HEADERS):
            raise InvalidRequest(
                f"{at}.headers.{header}", "is a secret: name it in headers_env or headers_file instead"
            )


def _refuse_password(value: Any, at: str) -> None:
    """No URL with a password in it: such a file is committed sooner or later."""
    if isinstance(value, str) and "://" in value and urlsplit(value.partition("{")[0]).password is not None:
        raise InvalidRequest(at, f"holds a password: give {at.rpartition('.')[2]}_env or {at.rpartition('.')[2]}_file")


def _literal(text: str) -> str:
    """Braces in a secret are no fields."""
    return text.replace("{", "{{").replace("}", "}}")


def _meant(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
