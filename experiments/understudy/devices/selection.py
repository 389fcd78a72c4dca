"""Maps requested devices to TensorFlow's visible devices and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.devices.errors import DeviceLayoutError

_NAME = re.compile(r"(GPU|CPU)(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which devices a process uses.

    Attributes:
        gpus: Numbers of the physical GPUs to make visible, ascending; TensorFlow renumbers them from 0.
        names: The devices to use, by TensorFlow's names after that.
        asked: For each of these names, the user's name of the device. They differ for GPUs only.
    """

    gpus: tuple[int, ...]
    names: tuple[str, ...]
    asked: Mapping[str, str]


def canonical(name: str) -> str:
    """Return ``GPU:0`` for ``/device:GPU:0``, ``/job:worker/task:1/device:GPU:0``, ``gpu:0`` and the like."""
    parts = name.upper().strip("/").replace("/", ":").split(":")
    return ":".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])


def select(wanted: Sequence[str], *, gpus: int, cpus: int, logical_cpus: int | None = None) -> Selection:
    """Choose devices.

    A GPU that is not chosen must be hidden, as TensorFlow takes memory on every visible GPU. If CPUs are chosen, by
    name or by splitting the CPU, all GPUs are hidden.

    Args:
        wanted: Names such as ``GPU:1``; ``GPU`` or ``CPU`` alone means all of the kind. If empty: the CPUs if they are
            split, else all GPUs, else all CPUs.
        gpus: Number of GPUs.
        cpus: Number of CPU devices, after splitting.
        logical_cpus: Number of devices that the CPU is split into; None if not configured.

    Raises:
        DeviceLayoutError: A device does not exist, or is named twice.
    """
    if not wanted:
        wanted = ("GPU",) if gpus and logical_cpus is None else ("CPU",)
    chosen = [device for name in wanted for device in _expand(canonical(name), gpus=gpus, cpus=cpus)]
    present = _present(gpus, cpus)
    missing = [name for name in chosen if name not in present]
    if missing:
        raise DeviceLayoutError(
            f"there is no {', '.join(missing)}: asked for {', '.join(wanted)}, and the devices are {', '.join(present)}"
        )
    if len(set(chosen)) < len(chosen):
        raise DeviceLayoutError(
            f"a device is named twice: asked for {', '.join(wanted)}, and the devices are {', '.join(present)}"
        )
    visible = tuple(sorted(int(name.partition(":")[2]) for name in chosen if name.startswith("GPU")))
    renumbered = {f"GPU:{gpu}": f"GPU:{place}" for place, gpu in enumerate(visible)}
    names = tuple(renumbered.get(name, name) for name in chosen)
    return Selection(gpus=visible, names=names, asked=dict(zip(names, chosen, strict=True)))


def _expand(name: str, *, gpus: int, cpus: int) -> list[str]:
    """Return the devices that a name stands for, or the name itself if there are none."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] is not None:
        return [name]
    count = gpus if match[1] == "GPU" else cpus
    return [f"{match[1]}:{index}" for index in range(count)] or [name]


def _present(gpus: int, cpus: int) -> list[str]:
    return [*(f"GPU:{index}" for index in range(gpus)), *(f"CPU:{index}" for index in range(cpus))]
