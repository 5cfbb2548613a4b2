"""Commit and push, with a compare-and-swap of the ref: CONDITIONAL.

    [downstreams.notes]
    type = "git"
    url = "https://git.example.org/team/notes.git"
    ref = "refs/heads/main"             # or refs = ["refs/heads/agent/*"]: then the payload names its ref
    token_env = "NOTES_TOKEN"

    await attempt.effect("publish", {"files": {"a.txt": "text"}, "message": "Publish a"}, using=notes)

The commit is made of the bound payload and the bound precondition alone (what the ref stood at), so that every machine
makes the same commit with the same id, and a push that is repeated finds itself there already. The push goes through
only while the ref still stands at the old id. It never merges, rebases or forces anything.

Rests on one thing: that nobody forces the ref back, drops commits from it, or deletes it and makes it anew. Protect
the ref against that at the server. Where such a rewrite shows, a person decides.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fencepost.clock import wall_us
from fencepost.effects.base import (
    Absent,
    Call,
    Checked,
    Declaration,
    Gone,
    Guarantee,
    Happened,
    Standing,
    StillUnknown,
    Unknown,
)
from fencepost.effects.git_payload import EFFECT, NOWHERE, Ground, Rules, body, check_person, check_ref, commit, names
from fencepost.effects.git_process import Runner, Said, TookTooLong, check_url
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.commands import check_seconds

__all__ = ["Git"]

_OURS = "refs/fencepost/"  # in our own repository alone; it is never pushed
_AUTHOR = "fencepost <fencepost@localhost>"
# The server or a proxy answered, and the answer was no. Everything else that is no clear status is unknown.
_REFUSALS = (
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "Permission denied (",
    "The requested URL returned error: 4",
    "access denied or repository not exported",
    "service not enabled",
    "does not appear to be a git repository",
    "Host key verification failed",
    "' not found",
)


class _NotReached(Exception):
    """The remote could not be asked; nothing was sent that could change it."""


class _Rewritten(Exception):
    """The ref's history since the bound precondition is not all there, so it proves nothing."""


