"""Whether this process should have GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_NO_DEVICES = {"", "void", "none"}
_HIDES_ALL = re.compile(r"(-1\b.*|NoDevFiles|\s*)")


def is_hidden(environ: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides every GPU from CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and _HIDES_ALL.fullmatch(visible) is not None


def device_files(folder: Path = Path("/dev")) -> list[str]:
    """Return the device files of GPUs, such as ``/dev/nvidia0``."""
    return sorted(str(file) for file in folder.glob("nvidia[0-9]*"))


def expects_gpus(
    *, wanted: Sequence[str], logical_cpus: int | None, environ: Mapping[str, str], files: Sequence[str]
) -> str | None:
    """Return why GPUs are expected, as a clause for a sentence; None if they are not.

    Args:
        wanted: The requested devices, by canonical names; empty if none are requested.
        logical_cpus: Number of devices to split the CPU into, which requests CPUs.
        environ: The process's environment.
        files: What `device_files` returns.
    """
    named = [name for name in wanted if name.startswith("GPU")]
    if named:
        return f"--devices asks for {', '.join(named)}"
    if wanted or logical_cpus is not None or is_hidden(environ):
        return None
    given = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if given not in _NO_DEVICES:
        return f"NVIDIA_VISIBLE_DEVICES is {given!r}"
    return f"{files[0]} is there" if files else None
