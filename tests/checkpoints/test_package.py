"""The package's surface and its weight."""

from __future__ import annotations

import subprocess
import sys

from understudy import checkpoints


def test_everything_public_is_there() -> None:
    assert all(hasattr(checkpoints, name) for name in checkpoints.__all__)


def test_importing_it_loads_no_tensorflow() -> None:
    code = "import sys, understudy.checkpoints; print([m for m in ('tensorflow', 'keras', 'h5py') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout == "[]\n"
