"""The coordinator and its loops: every command passes here, once."""
