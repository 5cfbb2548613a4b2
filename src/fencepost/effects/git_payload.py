"""What a git effect is bound to: the files, the message, who and when. Checked before anything is prepared.

Everything that goes into the commit stands in the bound payload or in the bound precondition, so that any machine
builds the same commit, with the same id, at any time.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from fencepost.errors import InvalidRequest
from fencepost.kernel.digests import encode

MAX_FILES = 1_000
MAX_MESSAGE_BYTES = 64 << 10
MAX_PATH_BYTES = 1_024
NOWHERE = "0" * 40  # the old id of a ref that does not exist
_ID = re.compile(r"[0-9a-f]{40}\Z")
_PERSON = re.compile(r"[^<>\n\0]+ <[^<>\n\0 ]+>\Z")
_REF = re.compile(r"refs/[A-Za-z0-9._/+@=-]+\Z")
_TRAILER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*: \S.*\Z")
MARK = "Fencepost-"
EFFECT = "Fencepost-Effect"


@dataclass(frozen=True, slots=True)
class Ground:
    """The bound precondition: where the ref stood, and for a new ref the commit that it starts from, if any."""

    old: str
    parent: str | None

    def __str__(self) -> str:
        return self.old if self.parent in (None, self.old) else f"{self.old} from {self.parent}"

    @classmethod
    def read(cls, text: str | None) -> Ground:
        old, _, base = (text or "").partition(" from ")
        if not _ID.match(old) or (base and not _ID.match(base)):
            raise InvalidRequest("precondition", f"must be a commit id, got {text!r}")
        return cls(old, base or (None if old == NOWHERE else old))

    @property
    def new(self) -> bool:
        """The ref did not exist."""
        return self.old == NOWHERE


def check_ref(ref: object, field: str) -> str:
    """A full name such as refs/heads/main, by git's own rules for names."""
    good = (
        isinstance(ref, str)
        and _REF.match(ref)
        and ".." not in ref
        and "@{" not in ref
        and not ref.endswith((".", "/"))
        and not any(part.startswith(".") or part.endswith(".lock") or not part for part in ref.split("/"))
    )
    if not isinstance(ref, str) or not good:
        raise InvalidRequest(field, "must be a full ref name such as refs/heads/main")
    return ref


def check_person(person: object, field: str) -> str:
    if not isinstance(person, str) or not _PERSON.match(person) or not person.isprintable():
        raise InvalidRequest(field, "must read: Name <address>")
    return person


def check_files(files: object) -> dict[str, str | dict[str, str] | None]:
    """`files` as they are, or InvalidRequest naming the path: relative, inside the repository and outside .git."""
    if not isinstance(files, dict) or not files:
        raise InvalidRequest("payload.files", "must name at least one file: {path: text | {$bytes: base64} | null}")
    if len(files) > MAX_FILES:
        raise InvalidRequest("payload.files", f"{len(files)} files are over the limit of {MAX_FILES}")
    for path, content in files.items():
        _check_path(path)
        body(content, path)
    folders = {path[:at] for path in files for at in range(len(path)) if path[at] == "/"}
    for path in files:
        if path in folders and files[path] is not None:
            raise InvalidRequest(f"payload.files[{path!r}]", "is a file and a folder at once")
    return files


def _check_path(path: object) -> None:
    where = f"payload.files[{path!r}]"
    if not isinstance(path, str) or not path or len(path.encode()) > MAX_PATH_BYTES:
        raise InvalidRequest(where, f"must be a path of 1 to {MAX_PATH_BYTES} bytes")
    if path.startswith("/") or "\\" in path or any(unicodedata.category(sign) == "Cc" for sign in path):
        raise InvalidRequest(where, "must be relative, with '/' between folders, without control characters")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise InvalidRequest(where, "must not contain empty parts, '.' or '..'")
        # What some file systems take for .git: other case, signs that do not show, trailing dots and spaces, 8.3 names.
        plain = "".join(sign for sign in part if unicodedata.category(sign) != "Cf").casefold().partition(":")[0]
        if plain.rstrip(". ") == ".git" or re.match(r"git~\d+\Z", plain.rstrip(". ")):
            raise InvalidRequest(where, "must stay out of .git")


