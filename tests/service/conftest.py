"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_tools import tool
from service.rig import Rig, running_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as rig:
        yield rig


@pytest.fixture
def promtool() -> Path:
    return tool("promtool")
