"""Configures the devices of this process, before TensorFlow starts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from understudy.devices import driver
from understudy.devices.cuda_libraries import LibraryFault, preload
from understudy.devices.diagnosis import device_files, expects_gpus, is_hidden, tensorflow_warnings, why_no_gpu
from understudy.devices.errors import DeviceLayoutError, DevicesFixedError, NoGpuError
from understudy.devices.host import usable_memory_bytes
from understudy.devices.selection import Selection, canonical, select

_log = logging.getLogger(__name__)

_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices of this process, decided and not yet configured.

    Attributes:
        selection: The selected devices.
        logical_cpus: Number of devices to split the CPU into; None leaves it unchanged.
    """

    selection: Selection
    logical_cpus: int | None


def plan(wanted: Sequence[str] = (), logical_cpus: int | None = None) -> Layout:
    """Load CUDA's libraries if GPUs may be used, and decide which devices to use. Changes no device.

    Args:
        wanted: Devices by name; see `understudy.devices.selection.select`.
        logical_cpus: Number of devices to split the CPU into.

    Raises:
        NoGpuError: GPUs are requested or present, and TensorFlow finds none.
        DeviceLayoutError: A device does not exist, or is named twice.
    """
    wanted = [canonical(name) for name in wanted]
    expected = expects_gpus(wanted=wanted, logical_cpus=logical_cpus, environ=os.environ, files=device_files())
    faults = preload() if _may_have_gpus(expected, wanted, logical_cpus) else []
    gpus = len(tf.config.list_physical_devices("GPU"))
    if expected is not None and not gpus:
        raise NoGpuError(_why_no_gpu(expected, faults))
    try:
        selection = select(wanted, gpus=gpus, cpus=logical_cpus or _cpus(), logical_cpus=logical_cpus)
    except DeviceLayoutError as error:
        raise DeviceLayoutError(f"{error}{_about_mig(os.environ)}") from error
    return Layout(selection=selection, logical_cpus=logical_cpus)


def apply(layout: Layout, *, gpu_memory_limit_mib: int | None = None) -> None:
    """Hide unused GPUs, let memory grow as needed or bound it, and split the CPU.

    Idempotent.

    Raises:
        DevicesFixedError: TensorFlow already runs, with other devices.
    """
    physical = tf.config.list_physical_devices("GPU")
    gpus = [physical[index] for index in layout.selection.gpus]
    try:
        if tf.config.get_visible_devices("GPU") != gpus:
            tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            _bound_memory(gpu, gpu_memory_limit_mib)
        _split_cpu(layout.logical_cpus)
    except RuntimeError as error:
        raise DevicesFixedError(
            f"TensorFlow is already running with other devices ({error}); set them up before anything else uses it"
        ) from error


def describe(layout: Layout) -> list[dict[str, Any]]:
    """Return a description of each used device: the user's name for it, TensorFlow's, its kind and memory.

    For a GPU also its model, its compute capability, its PCI bus id and the driver's version.
    """
    physical = tf.config.list_physical_devices("GPU")
    try:
        known = driver.list_gpus() if layout.selection.gpus else []
    except driver.DriverError as error:
        known = []
        _log.warning("the driver does not describe the GPUs: %s", error)
    described = []
    for name in layout.selection.names:
        asked = layout.selection.asked[name]
        kind, _, number = asked.partition(":")
        facts: dict[str, Any] = {"device": asked, "tensorflow_name": name, "kind": kind}
        if kind == "GPU":
            facts |= _gpu_facts(physical[int(number)], int(number), known)
        else:
            facts["memory_mib"] = usable_memory_bytes() // _MIB
        described.append(facts)
    return described


def _may_have_gpus(expected: str | None, wanted: Sequence[str], logical_cpus: int | None) -> bool:
    """Return whether GPUs may be used: they are expected, or the driver is present and nothing excludes them."""
    if is_hidden(os.environ):
        return False
    return expected is not None or (not wanted and logical_cpus is None and driver.is_there())


def _cpus() -> int:
    """Return the number of devices that the CPU is already split into."""
    cpu, *_ = tf.config.list_physical_devices("CPU")
    return len(tf.config.get_logical_device_configuration(cpu) or (cpu,))


def _why_no_gpu(expected: str, faults: Sequence[LibraryFault]) -> str:
    is_cuda_build = bool(tf.test.is_built_with_cuda())
    driver_fault = _driver_fault()
    explained = is_hidden(os.environ) or not is_cuda_build or driver_fault or any(f.library.required for f in faults)
    return why_no_gpu(
        expected,
        environ=os.environ,
        is_cuda_build=is_cuda_build,
        driver_fault=driver_fault,
        faults=faults,
        warnings="" if explained else tensorflow_warnings(),
    )


def _driver_fault() -> str | None:
    try:
        return None if driver.list_gpus() else "it shows no GPU"
    except driver.DriverError as error:
        return str(error)


def _about_mig(environ: Mapping[str, str]) -> str:
    """Return an addition to an error for a request of several MIG instances, else an empty string."""
    named = " ".join(environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    if len(set(re.findall(r"MIG-[^,\s]+", named))) <= 1:
        return ""
    return "; CUDA gives a process one MIG instance, so run a process for each"


def _bound_memory(gpu: Any, limit_mib: int | None) -> None:
    if limit_mib is None:
        if not tf.config.experimental.get_memory_growth(gpu):
            tf.config.experimental.set_memory_growth(gpu, True)
        return
    bound = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)
    if tf.config.get_logical_device_configuration(gpu) != [bound]:
        tf.config.set_logical_device_configuration(gpu, [bound])


def _split_cpu(logical_cpus: int | None) -> None:
    if logical_cpus is None or _cpus() == logical_cpus:
        return
    cpu, *_ = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * logical_cpus)


def _gpu_facts(gpu: Any, number: int, known: Sequence[driver.Gpu]) -> dict[str, Any]:
    details = tf.config.experimental.get_device_details(gpu)
    facts: dict[str, Any] = {
        "model": details.get("device_name", "unknown"),
        "compute_capability": ".".join(map(str, details.get("compute_capability", ()))) or "unknown",
        "driver": driver.driver_version() or "unknown",
    }
    if number < len(known):
        facts |= {"memory_mib": known[number].memory_bytes // _MIB, "bus_id": known[number].bus_id}
    return facts
