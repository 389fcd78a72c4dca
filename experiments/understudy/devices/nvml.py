"""GPU state from NVIDIA's management library. Optional: it needs the extra ``gpu``, and the driver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

_PERCENT = 100.0


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """The current state of a GPU. A value that it does not report is None: utilization under MIG, errors without ECC.

    Attributes:
        memory_used_bytes: Used by all processes.
        memory_total_bytes: Total memory.
        utilization: The share of the last sampling period, from 1/6 to 1 s, in which a kernel ran.
        corrected_errors: Memory errors since the driver was loaded that ECC corrected.
        uncorrected_errors: Memory errors since then that ECC could not correct.
    """

    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization: float | None
    corrected_errors: int | None
    uncorrected_errors: int | None


class Nvml:
    """The opened library. Thread-safe; stays open until the process ends.

    Raises:
        NvmlUnavailableError: The library is not installed, or the driver is missing.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise NvmlUnavailableError("nvidia-ml-py is not installed: pip install 'understudy[gpu]'") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(f"NVML cannot be used: {error}") from error

    def read(self, bus_id: str) -> GpuReading | None:
        """Return the state of the GPU with this PCI bus id; None if NVML does not know it. Takes about 1 ms."""
        nvml = self._nvml
        gpu = self._ask(lambda: nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode()))
        if gpu is None:
            return None
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu))
        return GpuReading(
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization=None if rates is None else rates.gpu / _PERCENT,
            corrected_errors=self._errors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            uncorrected_errors=self._errors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )

    def _errors(self, gpu: Any, kind: int) -> int | None:
        nvml = self._nvml
        count = self._ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))
        return None if count is None else int(count)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the value; None if this GPU does not report it."""
        try:
            return question()
        except self._nvml.NVMLError as error:
            _log.debug("NVML does not answer: %s", error)
            return None


class NvmlUnavailableError(Exception):
    """NVML is not installed, or there is no driver. The text says which."""
