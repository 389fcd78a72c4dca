"""The devices that replicas run on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from understudy.evaluator.compute.precision import set_precision
from understudy.evaluator.errors import DeviceError
from understudy.evaluator.settings import Precision

MemoryKind = Literal["current", "peak"]

_lock = threading.Lock()
_strategies: dict[DeviceSettings, Any] = {}


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Which devices replicas run on, and how.

    Attributes:
        devices: Device names such as ``GPU:0`` or ``CPU:1``, one replica each; empty for every GPU, or every CPU device
            where there is no GPU.
        logical_cpus: Into how many devices to split the CPU; None leaves it whole.
        gpu_memory_limit_mib: The most memory to take on each GPU; None takes what is needed.
        precision: How GPUs multiply float32: ``exact``, or ``fast`` with TF32.
        intra_op_threads: Threads within one operation; None shares the cores out among several replicas on the CPU, and
            leaves the choice to TensorFlow where there is one.
        inter_op_threads: Operations that run at once; None is at least one for each replica on the CPU.
    """

    devices: tuple[str, ...] = ()
    logical_cpus: int | None = None
    gpu_memory_limit_mib: int | None = None
    precision: Precision = "exact"
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None


def build_strategy(settings: DeviceSettings) -> Any:
    """Return the `tf.distribute.MirroredStrategy` for these settings, the same one for the same settings.

    The first call fixes the process's devices; TensorFlow cannot change them later. The precision is the process's too,
    that of the last call. Thread-safe.

    Raises:
        DeviceError: There is no such device, or TensorFlow was already running with other devices.
    """
    with _lock:
        set_precision(settings.precision)
        if settings not in _strategies:
            _configure(settings)
            _strategies[settings] = tf.distribute.MirroredStrategy(_choose(settings.devices))
        return _strategies[settings]


def device_memory() -> dict[tuple[str, MemoryKind], int]:
    """Return the bytes in use, by device and kind. ``CPU`` is the memory of the whole process."""
    current, peak = _process_memory()
    memory: dict[tuple[str, MemoryKind], int] = {("CPU", "current"): current, ("CPU", "peak"): peak}
    for device in _logical_names("GPU"):
        info = tf.config.experimental.get_memory_info(device)
        memory[device, "current"] = int(info["current"])
        memory[device, "peak"] = int(info["peak"])
    return memory


def _process_memory() -> tuple[int, int]:
    """Return the resident bytes now, and the most there have been."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kibibytes = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    current = int(kibibytes["VmRSS"]) * 1024
    return current, max(current, int(kibibytes["VmHWM"]) * 1024)


def _configure(settings: DeviceSettings) -> None:
    try:
        _set_threads(settings)
        _split_cpu(settings.logical_cpus)
        _bound_gpus(settings.gpu_memory_limit_mib)
    except RuntimeError as error:
        raise DeviceError(
            f"TensorFlow is already running with other devices ({error}); set them up before anything else uses it"
        ) from error


def _set_threads(settings: DeviceSettings) -> None:
    if settings.intra_op_threads not in {None, tf.config.threading.get_intra_op_parallelism_threads()}:
        tf.config.threading.set_intra_op_parallelism_threads(settings.intra_op_threads)
    if settings.inter_op_threads not in {None, tf.config.threading.get_inter_op_parallelism_threads()}:
        tf.config.threading.set_inter_op_parallelism_threads(settings.inter_op_threads)
    replicas = _cpu_replicas(settings)
    if replicas > 1:
        with contextlib.suppress(RuntimeError):  # it runs already, and nobody asked for a number
            _share_out_cores(settings, replicas)


def _cpu_replicas(settings: DeviceSettings) -> int:
    """Return how many replicas there will be on the CPU."""
    if settings.devices:
        return sum(_canonical(name).startswith("CPU") for name in settings.devices)
    return 0 if tf.config.list_physical_devices("GPU") else settings.logical_cpus or 1


def _share_out_cores(settings: DeviceSettings, replicas: int) -> None:
    """Give every replica cores of its own: operations that each spread over all cores get in each other's way."""
    cores = len(os.sched_getaffinity(0))
    if settings.intra_op_threads is None:
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // replicas))
    if settings.inter_op_threads is None:
        tf.config.threading.set_inter_op_parallelism_threads(max(replicas, cores))


def _split_cpu(logical_cpus: int | None) -> None:
    if logical_cpus is None:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) != logical_cpus:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * logical_cpus)


def _bound_gpus(limit_mib: int | None) -> None:
    for gpu in tf.config.list_physical_devices("GPU"):
        if limit_mib is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:
            bound = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)
            if tf.config.get_logical_device_configuration(gpu) != [bound]:
                tf.config.set_logical_device_configuration(gpu, [bound])


def _choose(wanted: Sequence[str]) -> list[str]:
    present = [*_logical_names("GPU"), *_logical_names("CPU")]
    if not wanted:
        return _logical_names("GPU") or _logical_names("CPU")
    chosen = [_canonical(name) for name in wanted]
    missing = [name for name in chosen if name not in present]
    if missing or len(set(chosen)) < len(chosen):
        fault = f"there is no {', '.join(missing)}" if missing else "a device is named twice"
        raise DeviceError(f"{fault}: asked for {', '.join(wanted)}, and the devices are {', '.join(present)}")
    return chosen


def _logical_names(kind: str) -> list[str]:
    return [_canonical(device.name) for device in tf.config.list_logical_devices(kind)]


def _canonical(name: str) -> str:
    """Shorten ``/device:GPU:0`` and ``/gpu:0`` to ``GPU:0``."""
    return name.upper().removeprefix("/").removeprefix("DEVICE:")
