"""Diagnoses why TensorFlow finds no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from understudy.devices.cuda_libraries import LibraryFault
from understudy.devices.expectation import is_hidden

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
        expected: Why GPUs are expected; see `understudy.devices.expectation`.
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
