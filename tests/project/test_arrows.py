"""What import-linter cannot say: which imports are *allowed*. The arrows themselves stand in pyproject.toml."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
ALLOWED_IN_THE_KERNEL = {"msgspec", "rfc8785"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which arrow it is"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str = "") -> list[Path]:
    return sorted((SOURCE / "fencepost" / folder).rglob("*.py"))


def test_the_kernel_imports_the_standard_library_msgspec_and_rfc8785_and_nothing_else() -> None:
    checked = modules("kernel")
    assert checked, "no kernel found: this test would pass on anything"
    for path in checked:
        for name in imports(path):
            top = name.partition(".")[0]
            inside = f"{name}.".startswith(("fencepost.kernel.", "fencepost.errors."))
            assert inside or top in ALLOWED_IN_THE_KERNEL or top in sys.stdlib_module_names, f"{path.name}: {name}"


def test_no_module_imports_a_public_name_from_the_front_door() -> None:
    # `from fencepost import Claim` inside the package would tie every layer to all others, unseen by import-linter.
    children = {path.stem for path in (SOURCE / "fencepost").iterdir()}
    for path in modules():
        for name in imports(path):
            if name == "fencepost" or (name.startswith("fencepost.") and name.split(".")[1] not in children):
                raise AssertionError(f"{path.relative_to(SOURCE)} imports {name}: import it from where it stands")
