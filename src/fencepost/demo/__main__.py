"""`python -m fencepost.demo` plays the demo; `fencepost demo` does the same and takes options."""

import sys

from fencepost.demo import run

sys.exit(run())
