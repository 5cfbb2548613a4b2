"""Every word that fencepost prints has a text; the texts name only commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cyclopts import App

from fencepost import errors
from fencepost.cli.dispatch import build
from fencepost.cli.explain import EXPLANATIONS, best_code, explain, hint, suggest
from fencepost.kernel import outcomes, records

KERNEL = Path(outcomes.__file__).parent


def codes_of_errors() -> set[str]:
    return {
        found.code
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, errors.FencepostError) and hasattr(found, "code")
    }


@pytest.mark.parametrize(
    "codes",
    [
        pytest.param({outcome.value for outcome in outcomes.Outcome}, id="outcomes"),
        pytest.param({reason.value for reason in outcomes.Reason}, id="reasons"),
        pytest.param(codes_of_errors(), id="errors"),
        pytest.param(set(records.EVENTS), id="events"),
        pytest.param(set(records.LOG_KINDS), id="log entries"),
        pytest.param({state.name for state in records.State}, id="states"),
        pytest.param({end.name for end in records.End} - {"NONE"}, id="ends"),
        pytest.param({state.name for state in records.StagedState}, id="staged results"),
    ],
)
def test_every_code_has_a_text(codes: set[str]) -> None:
    assert len(codes) > 2
    assert codes - EXPLANATIONS.keys() == set()


def test_every_reason_that_the_kernel_writes_as_text_has_one() -> None:
    source = "".join(path.read_text() for path in KERNEL.glob("*.py"))
    written = set(re.findall(r'Refusal\(Outcome\.\w+, "([A-Z_]+)"', source))
    written |= set(re.findall(r'"park_reason"\] = "([A-Z_]+)"', source))
    assert {"ATTEMPT", "ATTEMPTS", "FINAL"} <= written, "the pattern no longer finds them"
    assert written - EXPLANATIONS.keys() == set()


def test_no_text_stands_for_a_code_that_is_never_printed() -> None:
    known = {
        *(outcome.value for outcome in outcomes.Outcome),
        *(reason.value for reason in outcomes.Reason),
        *codes_of_errors(),
        *records.EVENTS,
        *records.LOG_KINDS,
        *(state.name for state in records.State),
        *(end.name for end in records.End),
        *(state.name for state in records.StagedState),
        *{"ATTEMPT", "ATTEMPT_PRUNED", "FINAL", "MISSING", "RECLAIMED"},
    }
    assert {part for code in EXPLANATIONS for part in code.split("/")} - known == set()


def test_every_text_says_what_happened_and_what_to_do_in_whole_sentences() -> None:
    for text in EXPLANATIONS.values():
        for sentence in (text.what, text.todo, text.hint):
            assert sentence[0].isupper() or sentence[0] == "`", text
            assert sentence.endswith("."), text
        assert len(text.hint) <= 160, text


def test_the_texts_name_only_commands_that_exist() -> None:
    app = build()
    named = set()
    for text in EXPLANATIONS.values():
        for command in re.findall(r"`fencepost ([^`]+)`", f"{text.what} {text.todo}"):
            words = [word for word in command.split() if re.fullmatch(r"[a-z][a-z-]*", word)]
            path = words[:2] if words[0] in ("pool", "migrate") else words[:1]
            named.add(" ".join(path))
            app.parse_args([*path, "--help"])  # raises for a command that is not there
            at = app
            for word in path:
                at = at[word]
    assert len(named) > 8


def commands(app: App) -> list[App]:
    found = [app[name] for name in app if not name.startswith("-")]
    return [*found, *(inner for command in found for inner in commands(command))]


def test_every_command_and_every_option_says_what_it_is() -> None:
    found = commands(build())
    assert len(found) > 25
    for command in found:
        assert command.help, command.name
        for argument in command.assemble_argument_collection(parse_docstring=True):
            if argument.children:
                continue  # the group of common options, each of which says it
            assert argument.parameter.help, (command.name, argument.name)


def test_every_command_but_a_family_takes_json() -> None:
    for command in commands(build()):
        if command.default_command is not None:
            names = {name for argument in command.assemble_argument_collection() for name in argument.names}
            assert {"--json", "--store"} <= names, command.name


def test_the_most_specific_text_gives_the_hint() -> None:
    assert best_code("FENCED", "GENERATION") == "FENCED/GENERATION"
    assert best_code("FENCED", "EPOCH") == "EPOCH"
    assert best_code("NOT_COMMITTED", "PARKED") == "PARKED"
    assert best_code("ENDED", "RELEASED") == "ENDED"
    assert best_code("HELD", None) == "HELD"
    assert hint("HELD") == EXPLANATIONS["HELD"].hint
    assert "explain" in hint("NO_SUCH_THING")


def test_a_code_is_found_however_it_was_typed() -> None:
    assert [text.code for text in explain("fenced/generation")] == ["FENCED/GENERATION", "GENERATION", "FENCED"]
    assert explain("STALE-INPUT") == [EXPLANATIONS["STALE_INPUT"]]
    assert [text.code for text in explain("pool")] == ["pool", "POOL"]
    assert explain("NOTHING_OF_THE_KIND") == []
    assert "FENCED" in suggest("fence")
