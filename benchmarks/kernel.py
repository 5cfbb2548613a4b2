"""What one decision costs: claim, renew, commit and a refusal, with full records and nothing around them.

Each figure is the median of many timed decisions, in microseconds of CPU.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from measuring import INPUT, RESULT, at_least_one, machine, parser, scratch, show

from fencepost.kernel import commands as k
from fencepost.kernel.digests import encode
from fencepost.kernel.kernel import Kernel
from fencepost.kernel.operations import Accepted, Granted
from fencepost.kernel.outcomes import Outcome, Refusal
from fencepost.kernel.records import Pool, State, Task
from fencepost.kernel.writes import Snapshot
from fencepost.wire import new_attempt_id, new_id

GOAL = 10.0
NOW = 1_800_000_000_000_000
TTL = 30_000_000


def ready(digest: str) -> Task:
    return Task(
        task_id=new_id(),
        pool="default",
        queue="default",
        kind="default",
        graph_id=None,
        node_id="main",
        revision=1,
        input_digest=digest,
        submitted_digest=digest,
        state=int(State.READY),
        state_version=1,
        scheduler_epoch=0,
        claim_generation=0,
        attempt_id=None,
        owner_id=None,
        claimed_at=None,
        lease_expires_at=None,
        cancel_generation=0,
        result_commit_id=None,
        priority=0,
        available_at=NOW - 1_000_000,
        ready_at=NOW - 1_000_000,
        charged_attempts=0,
        max_attempts=5,
        deps_total=0,
        deps_remaining=0,
        successors=0,
        checkpoint_number=0,
        checkpoint_generation=0,
        end=0,
        cancel_with_parent=False,
        park_reason=None,
        created_at=NOW - 1_000_000,
    )


def decisions() -> dict[str, Callable[[], Any]]:
    """By name, a decision to be timed; each has been tried once, and answered what it should."""
    kernel = Kernel()
    task = ready(encode(INPUT, "input").digest)
    result = encode(RESULT, "result")

    def snapshot(standing: Task) -> Snapshot:
        return Snapshot(now=NOW, pools={"default": Pool("default")}, tasks={standing.task_id: standing})

    claim = k.ClaimNext(
        request_id=new_id(),
        pool="default",
        queues=("default",),
        kinds=None,
        epoch=1,
        owner_id="caller-1",
        ttl_us=TTL,
        attempt_ids=(new_attempt_id(),),
    )
    free = snapshot(task)
    claimed = kernel.decide(free, claim, [task]).answer.tasks[0]
    held = snapshot(claimed)
    presented = k.Presented(
        "store", "default", claimed.task_id, claimed.attempt_id, 1, 0, claimed.input_digest, claimed.owner_id
    )

    def commit(by: k.Presented) -> k.Commit:
        return k.Commit(
            request_id=new_id(),
            epoch=1,
            claim=by,
            result_digest=result.digest,
            content=result,
            result_commit_id=new_id(),
        )

    renew = k.Renew(request_id=new_id(), epoch=1, claim=presented, ttl_us=TTL)
    good = commit(presented)
    late = commit(k.Presented("store", "default", claimed.task_id, new_attempt_id(), 0, 0, claimed.input_digest))
    made: dict[str, Callable[[], Any]] = {
        "claim": lambda: kernel.decide(free, claim, (task,)),
        "renew": lambda: kernel.decide(held, renew),
        "commit": lambda: kernel.decide(held, good),
        "refusal": lambda: kernel.decide(held, late),
    }
    expected = {"claim": Granted, "renew": Accepted, "commit": Accepted, "refusal": Refusal}
    for name, decide in made.items():
        answer = decide().answer
        if type(answer) is not expected[name] or (name == "refusal" and answer.outcome is not Outcome.FENCED):
            raise AssertionError(f"{name} was answered {answer}")
    return made


def measure(decide: Callable[[], Any], times: int) -> float:
    """The median of single decisions, in µs, less what reading the clock costs."""
    clock = time.perf_counter_ns
    for _ in range(1000):
        decide()
    taken: list[int] = []
    empty: list[int] = []
    gc.collect()
    for _ in range(times):
        began = clock()
        decide()
        taken.append(clock() - began)
        began = clock()
        empty.append(clock() - began)
    return (statistics.median(taken) - statistics.median(empty)) / 1000


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--times", type=at_least_one, default=20_000, help="decisions of a repetition (default 20000)")
    chosen = options.parse_args()
    each = {
        name: [round(measure(decide, chosen.times), 2) for _ in range(chosen.repeat)]
        for name, decide in decisions().items()
    }
    with scratch(chosen.folder) as folder:
        about = machine(folder)
    found = {
        "benchmark": "kernel",
        "median_us": {name: round(statistics.median(values), 2) for name, values in each.items()},
        "goal_us": GOAL,
        "each": each,
        "machine": about,
    }
    rows = [(name, us, GOAL) for name, us in found["median_us"].items()]
    show(found, chosen.json, "one decision of the kernel", ["decision", "median µs", "goal µs"], rows)


if __name__ == "__main__":
    main()
