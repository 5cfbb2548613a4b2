"""The command line. `main` is what the `fencepost` script calls; importing this package imports no command."""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (default: what stands on the command line) and returns its exit code; 130 for Ctrl-C."""
    try:
        from fencepost.cli.dispatch import main as run

        return run(arguments)
    except KeyboardInterrupt:  # here, since it may come while the commands are being imported
        return INTERRUPTED


__all__ = ["main"]
