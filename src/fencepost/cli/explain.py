"""What every code means and what to do about it: one table, from which the command line and the reference are made.

A code is a word that fencepost prints: an outcome, a reason, an error's code, the name of an event or of a log
entry, a state, an attempt's end. `OUTCOME/REASON` has a text of its own where a reason means different things under
different outcomes. The texts stand in `explanations.txt` beside this module.
"""

from __future__ import annotations

import difflib
from importlib import resources

import msgspec

__all__ = ["EXPLANATIONS", "Explanation", "best_code", "explain", "hint", "suggest"]


class Explanation(msgspec.Struct, frozen=True):
    """`what` happened, and what `todo` about it. `kind`: where the code is met (one word is often several things)."""

    code: str
    kind: str
    what: str
    todo: str

    @property
    def hint(self) -> str:
        """One sentence: what to do first."""
        first, dot, _ = self.todo.partition(". ")
        return first + dot.strip()


def _read(text: str) -> dict[str, Explanation]:
    """The table, in the order in which it is written. Raises ValueError where an entry is incomplete or doubled."""
    found: dict[str, Explanation] = {}
    for block in text.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            continue
        code, bar, kind = lines[0].removeprefix("= ").partition(" | ")
        what, mark, todo = " ".join(lines[1:]).partition(" > ")
        if not (lines[0].startswith("= ") and bar and mark and what and todo) or code in found:
            raise ValueError(f"explanations.txt: the entry that begins {lines[0]!r} is incomplete or doubled")
        found[code] = Explanation(code, kind, what, todo)
    return found


EXPLANATIONS: dict[str, Explanation] = _read(
    resources.files("fencepost.cli").joinpath("explanations.txt").read_text("utf-8")
)


def explain(code: str) -> list[Explanation]:
    """The texts for a code as it was printed: any case, `-` for `_`, `OUTCOME/REASON` or `OUTCOME REASON`.

    The most specific comes first; [] where there is none. Of names that differ by case alone (`POOL`, the reason,
    and `pool`, the log entry) the one that is spelled so comes first.
    """
    wanted = code.strip().replace("-", "_").replace(" ", "/")
    parts = [wanted, *reversed(wanted.split("/"))] if "/" in wanted else [wanted]
    found: list[Explanation] = []
    for part in parts:
        if part in EXPLANATIONS:
            found.append(EXPLANATIONS[part])
        found += [text for known, text in EXPLANATIONS.items() if known.upper() == part.upper() and text not in found]
    return found


def hint(outcome: str, reason: str | None = None) -> str:
    """The one line that ends a printed refusal or error: what to do first."""
    text = EXPLANATIONS.get(best_code(outcome, reason))
    return text.hint if text is not None else f"Look it up: `fencepost explain {outcome}`."


def best_code(outcome: str, reason: str | None = None) -> str:
    """The code whose text says most about a refusal: the pair, the reason, or the outcome alone."""
    pair = f"{outcome}/{reason}"
    if pair in EXPLANATIONS:
        return pair
    text = EXPLANATIONS.get(reason or "")
    # Some reasons are no reasons' codes: a task's state says what to do next; an attempt's end (with ENDED) does not.
    if text is not None and (text.kind.startswith("reason") or outcome in ("NOT_COMMITTED", "NOT_CLAIMABLE")):
        return text.code
    return outcome


def suggest(code: str) -> list[str]:
    """Codes that look like this one."""
    return difflib.get_close_matches(code.upper(), list(EXPLANATIONS), n=3, cutoff=0.6)
