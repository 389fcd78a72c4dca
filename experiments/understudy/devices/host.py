"""What this process may use of the machine: cores and memory, with the limits of its cgroups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
PROCESS: Final = Path("/proc/self/cgroup")
MEMORY: Final = Path("/proc/meminfo")

_KIBIBYTE: Final = 1024


def usable_cores(*, cgroups: Path = CGROUPS, process: Path = PROCESS) -> int:
    """Return how many cores this process may keep busy, at least 1.

    That is the number of cores of its affinity, or less if a cgroup limits its CPU time (a container's CPU limit),
    which TensorFlow does not see. A part of a core counts as one.

    Args:
        cgroups: Where cgroups are mounted.
        process: The list of the process's cgroups.
    """
    affinity = len(os.sched_getaffinity(0))
    return max(1, min([affinity, *(math.ceil(share) for share in _cpu_limits(cgroups, process))]))


def available_memory_bytes(*, cgroups: Path = CGROUPS, process: Path = PROCESS, memory: Path = MEMORY) -> int:
    """Return how many more bytes of memory this process may use, about; the least of the machine's and its cgroups'.

    Args:
        cgroups: Where cgroups are mounted.
        process: The list of the process's cgroups.
        memory: The machine's memory.
    """
    left = (limit - used for limit, used in _memory_limits(cgroups, process))
    return max(0, min([_machine_bytes(memory, "MemAvailable"), *left]))


def usable_memory_bytes(*, cgroups: Path = CGROUPS, process: Path = PROCESS, memory: Path = MEMORY) -> int:
    """Return how many bytes of memory this process may use in all; see `available_memory_bytes`."""
    limits = (limit for limit, _ in _memory_limits(cgroups, process))
    return min([_machine_bytes(memory, "MemTotal"), *limits])


def _machine_bytes(memory: Path, name: str) -> int:
    lines = (line.partition(":") for line in memory.read_text(encoding="ascii").splitlines())
    known = {each: value.split()[0] for each, _, value in lines if value.strip()}
    return int(known[name]) * _KIBIBYTE


def _cpu_limits(cgroups: Path, process: Path) -> Iterator[float]:
    """Yield the limits of CPU time, in cores."""
    for folder in _folders(cgroups, process, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_limits(cgroups: Path, process: Path) -> Iterator[tuple[int, int]]:
    """Yield the limits of memory, and what is used of each, in bytes. Memory of cached files does not count as used."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder in _folders(cgroups, process, "memory"):
        for limit_name, used_name in names:
            limit, used = _read(folder / limit_name), _read(folder / used_name)
            if limit.isdigit() and used.isdigit():
                cached = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                yield int(limit), int(used) - int(cached.get("inactive_file", 0))


def _folders(cgroups: Path, process: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's cgroups that have a controller, and of the groups around them."""
    for line in _read(process).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        folder = root / path.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _read(path: Path) -> str:
    """Return a file's text; empty if there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
