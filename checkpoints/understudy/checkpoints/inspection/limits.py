"""The limits of a process that inspects a file."""

from __future__ import annotations

import resource
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

_SPARE_MEMORY_BYTES = 2**30
_MEMORY_PER_BYTE = 8
_OPEN_FILES = 32
_PATIENCE = 12
"""How much longer than its CPU time a process may take on a busy machine."""
_SECONDS_BEFORE_SIGKILL = 5
_MEMORY_USE = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a fork may use: CPU and wall time in seconds, additional address space, and the size of files it writes."""

    seconds: int
    wall_seconds: int
    memory_bytes: int
    written_bytes: int = 0

    def apply(self) -> None:
        """Limit this process.

        SIGXCPU ends it after its CPU time, and SIGALRM after its wall time, even inside a library.
        """
        signal.alarm(self.wall_seconds)
        used = int(_MEMORY_USE.read_bytes().split()[0]) * resource.getpagesize() if _MEMORY_USE.exists() else 0
        for what, limit, reserve in (
            (resource.RLIMIT_CPU, self.seconds, _SECONDS_BEFORE_SIGKILL),
            (resource.RLIMIT_AS, used + self.memory_bytes if used else resource.RLIM_INFINITY, 0),
            (resource.RLIMIT_FSIZE, self.written_bytes, 0),
            (resource.RLIMIT_NOFILE, _OPEN_FILES, 0),
            (resource.RLIMIT_CORE, 0, 0),
        ):
            highest = resource.getrlimit(what)[1]
            soft, hard = (_lower(value, highest) for value in (limit, limit + reserve))
            resource.setrlimit(what, (soft, hard))


def _lower(limit: int, highest: int) -> int:
    """Return the lower of two limits; infinity is a negative number."""
    if resource.RLIM_INFINITY in (limit, highest):
        return highest if limit == resource.RLIM_INFINITY else limit
    return min(limit, highest)


def limits_for(size_bytes: int, *, seconds: int, written_bytes: int) -> dict[str, int]:
    """Return the limits for a file of a size, as a request holds them."""
    memory = _SPARE_MEMORY_BYTES + _MEMORY_PER_BYTE * size_bytes
    return asdict(
        Limits(seconds=seconds, wall_seconds=_PATIENCE * seconds, memory_bytes=memory, written_bytes=written_bytes)
    )
