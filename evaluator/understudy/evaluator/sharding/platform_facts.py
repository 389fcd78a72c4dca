"""What the bits of a model's outputs depend on besides the model and the data, and what a mixture of it means."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.libraries import library_version
from understudy.evaluator.sharding.pool import Facts

SOFTWARE = ("tensorflow", "keras", "numpy")
"""The packages that compute the outputs and the scores."""

_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS", "TF_CPU_MAX_ISA", "XLA_FLAGS")
_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "avx_vnni", "asimd", "sve")
_CPU_INFO = Path("/proc/cpuinfo")


def platform_facts(device: str, threads: int | None) -> Facts:
    """Return what this process's results depend on.

    Args:
        device: The kind of the device that computes.
        threads: The number of threads within one operation; None for one for each core.
    """
    facts = {name: library_version(name) for name in SOFTWARE}
    facts |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    cores = len(os.sched_getaffinity(0))
    return {
        **facts,
        "machine": platform.machine(),
        "device": device,
        "threads": str(threads or cores),
        "instructions": _instructions(),
    }


def _instructions() -> str:
    """Return the sets of vector instructions that kernels choose by."""
    try:
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(flag for flag in _FLAGS if flag in flags)


class MixtureNotes:
    """Compares the facts of all workers. Other software is refused, other hardware and settings are noted.

    Attributes:
        seen: The facts so far, each once.
        notes: In which facts the workers differ.
    """

    def __init__(self) -> None:
        self.seen: tuple[Facts, ...] = ()
        self.notes: tuple[str, ...] = ()

    def add(self, facts: Facts) -> None:
        """Add the facts of a worker.

        Raises:
            ConfigurationError: It has other versions of what computes than the others.
        """
        if facts in self.seen:
            return
        self.seen = (*self.seen, facts)
        values = {name: sorted({each.get(name, "none") for each in self.seen}) for each in self.seen for name in each}
        differing = {name: found for name, found in sorted(values.items()) if len(found) > 1}
        for name in SOFTWARE:
            if name in differing:
                raise ConfigurationError(
                    f"the workers have {name} {' and '.join(differing[name])}, whose results differ; use one image "
                    "everywhere"
                )
        self.notes = tuple(
            f"the workers differ in {name} ({'; '.join(found)}), so the last digits may depend on which of them "
            "computed a shard"
            for name, found in differing.items()
        )
