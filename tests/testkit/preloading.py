"""Starts programs of this project in a fraction of the time; see `tests/startup/preloaded.py`."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from startup.handover import FORK_NAME, INSPECTIONS

STARTUP = Path(__file__).parents[1] / "startup"
VARIABLE = "TESTS_PRELOADED"
"""The environment variable with the server's address, which `tests/startup/sitecustomize.py` reads."""

HEEDING_HANGUP = ("env", "--default-signal=HUP")
"""Begins the command line of a program that heeds SIGHUP, also where the tests ignore it, as under nohup. For programs
that are not preloaded."""

END_SECONDS = 60

_SHARED = "TESTS_PRELOADED_SHARED"
"""The environment variable with the address of the server that the processes of a test session share."""


def preloaded() -> Mapping[str, str]:
    """Return what a program's environment needs so that it runs in a fork of a process that has imported TensorFlow."""
    return {VARIABLE: os.environ.get(_SHARED) or _server()}


def fork_of(process_id: int) -> int:
    """Return the process that runs the program of another, once that has handed over: the one to send SIGSTOP to."""
    name = FORK_NAME.format(process_id)
    ends = time.monotonic() + END_SECONDS
    while not (forks := [each.pid for each in psutil.process_iter(["name"]) if each.info["name"] == name]):
        assert time.monotonic() < ends
        time.sleep(0.01)
    (fork,) = forks
    return fork


def share() -> None:
    """Make the server of this process that of the processes which it starts, too."""
    if _SHARED not in os.environ:
        os.environ[_SHARED] = _server()


@functools.cache
def _server() -> str:
    """Start a server, and return its address. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = f"{folder.name}/socket"
    with _listening(address) as listener, _listening(address + INSPECTIONS) as inspections:
        files = (listener.fileno(), inspections.fileno())
        process = subprocess.Popen(
            [sys.executable, str(STARTUP / "preloaded.py"), *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=files,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    assert process.stdin is not None

    def end() -> None:
        with process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(END_SECONDS)
        folder.cleanup()

    atexit.register(end)
    return address


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    return listener
