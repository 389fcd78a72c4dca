"""Devices are set up once, and what cannot be had is named."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from testkit.preloading import preloaded
from understudy.evaluator.evaluator_errors import DeviceError
from understudy.evaluator.model.devices import DeviceSettings, build_strategy, device_memory

CORES = len(os.sched_getaffinity(0))

LAYOUTS: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({}, (1, 0, 0)),
    ({"logical_cpus": 3, "intra_op_threads": 1, "inter_op_threads": 3}, (3, 1, 3)),
    ({"logical_cpus": 3}, (3, max(1, CORES // 3), max(3, CORES))),
    ({"logical_cpus": 3, "devices": ("CPU:0", "cpu:2")}, (2, max(1, CORES // 2), max(2, CORES))),
    ({"logical_cpus": 3, "devices": ("CPU:1",)}, (1, 0, 0)),
    ({"logical_cpus": 2, "intra_op_threads": 5, "inter_op_threads": 7}, (2, 5, 7)),
    ({"default_intra_op_threads": 1, "default_inter_op_threads": 2}, (1, 1, 2)),
    ({"intra_op_threads": 3, "default_intra_op_threads": 1}, (1, 3, 0)),
]
"""Settings, and the replicas, the threads within an operation and the threads between operations that they lead to."""

PROGRAM = """
import ast, os, sys
import tensorflow as tf
from understudy.evaluator.model.devices import DeviceSettings, build_strategy

for settings in ast.literal_eval(sys.argv[1]):
    # TensorFlow lays out its devices once in a process; a fork is cheaper than to import it again.
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    strategy = build_strategy(DeviceSettings(**settings))
    threads = tf.config.threading
    intra, inter = threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads()
    print(strategy.num_replicas_in_sync, intra, inter, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def laid_out() -> list[tuple[int, ...]]:
    """Return what each of the layouts led to."""
    command = [sys.executable, "-c", PROGRAM, repr([settings for settings, _ in LAYOUTS])]
    environ = {**os.environ, **preloaded()}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]


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


def test_memory_is_told_in_bytes() -> None:
    memory = device_memory()
    assert 0 < memory["CPU", "current"] <= memory["CPU", "peak"]


@pytest.mark.parametrize("place", range(len(LAYOUTS)), ids=[str(settings) for settings, _ in LAYOUTS])
def test_the_cpu_is_split_into_replicas_that_share_out_the_cores(laid_out: list[tuple[int, ...]], place: int) -> None:
    assert laid_out[place] == LAYOUTS[place][1]
