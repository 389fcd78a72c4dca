"""How a program comes to run inside Envoy, played by the test."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from understudy.service.envoy.envoy_server import Host
from understudy.service.envoy.launch import ReexecState

SECONDS = 60
CALL = {"type": "http", "path": "/a.B/C"}


@pytest.fixture
async def host() -> Host:
    return Host(
        ReexecState(module=None, arguments=["none"], executable=sys.executable, replaced={}, port=1, folder="none")
    )


async def nothing(*_: Any) -> Any:
    """Stands for ASGI's functions where a test has no use for them."""


async def test_calls_wait_until_the_program_opens_the_application(host: Host) -> None:
    answered: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        answered.append(scope["path"])

    early = asyncio.ensure_future(host(CALL, nothing, nothing))
    await asyncio.sleep(0)
    assert not early.done()
    host.open(answer)
    await asyncio.wait_for(early, SECONDS)
    await host(CALL, nothing, nothing)
    assert answered == ["/a.B/C", "/a.B/C"]


async def test_a_program_needs_the_event_loop_to_run_on(host: Host) -> None:
    coroutine = nothing()
    with pytest.raises(RuntimeError, match="event loop"):
        host.run(coroutine)
    await coroutine
