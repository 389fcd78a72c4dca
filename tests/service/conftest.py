"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_tools import tool
from service.rig import FRONT_ENDS, Rig, running_rig


@pytest.fixture(params=FRONT_ENDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with running_rig(request.param) as rig:
        yield rig


@pytest.fixture
def promtool() -> Path:
    return tool("promtool")
