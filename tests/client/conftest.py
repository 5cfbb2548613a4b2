from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fencepost.testing import MemoryClient, memory_client


@pytest.fixture
async def client() -> AsyncIterator[MemoryClient]:
    async with memory_client() as client:
        yield client
