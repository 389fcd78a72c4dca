"""The front ends as another package would wrap them: each reports how long its event loop was held."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from understudy.service.front_end import Main
from understudy.service.settings import ServeSettings

FILE_VARIABLE = "UNDERSTUDY_TEST_HOLDS"
"""The environment variable with the file of the report: lines of `time.monotonic`, a hold's seconds, and its CPU's."""

TICK_SECONDS = 0.002
REPORTED_SECONDS = 0.004

_T = TypeVar("_T")


def run_grpcio(settings: ServeSettings, main: Main[_T]) -> _T:
    """Run the service; see `understudy.service.front_end.RunFrontEnd`."""
    result: _T = importlib.import_module("understudy.service.grpcio.grpc_server").run(settings, _watched(main))
    return result


def run_envoy(settings: ServeSettings, main: Main[_T]) -> _T:
    """Run the service; see `understudy.service.front_end.RunFrontEnd`."""
    result: _T = importlib.import_module("understudy.service.envoy.envoy_server").run(settings, _watched(main))
    return result


def _watched(main: Main[_T]) -> Callable[[Any, Any], Coroutine[Any, Any, _T]]:
    async def watched(make: Any, handle_signals: Any) -> _T:
        watch = asyncio.create_task(_watch(Path(os.environ[FILE_VARIABLE])))
        try:
            return await main(make, handle_signals)
        finally:
            watch.cancel()

    return watched


async def _watch(file: Path) -> None:
    with file.open("a", buffering=1) as lines:
        while True:
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            held = now - began - TICK_SECONDS
            if held >= REPORTED_SECONDS:
                lines.write(f"{now} {held} {time.process_time() - cpu}\n")
