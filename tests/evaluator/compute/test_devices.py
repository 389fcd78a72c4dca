"""Devices are set up once, and what cannot be had is named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from understudy.evaluator.compute.devices import DeviceSettings, build_strategy, device_memory
from understudy.evaluator.errors import DeviceError

PROGRAM = """
from understudy.evaluator.compute.devices import DeviceSettings, build_strategy
strategy = build_strategy(DeviceSettings(logical_cpus=3, intra_op_threads=1, inter_op_threads=3))
print(strategy.num_replicas_in_sync)
"""


THREADS = """
import sys, tensorflow as tf
from understudy.evaluator.compute.devices import DeviceSettings, build_strategy
build_strategy(DeviceSettings({settings}))
print(tf.config.threading.get_intra_op_parallelism_threads(), tf.config.threading.get_inter_op_parallelism_threads())
"""
CORES = len(os.sched_getaffinity(0))


def test_the_same_settings_give_the_same_strategy(logical_cpus: tuple[str, ...]) -> None:
    settings = DeviceSettings(devices=logical_cpus[:2], logical_cpus=len(logical_cpus))
    strategy = build_strategy(settings)
    assert strategy.num_replicas_in_sync == 2
    assert build_strategy(settings) is strategy


def test_devices_go_by_short_and_long_names(logical_cpus: tuple[str, ...]) -> None:
    strategy = build_strategy(DeviceSettings(devices=("/device:CPU:1", "cpu:2")))
    assert strategy.num_replicas_in_sync == 2
    assert len(logical_cpus) > 2


@pytest.mark.parametrize(
    ("devices", "message"),
    [(("CPU:9",), "there is no CPU:9: asked for CPU:9, and the devices are .*CPU:0"), (("CPU:0", "cpu:0"), "twice")],
)
@pytest.mark.usefixtures("logical_cpus")
def test_devices_that_are_not_there_are_named(devices: tuple[str, ...], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        build_strategy(DeviceSettings(devices=devices))


def test_devices_cannot_change_once_tensorflow_runs(logical_cpus: tuple[str, ...]) -> None:
    build_strategy(DeviceSettings(devices=logical_cpus[:1]))
    with pytest.raises(DeviceError, match="already running with other devices"):
        build_strategy(DeviceSettings(logical_cpus=3))


def test_the_cpu_is_split_into_replicas() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "3"


def test_memory_is_told_in_bytes() -> None:
    memory = device_memory()
    assert 0 < memory["CPU", "current"] <= memory["CPU", "peak"]


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ("", (0, 0)),
        ("logical_cpus=3", (max(1, CORES // 3), max(3, CORES))),
        ("logical_cpus=3, devices=('CPU:0', 'cpu:2')", (max(1, CORES // 2), max(2, CORES))),
        ("logical_cpus=3, devices=('CPU:1',)", (0, 0)),
        ("logical_cpus=2, intra_op_threads=5, inter_op_threads=7", (5, 7)),
    ],
)
def test_replicas_on_the_cpu_share_out_the_cores(settings: str, threads: tuple[int, int]) -> None:
    program = THREADS.format(settings=settings)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [str(number) for number in threads]
