"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testkit.prometheus_tools import tool
from testkit.server_harness import FRONT_ENDS, ServerHarness, running_harness
from testkit.through_codecs import CODECS
from understudy.service.services import Codecs


@pytest.fixture(params=FRONT_ENDS)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[ServerHarness]:
    async with running_harness(request.param) as harness:
        yield harness


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(params=CODECS)
def codecs(request: pytest.FixtureRequest) -> Codecs:
    return CODECS[request.param]()


@pytest.fixture
def promtool() -> Path:
    return tool("promtool")
