"""The GPUs of this machine: all found, one alone used, memory that grows as needed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

from understudy.devices import layout

pytestmark = pytest.mark.gpu

USE_ONE = """
import sys
import tensorflow as tf
from understudy.evaluator.model.devices import DeviceSettings, build_strategy, device_memory, user_name

strategy = build_strategy(DeviceSettings(devices=(sys.argv[1],)))
with tf.device(strategy.extended.worker_devices[0]):
    total = float(tf.reduce_sum(tf.ones((1024, 1024)) @ tf.ones((1024, 1024))))
assert total == 2.0**30, total
assert [user_name(name) for name in strategy.extended.worker_devices] == [sys.argv[1]]
assert (sys.argv[1], "current") in device_memory()
print("computed", flush=True)
sys.stdin.read()
"""


def nvidia_smi(*query: str) -> list[str]:
    asked = subprocess.run(
        ["nvidia-smi", *query, "--format=csv,noheader,nounits"],  # noqa: S607 - the driver's, wherever it is
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]


def test_every_gpu_that_the_driver_shows_is_found_and_described(devices: tuple[str, ...]) -> None:
    described = layout.describe(layout.plan(["GPU"]))

    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        assert len(devices) == len(nvidia_smi("--query-gpu=index"))
    for facts in described:
        assert facts["memory_mib"] > 0
        assert facts["compute_capability"] != "unknown"
        assert facts["driver"] != "unknown"


def test_the_last_gpu_alone_is_used_when_it_alone_is_asked_for(several: tuple[str, ...]) -> None:
    wanted = f"GPU:{len(several) - 1}"
    with subprocess.Popen(
        [sys.executable, "-c", USE_ONE, wanted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computed\n"
        used = [row.split(", ") for row in nvidia_smi("--query-compute-apps=pid,gpu_bus_id")]
        process.communicate("")

    buses = {bus.upper()[-12:] for pid, bus in used if int(pid) == process.pid}
    assert process.returncode == 0
    if not buses:
        pytest.skip("nvidia-smi shows no processes here, as in a container of its own process namespace")
    assert buses == {str(layout.describe(layout.plan(["GPU"]))[-1]["bus_id"]).upper()[-12:]}


def test_memory_grows_as_needed(devices: tuple[str, ...]) -> None:
    totals: list[dict[str, Any]] = layout.describe(layout.plan(["GPU"]))
    for name, facts in zip(devices, totals, strict=True):
        with tf.device(name):
            tf.reduce_sum(tf.ones((256, 256))).numpy()
        assert tf.config.experimental.get_memory_growth(tf.config.list_physical_devices("GPU")[int(name[-1])])
        assert tf.config.experimental.get_memory_info(name)["current"] < facts["memory_mib"] * 2**20 / 2


PRODUCT_ERROR = """
import sys
import numpy as np
import tensorflow as tf
from understudy.evaluator.model.devices import DeviceSettings, build_strategy

strategy = build_strategy(DeviceSettings(devices=("GPU:0",), precision=sys.argv[1]))
a, b = np.random.default_rng(5).normal(size=(2, 512, 512)).astype(np.float32)
with tf.device(strategy.extended.worker_devices[0]):
    product = (tf.constant(a) @ tf.constant(b)).numpy()
exact = a.astype(np.float64) @ b.astype(np.float64)
print(np.abs(product - exact).max() / np.abs(exact).max())
"""


def product_error(precision: str) -> float:
    """Return the largest error of a product of matrices, relative to its largest value."""
    computed = subprocess.run(
        [sys.executable, "-c", PRODUCT_ERROR, precision],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    return float(computed.stdout)


def test_exact_products_are_those_of_float32_and_fast_ones_of_tf32(devices: tuple[str, ...]) -> None:
    assert product_error("exact") < 1e-6
    capability = float(layout.describe(layout.plan([devices[0]]))[0]["compute_capability"])
    if capability < 8.0:
        pytest.skip(f"compute capability {capability}: GPUs have TF32 from 8.0 on")
    assert 1e-5 < product_error("fast") < 1e-2
