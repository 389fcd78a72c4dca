"""What the driver's library says, through a stub of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.stub_libraries import build, lines_of, needs_compiler
from understudy.devices.driver import driver_version

STUB = """
#include <stdio.h>
#include <string.h>
int cuInit(unsigned flags) { return STATUS; }
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80UL << 30; return 0; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { snprintf(id, length, "0000:%02d:00.0", device); return 0; }
"""

PROGRAM = """
from understudy.devices.driver import DriverError, list_gpus
try:
    for gpu in list_gpus():
        print(gpu.name, gpu.memory_bytes, gpu.bus_id, sep=";")
except DriverError as error:
    print("fault:", error)
"""

PROC_FILE = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  555.42.06  Tue Jun  4 00:53:58 UTC 2024
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


@needs_compiler
def test_gpus_come_with_model_memory_and_bus(tmp_path: Path) -> None:
    build(STUB.replace("STATUS", "0"), "libcuda.so.1", tmp_path)

    assert lines_of(PROGRAM, libraries=tmp_path) == [
        "Stub 10;85899345920;0000:10:00.0",
        "Stub 11;85899345920;0000:11:00.0",
    ]


@needs_compiler
def test_a_driver_that_refuses_is_quoted(tmp_path: Path) -> None:
    build(STUB.replace("STATUS", "803"), "libcuda.so.1", tmp_path)

    assert lines_of(PROGRAM, libraries=tmp_path) == ["fault: cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"]


def test_a_driver_that_is_not_there_is_named(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has the driver")
    (fault,) = lines_of(PROGRAM, libraries=tmp_path)

    assert fault.startswith("fault: libcuda.so.1: cannot open shared object file")


def test_the_kernel_driver_s_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None

    file.write_text(PROC_FILE, encoding="ascii")

    assert driver_version(file) == "555.42.06"
