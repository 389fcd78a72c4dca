"""What NVML says of a GPU, through stubs of the driver's libraries, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from testkit.stub_libraries import build, lines_of, needs_compiler
from understudy.evaluator.types import GpuReading
from understudy.service.evaluator_metrics import EvaluatorCollector
from understudy.service.handlers.status_handlers import exposition

STUB = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Rates;
enum { NOT_SUPPORTED = 3, NOT_FOUND = 6 };
static int first, second;
int nvmlInitWithFlags(unsigned flags) { return 0; }
const char *nvmlErrorString(int status) { return "Stubborn"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **gpu) {
    if (!strcmp(id, "0000:0a:00.0")) { *gpu = &first; return 0; }
    if (!strcmp(id, "0000:0b:00.0")) { *gpu = &second; return 0; }
    return NOT_FOUND;
}
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) { memory->total = 1000; memory->used = 250; return 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, Rates *rates) {
    rates->gpu = 75;
    return gpu == &first ? 0 : NOT_SUPPORTED;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *count) {
    *count = kind == 0 ? 8 : 1;
    return gpu == &first && counter == 0 ? 0 : NOT_SUPPORTED;
}
"""

PROGRAM = """
import dataclasses, sys
from understudy.devices.nvml import Nvml, NvmlUnavailableError
try:
    nvml = Nvml()
    for bus_id in sys.argv[1:]:
        reading = nvml.read(bus_id)
        print(reading and dataclasses.astuple(reading))
except NvmlUnavailableError as error:
    print("unavailable:", error)
"""


@needs_compiler
def test_each_gpu_tells_what_it_can(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    build(STUB, "libnvidia-ml.so.1", tmp_path)

    assert lines_of(PROGRAM, "0000:0a:00.0", "0000:0b:00.0", "0000:0c:00.0", libraries=tmp_path) == [
        "(250, 1000, 0.75, 8, 1)",
        "(250, 1000, None, None, None)",
        "None",
    ]


def test_without_the_driver_nvml_is_unavailable(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has the driver")

    assert lines_of(PROGRAM, "0000:0a:00.0", libraries=tmp_path) == [
        "unavailable: NVML cannot be used: NVML Shared Library Not Found"
    ]


class IdleEvaluator:
    """What the collector asks, of an evaluator with these GPUs and nothing to serve."""

    replicas = 1
    serving_step = latest_step = best_step = rollout = None

    def __init__(self, readings: dict[str, GpuReading]) -> None:
        self.gpu_readings = lambda: readings
        self.checkpoint_age_seconds = lambda: None
        self.checkpoints_waiting = lambda: 0
        self.source_failures = 0
        self.device_memory = dict


def shown(readings: dict[str, GpuReading]) -> list[str]:
    registry = CollectorRegistry()
    registry.register(EvaluatorCollector(IdleEvaluator(readings)))  # type: ignore[arg-type] # all that it asks
    lines = exposition(registry)[0].decode().splitlines()
    return [line for line in lines if line.startswith("understudy_device_")]


def test_readings_are_metrics_and_what_is_not_told_has_no_series() -> None:
    partial = GpuReading(
        memory_used_bytes=250, memory_total_bytes=1000, utilization=None, corrected_errors=None, uncorrected_errors=1
    )

    assert shown({"GPU:1": partial}) == [
        'understudy_device_nvml_memory_bytes{device="GPU:1",kind="used"} 250.0',
        'understudy_device_nvml_memory_bytes{device="GPU:1",kind="total"} 1000.0',
        'understudy_device_ecc_errors_total{device="GPU:1",kind="uncorrected"} 1.0',
    ]


def test_without_nvml_there_are_no_such_metrics() -> None:
    assert shown({}) == []
