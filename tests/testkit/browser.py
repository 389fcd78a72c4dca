"""A real browser without a window: Chromium on PATH, or where tools/fetch_browser.sh unpacks it."""

from __future__ import annotations

import ctypes.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".tools" / "chromium" / "chromium"
LAUNCH_MILLISECONDS = 150_000
WAIT_MILLISECONDS = 60_000


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run the browser; skip the test if there is none."""
    program = shutil.which("chromium") or (str(FETCHED) if FETCHED.exists() else None)
    if program is None:
        pytest.skip(f"chromium is neither on PATH nor at {FETCHED}; tools/fetch_browser.sh fetches it")
    expect.set_options(timeout=WAIT_MILLISECONDS)  # by default it gives up after 5 s
    with _driver_libraries():
        playwright = sync_playwright().start()
    try:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],  # as root, and in containers
            timeout=LAUNCH_MILLISECONDS,
        )
        try:
            yield browser
        finally:
            browser.close()
    finally:
        playwright.stop()


@contextmanager
def _driver_libraries() -> Iterator[None]:
    """Give the driver of the browser the library that a minimal system lacks."""
    fetched = [] if ctypes.util.find_library("atomic") else [*FETCHED.parent.glob("usr/lib/*/libatomic.so.1")]
    with mock.patch.dict(os.environ, {"LD_PRELOAD": str(fetched[0])} if fetched else {}):
        yield


class Tabs:
    """Opens tabs, and notes every error and dialog in them.

    Args:
        browser: The browser.

    Attributes:
        errors: What the console, scripts and the network reported.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.errors: list[str] = []

    def open(self, url: str, **options: Any) -> Page:
        """Open a page in a context of its own, and wait for it."""
        context = self._browser.new_context(**options)
        self._contexts.append(context)
        context.set_default_timeout(WAIT_MILLISECONDS)
        page = context.new_page()
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        page.goto(url)
        return page

    def close(self) -> None:
        """Close every tab."""
        for context in self._contexts:
            context.close()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


def violations(page: Page) -> list[str]:
    """Return what axe-core finds wrong with the accessibility of a page."""
    found = Axe().run(page)
    return [
        f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']][:3]}"
        for one in found.response["violations"]
    ]


def overflow(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wider
