"""Runs the demo, and takes the pictures of its page for README and the docs.

python -m tools.screenshots [FOLDER]
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
FETCHED = ROOT / ".tools" / "chromium" / "chromium"
DEMO_SECONDS = 600
OVERVIEW, CHECKPOINT = (1500, 1300), (1200, 900)
"""The widths and heights of the pictures."""


def main() -> None:
    """Write ``page.png`` and ``page-checkpoint.png`` into the folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    command = [sys.executable, "-m", "understudy.cli", "demo", "--keep"]
    story = subprocess.run(command, capture_output=True, text=True, timeout=DEMO_SECONDS, check=True).stdout
    service, address = _found(r"kill (\d+)", story), _found(r"shows what it does at (\S+)", story)
    try:
        take(address, folder)
    finally:
        os.kill(int(service), signal.SIGTERM)


def take(address: str, folder: Path) -> None:
    """Take the pictures of a page."""
    program = shutil.which("chromium") or str(FETCHED)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])  # as root, in containers
        page = browser.new_page()
        _picture(page, address, OVERVIEW, folder / "page.png")
        step = page.locator("#state .large a").inner_text().removeprefix("step ")
        _picture(page, f"{address}checkpoints/{step}", CHECKPOINT, folder / "page-checkpoint.png")
        browser.close()


def _picture(page: Page, url: str, size: tuple[int, int], file: Path) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(url)
    page.screenshot(path=file)


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"the demo printed nothing like {pattern}")
    return found[1]


if __name__ == "__main__":
    main()
