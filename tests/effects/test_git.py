"""git against real repositories: a bare one by path, and `git daemon` behind a proxy that cuts pushes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.effects.base import Absent, Call, Gone, Happened, Standing, StillUnknown, Unknown
from fencepost.effects.git import Git
from fencepost.effects.git_payload import Ground
from fencepost.errors import InvalidRequest, Unavailable
from tests.effects.repositories import EFFECT, MAIN, PAYLOAD, CuttingProxy, Daemon, Remote, call, git_to

NOWHERE = "0" * 40


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


@pytest.fixture
async def git(remote: Remote) -> AsyncIterator[Git]:
    downstream = git_to(str(remote.path))
    yield downstream
    await downstream.close()


@pytest.fixture
def daemon(remote: Remote) -> Iterator[Daemon]:
    server = Daemon(remote)
    yield server
    server.close()


@pytest.fixture
async def proxy(daemon: Daemon) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(daemon.port) as between:
        yield between


async def _held(proxy: CuttingProxy, pushing: asyncio.Future[Any]) -> None:
    """Wait until the proxy holds the push."""
    held = asyncio.ensure_future(proxy.held.wait())
    await asyncio.wait({held, pushing}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert held.done(), pushing.result() if pushing.done() else "no push arrived"


async def prepared(git: Git, payload: Any = PAYLOAD, **more: Any) -> Call:
    bound = await git.bind_for(payload, 1)
    return call(bound, await git.precondition(bound), **more)


async def test_a_push_is_one_commit_that_names_its_effect_and_generation(remote: Remote, git: Git) -> None:
    before = remote.tip()
    bound = await git.bind_for(PAYLOAD, 1) | {"at": 1_000_000_000}
    found = await git.execute(call(bound, await git.precondition(bound)))
    assert isinstance(found, Happened)
    assert remote.git("log", "-1", "--format=%at %ct", MAIN) == "1000000000 1000000000"
    assert found.receipt == {"commit": remote.tip(), "ref": MAIN, "parent": before}
    assert found.etag == remote.tip()
    assert remote.message() == f"Say A\n\nFencepost-Effect: {EFFECT}\nFencepost-Generation: 1"
    assert (remote.file("a.txt"), remote.file("README")) == ("A", "hello")
    assert remote.git("log", "-1", "--format=%an <%ae> %cn <%ce>", MAIN) == " ".join(
        2 * ["fencepost <fencepost@localhost>"]
    )


async def test_the_same_effect_is_the_same_commit_on_every_machine_and_a_repeated_push_changes_nothing(
    remote: Remote, git: Git
) -> None:
    first = await prepared(git)
    other = git_to(str(remote.path))
    await git._fetch(MAIN, remote.tip())
    made = await git._commit(first, _ground(first))
    await other._fetch(MAIN, remote.tip())
    assert (
        await other._commit(call(first.payload, first.precondition or "", execution=2, generation=7), _ground(first))
        == made
    )
    happened = await git.execute(first)
    assert isinstance(happened, Happened) and happened.etag == made
    # Straight to the push, as a sender does that looked at the ref before the other one's push arrived.
    again = await other._push(first, _ground(first), MAIN, made)
    assert isinstance(again, Happened) and again.etag == made
    assert remote.commits() == 2
    await other.close()


def _ground(of: Call) -> Ground:
    return Ground.read(of.precondition)


async def test_a_ref_that_moved_on_is_never_pushed_to(remote: Remote, git: Git) -> None:
    late = await prepared(git)
    theirs = remote.push("b.txt", "B\n")
    found = await git.execute(late)
    assert isinstance(found, Absent) and found.why == "PRECONDITION"
    assert remote.tip() == theirs


async def test_a_ref_that_moved_before_the_push_began_is_not_overwritten(remote: Remote, git: Git) -> None:
    late = await prepared(git)
    await git._fetch(MAIN, remote.tip())
    made = await git._commit(late, _ground(late))
    theirs = remote.push("b.txt", "B\n")
    assert isinstance(made, str)
    found = await git._push(late, _ground(late), MAIN, made)  # its look was before that
    assert isinstance(found, Absent) and found.why == "PRECONDITION"
    assert remote.tip() == theirs


async def test_a_ref_that_moves_between_the_look_and_the_push_is_not_overwritten(
    remote: Remote, daemon: Daemon, proxy: CuttingProxy
) -> None:
    """The look at the ref says that it stands; somebody pushes while ours is on its way: the server compares."""
    git = git_to(f"git://127.0.0.1:{proxy.port}/remote.git")
    proxy.hold = asyncio.Event()
    pushing = asyncio.ensure_future(git.execute(await prepared(git)))
    await _held(proxy, pushing)
    theirs = await asyncio.to_thread(remote.push, "b.txt", "B\n")
    proxy.hold.set()
    found = await asyncio.wait_for(pushing, 20)
    assert isinstance(found, Absent) and found.why == "PRECONDITION", found
    assert remote.tip() == theirs
    await git.close()


async def test_a_push_whose_answer_was_lost_is_unknown_and_its_history_names_it(
    remote: Remote, daemon: Daemon, proxy: CuttingProxy
) -> None:
    git = git_to(f"git://127.0.0.1:{proxy.port}/remote.git")
    sent = await prepared(git)
    proxy.cut = "answer"
    assert isinstance(await git.execute(sent), Unknown)
    assert (proxy.pushes, remote.commits()) == (1, 2)
    ours = remote.tip()
    remote.pull()
    remote.push("b.txt", "B\n")  # and it moved on since
    successor = git_to(f"git://127.0.0.1:{daemon.port}/remote.git")
    found = await successor.query(sent)
    assert isinstance(found, Happened)
    assert found.receipt["commit"] == ours
    # A repeat finds it as well, and pushes nothing.
    assert await successor.execute(call(sent.payload, sent.precondition or "", execution=2)) == found
    assert remote.commits() == 3
    await git.close()
    await successor.close()


async def test_a_push_that_never_arrived_is_unknown_and_the_ref_still_stands(
    remote: Remote, proxy: CuttingProxy
) -> None:
    git = git_to(f"git://127.0.0.1:{proxy.port}/remote.git")
    sent = await prepared(git)
    proxy.cut = "request"
    assert isinstance(await git.execute(sent), Unknown)
    proxy.cut = None
    assert await git.query(sent) == Standing()
    assert isinstance(await git.execute(call(sent.payload, sent.precondition or "", execution=2)), Happened)
    assert (proxy.pushes, remote.commits()) == (1, 2)
    await git.close()


async def test_a_ref_that_moved_on_without_it_is_gone(remote: Remote, git: Git) -> None:
    sent = await prepared(git)
    remote.push("b.txt", "B\n")
    found = await git.query(sent)
    assert isinstance(found, Gone) and found.ground == "MOVED_ON"


async def test_a_ref_that_was_rewritten_proves_nothing_and_is_for_a_person(remote: Remote, git: Git) -> None:
    sent = await prepared(git)
    assert isinstance(await git.execute(sent), Happened)
    remote.somebody("commit", "-q", "--amend", "-m", "rewritten")
    remote.push("b.txt", "B\n", force=True)
    found = await git.query(sent)
    assert isinstance(found, StillUnknown) and found.moved_on


async def test_a_ref_that_is_gone_proves_nothing(remote: Remote, git: Git) -> None:
    sent = await prepared(git)
    remote.git("update-ref", "-d", MAIN)
    found = await git.query(sent)
    assert isinstance(found, StillUnknown) and found.moved_on
    executed = await git.execute(sent)
    assert isinstance(executed, Absent) and executed.why == "PRECONDITION"


@pytest.mark.parametrize("new", [False, True])
async def test_a_history_that_the_remote_itself_cut_off_proves_nothing(
    remote: Remote, tmp_path: Path, new: bool
) -> None:
    git = git_to(f"file://{tmp_path}/shallow.git")
    for number in range(3):
        remote.push("n.txt", f"{number}\n")
    sent = call(await git.bind_for(PAYLOAD, 1), NOWHERE if new else remote.git("rev-parse", f"{MAIN}~2"))
    remote.git("clone", "-q", "--bare", "--depth=1", f"file://{remote.path}", f"{tmp_path}/shallow.git")
    found = await git.query(sent)
    assert isinstance(found, StillUnknown) and "cut off" in found.why, found
    await git.close()


async def test_a_history_that_was_cut_off_in_the_cache_proves_nothing(remote: Remote, tmp_path: Path) -> None:
    remote.push("n.txt", "1\n")
    remote.git("clone", "-q", "--bare", "--depth=1", f"file://{remote.path}", f"{tmp_path}/cache")
    git = git_to(str(remote.path), cache=tmp_path / "cache")
    found = await git.query(call(await git.bind_for(PAYLOAD, 1), NOWHERE))
    assert isinstance(found, StillUnknown) and "cut off" in found.why, found


async def test_a_squash_of_it_still_names_it(remote: Remote, git: Git) -> None:
    sent = await prepared(git)
    remote.push("b.txt", "B\n", message=f"Squashed\n\n* Say A\n\nFencepost-Effect: {EFFECT}\n\n* and more")
    assert isinstance(await git.query(sent), Happened)


async def test_another_effect_that_merely_mentions_it_is_not_it(remote: Remote, git: Git) -> None:
    sent = await prepared(git)
    remote.push("b.txt", "B\n", message=f"About\n\nsee Fencepost-Effect: {EFFECT} for more")
    assert isinstance(await git.query(sent), Gone)


async def test_an_unreachable_remote_is_absent_before_the_push_and_unavailable_before_the_prepare(
    remote: Remote, tmp_path: Path
) -> None:
    git = git_to(str(tmp_path / "nowhere.git"))
    bound = await git.bind_for(PAYLOAD, 1)
    with pytest.raises(Unavailable):
        await git.precondition(bound)
    found = await git.execute(call(bound, remote.tip()))
    assert isinstance(found, Absent) and found.why == "REFUSED"
    assert isinstance(await git.query(call(bound, remote.tip())), StillUnknown)
    assert not (await git.check()).ok
    await git.close()


async def test_a_hook_that_declines_is_absent(remote: Remote, git: Git) -> None:
    hook = remote.path / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    found = await git.execute(await prepared(git))
    assert isinstance(found, Absent) and found.why == "REFUSED", found
    assert remote.commits() == 1


async def test_nothing_is_pushed_after_send_by(remote: Remote, git: Git) -> None:
    found = await git.execute(await prepared(git, within=-1.0))
    assert isinstance(found, Unknown)
    assert remote.commits() == 1


@pytest.mark.parametrize("how", ["too-long", "cancelled"])
async def test_a_push_that_takes_too_long_or_is_cancelled_is_ended(
    how: str, remote: Remote, proxy: CuttingProxy
) -> None:
    git = git_to(f"git://127.0.0.1:{proxy.port}/remote.git", timeout=1.0 if how == "too-long" else 20.0)
    sent = await prepared(git)
    proxy.hold = asyncio.Event()
    pushing = asyncio.ensure_future(git.execute(sent))
    await _held(proxy, pushing)
    if how == "cancelled":
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(pushing, 10)
    else:
        assert isinstance(await asyncio.wait_for(pushing, 10), Unknown)
    proxy.cut = "request"
    proxy.hold.set()
    assert remote.commits() == 1
    assert not _runs_here(git)
    await git.close()


async def test_a_push_that_arrives_after_its_caller_gave_up_and_its_repeat_are_one_commit(
    remote: Remote, proxy: CuttingProxy
) -> None:
    git, successor = (git_to(f"git://127.0.0.1:{proxy.port}/remote.git") for _ in range(2))
    sent = await prepared(git)
    proxy.late = 0.5
    pushing = asyncio.ensure_future(git.execute(sent))
    await _held(proxy, pushing)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert await successor.query(sent) == Standing()
    repeated = await successor.execute(call(sent.payload, sent.precondition or "", execution=2, generation=2))
    assert isinstance(repeated, Happened)
    async with asyncio.timeout(10):
        while proxy.pushes < 2:  # the late one, too
            await asyncio.sleep(0.01)
    assert remote.commits() == 2
    assert await successor.query(sent) == repeated
    for one in (git, successor):
        await one.close()


def _runs_here(git: Git) -> list[str]:
    """What still runs in this downstream's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(git._folder):  # a zombie has none
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


