"""`python -m fencepost`: the same as the `fencepost` script."""

import sys

from fencepost.cli import main

if __name__ == "__main__":
    sys.exit(main())
