"""How a program comes to run inside Envoy, played by the test."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
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


async def test_what_envoy_needed_is_deleted_when_the_service_has_ended_however_the_program_ends_then(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    state = ReexecState(
        module=None, arguments=["none"], executable=sys.executable, replaced={}, port=1, folder=str(folder)
    )
    host = Host(state)
    host._loop = asyncio.get_running_loop()

    async def serve() -> str:
        assert folder.is_dir()
        return "served"

    assert await asyncio.to_thread(host.run, serve()) == "served"
    assert not folder.exists()
