"""Write docs/reference/ from the kernel's own data. `--check` writes nothing and fails where a page differs.

The tables of doors, guards, transitions, limits and events stand once, in the kernel; the explanations stand once, in
the command line's table. A page that was edited by hand, or not generated again after a change, fails `make check`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from pathlib import Path

from fencepost.cli.explain import EXPLANATIONS, Explanation
from fencepost.kernel import commands, digests
from fencepost.kernel.effect_rules import GROUNDS
from fencepost.kernel.fence import DOORS, Compare, Guard
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Operation
from fencepost.kernel.outcomes import Outcome, Reason
from fencepost.kernel.records import EVENTS, LOG_KINDS, EffectState, End, Guarantee, Policy, StagedState, State, Terms
from fencepost.kernel.table import EFFECT_TRANSITIONS, PREPARE, TRANSITIONS, Transition
from fencepost.stores.base import REQUEST_RETENTION_US

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Made by tools/generate_docs.py from the kernel's tables. Do not edit: run it again. -->\n\n"

# What a guard answers, by the last part of its id, where that is not simply a refusal's word.
ANSWERS = {
    "said-again": "what was said the first time, nothing changes; another caller's id: error INVALID",
    "first-times-again": "RENEWED with the times of the first answer; another caller's id: error INVALID",
    "as-they-stand": "the claims it made as they stand, or ENDED and how; another owner's id: error INVALID",
    "committed-again": "COMMITTED, the same result commit",
    "said-so": "CANCELLED, saying so; nothing changes",
    "invalid": "error INVALID",
    "not-staged": "error NOT_STAGED",
    "fenced-or-ended": "FENCED, or ENDED where this attempt ended by its own commit, release or fail",
    "conflict-or-held": "CONFLICT, or HELD while the lease runs",
    "unsettled": "error UNSETTLED, naming them",
    "denied-or-abandoned": "DENIED or ABANDONED",
    "execute-again-or-reconcile": "EXECUTE with the `send_by` of the first answer while that execution is under way; "
    "APPROVAL_REQUIRED where that was said; else RECONCILE. Another caller's id: error INVALID",
    "reconcile": "RECONCILE, saying what is open",
    "evidence-or-conflict": "EVIDENCE; CONFLICT where a reservation is stored",
    "evidence-or-person-or-too-early": "EVIDENCE; CONFLICT where a reservation is stored; PERSON where this guarantee "
    "cannot tell; TOO_EARLY with the time; another guarantee's ground: error INVALID",
    "conflict-or-person-or-too-early": "CONFLICT where a reservation is stored; PERSON where this guarantee cannot "
    "tell; TOO_EARLY with the time; a ground that is not the caller's to give: error INVALID",
    "recorded": "RECORDED, nothing changes; another receipt of a COMMITTED effect: with an alarm",
}
WHO = {"claim": "a claim's holder", "person": "a person", "loop": "the service's loop"}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * (lines[0].count(" | ") + 1))
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n\n"


def answer_of(guard: Guard) -> str:
    last = guard.id.rpartition(":")[2]
    if last in ANSWERS:
        return ANSWERS[last]
    return Outcome[last.replace("-", "_").upper()].value


def command_name(operation: Operation) -> str:
    """`SaveCheckpoint` → `checkpoint`: the door's name where the door has one operation, else the operation's own."""
    word = operation.command.__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in word).lstrip("_").removeprefix("save_")


def bits(mask: int) -> str:
    return ", ".join(bit.name.lower() for bit in Compare if mask & bit and bit.name)


# pages ------------------------------------------------------------------------------------------


def refusals() -> str:
    page = "# Refusals, in order\n\n" + MADE
    page += (
        "A refusal is an answer: typed, final for this call, and it changes no record. Each door asks its questions\n"
        "in the order of its table and answers with the first one that is not met, so that a stranger learns only\n"
        "that it is a stranger. Errors (INVALID, NOT_STAGED, SPAWN_CONFLICT) mean that the call itself is wrong.\n\n"
        "The same texts in the terminal: `fencepost explain CODE`.\n\n"
    )
    for operation in Kernel().operations:
        if not operation.guards:
            continue
        door = f" (door `{operation.door}`)" if command_name(operation) != operation.door else ""
        page += f"## {command_name(operation)}{door}\n\n"
        rows = [(n, g.says, answer_of(g), f"`{g.id}`") for n, g in enumerate(operation.guards, 1)]
        page += table(("", "it must be that", "else", "rule"), rows)
        if operation.each:
            page += "Then each candidate, best first; one that does not meet these is passed over without a word:\n\n"
            page += table(
                ("", "it must be that", "rule"), [(n, g.says, f"`{g.id}`") for n, g in enumerate(operation.each, 1)]
            )
    page += "`create_pool` has no question to ask: a pool that exists is answered as it stands.\n\n"
    for title, kinds in (
        ("What each refusal means", ("refusal",)),
        ("Reasons", ("reason", "park reason")),
        ("Errors", ("error",)),
    ):
        page += f"# {title}\n\n" + explained(e for e in EXPLANATIONS.values() if e.kind.split(", ")[0] in kinds)
    return page


def explained(found: Iterable[Explanation]) -> str:
    text = ""
    for explanation in found:
        text += f"## `{explanation.code}`\n\n{explanation.what}\n\n*What to do.* {explanation.todo}\n\n"
    return text


def doors() -> str:
    page = "# Doors\n\n" + MADE
    page += (
        "A door is a place through which something can change. This is the whole list: what is not on it cannot\n"
        "write. The comparisons are those that an accepted change must have made; each event keeps them as a mask,\n"
        "and *coverage* is the share of changes whose event shows them all.\n\n"
    )
    rows = [
        (f"`{d.name}`", WHO[d.who], d.says, bits(d.compares), ", ".join(f"`{name}`" for name in d.events) or "none")
        for d in DOORS.values()
    ]
    page += table(("door", "who calls", "what it does", "compares", "events"), rows)
    page += "Beside the records, changing none of them: "
    beside = [command_name(o) for o in Kernel().operations if o.door not in DOORS]
    page += ", ".join(f"`{name}`" for name in beside) + ". They ask only that the attempt existed.\n\n"
    page += "# Operations\n\n"
    rows = []
    for operation in Kernel().operations:
        asked = (*operation.guards, *operation.each)
        rows.append((f"`{command_name(operation)}`", f"`{operation.door}`", len(asked), bits(mask(asked)) or "nothing"))
    page += table(("operation", "door", "questions", "compares"), rows)
    page += "# Comparisons\n\n"
    meanings: dict[str, list[str]] = {}
    for _, guard in Kernel().guards():
        for bit in Compare:
            if guard.compares & bit and bit.name and guard.says not in meanings.setdefault(bit.name.lower(), []):
                meanings[bit.name.lower()].append(guard.says)
    page += table(
        ("comparison", "bit", "means, by door"),
        [(bit.name.lower(), int(bit), "; ".join(meanings[bit.name.lower()])) for bit in Compare if bit.name],
    )
    return page


def mask(guards: Iterable[Guard]) -> int:
    found = 0
    for guard in guards:
        found |= int(guard.compares)
    return found


def states() -> str:
    page = "# States and transitions\n\n" + MADE
    page += table(
        ("state", "means"), [(f"`{state.name}`", EXPLANATIONS[state.name].what) for state in sorted(State, key=_order)]
    )
    page += "```mermaid\nstateDiagram-v2\n"
    for (before, after), found in arrows().items():
        page += f"    {before} --> {after}: {', '.join(found)}\n"
    page += "    COMMITTED --> [*]\n```\n\n"
    page += "The same as text: from the state on the left, by these doors, to the state above.\n\n"
    order = sorted(State, key=_order)
    grid = []
    for before in (None, *order):
        cells = [", ".join(arrows().get((before.name if before else "[*]", after.name), ())) or "·" for after in order]
        grid.append((f"**{before.name if before else 'new'}**", *cells))
    page += table(("", *(state.name for state in order)), grid)
    page += (
        "# Every row\n\nEach accepted change of a task's record. Every event moves the state version by one.\n"
        "*Charged* ends count towards `max_attempts`.\n\n"
    )
    for door in DOORS.values():
        rows = [row for row in TRANSITIONS if row.door == door.name]
        if rows:
            page += f"## {door.name}\n\n"
            page += table(("whose record", "from", "if", "to", "events", "the attempt ends"), map(_transition, rows))
    return page


def _order(state: State) -> int:
    names = ("BLOCKED", "READY", "CLAIMED", "COMMITTED", "PARKED", "CANCELLED")
    return names.index(state.name)


def arrows() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in TRANSITIONS:
        if row.before is row.after and row.subject != "task":
            continue  # a count moved, the state did not
        if row.before is row.after and all(event.startswith("effect_") for event in row.events):
            continue  # only the version moved: these stand on the page of effects
        doors = found.setdefault((row.before.name if row.before else "[*]", row.after.name), [])
        word = row.door if row.subject in ("task", "new task") else f"{row.door} (parent's)"
        if word not in doors:
            doors.append(word)
    return found


def _transition(row: Transition) -> tuple[str, ...]:
    end = "" if row.end is None else f"{row.end.name}{', charged' if row.charged else ''}"
    return (
        row.subject,
        row.before.name if row.before else "",
        row.condition or "always",
        row.after.name,
        ", ".join(f"`{event}`" for event in row.events),
        end,
    )


def seconds(value: float) -> str:
    for size, word in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if value >= size and value % size == 0:
            count = round(value / size)
            return f"{count} {word}{'s' if count != 1 else ''}"
    return f"{value:g} s"


# Every limit of these two modules has its words here; one that has none stops the generator.
LIMITS = {
    "MAX_ID_LENGTH": "characters of an id, queue, kind, pool, owner or usage key; none of control; compared exactly",
    "MAX_BATCH": "tasks in one submit, claims in one batch",
    "MAX_ERROR_BYTES": "bytes of an error text; longer ones are cut, with a mark",
    "MAX_USAGE_KEYS": "numbers in one usage report, finite and not negative",
    "MAX_PRIORITY": "largest priority; the smallest is its negative, smaller goes first, 0 is the default",
    "MAX_ATTEMPTS_LIMIT": "largest `max_attempts`",
    "MAX_EFFECTS": "effects of one task, in all its revisions",
    "MAX_EXECUTIONS": "executions of one effect",
    "MAX_STATEMENTS": "TRANSACTIONAL effects in one commit",
    "MAX_EVIDENCE": "late reports kept with one effect; beyond it the oldest that was decided about makes room",
    "MAX_RECEIPT_BYTES": "bytes of a receipt, as encoded",
    "MAX_NOTE_BYTES": "bytes of a note, or of the evidence that a person gives",
    "MAX_SECONDS": "seconds: the longest delay, wait or duration that is taken",
    "DEFAULT_TTL": "seconds that a lease runs where the caller names no ttl",
    "MAX_CONTENT_BYTES": "bytes of an input, result, checkpoint or effect's payload, as encoded",
    "MAX_NESTING": "levels of nesting in a JSON value",
    "MAX_INTEGER": "largest integer in a JSON value (2^53), and its negative; larger ones belong in strings",
}
POLICY = {
    "max_ttl": "the longest ttl that a claim or a renewal may ask for",
    "max_claim_age": "how long one claim can be renewed; after that EXHAUSTED",
    "max_attempts": "charged attempts before a task is PARKED, where the task names no number of its own",
    "backoff_base": "a failed task waits base^n seconds, n its charged attempts",
    "backoff_max": "the longest such wait",
    "backoff_jitter": "share by which a wait is moved at random, up or down",
    "reclaim_grace": "how long after its lease a task is left to its owner",
    "retention": "how long bodies, events and log entries of finished tasks are kept",
}


def limits() -> str:
    page = "# Limits and defaults\n\n" + MADE
    page += "What lies beyond a limit is refused as INVALID, with the field and the limit; nothing is clamped.\n\n"
    rows = []
    for module in (commands, digests):
        for name in dir(module):
            if name.startswith(("MAX_", "DEFAULT_")):
                value = getattr(module, name)
                words = f" ({seconds(value)})" if name == "MAX_SECONDS" else ""
                rows.append((f"`{name}`", f"{value:,.12g}{words}", LIMITS[name]))
    page += table(("name", "value", "of what"), rows)
    page += f"A request id is remembered for {seconds(REQUEST_RETENTION_US / 1e6)}.\n\n# Policy of a pool\n\n"
    page += "Defaults of `fencepost pool policy`. A `max_ttl` above `max_claim_age` is refused.\n\n"
    rows = []
    for name in Policy.__struct_fields__:
        value = getattr(Policy(), name)
        timed = name not in ("max_attempts", "backoff_base", "backoff_jitter")
        rows.append((f"`{name}`", seconds(value) if timed else f"{value:g}", POLICY[name]))
    return page + table(("name", "default", "means"), rows)


def events() -> str:
    page = "# Events and log entries\n\n" + MADE
    page += (
        "Both lists are closed. An *event* is one accepted change of one task's record, keyed by task and state\n"
        "version, so that a gap shows. A *log entry* is what changes no task's record, in order of time.\n\n"
    )
    written = {name: [d.name for d in DOORS.values() if name in d.events] for name in EVENTS}
    page += table(
        ("event", "written by", "means"),
        [(f"`{name}`", ", ".join(written[name]), EXPLANATIONS[name].what) for name in EVENTS],
    )
    page += table(("log entry", "means"), [(f"`{name}`", EXPLANATIONS[name].what) for name in LOG_KINDS])
    page += "# How an attempt ends\n\n"
    page += table(
        ("end", "means"), [(f"`{end.name}`", EXPLANATIONS[end.name].what) for end in End if end is not End.NONE]
    )
    page += "# Staged results\n\n"
    return page + table(
        ("state", "means"), [(f"`{state.name}`", EXPLANATIONS[state.name].what) for state in StagedState]
    )


EFFECT_STATES = {
    "AWAITING_APPROVAL": "a person has to approve the next execution; nothing may be sent",
    "PREPARED": "an execution is stored, and may be under way",
    "UNKNOWN": "an execution may have happened; nobody who may say so has said whether it did",
    "COMMITTED": "it happened; the receipt is kept, and given to whoever asks for this effect again",
    "ABSENT": "it did not happen; it may be executed again",
    "DENIED": "a person refused it, or an attempt withdrew it",
    "ABANDONED": "a person gave it up without knowing",
}
GUARANTEES = {
    "TRANSACTIONAL": ("the same database, inside the commit's transaction", "it is never UNKNOWN"),
    "RESERVATION": ("reserve, then confirm or cancel", "ask for the stored reservation, confirm or cancel it"),
    "CONDITIONAL": (
        "a conditional write whose versions never return",
        "repeat while the version still stands; once it moved on, the complete history tells, or else a person",
    ),
    "IDEMPOTENT": (
        "an idempotency key that it remembers for a stated time",
        "ask by key, or repeat, while the retention less the margin lasts; after that a person",
    ),
    "READ_ONLY": ("no side effect", "repeat"),
    "NON_REPLAYABLE": ("none of these; what is not declared is this", "a person"),
}
GROUND_WORDS = {
    "NOT_FOUND": "IDEMPOTENT, READ_ONLY: the key is not known there, asked late enough",
    "MOVED_ON": "CONDITIONAL: the bound version is gone for good, the complete history lacks the effect id",
    "NO_RESERVATION": "RESERVATION: none is stored",
    "RESERVATION_CANCELLED": "RESERVATION: the stored one was cancelled",
    "RESERVATION_LAPSED": "RESERVATION: the stored one has lapsed for good",
}


def effects() -> str:
    page = "# Effects\n\n" + MADE
    page += (
        "An effect is one side effect on the outside world, identified by its slot. Its execution is stored before it\n"
        "is sent. Each change below is one event of its task's record, in the same transaction.\n\n"
    )
    page += table(("state", "means"), [(f"`{state.name}`", EFFECT_STATES[state.name]) for state in EffectState])
    moves: dict[tuple[str, str], list[str]] = {}
    for row in EFFECT_TRANSITIONS:
        if row.before is not row.after:
            doors = moves.setdefault((row.before.name if row.before is not None else "[*]", row.after.name), [])
            word = "end of attempt" if row.event == "attempt_ended" else row.door.removeprefix("effect.")
            if word not in doors:
                doors.append(word)
    page += "```mermaid\nstateDiagram-v2\n"
    page += "".join(f"    {before} --> {after}: {', '.join(doors)}\n" for (before, after), doors in moves.items())
    page += "    COMMITTED --> [*]\n```\n\n"
    page += "The same as text: from the state on the left, by these doors, to the state above.\n\n"
    grid = []
    for before in ("[*]", *EffectState.__members__):
        cells = [", ".join(moves.get((before, after), ())) or "·" for after in EffectState.__members__]
        grid.append((f"**{'new' if before == '[*]' else before}**", *cells))
    page += table(("", *EffectState.__members__), grid)
    page += (
        "# What prepare answers\n\n"
        "To the payload digest and downstream that the slot is bound to, or to an empty slot.\n"
        "Another payload or downstream is PAYLOAD_CONFLICT in every row, with what is bound and its state. Where this\n"
        "effect or another of the task cannot be replayed, EXECUTE is BUSY while another one, READ_ONLY apart, is\n"
        "PREPARED or UNKNOWN.\n\n"
    )
    holding = [row.holds for row in PREPARE]
    rows = []
    for case in PREPARE:
        condition = case.condition or ("otherwise" if holding.count(case.holds) > 1 else "always")
        rows.append((case.holds.name if case.holds is not None else "nothing", condition, case.answer, case.says))
    page += table(("the slot holds", "if", "answer", "with"), rows)
    page += "# Guarantees\n\n"
    page += table(
        ("guarantee", "the downstream offers", "UNKNOWN is cleared"), [(f"`{g}`", *GUARANTEES[g]) for g in Guarantee]
    )
    default = Terms("")
    page += (
        f"The default is `{default.guarantee}`, with a send window of {seconds(default.send_window_us / 1e6)} and a "
        f"settle time of {seconds(default.settle_time_us / 1e6)}.\n\n"
    )
    page += "Grounds on which an UNKNOWN effect becomes ABSENT; all but `NOT_FOUND` are certain and count at once:\n\n"
    page += table(("ground", "of"), [(f"`{ground}`", GROUND_WORDS[ground]) for ground in GROUNDS])
    page += "# Every row\n\n"
    for door in DOORS.values():
        found = [row for row in EFFECT_TRANSITIONS if row.door == door.name]
        if found:
            page += f"## {door.name}\n\n"
            page += table(
                ("from", "if", "to", "event"),
                [
                    (
                        r.before.name if r.before is not None else "",
                        r.condition or "always",
                        r.after.name,
                        f"`{r.event}`",
                    )
                    for r in found
                ],
            )
    return page


PAGES = {
    "refusals": refusals,
    "doors": doors,
    "states": states,
    "effects": effects,
    "limits": limits,
    "events": events,
}


def unexplained() -> list[str]:
    """Outcomes, reasons and events that the explanations have no text for."""
    names = [*Outcome.__members__, *Reason.__members__, *EVENTS, *LOG_KINDS, *State.__members__]
    return [name for name in names if name not in EXPLANATIONS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 with the difference, if there is one"
    )
    check = parser.parse_args().check
    missing = unexplained()
    if missing:
        print("no explanation of:", *missing, file=sys.stderr)
        return 1
    stale = False
    for name, make in PAGES.items():
        path = FOLDER / f"{name}.md"
        wanted = make().rstrip() + "\n"
        found = path.read_text("utf-8") if path.exists() else ""
        if found == wanted:
            continue
        if check:
            stale = True
            where = f"docs/reference/{name}.md"
            sys.stdout.writelines(
                difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), where, "generated")
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, "utf-8")
            print(f"wrote docs/reference/{name}.md")
    if stale:
        print("docs/reference differs from the kernel's tables: run tools/generate_docs.py", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
