"""The command line. `main` is what the `fencepost` script calls; importing this package imports no command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (default: what stands on the command line) and returns its exit code."""
    try:
        from fencepost.cli.dispatch import main as run

        return run(arguments)
    except KeyboardInterrupt:  # while the modules were being imported
        return 130


__all__ = ["main"]
