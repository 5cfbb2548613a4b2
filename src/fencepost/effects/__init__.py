"""Calls to the outside world: what a downstream declares of itself, and the one flow in which it is called.

    base        what a downstream is, and what its calls may find
    performing  prepare → look at `send_by` → call → settle or reconcile
    http, smtp, sql, git, s3, aws     downstreams
    config      `[downstreams.NAME]` of fencepost.toml

Nothing here decides what a finding means: the rules stand in the kernel.
"""
