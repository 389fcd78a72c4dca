"""Starts programs of this project in a fraction of the time; see `tests/startup/preloaded.py`."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

STARTUP = Path(__file__).parents[1] / "startup"
VARIABLE = "TESTS_PRELOADED"
"""The environment variable with the server's address, which `tests/startup/sitecustomize.py` reads."""

START_SECONDS = 100
END_SECONDS = 10


def preloaded() -> Mapping[str, str]:
    """Return what a program's environment needs so that it runs in a fork of a process that has imported TensorFlow."""
    return {VARIABLE: _server()}


@functools.cache
def _server() -> str:
    """Start the server of this process's tests, and return its address. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, str(STARTUP / "preloaded.py"), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n", "the server of preloaded programs did not start"

    def end() -> None:
        with process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(END_SECONDS)
        folder.cleanup()

    atexit.register(end)
    return address
