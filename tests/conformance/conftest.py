"""The conformance suite: whole behaviours, run on every store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fencepost.client.client import Client
from tests.conformance.worlds import WORLDS, World

# Other ways to the same store run what differs there in `make test`, and the rest in `make soak`.
LONG = {
    "postgres-pgbouncer": {"test_limits", "test_people", "test_fence", "test_effects"},
    "postgres-worker": {"test_limits", "test_people", "test_fence", "test_graphs", "test_effects"},
    "postgres-operator": {"test_limits", "test_fence", "test_claims", "test_graphs", "test_effects"},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.name and item.path.stem in files for name, files in LONG.items()):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(params=sorted(WORLDS))
def store_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def world(store_name: str, tmp_path: Path) -> AsyncIterator[World]:
    made = WORLDS[store_name](tmp_path)
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture
async def client(world: World) -> Client:
    return await world.client()