async def test_a_new_ref_starts_at_its_base_and_is_made_once(remote: Remote) -> None:
    git = git_to(str(remote.path), refs=("refs/heads/agent/*",), base=MAIN)
    branch = "refs/heads/agent/one"
    sent = await prepared(git, PAYLOAD | {"ref": branch})
    assert sent.precondition == f"{NOWHERE} from {remote.tip()}"
    remote.push("b.txt", "B\n")  # the base moves on; ours still starts where it was bound to
    assert await git.query(sent) == Standing()
    found = await git.execute(sent)
    assert isinstance(found, Happened)
    assert remote.git("rev-parse", f"{branch}~1") == remote.git("rev-parse", f"{MAIN}~1")
    assert isinstance(await git.query(sent), Happened)
    other = await prepared(git, {"files": {"x": "X"}, "message": "other", "ref": branch})
    assert other.precondition == remote.tip(branch)
    await git.close()


async def test_a_new_ref_does_not_start_from_nothing_where_its_base_is_missing(remote: Remote) -> None:
    git = git_to(str(remote.path), ref="refs/heads/one", base="refs/heads/nowhere")
    with pytest.raises(InvalidRequest, match="base"):
        await prepared(git)
    await git.close()


async def test_an_empty_repository_gets_its_first_commit(tmp_path: Path) -> None:
    remote = Remote(tmp_path, empty=True)
    git = git_to(str(remote.path))
    sent = await prepared(git)
    assert sent.precondition == NOWHERE
    assert isinstance(await git.execute(sent), Happened)
    assert remote.commits() == 1
    await git.close()


