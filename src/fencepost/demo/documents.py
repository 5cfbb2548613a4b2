"""Which documents the demo reads, how fast, and what it finds in them.

The work is real: each document is read piece by piece, hashed, and its words, headings and links are counted.
Only its speed is set, so that a person can watch it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

CHOSEN_SECONDS = 3.0  # how long the chosen document, the longest one, takes to read
OTHERS_SECONDS = 3.0  # how long two workers take at most for all the others
LONGEST_SECONDS = 4.0  # how long any takes at most, corrected ones included: a correction may outgrow a tiny text
PIECES = 10
MOST_DOCUMENTS = 200  # with more, an act would outlast a reader's patience
CORRECTION = b"\n\nThis paragraph was added while a worker slept. Whoever read the text before has not seen it.\n"

_BUNDLED = Path(__file__).parent / "texts"
_PICTURES = {".svg", ".drawio"}  # text to a computer, a picture to everybody else
_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_HEADING = re.compile(r"^#{1,6} \S", re.MULTILINE)
_LINK = re.compile(r"\]\([^)\s]+\)|<https?://[^>\s]+>|(?<![(<])https?://[^\s)>]+")
_FENCED_CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


class Document(msgspec.Struct, frozen=True):
    """One task's input. `path` is the demo's own copy; `title` is its name below the folder that was given."""

    title: str
    path: str
    bytes_per_second: float


class Findings(msgspec.Struct, frozen=True):
    """One task's result: what stands in the document, which text that was, and who read it."""

    title: str
    words: int
    headings: int
    links: int
    digest: str
    read_by: str


class Reading:
    """One worker's pass through one document, as its text stood when the reading began."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._content = Path(document.path).read_bytes()
        self._sha256 = hashlib.sha256()

    def pieces(self) -> Iterator[tuple[int, float]]:
        """Piece by piece: how many per cent are read with it, and how many seconds that takes."""
        size = len(self._content)
        for number in range(PIECES):
            piece = self._content[size * number // PIECES : size * (number + 1) // PIECES]
            seconds = min(len(piece) / self._document.bytes_per_second, LONGEST_SECONDS / PIECES)
            yield (number + 1) * 100 // PIECES, seconds
            self._sha256.update(piece)

    def findings(self, read_by: str) -> Findings:
        text = self._content.decode()
        prose = _FENCED_CODE.sub("", text)
        return Findings(
            title=self._document.title,
            words=len(_WORD.findall(text)),
            headings=len(_HEADING.findall(prose)),
            links=len(_LINK.findall(prose)),
            digest=f"sha256:{self._sha256.hexdigest()}",
            read_by=read_by,
        )


def default_folder() -> Path:
    """The project's own docs in a checkout, else the sample texts that come with the package."""
    checkout = Path(__file__).parents[3]
    docs = checkout / "docs"
    return docs if (checkout / "pyproject.toml").is_file() and find(docs) else _BUNDLED


def find(folder: Path) -> list[Path]:
    """Every text file below the folder, in order of name: UTF-8, not empty, not hidden, no picture in letters."""
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if not hidden and path.is_file() and path.suffix.lower() not in _PICTURES and _is_text(path):
            found.append(path)
    return found


def _is_text(path: Path) -> bool:
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(content.strip()) and b"\0" not in content


def copy(paths: list[Path], folder: Path, into: Path) -> list[Document]:
    """Copies to work on, since the demo changes one of them. The longest comes first: it is the chosen one."""
    sizes = {path: path.stat().st_size for path in paths}
    by_length = sorted(paths, key=lambda path: (-sizes[path], path))
    pace = sizes[by_length[0]] / CHOSEN_SECONDS
    pace_of_others = max(pace, sum(sizes[path] for path in by_length[1:]) / (2 * OTHERS_SECONDS))
    documents = []
    for number, path in enumerate(by_length):
        copied = into / f"{number:03}{path.suffix}"
        shutil.copyfile(path, copied)
        title = "".join(letter if letter.isprintable() else "?" for letter in str(path.relative_to(folder)))
        documents.append(Document(title, str(copied), pace_of_others if number else pace))
    return documents


def correct(document: Document) -> None:
    """Change the document, as documents do while somebody sleeps."""
    with Path(document.path).open("ab") as file:
        file.write(CORRECTION)


def digest(document: Document) -> str:
    """Of the document as it stands now."""
    return f"sha256:{hashlib.sha256(Path(document.path).read_bytes()).hexdigest()}"


def plain(value: Any) -> Any:
    """A document or findings as builtins, for queues that store JSON."""
    return msgspec.to_builtins(value)
