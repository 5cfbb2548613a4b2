"""git over HTTP, against git's own server program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.effects.base import Absent, Call, Happened, Standing, Unknown
from fencepost.effects.git import Git, _pushed
from fencepost.effects.git_process import Said
from fencepost.errors import Unavailable
from tests.effects.git_http import TOKEN, GitHttp
from tests.effects.repositories import PAYLOAD, Remote, call, git_to


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


@pytest.fixture
def server(remote: Remote) -> Iterator[GitHttp]:
    serving = GitHttp(remote)
    yield serving
    serving.close()


async def prepared(git: Git) -> Call:
    bound = await git.bind_for(PAYLOAD, 1)
    return call(bound, await git.precondition(bound))


async def test_a_push_with_the_right_token_happens_once(remote: Remote, server: GitHttp) -> None:
    git = git_to(server.url, token=TOKEN)
    sent = await prepared(git)
    assert await git.query(sent) == Standing()
    assert isinstance(await git.execute(sent), Happened)
    assert isinstance(await git.execute(sent), Happened)  # it looks first, and finds it
    assert isinstance(await git.query(sent), Happened)
    assert remote.commits() == 2
    await git.close()


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_without_the_right_token_nothing_is_prepared_nor_sent_and_nobody_is_asked(
    remote: Remote, server: GitHttp, token: str | None
) -> None:
    git = git_to(server.url, token=token)
    with pytest.raises(Unavailable):
        await prepared(git)
    found = await git.execute(call(await git.bind(PAYLOAD), remote.tip()))
    assert isinstance(found, Absent) and found.why == "REFUSED"
    assert remote.commits() == 1
    await git.close()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_server_that_refuses_the_push_itself_is_absent(remote: Remote, server: GitHttp, status: int) -> None:
    git = git_to(server.url, token=TOKEN)
    sent = await prepared(git)
    server.answers["git-receive-pack"] = status
    found = await git.execute(sent)
    assert isinstance(found, Absent) and found.why == "REFUSED", found
    assert remote.commits() == 1
    await git.close()


@pytest.mark.parametrize("part", ["service=git-receive-pack", "remote.git/git-receive-pack"])
@pytest.mark.parametrize("status", [500, 502])
async def test_a_server_error_in_the_push_is_unknown(server: GitHttp, part: str, status: int) -> None:
    git = git_to(server.url, token=TOKEN)
    sent = await prepared(git)
    server.answers[part] = status
    assert isinstance(await git.execute(sent), Unknown)
    server.answers.clear()
    assert await git.query(sent) == Standing()
    await git.close()


def test_what_a_hook_says_is_not_taken_for_the_servers_answer() -> None:
    said = Said(128, b"", "remote: The requested URL returned error: 403\nfatal: the remote end hung up unexpectedly\n")
    assert isinstance(_pushed(said, "refs/heads/main", {}, "1" * 40), Unknown)


async def test_a_redirect_is_not_followed_so_that_the_token_stays_here(server: GitHttp) -> None:
    git = git_to(server.url, token=TOKEN)
    server.answers["remote.git/"] = 301
    with pytest.raises(Unavailable):
        await prepared(git)
    assert not any("elsewhere" in path for path in server.asked)
    await git.close()