async def test_files_are_written_taken_away_and_keep_their_mode(remote: Remote, git: Git) -> None:
    remote.make_executable("README")
    remote.push("old.txt", "old\n")
    payload = {
        "files": {
            "README": "changed\n",
            "old.txt": None,
            "never.txt": None,
            "dir/ümläut file": {"$bytes": "AP8="},
        },
        "message": "Many\n\nSigned-off-by: T <t@localhost>",
        "author": "Ann <ann@localhost>",
    }
    assert isinstance(await git.execute(await prepared(git, payload)), Happened)
    listed = remote.git("-c", "core.quotePath=false", "ls-tree", "-r", MAIN)
    assert [line.split()[0] + " " + line.partition("\t")[2] for line in listed.splitlines()] == [
        "100755 README",
        "100644 dir/ümläut file",
    ]
    assert remote.git("log", "-1", "--format=%an %cn", MAIN) == "Ann fencepost"
    trailers = remote.git("log", "-1", "--format=%(trailers:keyonly,separator=%x2C)", MAIN)
    assert trailers == "Signed-off-by,Fencepost-Effect,Fencepost-Generation"


async def test_files_that_do_not_fit_what_is_there_are_refused(remote: Remote, git: Git) -> None:
    remote.push("folder/file", "x\n")
    for files in ({"README/inside": "x"}, {"folder": "x"}, {"folder": None}):
        found = await git.execute(await prepared(git, {"files": files, "message": "m"}))
        assert isinstance(found, Absent) and found.why == "REFUSED", files
    assert remote.commits() == 2
    moved = {"files": {"README": None, "README/inside": "x"}, "message": "m"}
    assert isinstance(await git.execute(await prepared(git, moved)), Happened)
    assert remote.file("README/inside") == "x"


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../b", "a//b", "", ".", ".git/config", "a/.GIT/hooks/x", "a/.git.", ".g\u200cit/x",
     "git~1/x", "a\\b", "a\nb", ".git::$INDEX_ALLOCATION/x"],
)  # fmt: skip
async def test_a_path_that_leads_out_of_the_tree_is_refused_by_name(path: str) -> None:
    git = git_to("/nowhere")
    with pytest.raises(InvalidRequest, match=r"payload\.files"):
        await git.bind({"files": {path: "x"}, "message": "m"})


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (None, "payload"),
        ({"files": {}, "message": "m"}, "payload.files"),
        ({"files": {"a": "x", "a/b": "y"}, "message": "m"}, "payload.files"),
        ({"files": {"a": 1}, "message": "m"}, "payload.files"),
        ({"files": {"a": {"$bytes": "?"}}, "message": "m"}, "payload.files"),
        ({"files": {"a": "x"}}, "payload.message"),
        ({"files": {"a": "x"}, "message": f"m\n\nfencepost-effect: {EFFECT}"}, "payload.message"),
        ({"files": {"a": "x"}, "message": "m", "author": "nobody"}, "payload.author"),
        ({"files": {"a": "x"}, "message": "m", "author": "A\rB <a@b>"}, "payload.author"),
        ({"files": {"a": "\ud800"}, "message": "m"}, "payload"),
        ({"files": {"a": "x"}, "message": "m", "ref": "refs/heads/other"}, "payload.ref"),
        ({"files": {"a": "x"}, "message": "m", "force": True}, "payload.force"),
    ],
)
async def test_a_payload_that_cannot_be_sent_is_refused_by_name(payload: Any, field: str) -> None:
    git = git_to("/nowhere")
    with pytest.raises(InvalidRequest) as refused:
        await git.bind(payload)
    assert refused.value.field.startswith(field)