class Git:
    """One remote repository, and the refs that may be pushed to.

    `ref`: the one ref; or `refs`: patterns that a payload's own `ref` must meet. `base`: the ref that a new ref starts
    from (without it, a new ref starts with a root commit). `author`: who commits, and the author unless the payload
    names one. `cache`: a folder kept between processes; without it each process fetches the ref once into a temporary
    one. `timeout`: seconds for one git command. `user`, `token`: for http and https. `ssh_key`, `ssh_known_hosts`:
    paths, for ssh.

    Raises InvalidRequest naming the field. Opens nothing.
    """

    def __init__(
        self,
        declaration: Declaration,
        url: str,
        *,
        ref: str | None = None,
        refs: tuple[str, ...] = (),
        base: str | None = None,
        author: str = _AUTHOR,
        cache: Path | None = None,
        timeout: float = 30.0,
        user: str = "fencepost",
        token: str | None = None,
        ssh_key: Path | None = None,
        ssh_known_hosts: Path | None = None,
    ) -> None:
        if declaration.guarantee != Guarantee.CONDITIONAL:
            raise InvalidRequest("guarantee", "git is CONDITIONAL")
        if (ref is None) == (not refs):
            raise InvalidRequest("ref", "name either ref or refs")
        if ref is not None:
            check_ref(ref, "ref")
        for pattern in refs:
            check_ref(pattern.replace("*", "x").replace("?", "x").replace("[", "x").replace("]", "x"), "refs")
        if base is not None:
            check_ref(base, "base")
        check_seconds(timeout, "timeout", above=True)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InvalidRequest("token", "must be one line of printable ASCII text")
        self.declaration = declaration
        self.url = check_url(url, "url")
        self._rules = Rules(ref, refs, check_person(author, "author"))
        self._base = base
        self._temporary = None if cache is not None else Path(tempfile.gettempdir()) / f"fencepost-git-{uuid.uuid4()}"
        self._folder = cache or self._temporary or Path()
        if self._temporary is not None:
            self._clearing = weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        self._git = Runner(
            self._folder,
            self.url,
            user=user,
            token=token,
            ssh_key=ssh_key,
            ssh_known_hosts=ssh_known_hosts,
            timeout=timeout,
        )
        self._here: dict[str, str] = {}  # by ref: the tip that was fetched last, whole

    # before the prepare ---------------------------------------------------------------------------

    async def bind(self, payload: Any) -> Any:
        """`payload` with everything that goes into the commit. Raises InvalidRequest naming the field."""
        return self._rules.bind(payload, wall_us() // 1_000_000, None)

    async def bind_for(self, payload: Any, generation: int) -> Any:
        """The same, with the generation that the commit names, whoever pushes it in the end."""
        return self._rules.bind(payload, wall_us() // 1_000_000, generation)

    async def same(self, bound: Any, payload: Any) -> bool:
        """Whether `bound` is what `payload` was bound to: its date and generation are those of the first."""
        return isinstance(bound, dict) and bound == self._rules.bind(payload, bound["at"], bound.get("generation"))

    async def precondition(self, payload: Any) -> str:
        """Where the ref stands. Raises Unavailable where the remote could not be asked."""
        ref = payload["ref"]
        try:
            tips = await self._tips(ref, *([self._base] if self._base else []))
        except (_NotReached, TookTooLong) as error:
            raise Unavailable(f"{self.declaration.downstream}: {error}") from None
        old = tips.get(ref, NOWHERE)
        if old == NOWHERE and self._base is not None and self._base not in tips:
            raise InvalidRequest("base", f"{self._base} does not exist at the remote, so that {ref} cannot start there")
        parent = old if old != NOWHERE else (tips.get(self._base) if self._base else None)
        return str(Ground(old, parent))

    # the call -------------------------------------------------------------------------------------

    async def execute(self, call: Call) -> Happened | Absent | Unknown:
        ground, ref = Ground.read(call.precondition), call.payload["ref"]
        try:
            tip = (await self._tips(ref)).get(ref, NOWHERE)
            if tip != ground.old:
                found = await self._since(ground, ref, tip, call.effect_id)
                return found or Absent("PRECONDITION", f"{ref} moved on to {tip}")
            if ground.parent is not None:
                await self._fetch(self._base or ref if ground.new else ref, ground.parent)
            made = await self._commit(call, ground)
        except (_NotReached, TookTooLong, Unavailable) as error:
            return Absent("REFUSED", str(error))  # nothing was pushed yet, and nothing will be
        except _Rewritten as error:
            return Absent("PRECONDITION", str(error))
        if isinstance(made, Absent):
            return made
        return await self._push(call, ground, ref, made)

    async def _push(self, call: Call, ground: Ground, ref: str, made: str) -> Happened | Absent | Unknown:
        left = call.send_by.remaining
        if left <= 0:
            return Unknown("not sent: its send_by was over")
        try:
            said = await self._git.run(
                "push",
                "--porcelain",
                "--no-verify",
                "--no-follow-tags",
                "--recurse-submodules=no",
                f"--force-with-lease={ref}:{'' if ground.new else ground.old}",
                self.url,
                f"{made}:{ref}",
                # Whoever asks later than this is told the truth: nothing of ours is under way any more.
                timeout=min(self._git.timeout, left + self.declaration.settle_time),
            )
        except TookTooLong as error:
            return Unknown(str(error))
        found = _pushed(said, ref, {"commit": made, "ref": ref, "parent": ground.parent}, made)
        if isinstance(found, Happened):
            self._here[ref] = made
        return found

    async def _commit(self, call: Call, ground: Ground) -> str | Absent:
        """The commit's id, its objects written here. Absent where the files do not fit what is there."""
        bound = call.payload
        bodies = {path: body(content, path) for path, content in bound["files"].items()}
        there = await self._there(ground.parent, bodies)
        misfit = _misfit(bodies, there)
        if misfit is not None:
            return Absent("REFUSED", f"the files do not fit what is there: {misfit}")
        written = {path: content for path, content in bodies.items() if content is not None}
        with tempfile.TemporaryDirectory(prefix="fencepost-git-") as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            if ground.parent is not None:
                await self._need("read-tree", ground.parent, environment=index)
            listed = [str(Path(folder) / str(number)) for number in range(len(written))]
            await asyncio.to_thread(_write, listed, written.values())
            blobs = await self._need(
                "hash-object",
                "-w",
                "--no-filters",
                "--stdin-paths",
                feed="".join(f"{name}\n" for name in listed).encode(),
            )
            # First what goes, so that a folder may take a file's place.
            lines = [f"0 {NOWHERE}\t{path}\0" for path in bodies if path not in written]
            for path, blob in zip(written, blobs.text.split(), strict=True):
                mode = "100755" if there.get(path) == "100755" else "100644"
                lines.append(f"{mode} {blob}\t{path}\0")
            await self._need("update-index", "-z", "--index-info", feed="".join(lines).encode(), environment=index)
            tree = (await self._need("write-tree", environment=index)).text
        content = commit(tree, ground, bound, call.effect_id)
        return (await self._need("hash-object", "-t", "commit", "-w", "--stdin", feed=content)).text

    async def _there(self, parent: str | None, paths: Iterable[str]) -> dict[str, str]:
        """The mode of what stands in `parent` at each of `paths` and at each folder above them."""
        if parent is None:
            return {}
        asked = {path[:at] for path in paths for at in (*_slashes(path), len(path))}
        listed = await self._need("--literal-pathspecs", "ls-tree", "-z", parent, "--", *sorted(asked))
        entries = (entry.partition("\t") for entry in listed.out.decode("utf-8", "surrogateescape").split("\0")[:-1])
        return {path: about.partition(" ")[0] for about, _, path in entries}

    async def _need(self, *arguments: str, feed: bytes = b"", environment: Mapping[str, str] | None = None) -> Said:
        said = await self._git.run(*arguments, feed=feed, environment=environment)
        if said.code:
            raise _NotReached(f"git {arguments[0]}: {said.why}")
        return said

    # asking ---------------------------------------------------------------------------------------

    async def query(self, call: Call) -> Happened | Gone | Standing | StillUnknown:
        """What the ref's own history says; a history that is not whole says nothing."""
        ground, ref = Ground.read(call.precondition), call.payload["ref"]
        try:
            tip = (await self._tips(ref)).get(ref, NOWHERE)
            if tip == ground.old:
                return Standing()
            found = await self._since(ground, ref, tip, call.effect_id)
        except (_NotReached, TookTooLong, Unavailable) as error:
            return StillUnknown(str(error))
        except _Rewritten as error:
            return StillUnknown(str(error), moved_on=True)
        return found or Gone("MOVED_ON", f"{ref} moved on to {tip} without it")

    async def _since(self, ground: Ground, ref: str, tip: str, effect_id: str) -> Happened | None:
        """The commit that names the effect in `ref`'s history since the precondition; None: it is not in there."""
        if tip == NOWHERE:
            raise _Rewritten(f"{ref} is gone")
        await self._fetch(ref, tip)
        if (await self._need("rev-parse", "--is-shallow-repository")).text != "false":
            raise _Rewritten(f"the history in {self._folder} is cut off")
        until: list[str] = []
        if not ground.new:
            within = await self._git.run("merge-base", "--is-ancestor", ground.old, tip)
            if within.code:
                raise _Rewritten(f"{ref} was rewritten: {ground.old} is no longer in its history")
            until = [f"^{ground.old}"]
        listed = await self._need(
            "log", "-z", "--format=%H%n%P%n%B", "--fixed-strings", f"--grep={EFFECT}: {effect_id}", tip, *until
        )
        for entry in listed.out.decode("utf-8", "replace").split("\0"):
            made, _, rest = entry.partition("\n")
            parents, _, message = rest.partition("\n")
            if names(message, effect_id):
                receipt = {"commit": made, "ref": ref, "parent": parents.partition(" ")[0] or None}
                return Happened(receipt, made)
        return None

    async def _tips(self, *refs: str) -> dict[str, str]:
        """Where `refs` stand at the remote; one that does not exist is left out."""
        said = await self._git.run("ls-remote", "--quiet", "--refs", self.url, *refs)
        if said.code:
            raise _NotReached(said.why)
        tips = {name: tip for tip, _, name in (line.partition("\t") for line in said.text.splitlines())}
        if any(len(tip) != len(NOWHERE) for tip in tips.values()):
            raise InvalidRequest("url", "repositories with SHA-256 object ids are not supported")
        return {ref: tips[ref] for ref in refs if ref in tips}

    async def _fetch(self, ref: str, wanted: str) -> None:
        """See to it that `wanted`, which `ref` stood at, is here with its whole history.

        Raises _NotReached where it cannot be had, _Rewritten where the ref does not lead to it any more.
        """
        if self._here.get(ref) == wanted:
            return
        # Only what a finished fetch left behind is whole: one that was cut off may have left a commit without the rest.
        kept = await self._need("for-each-ref", "--format=%(refname)", _OURS)
        if kept.out and await self._has(wanted):
            held = await self._git.run("for-each-ref", "--count=1", f"--contains={wanted}", _OURS)
            if held.out and not held.code:
                self._here[ref] = wanted
                return
        # A name of its own for each fetch: processes that share the folder do not lock each other out.
        mine = f"{_OURS}{hashlib.sha256(ref.encode()).hexdigest()[:16]}/{uuid.uuid4().hex}"
        said = await self._git.run(
            "fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--recurse-submodules=no", self.url,
            f"+{ref}:{mine}",
        )  # fmt: skip
        if said.code:
            raise _NotReached(said.why)
        if (await self._git.run("rev-parse", "--quiet", "--verify", mine)).code:
            raise _Rewritten("the remote's own history is cut off")  # git takes no such ref, and says nothing
        for older in kept.text.splitlines():
            if older.rpartition("/")[0] == mine.rpartition("/")[0]:
                await self._git.run("update-ref", "-d", older)  # one that stays does no harm
        if (await self._git.run("merge-base", "--is-ancestor", wanted, mine)).code:
            raise _Rewritten(f"{ref} was rewritten: {wanted} is no longer in its history")
        self._here[ref] = wanted

    async def _has(self, commit_id: str) -> bool:
        return not (await self._git.run("cat-file", "-e", f"{commit_id}^{{commit}}")).code

    # the rest -------------------------------------------------------------------------------------

    async def check(self) -> Checked:
        """Can the remote be read, and does the ref exist?"""
        ref = self._rules.ref
        try:
            tips = await self._tips(*([ref] if ref else []), *([self._base] if self._base else []))
        except (_NotReached, TookTooLong, Unavailable) as error:
            return Checked(Guarantee.CONDITIONAL, False, (str(error),))
        says = [f"{name} stands at {tip}" for name, tip in tips.items()]
        if ref is not None and ref not in tips:
            says.append(f"{ref} does not exist yet: the first push makes it")
        says.append("holds while nobody forces the ref back, drops commits from it, or deletes and makes it anew")
        return Checked(Guarantee.CONDITIONAL, True, tuple(says))

    async def close(self) -> None:
        """Take the temporary copy away."""
        if self._temporary is not None:
            await asyncio.to_thread(self._clearing)


def _write(names: Iterable[str], contents: Iterable[bytes]) -> None:
    for name, content in zip(names, contents, strict=True):
        Path(name).write_bytes(content)


def _slashes(path: str) -> list[int]:
    return [at for at, sign in enumerate(path) if sign == "/"]


_FOLDERS = ("040000", "160000")  # and other repositories


def _misfit(bodies: Mapping[str, bytes | None], there: Mapping[str, str]) -> str | None:
    """What would have to go without having been named."""
    for path, content in bodies.items():
        if there.get(path) in _FOLDERS:
            return f"{path} is a folder"
        if content is None:
            continue
        for at in _slashes(path):
            above = path[:at]
            if there.get(above, _FOLDERS[0]) != _FOLDERS[0] and bodies.get(above, b"") is not None:
                return f"{above} is no folder"
    return None


def _pushed(said: Said, ref: str, receipt: dict[str, Any], made: str) -> Happened | Absent | Unknown:
    """What a push found, by its own table of statuses: one line a ref, `FLAG\\tFROM:TO\\tSUMMARY (REASON)`."""
    for line in said.out.decode("utf-8", "replace").splitlines():
        flag, _, rest = line.partition("\t")
        names_, _, summary = rest.partition("\t")
        if names_.rpartition(":")[2] != ref:
            continue
        if flag.strip() in ("", "*", "=", "+"):
            return Happened(receipt, made)
        if summary.startswith("[remote failure]"):
            return Unknown(f"the remote did not say what became of it: {summary}")
        moved = ("stale info", "fetch first", "failed to update ref", "cannot lock ref", "incorrect old value")
        return Absent("PRECONDITION" if any(reason in summary for reason in moved) else "REFUSED", summary)
    # What a hook at the server says comes as `remote:`, and may say anything.
    ours = "\n".join(line for line in said.err.splitlines() if not line.startswith("remote:"))
    if any(sign in ours for sign in _REFUSALS):
        return Absent("REFUSED", said.why)
    return Unknown(f"the push was cut off: {said.why}")
