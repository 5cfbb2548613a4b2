"""Whatever the README and the docs show is tried: programs run, outputs compared, links followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fencepost.stores.postgres_roles import roles_sql
from tests.docs.pages import PAGES, ROOT, Block, agrees, blocks, console, run

LINK = re.compile(r"\]\(([^)\s]+)\)")
KNOWN = {"python", "sh", "console", "json", "sql", "text", "toml"}
LINKING = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
FILES = {"json", "toml"}  # a block of these is a file, and is tried by what reads it


def try_block(block: Block, folder: Path, printed: str) -> str:
    """Try one block, and give what it printed; `printed` is what the block before it did."""
    where = f"the block at line {block.line}"
    if block.mark.startswith("file: "):
        name = block.mark.removeprefix("file: ")
        (folder / Path(name).name).write_text(block.text)
        return ""
    if block.language == "python":
        code, printed = run(["python3", "-c", block.text], folder)
        assert code == 0, f"{where} ended with {code}:\n{printed}"
        return printed
    if block.language == "text":
        assert block.mark == "output", f"{where} shows text that nothing printed"
        assert agrees(block.text, printed), f"{where} shows another output than this:\n{printed}"
        return ""
    if block.language == "console":
        for command, shown in console(block.text):
            code, printed = run(["sh", "-c", command], folder)
            assert code == 0, f"{where}: {command!r} ended with {code}:\n{printed}"
            assert agrees(shown, printed), f"{where}: {command!r} printed something else:\n{printed}"
        return ""
    assert block.language == "sh", f"{where} is of the language {block.language!r}, which nobody tries"
    for command in block.text.splitlines():
        # What make's targets do is tried elsewhere; here it counts that the targets are there.
        assert command.startswith("make "), f"{where}: {command!r} belongs into a console block, which is tried"
        code, printed = run([*command.split(), "--dry-run"], ROOT)
        assert code == 0, f"{where}: {command!r} ended with {code}:\n{printed}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_everything_that_a_page_shows_works(page: str, tmp_path: Path) -> None:
    printed = ""
    for block in blocks(page):
        printed = try_block(block, tmp_path, printed)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tried(page: str) -> None:
    fences = re.findall(r"^```", (ROOT / page).read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page)), "a block is not closed, or is indented"
    for block in blocks(page):
        assert block.language in KNOWN, f"line {block.line}"
        assert block.language not in FILES or block.mark.startswith("file: "), f"line {block.line}"


def test_the_pages_show_enough_to_be_worth_trying() -> None:
    tried = [block for page in PAGES for block in blocks(page) if block.language in ("python", "console")]
    assert len(tried) >= 10


@pytest.mark.parametrize("page", LINKING)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    missing = [
        link
        for link in LINK.findall((ROOT / page).read_text())
        if not link.startswith(("https://", "#")) and not (ROOT / page).parent.joinpath(link.partition("#")[0]).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", LINKING)
def test_every_link_into_a_page_names_one_of_its_headings(page: str) -> None:
    missing = []
    for link in LINK.findall((ROOT / page).read_text()):
        path, _, anchor = link.partition("#")
        if not anchor or link.startswith("https://"):
            continue
        target = (ROOT / page).parent.joinpath(path) if path else ROOT / page
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        if anchor not in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]:
            missing.append(link)
    assert missing == []


def test_the_roles_on_the_page_are_those_that_the_command_prints() -> None:
    [shown] = [block.text for block in blocks("docs/postgresql.md") if block.mark == "file: roles.sql"]
    assert shown == roles_sql()


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {page for page in PAGES if page != "README.md"} <= linked


def test_every_example_is_shown_in_a_page_word_for_word() -> None:
    shown = {
        block.mark.removeprefix("file: "): block.text
        for page in PAGES
        for block in blocks(page)
        if block.mark.startswith("file: examples/")
    }
    examples = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert examples
    assert shown == examples


# the README's order -------------------------------------------------------------------------------


def test_the_readme_says_what_it_is_for_then_the_two_commands_then_the_picture_then_the_python() -> None:
    readme = (ROOT / "README.md").read_text()
    second = "## The second send never happens"
    marks = ["# fencepost", "make demo", "make test", "![", "```python", second, "## Put your own agent"]
    places = [readme.index(mark) for mark in marks]
    assert places == sorted(places)
    purpose = readme[: readme.index("## ")]
    assert 200 < len(purpose) < 1_000, "what it is for is said in a paragraph or two"


def test_the_readmes_python_has_about_twenty_lines() -> None:
    first = next(block for block in blocks("README.md") if block.language == "python")
    assert 15 <= len([line for line in first.text.splitlines() if line.strip()]) <= 22


def test_the_readmes_second_send_has_about_as_many() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## The second send") : readme.index("## Put your own agent")]
    shown = [block for block in blocks("README.md") if block.language == "python" and block.text in section]
    assert [block.mark for block in shown] == ["file: toy.py", ""]
    assert 12 <= len([line for line in shown[1].text.splitlines() if line.strip()]) <= 22


def test_the_readmes_picture_is_one_of_the_late_worker_being_fenced() -> None:
    [picture] = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    drawn = re.sub(r"&#160;|<[^>]+>", " ", (ROOT / picture).read_text())
    for word in ("SIGSTOP", "SIGCONT", "FENCED", "GENERATION", "usual"):
        assert word in drawn
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


# the tests themselves can fail --------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [
        Block("python", "raise SystemExit(3)\n", "", 1),
        Block("console", "$ false\n", "", 1),
        Block("console", "$ echo one\ntwo\n", "", 1),
        Block("text", "never printed\n", "output", 1),
        Block("text", "not even marked as output\n", "", 1),
        Block("sh", "make no-such-target\n", "", 1),
        Block("ruby", "puts 1\n", "", 1),
    ],
    ids=lambda block: f"{block.language}-{block.text[:12].strip()}",
)
def test_a_block_that_does_not_work_is_found(block: Block, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        try_block(block, tmp_path, "something else")


def test_an_output_may_leave_things_open() -> None:
    assert agrees("…FENCED…\n", "the answer: FENCED (GENERATION)\n")
    assert agrees("one\ntwo\n", "one\ntwo")
    assert not agrees("…FENCED", "FENCED too late\n")