async def test_a_successor_knows_its_own_payload_again_whenever_it_was_bound() -> None:
    git = git_to("/nowhere")
    bound = await git.bind_for(PAYLOAD, 1) | {"at": 1}
    assert await git.same(bound, PAYLOAD)
    assert not await git.same(bound, PAYLOAD | {"message": "Say B"})


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c x",
        "ftp://host/x",
        "https://user:secret@host/x",
        "relative/path",
        "-u",
        "--upload-pack=x:y",
        "host:x y",
    ],
)
def test_a_url_that_is_no_repository_of_ours_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        git_to(url)


async def test_the_users_configuration_and_environment_change_nothing(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("pre-push", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {home}/ran-{name}\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / ".gitconfig").write_text(
        f'[core]\n hooksPath = {hooks}\n[commit]\n gpgSign = true\n[url "nowhere:"]\n insteadOf = /\n'
        "[user]\n name = Mallory\n"
    )
    monkeypatch.setenv("HOME", str(home))
    for name, value in {
        "GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "GIT_AUTHOR_DATE": "1",
        "GIT_CONFIG_PARAMETERS": "'core.hooksPath=/nowhere'", "GIT_SSH_COMMAND": "false",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    git = git_to(str(remote.path))
    assert isinstance(await git.execute(await prepared(git)), Happened)
    assert not list(home.glob("ran-*"))
    await git.close()


async def test_a_kept_cache_is_used_by_the_next_process(remote: Remote, tmp_path: Path) -> None:
    first = git_to(str(remote.path), cache=tmp_path / "cache")
    assert isinstance(await first.execute(await prepared(first)), Happened)
    remote.pull()
    remote.push("b.txt", "B\n")
    second = git_to(str(remote.path), cache=tmp_path / "cache")
    assert isinstance(await second.execute(await prepared(second)), Happened)
    refs = await second._git.run("for-each-ref", "refs/fencepost/")
    assert len(refs.text.splitlines()) == 1
    await first.close()
    await second.close()
    assert (tmp_path / "cache" / "HEAD").exists()
