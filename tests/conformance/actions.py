"""Short forms of what every scenario does first."""

from __future__ import annotations

from typing import Any

from fencepost.client.client import Client
from fencepost.wire import Claim, Committed, NewTask, Refused, TaskView
from tests.conformance.worlds import World


async def given(client: Client, task_id: str = "t", input: Any = None, **more: Any) -> TaskView:
    """A submitted task."""
    answer = await client.submit(NewTask(input if input is not None else {"n": 1}, task_id=task_id, **more))
    assert not isinstance(answer, Refused), answer
    return answer.task


async def claimed(client: Client, owner: str = "A", **more: Any) -> Claim:
    """A claim of the best task."""
    answer = await client.claim_next(owner=owner, **more)
    assert not isinstance(answer, Refused), answer
    assert len(answer) == 1, answer
    return answer[0]


async def committed(client: Client, claim: Claim, result: Any = "done", **more: Any) -> Committed:
    answer = await client.commit(claim, result, **more)
    assert isinstance(answer, Committed), answer
    return answer


async def done(client: Client, task_id: str, result: Any = "done", **more: Any) -> Committed:
    """Submitted, claimed and committed."""
    await given(client, task_id, **more)
    view = await client.task(task_id)
    assert isinstance(view, TaskView)
    claim = await client.claim(task_id, expected_state_version=view.state_version, owner="A")
    assert isinstance(claim, Claim), claim
    return await committed(client, claim, result)


async def taken_over(world: World, client: Client, claim: Claim, owner: str = "B") -> Claim:
    """The successor's claim, after the lease of `claim` ran out."""
    await world.advance(claim.ttl + 1)
    return await claimed(client, owner)


async def raised(client: Client, pool: str = "default") -> int:
    """The new epoch; `client` has adopted it."""
    view = await client.pool(pool)
    assert not isinstance(view, Refused)
    answer = await client.raise_epoch(
        pool, expected_epoch=view.epoch, expected_state_version=view.state_version, who="test"
    )
    assert not isinstance(answer, Refused), answer
    return await client.adopt_epoch(pool)


async def state_of(client: Client, task_id: str = "t") -> str:
    view = await client.task(task_id)
    assert isinstance(view, TaskView), view
    return view.state


def refusal(answer: Any) -> tuple[str, str | None]:
    assert isinstance(answer, Refused), answer
    return str(answer.outcome), answer.reason
