"""From the devices asked for to those that TensorFlow shows."""

from __future__ import annotations

import re

import pytest

from understudy.devices.errors import DeviceLayoutError
from understudy.devices.selection import canonical, select


@pytest.mark.parametrize(
    ("wanted", "logical_cpus", "visible", "names", "asked"),
    [
        ((), None, (0, 1, 2), ("GPU:0", "GPU:1", "GPU:2"), ("GPU:0", "GPU:1", "GPU:2")),
        (("GPU",), None, (0, 1, 2), ("GPU:0", "GPU:1", "GPU:2"), ("GPU:0", "GPU:1", "GPU:2")),
        (("GPU:1",), None, (1,), ("GPU:0",), ("GPU:1",)),
        (("GPU:2", "GPU:0"), None, (0, 2), ("GPU:1", "GPU:0"), ("GPU:2", "GPU:0")),
        (("/device:GPU:2", "cpu:0"), None, (2,), ("GPU:0", "CPU:0"), ("GPU:2", "CPU:0")),
        (("CPU:0",), None, (), ("CPU:0",), ("CPU:0",)),
        (("CPU",), 2, (), ("CPU:0", "CPU:1"), ("CPU:0", "CPU:1")),
        ((), 2, (), ("CPU:0", "CPU:1"), ("CPU:0", "CPU:1")),
    ],
)
def test_gpus_that_are_not_chosen_are_hidden_and_the_others_numbered_again(
    wanted: tuple[str, ...],
    logical_cpus: int | None,
    visible: tuple[int, ...],
    names: tuple[str, ...],
    asked: tuple[str, ...],
) -> None:
    selection = select(wanted, gpus=3, cpus=logical_cpus or 1, logical_cpus=logical_cpus)

    assert selection.gpus == visible
    assert selection.names == names
    assert tuple(selection.asked[name] for name in names) == asked


def test_without_gpus_all_cpus_are_used() -> None:
    assert select((), gpus=0, cpus=2).names == ("CPU:0", "CPU:1")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("GPU:3",), "there is no GPU:3: asked for GPU:3, and the devices are GPU:0, GPU:1, GPU:2, CPU:0"),
        (("CPU:1", "TPU:0"), "there is no CPU:1, TPU:0: asked for CPU:1, TPU:0, and"),
        (("gpu:x",), "there is no X: asked for gpu:x"),
        (("GPU", "GPU:1"), "a device is named twice: asked for GPU, GPU:1"),
    ],
)
def test_what_cannot_be_had_is_named_beside_what_there_is(wanted: tuple[str, ...], message: str) -> None:
    with pytest.raises(DeviceLayoutError, match=re.escape(message)):
        select(wanted, gpus=3, cpus=1)


@pytest.mark.parametrize(
    "name", ["GPU:1", "gpu:1", "/gpu:1", "/device:GPU:1", "/job:worker/replica:0/task:1/device:GPU:1"]
)
def test_names_are_shortened(name: str) -> None:
    assert canonical(name) == "GPU:1"
