"""Files that are read again when they change: certificates, callers and the keys of signatures."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO, Protocol

import structlog
from prometheus_client import CollectorRegistry, Gauge

REFRESH_SECONDS = 1.0
"""How often to check whether files have changed."""

_log = structlog.get_logger(__name__)


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading that anything may replace while the service runs. Never waits, as for a pipe's writer.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        return opened
    opened.close()
    raise OSError(errno.EINVAL, "it is no regular file", str(file))


class RefreshedFiles(Protocol):
    """What is read from files."""

    @property
    def is_current(self) -> bool:
        """Whether it is what the files hold; if not, that cannot be used."""

    def refresh(self) -> None:
        """Read the files again if they changed. Blocks."""


class ReloadGauge:
    """Shows whether the newest content of files is in use.

    Args:
        registry: Where to register the metric.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "understudy_last_reload_successful",
            "1 while the newest content of these files is in use, 0 while it cannot be used and the one before is.",
            ["files"],
            registry=registry,
        )

    def show(self, name: str, *, is_current: bool) -> None:
        """Show it of files by their name."""
        self._gauge.labels(name).set(is_current)


async def keep_refreshing(name: str, files: RefreshedFiles, reloads: ReloadGauge, executor: Executor) -> None:
    """Read files again when they change, until this is cancelled.

    Args:
        name: What the metric calls them.
        files: What is read from them.
        reloads: Shows whether that worked.
        executor: Runs what blocks.
    """
    loop = asyncio.get_running_loop()
    reloads.show(name, is_current=True)
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        try:
            await loop.run_in_executor(executor, files.refresh)
            reloads.show(name, is_current=files.is_current)
        except Exception as error:  # noqa: BLE001 - else later changes would never be used
            reloads.show(name, is_current=False)
            _log.warning("cannot use a changed file yet", reason=f"{type(error).__name__}: {error}")
