"""The devices that replicas run on, and how GPUs multiply float32 numbers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from understudy.devices import driver, layout
from understudy.devices.errors import DeviceLayoutError
from understudy.devices.host import usable_cores
from understudy.devices.nvml import GpuReading, Nvml, NvmlUnavailableError
from understudy.devices.selection import canonical
from understudy.evaluator.evaluator_errors import DeviceError
from understudy.evaluator.settings import Precision

_log = logging.getLogger(__name__)

MemoryKind = Literal["current", "peak"]
_lock = threading.Lock()

_user_names: dict[str, str] = {}
"""The user's names of the strategies' devices, by TensorFlow's names."""


def set_precision(precision: Precision) -> None:
    """Switch TF32 on GPUs off (``exact``) or on (``fast``), for the whole process. TensorFlow's default is on."""
    tf.config.experimental.enable_tensor_float_32_execution(precision == "fast")


def precision_note(devices: Sequence[str]) -> str | None:
    """Return a note about numbers computed on these devices; None for CPUs, which have no TF32."""
    if not any("GPU" in device.upper() for device in devices):
        return None
    if tf.config.experimental.tensor_float_32_execution_enabled():
        return "precision is fast: GPUs round the factors of float32 products to 10 bits (TF32)"
    return "precision is exact: GPUs compute float32 products in float32, without TF32"


_strategies: dict[DeviceSettings, Any] = {}


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The devices of the replicas and their configuration.

    Attributes:
        devices: Device names such as ``GPU:0`` or ``CPU:1``, one replica each; ``GPU`` for all GPUs. Empty for every
            GPU, or every CPU device if there is no GPU.
        logical_cpus: The number of logical devices to split the CPU into, used instead of GPUs; None for no split.
        gpu_memory_limit_mib: The maximum memory to allocate on each GPU; None for as much as needed.
        precision: How GPUs multiply float32: ``exact``, or ``fast`` with TF32.
        intra_op_threads: Threads within one operation; None divides the cores among several replicas on the CPU, and
            leaves the choice to TensorFlow for a single replica whose CPU time is not limited.
        inter_op_threads: Operations that run at once; None for at least one for each replica on the CPU.
        default_intra_op_threads: Instead of None, unless TensorFlow is already running.
        default_inter_op_threads: Likewise.
    """

    devices: tuple[str, ...] = ()
    logical_cpus: int | None = None
    gpu_memory_limit_mib: int | None = None
    precision: Precision = "exact"
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    default_intra_op_threads: int | None = field(default=None, compare=False)
    default_inter_op_threads: int | None = field(default=None, compare=False)


def build_strategy(settings: DeviceSettings) -> Any:
    """Return the `tf.distribute.MirroredStrategy` for these settings, the same one for the same settings.

    The first call fixes the process's devices; TensorFlow cannot change them later. The precision applies to the whole
    process; the last call sets it. Thread-safe.

    Raises:
        DeviceError: There is no such device, or TensorFlow was already running with other devices.
    """
    with _lock:
        set_precision(settings.precision)
        if settings not in _strategies:
            _strategies[settings] = tf.distribute.MirroredStrategy(list(_lay_out(settings)))
        return _strategies[settings]


def user_name(device: str) -> str:
    """Return the user's name of a strategy's device: ``GPU:1`` even if it is the only one that TensorFlow sees."""
    name = canonical(device)
    return _user_names.get(name, name)


def has_gpu(strategy: Any) -> bool:
    """Whether any replica of a strategy is on a GPU."""
    return any("GPU" in device.upper() for device in strategy.extended.worker_devices)


def device_memory() -> dict[tuple[str, MemoryKind], int]:
    """Return the bytes in use, by device and kind. ``CPU`` is the memory of the whole process.

    It is left out while the process has no free file descriptor to read it with.
    """
    memory: dict[tuple[str, MemoryKind], int] = {}
    with contextlib.suppress(OSError):
        memory["CPU", "current"], memory["CPU", "peak"] = _process_memory()
    for device in tf.config.list_logical_devices("GPU"):
        info = tf.config.experimental.get_memory_info(canonical(device.name))
        memory[user_name(device.name), "current"] = int(info["current"])
        memory[user_name(device.name), "peak"] = int(info["peak"])
    return memory


def gpu_readings() -> dict[str, GpuReading]:
    """Return NVML's readings of the strategies' GPUs, by the user's names; empty without NVML."""
    with _lock:
        numbers = {name: int(name.partition(":")[2]) for name in _user_names.values() if name.startswith("GPU")}
        nvml = _open_nvml() if numbers else None
    if nvml is None:
        return {}
    gpus = driver.list_gpus()
    readings = {name: nvml.read(gpus[number].bus_id) for name, number in numbers.items()}
    return {name: reading for name, reading in readings.items() if reading is not None}


@functools.cache
def _open_nvml() -> Nvml | None:
    try:
        return Nvml()
    except NvmlUnavailableError as error:
        _log.info("no metrics of the GPUs' memory, utilization and errors: %s", error)
        return None


def _process_memory() -> tuple[int, int]:
    """Return the current and the peak resident bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kibibytes = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    current = int(kibibytes["VmRSS"]) * 1024
    return current, max(current, int(kibibytes["VmHWM"]) * 1024)


def _lay_out(settings: DeviceSettings) -> tuple[str, ...]:
    """Configure the process's devices and return the names of those to use."""
    try:
        planned = layout.plan(settings.devices, settings.logical_cpus)
        _set_threads(settings, planned.selection.names)
        layout.apply(planned, gpu_memory_limit_mib=settings.gpu_memory_limit_mib)
    except DeviceLayoutError as error:
        raise DeviceError(str(error)) from error
    for facts in layout.describe(planned):
        _log.info("device %s", " ".join(f"{key}={value}" for key, value in facts.items()))
    _user_names.update(planned.selection.asked)
    return planned.selection.names


def _set_threads(settings: DeviceSettings, devices: tuple[str, ...]) -> None:
    try:
        if settings.intra_op_threads not in {None, tf.config.threading.get_intra_op_parallelism_threads()}:
            tf.config.threading.set_intra_op_parallelism_threads(settings.intra_op_threads)
        if settings.inter_op_threads not in {None, tf.config.threading.get_inter_op_parallelism_threads()}:
            tf.config.threading.set_inter_op_parallelism_threads(settings.inter_op_threads)
    except RuntimeError as error:
        raise DeviceError(
            f"TensorFlow is already running with other threads ({error}); set them before anything else uses it"
        ) from error
    with contextlib.suppress(RuntimeError):  # already initialized; the user set no number
        _set_default_threads(settings, sum(name.startswith("CPU") for name in devices))


def _set_default_threads(settings: DeviceSettings, replicas: int) -> None:
    """Set the threads that the user did not.

    The cores are divided among the replicas on the CPU: operations that each use all cores compete with each other.
    For one replica, TensorFlow's own default counts cores that a limit of CPU time takes away again.
    """
    cores = usable_cores()
    intra, inter = settings.default_intra_op_threads, settings.default_inter_op_threads
    if replicas > 1 or (replicas and cores < len(os.sched_getaffinity(0))):
        intra, inter = intra or max(1, cores // replicas), inter or max(replicas, cores)
    if settings.intra_op_threads is None and intra is not None:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
    if settings.inter_op_threads is None and inter is not None:
        tf.config.threading.set_inter_op_parallelism_threads(inter)
