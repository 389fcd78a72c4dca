"""Whether this process should have GPUs, and why TensorFlow finds none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from understudy.devices.cuda_libraries import LibraryFault

_CPU_REMEDY = "to run on the CPU, say so with --devices CPU:0"
_ABOUT_GPUS = re.compile(r"cuda|gpu|dlopen|dso_loader|nvidia", re.IGNORECASE)
_LOG_PREFIX = re.compile(r"^\S*[IWEF]\d{4} [\d:.]+\s+\d+ |^\d{4}-\d\d-\d\d [\d:.]+: [IWEF] ")
_LONGEST = 500
_PATIENCE_SECONDS = 60.0

_PROGRAM = """
from understudy.devices.cuda_libraries import preload
preload()
import tensorflow as tf
tf.config.list_physical_devices("GPU")
"""


def why_no_gpu(
    expected: str,
    *,
    environ: Mapping[str, str],
    is_cuda_build: bool,
    driver_fault: str | None,
    faults: Sequence[LibraryFault],
    warnings: str,
) -> str:
    """Return a sentence with the reason for the missing GPU, and the remedy.

    Args:
        expected: Why GPUs are expected; see `understudy.devices.diagnosis`.
        environ: The process's environment.
        is_cuda_build: Whether this TensorFlow can use GPUs at all.
        driver_fault: The driver's fault, if any.
        faults: The libraries that could not be loaded.
        warnings: TensorFlow's warnings; see `tensorflow_warnings`.
    """
    missing = [fault for fault in faults if fault.library.required]
    if is_hidden(environ):
        visible = environ["CUDA_VISIBLE_DEVICES"]
        reason = f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all of them; unset it or list GPUs"
    elif not is_cuda_build:
        reason = "this TensorFlow is built without CUDA; install one that has it: pip install 'tensorflow[and-cuda]'"
    elif driver_fault is not None:
        reason = (
            f"NVIDIA's driver cannot be used ({driver_fault}); install it, and start a container with GPUs "
            "(docker run --gpus all; nvidia.com/gpu under Kubernetes)"
        )
    elif missing:
        names = ", ".join(fault.library.soname for fault in missing)
        packages = " ".join(dict.fromkeys(fault.library.package for fault in missing))
        reason = (
            f"TensorFlow cannot load {names} ({missing[0].reason}); install what is missing: "
            f"pip install 'tensorflow[and-cuda]', or {packages}"
        )
    else:
        reason = f"TensorFlow says: {warnings}" if warnings else "TensorFlow does not say why"
    return f"{expected}, but TensorFlow finds no GPU: {reason}; {_CPU_REMEDY}"


def tensorflow_warnings(timeout_seconds: float = _PATIENCE_SECONDS) -> str:
    """Return TensorFlow's warnings when it looks for GPUs; empty if there are none, or if it takes too long.

    Uses a separate process, since TensorFlow reads its log level once, when it is loaded.
    """
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return relevant(asked.stderr)


def relevant(log: str) -> str:
    """Return the lines of TensorFlow's log about GPUs, joined, without time stamps and source locations."""
    lines = [_LOG_PREFIX.sub("", line).strip() for line in log.splitlines() if _ABOUT_GPUS.search(line)]
    return " | ".join(dict.fromkeys(lines))[:_LONGEST]


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
