"""git, s3 and aws pass the kit that any downstream must pass, each against what it really reaches."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fencepost.effects.aws import Aws
from fencepost.effects.base import Declaration, Guarantee
from fencepost.effects.git import Git
from fencepost.effects.s3 import S3
from fencepost.testing import DownstreamWorld, Scenario, downstream_suite
from tests.effects.object_stores import KEYS, Between, boto, moto, rclone, seaweedfs, shared_bucket
from tests.effects.repositories import MAIN, CuttingProxy, Daemon, Remote
from tests.effects.token_server import TokenServer
from tests.effects.worlds import passed

pytestmark = pytest.mark.xdist_group("object_stores")  # one process starts the servers
WINDOWS: dict[str, Any] = {"send_window": 0.8, "settle_time": 0.5}


class GitWorld(DownstreamWorld):
    """A repository, and a proxy before its server."""

    unsupported: ClassVar = {
        "act_late": "the time-out of this scenario is over before git has looked, fetched and committed (see test_git)",
        "show_late": "a ref shows as soon as it has moved",
    }

    async def __aenter__(self) -> GitWorld:
        self._folder = Path(tempfile.mkdtemp(prefix="fencepost-git-world-"))
        self._remote = Remote(self._folder)
        self._daemon = Daemon(self._remote)
        self._proxy = await CuttingProxy(self._daemon.port).__aenter__()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._proxy.__aexit__()
        self._daemon.close()
        shutil.rmtree(self._folder)

    async def downstream(self) -> Git:
        # Git looks, fetches and commits within it, on a busy machine too.
        declaration = Declaration(name="repo", guarantee=Guarantee.CONDITIONAL, send_window=2.5, settle_time=0.5)
        return Git(declaration, f"git://127.0.0.1:{self._proxy.port}/remote.git", ref=MAIN)

    def payload(self, number: int) -> Any:
        return {"files": {"report.txt": f"{number}\n"}, "message": f"Report {number}"}

    async def count(self, effect_id: str, payload: Any) -> int:
        return self._remote.git("log", "--format=%B", MAIN).count(f"Fencepost-Effect: {effect_id}")

    async def lose_answer(self) -> None:
        self._proxy.lose = True


class S3World(DownstreamWorld):
    """A key in a bucket without versions; what the server accepted is counted on the way."""

    versions: ClassVar[bool] = False
    unsupported: ClassVar = {"show_late": "an object shows as soon as it is written"}

    async def __aenter__(self) -> S3World:
        self._address = self.server()
        self._proxy = await Between(self._address).__aenter__()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._proxy.__aexit__()

    def server(self) -> str:
        return seaweedfs()

    async def downstream(self) -> S3:
        declaration = Declaration(name="reports", guarantee=Guarantee.CONDITIONAL, **WINDOWS)
        bucket = shared_bucket(self._address, versions=self.versions)
        made = S3(declaration, bucket, prefix=f"{id(self)}/", endpoint=self._proxy.address, addressing="path", **KEYS)
        await made.earn()  # the trial writes, too: it is over before anything is cut
        return made

    def payload(self, number: int) -> Any:
        return {"key": "report.txt", "body": f"report {number}"}

    async def count(self, effect_id: str, payload: Any) -> int:
        return self._proxy.accepted.count(effect_id)

    async def lose_answer(self) -> None:
        self._proxy.lose = True

    async def act_late(self, seconds: float) -> None:
        self._proxy.late = seconds


class VersionsWorld(S3World):
    versions: ClassVar[bool] = True


class IgnoringWorld(S3World):
    """A server that ignores preconditions: NON_REPLAYABLE."""

    def server(self) -> str:
        return rclone()


class EfsWorld(DownstreamWorld):
    """moto's EFS, which honours CreationToken."""

    unsupported: ClassVar = {
        "show_late": "moto shows a file system as soon as it is made",
        "forget": "EFS knows a token as long as its file system exists",
    }

    async def __aenter__(self) -> EfsWorld:
        self._proxy = await Between(moto(), "POST").__aenter__()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._proxy.__aexit__()

    async def downstream(self) -> Aws:
        declaration = Declaration(name="efs", guarantee=Guarantee.IDEMPOTENT, retention=86_400.0, **WINDOWS)
        return Aws(declaration, "efs", "create_file_system", endpoint=self._proxy.address, **KEYS)

    def payload(self, number: int) -> Any:
        return {"Tags": [{"Key": "Name", "Value": f"{number}"}]}

    async def count(self, effect_id: str, payload: Any) -> int:
        return len(boto(moto(), "efs").describe_file_systems(CreationToken=effect_id)["FileSystems"])

    async def lose_answer(self) -> None:
        self._proxy.lose = True

    async def act_late(self, seconds: float) -> None:
        self._proxy.late = seconds


class Ec2World(DownstreamWorld):
    """EC2's ClientToken by its documented rule: not verified against EC2 itself."""

    async def __aenter__(self) -> Ec2World:
        self._server = TokenServer(moto())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()

    async def downstream(self) -> Aws:
        declaration = Declaration(name="ec2", guarantee=Guarantee.IDEMPOTENT, retention=86_400.0, **WINDOWS)
        return Aws(declaration, "ec2", "run_instances", endpoint=self._server.address, **KEYS)

    def payload(self, number: int) -> Any:
        return {"ImageId": "ami-12c6146b", "MinCount": 1, "MaxCount": number}

    async def count(self, effect_id: str, payload: Any) -> int:
        return self._server.machines.count(effect_id)

    async def lose_answer(self) -> None:
        self._server.lose = True

    async def act_late(self, seconds: float) -> None:
        self._server.late = seconds

    async def show_late(self, seconds: float) -> None:
        self._server.lose = True
        self._server.shows_from = time.monotonic() + seconds

    async def forget(self) -> None:
        self._server.forget()


def scenarios(*those: type[DownstreamWorld]) -> pytest.MarkDecorator:
    every = [(world, scenario) for world in those for scenario in downstream_suite(world)]
    ids = [f"{world.__name__}: {scenario}" for world, scenario in every]
    return pytest.mark.parametrize("scenario", [scenario for _, scenario in every], ids=ids)


@scenarios(GitWorld, VersionsWorld, Ec2World)
async def test_our_own_downstreams_pass(scenario: Scenario) -> None:
    await passed(scenario)


@pytest.mark.soak
@scenarios(S3World, IgnoringWorld, EfsWorld)
async def test_our_own_downstreams_pass_in_their_other_forms(scenario: Scenario) -> None:
    await passed(scenario)
