"""GPUs and versions as reported by NVIDIA's driver, through its library ``libcuda.so.1``."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"
VERSION_FILE = Path("/proc/driver/nvidia/version")

_BUS_ID_BYTES = 32
_NAME_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as CUDA counts them: without those that CUDA_VISIBLE_DEVICES hides.

    Attributes:
        name: The model name.
        memory_bytes: Total memory.
        bus_id: PCI bus id. MIG instances of one GPU have the same.
    """

    name: str
    memory_bytes: int
    bus_id: str


class DriverError(Exception):
    """The driver is missing or fails. The text gives the reason."""


def is_there() -> bool:
    """Return whether the driver's library can be loaded."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def list_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows to this process. Starts the driver in this process. Thread-safe.

    Raises:
        DriverError: The driver is missing or fails.
    """
    driver = _open()
    count = ctypes.c_int()
    _check(driver, driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_describe(driver, ordinal) for ordinal in range(count.value)]


def driver_version(file: Path = VERSION_FILE) -> str | None:
    """Return the kernel driver's version, such as ``555.42.06``; None without such a driver."""
    try:
        found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _open() -> Any:
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(str(error)) from error
    _check(driver, driver.cuInit(0), "cuInit")
    return driver


def _describe(driver: Any, ordinal: int) -> Gpu:
    device = ctypes.c_int()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver, driver.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    memory = ctypes.c_size_t()
    _check(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device), "cuDeviceTotalMem")
    bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
    _check(driver, driver.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, device), "cuDeviceGetPCIBusId")
    return Gpu(name=name.value.decode(), memory_bytes=memory.value, bus_id=bus_id.value.decode())


def _check(driver: Any, status: int, call: str) -> None:
    if status == 0:
        return
    name = ctypes.c_char_p()
    known = driver.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value
    raise DriverError(f"{call} failed with {name.value.decode() if known and name.value else status}")
