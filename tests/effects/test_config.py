"""`[downstreams.NAME]`: checked by name and key, secrets by environment or file alone."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fencepost.effects.base import Call, Declaration, Guarantee, Happened
from fencepost.effects.config import TYPES, Downstreams
from fencepost.effects.http import Http
from fencepost.effects.smtp import Smtp
from fencepost.effects.sql import Sql
from fencepost.errors import InvalidRequest

EXAMPLE = """
[mail]
type = "http"
guarantee = "IDEMPOTENT"
account = "acme"
retention = 86400
url = "https://mail.example.org/send"
query = "https://mail.example.org/sent/{key}"
token_env = "MAIL_TOKEN"
headers = { X-Team = "billing" }
headers_file = { X-Api-Key = "key.txt" }
unsure = [400]

[post]
type = "smtp"
host = "smtp.example.org"
user = "agent"
password_file = "secret.txt"
sender = "agent@example.org"
approval = true

[books]
type = "sql"
"""


class Own:
    """One's own downstream."""

    def __init__(self, declaration: Declaration, where: Path, *, token: str | None = None, size: int = 1) -> None:
        self.declaration = declaration
        self.where = where
        self.token = token
        self.size = size
        self.closed = 0

    async def execute(self, call: Call) -> Happened:
        return Happened()

    async def close(self) -> None:
        self.closed += 1


OWN = {"type": f"{__name__}:Own", "where": "folder"}


def read(text: str, folder: Path, **environment: str) -> Downstreams:
    return Downstreams(tomllib.loads(text), folder=folder, environment=environment)


def test_tables_become_downstreams_with_their_declarations_and_secrets(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("k{e}y\n")
    (tmp_path / "secret.txt").write_text("hush\n")
    found = read(EXAMPLE, tmp_path, MAIL_TOKEN="t0ken")
    assert list(found) == ["mail", "post", "books"]
    mail, post, books = found["mail"], found["post"], found["books"]
    assert isinstance(mail, Http)
    assert mail.declaration.downstream == "mail/acme"
    assert mail.declaration.guarantee == Guarantee.IDEMPOTENT
    sent = {name: template.fill({}, {}) for name, template in mail.headers.items()}
    assert sent == {"X-Team": "billing", "X-Api-Key": "k{e}y", "Authorization": "Bearer t0ken"}
    assert isinstance(post, Smtp)
    assert (post.password, post.declaration.approval) == ("hush", True)
    assert isinstance(books, Sql)
    assert found["mail"] is mail


def test_nothing_is_opened_and_no_secret_read_before_a_downstream_is_asked_for(tmp_path: Path) -> None:
    found = read(EXAMPLE, tmp_path)
    assert found.declaration("mail").retention == 86400
    assert "mail" in found
    assert "male" not in found
    with pytest.raises(InvalidRequest, match=r"downstreams\.mail\.token_env: .*MAIL_TOKEN is not set"):
        found["mail"]
    with pytest.raises(InvalidRequest, match=r"downstreams\.post\.password_file: secret.txt cannot be read"):
        found["post"]
    assert isinstance(found["books"], Sql)


@pytest.mark.parametrize(
    ("change", "field", "limit"),
    [
        ({"type": None}, "type", "is missing"),
        ({"type": "htp"}, "type", "did you mean http"),
        ({"type": "no.such.module:Thing"}, "type", "cannot be imported"),
        ({"type": "json:JSONDecodeErr"}, "type", "cannot be imported"),
        ({"urll": "x"}, "urll", "did you mean url"),
        ({"token": "hunter2"}, "token", "is a secret"),
        ({"headers": {"Authorization": "Bearer hunter2"}}, "headers.Authorization", "is a secret"),
        ({"headers": {"X-Auth-Token": "hunter2"}}, "headers.X-Auth-Token", "is a secret"),
        ({"headers": {"X-Api-Key": "hunter2"}}, "headers.X-Api-Key", "is a secret"),
        ({"proxy": "http://me:hunter2@proxy.example.org"}, "proxy", "proxy_env"),
        ({"url": "https://me:hunter2@example.org/"}, "url", "holds a password"),
        ({"url": 7}, "url", "Expected str"),
        ({"url_env": "URL"}, "url", "given twice"),
        ({"timeout": "soon"}, "timeout", "Expected float"),
        ({"unsure": ["x"]}, "unsure", "Expected int"),
        ({"retention": 5}, "retention", "must be above"),
        ({"guarantee": "EXACTLY_ONCE"}, "", "Invalid enum value"),
        ({"approval": "yes"}, "", "Expected bool"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_key_and_without_the_secret(
    change: dict[str, Any], field: str, limit: str, tmp_path: Path
) -> None:
    table = {"type": "http", "url": "https://example.org/", "guarantee": "IDEMPOTENT", "retention": 60, **change}
    if table["type"] is None:
        del table["type"]
    with pytest.raises(InvalidRequest, match=limit) as refused:
        Downstreams({"mail": table}, folder=tmp_path, environment={})
    assert refused.value.field == f"downstreams.mail.{field}".rstrip(".")
    assert "hunter2" not in str(refused.value)


def test_what_only_the_type_knows_is_refused_with_the_tables_name_when_it_is_made(tmp_path: Path) -> None:
    found = Downstreams({"x": {"type": "http", "url": "ftp://example.org/"}}, folder=tmp_path)
    with pytest.raises(InvalidRequest, match=r"downstreams\.x\.url: must begin with http"):
        found["x"]
    found = Downstreams({"x": {"type": "http"}}, folder=tmp_path)
    with pytest.raises(InvalidRequest, match=r"downstreams\.x: .*'url'"):
        found["x"]


def test_the_stores_own_database_is_transactional_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"downstreams\.books\.guarantee"):
        Downstreams({"books": {"type": "sql", "guarantee": "READ_ONLY"}}, folder=tmp_path)


def test_an_unknown_name_says_which_was_meant(tmp_path: Path) -> None:
    found = read(EXAMPLE, tmp_path)
    with pytest.raises(InvalidRequest, match=r"no \[downstreams.mial\] \(did you mean mail\?\); there are mail, post"):
        found.named("mial")
    with pytest.raises(InvalidRequest, match="none is configured"):
        Downstreams({}).named("mail")


async def test_ones_own_class_is_called_with_its_declaration_and_settings_and_closed(tmp_path: Path) -> None:
    table = OWN | {"token_env": "T", "size": 3, "guarantee": "READ_ONLY"}
    found = Downstreams({"own": table}, folder=tmp_path, environment={"T": "t"})
    own = found.named("own")
    assert isinstance(own, Own)
    assert (own.declaration.name, own.declaration.guarantee) == ("own", Guarantee.READ_ONLY)
    assert (own.where, own.token, own.size) == (tmp_path / "folder", "t", 3)
    await found.close()
    assert own.closed == 1
    with pytest.raises(InvalidRequest, match="is a secret"):
        Downstreams({"own": OWN | {"token": "t"}}, folder=tmp_path)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_type_is_where_it_is_said_to_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"downstreams\.x\.nonsense: is unknown"):
        Downstreams({"x": {"type": name, "nonsense": 1}}, folder=tmp_path)
