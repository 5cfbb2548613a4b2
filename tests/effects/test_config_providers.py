"""git, s3 and aws as tables of fencepost.toml: made of their settings, and refused by the setting's name."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost.effects.aws import Aws
from fencepost.effects.base import Guarantee
from fencepost.effects.config import Downstreams
from fencepost.effects.git import Git
from fencepost.effects.s3 import S3
from fencepost.errors import InvalidRequest, Unavailable

GIT = {"type": "git", "url": "https://git.example.org/notes.git", "ref": "refs/heads/main"}
S3_ = {"type": "s3", "bucket": "reports"}
EC2 = {"type": "aws", "service": "ec2", "operation": "run_instances", "retention": 86_400}


def made(table: dict[str, Any], folder: Path | None = None, **environment: str) -> Any:
    return Downstreams({"it": table}, folder=folder, environment=environment)["it"]


def test_each_type_is_made_with_its_guarantee(tmp_path: Path) -> None:
    git = made(GIT | {"cache": "kept", "token_env": "T", "author": "A <a@b>"}, tmp_path, T="secret")
    assert isinstance(git, Git) and git.declaration.guarantee == Guarantee.CONDITIONAL
    assert git._folder == tmp_path / "kept"
    basic = base64.b64encode(b"fencepost:secret").decode()
    assert f"Authorization: Basic {basic}" in git._git._environment.values()  # and in no list of processes
    several = made({"type": "git", "url": "/srv/notes.git", "refs": ["refs/heads/agent/*"], "base": "refs/heads/main"})
    assert isinstance(several, Git)
    s3 = made(S3_ | {"access_key_env": "A", "secret_key_env": "S", "endpoint": "http://127.0.0.1:1"}, A="a", S="s")
    assert isinstance(s3, S3) and s3.declaration.guarantee == Guarantee.CONDITIONAL
    aws = made(EC2)
    assert isinstance(aws, Aws) and aws.declaration.guarantee == Guarantee.IDEMPOTENT


async def test_without_boto3_nothing_is_prepared_and_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    s3, aws = made(S3_), made(EC2)
    with pytest.raises(Unavailable, match=r"fencepost\[aws\]"):
        await s3.earn()
    with pytest.raises(Unavailable, match=r"fencepost\[aws\]"):
        await aws.bind({})
    for one in (s3, aws):
        assert not (await one.check()).ok
        await one.close()


@pytest.mark.parametrize(
    ("table", "field"),
    [
        (GIT | {"token": "secret"}, "token"),
        (GIT | {"ref": "main"}, "ref"),
        (GIT | {"refs": ["refs/heads/x"]}, "ref"),
        ({"type": "git", "url": "/srv/notes.git"}, "ref"),
        (GIT | {"url": "https://me:secret@git.example.org/notes.git"}, "url"),
        (GIT | {"author": "nobody"}, "author"),
        (GIT | {"guarantee": "IDEMPOTENT", "retention": 60}, "guarantee"),
        (GIT | {"timeout": "long"}, "timeout"),
        (GIT | {"timeout": -1}, "timeout"),
        (GIT | {"token_env": "B"}, "token"),
        (S3_ | {"secret_key": "secret"}, "secret_key"),
        (S3_ | {"access_key_env": "A"}, "access_key"),
        (S3_ | {"addressing": "sideways"}, "addressing"),
        (S3_ | {"endpoint": "127.0.0.1"}, "endpoint"),
        (S3_ | {"prefix": "../"}, "prefix"),
        (S3_ | {"guarantee": "READ_ONLY"}, "guarantee"),
        (EC2 | {"retention": 200_000}, "retention"),
        (EC2 | {"token": "Other"}, "token"),
        (EC2 | {"operation": "create_image"}, "token"),
        (EC2 | {"timeout": 0}, "timeout"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(table: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(table, A="a", B="two\nlines")
    assert refused.value.field == f"downstreams.it.{field}", refused.value