def body(content: object, path: str) -> bytes | None:
    """What the file will hold; None: it is taken away."""
    where = f"payload.files[{path!r}]"
    if content is None:
        return None
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, dict) and content.keys() == {"$bytes"} and isinstance(content["$bytes"], str):
        try:
            return base64.b64decode(content["$bytes"], validate=True)
        except binascii.Error:
            raise InvalidRequest(where, "$bytes must be base64") from None
    raise InvalidRequest(where, 'must be text, {"$bytes": base64}, or null to take it away')


def check_message(message: object) -> str:
    if not isinstance(message, str) or not message.strip():
        raise InvalidRequest("payload.message", "must be text")
    if len(message.encode()) > MAX_MESSAGE_BYTES:
        raise InvalidRequest("payload.message", f"is over the limit of {MAX_MESSAGE_BYTES} bytes")
    for line in message.splitlines():
        if line.strip().casefold().startswith(MARK.casefold()):
            # It would pass for the trace of another effect.
            raise InvalidRequest("payload.message", f"must have no line that begins with {MARK}")
    return message


@dataclass(frozen=True, slots=True)
class Rules:
    """What the downstream's configuration allows and fills in."""

    ref: str | None  # the one ref; None: the payload names it
    refs: tuple[str, ...]  # patterns that a payload's ref must meet
    author: str

    def bind(self, payload: Any, at: int, generation: int | None) -> dict[str, Any]:
        """The payload as it is bound. Raises InvalidRequest naming the field."""
        encode(payload, "payload")
        if not isinstance(payload, dict):
            raise InvalidRequest("payload", "must be an object with files and message")
        for key in payload:
            if key not in ("files", "message", "author", "ref"):
                raise InvalidRequest(f"payload.{key}", "is unknown; known are files, message, author, ref")
        bound: dict[str, Any] = {
            "files": check_files(payload.get("files")),
            "message": check_message(payload.get("message")),
            "author": check_person(payload.get("author", self.author), "payload.author"),
            "committer": self.author,
            "ref": self._ref(payload.get("ref")),
            "at": at,
        }
        if generation is not None:
            bound["generation"] = generation
        return bound

    def _ref(self, ref: object) -> str:
        if self.ref is not None:
            if ref is not None and ref != self.ref:
                raise InvalidRequest("payload.ref", f"must be {self.ref}, as configured")
            return self.ref
        if ref is None:
            raise InvalidRequest("payload.ref", f"must name a ref; allowed are {', '.join(self.refs)}")
        name = check_ref(ref, "payload.ref")
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.refs):
            raise InvalidRequest("payload.ref", f"{name} is not allowed; allowed are {', '.join(self.refs)}")
        return name


def commit(tree: str, ground: Ground, bound: dict[str, Any], effect_id: str) -> bytes:
    """The commit object's bytes: the same wherever and whenever they are made."""
    head = [f"tree {tree}"]
    if ground.parent is not None:
        head.append(f"parent {ground.parent}")
    head += [f"{role} {bound[role]} {bound['at']} +0000" for role in ("author", "committer")]
    message = "\n".join(line.rstrip() for line in bound["message"].strip("\n").split("\n"))
    last = message.rpartition("\n\n")
    trailers = bool(last[1]) and all(_TRAILER.match(line) for line in last[2].split("\n"))
    marks = [f"{EFFECT}: {effect_id}"]
    if "generation" in bound:
        marks.append(f"{MARK}Generation: {bound['generation']}")
    return ("\n".join(head) + f"\n\n{message}\n" + ("" if trailers else "\n") + "\n".join(marks) + "\n").encode()


def names(message: str, effect_id: str) -> bool:
    """Whether a commit's message names the effect: as a line of its own, wherever a squash put it."""
    return any(line.strip() == f"{EFFECT}: {effect_id}" for line in message.splitlines())
