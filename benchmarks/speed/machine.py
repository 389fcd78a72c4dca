"""The machine and versions of a result, which are stored with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_LIBRARIES = ("understudy", "tensorflow", "keras", "numpy", "grpcio", "protobuf", "pyvoy")
_ROOT = Path(__file__).parents[2]


def described() -> dict[str, Any]:
    """Return the machine, its load, and the versions, before anything is measured."""
    return {
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]]),
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _commit() -> str:
    """Return the current commit, with a plus sign if files differ from it; empty without git."""
    command = ("git", "-C", str(_ROOT), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return found
