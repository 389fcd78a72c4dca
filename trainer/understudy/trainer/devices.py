"""The devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from understudy.trainer.errors import StrategyError


def configure(logical_cpus: int | None) -> None:
    """Let GPU memory grow as needed, and split the CPU if asked to. Call it before TensorFlow is first used.

    Raises:
        StrategyError: TensorFlow is in use already, with fewer CPU devices than asked for.
    """
    for gpu in tf.config.list_physical_devices("GPU"):
        _before_first_use(functools.partial(tf.config.experimental.set_memory_growth, gpu, enable=True))
    if logical_cpus is None:
        return
    cpu, *_ = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * logical_cpus
    _before_first_use(lambda: tf.config.set_logical_device_configuration(cpu, parts))
    present = len(tf.config.list_logical_devices("CPU"))
    if present < logical_cpus:
        raise StrategyError(
            f"{logical_cpus} logical CPUs were asked for, but TensorFlow runs with {present} in this process already; "
            "ask for them before anything else uses TensorFlow",
        )


def check_present(names: Sequence[str]) -> None:
    """Check that this machine has the devices named.

    Raises:
        StrategyError: It has not; the text lists what it has.
    """
    present = [_short_name(device.name) for device in tf.config.list_logical_devices()]
    for name in names:
        if _short_name(name) not in present:
            raise StrategyError(f"there is no device {name!r} here; there are {', '.join(present)}")
    if len({_short_name(name) for name in names}) < len(names):
        raise StrategyError(f"devices names one twice: {', '.join(names)}")


def has_gpu(names: Sequence[str]) -> bool:
    """Whether these devices, or all of this machine's if none are named, include a GPU."""
    if names:
        return any(_short_name(name).startswith("GPU") for name in names)
    return bool(tf.config.list_logical_devices("GPU"))


def restrict_gpus(names: Sequence[str]) -> None:
    """Hide all GPUs from TensorFlow but those named ``GPU:<number>``.

    Raises:
        StrategyError: There is no such GPU, or TensorFlow is in use already.
    """
    gpus = {f"GPU:{index}": gpu for index, gpu in enumerate(tf.config.list_physical_devices("GPU"))}
    unknown = [name for name in names if _short_name(name) not in gpus]
    if unknown:
        raise StrategyError(
            f"there is no device {unknown[0]!r} for a worker here; there are {', '.join(gpus) or 'no GPUs'}"
        )
    try:
        tf.config.set_visible_devices([gpus[_short_name(name)] for name in names], "GPU")
    except RuntimeError as error:
        raise StrategyError(f"devices cannot be chosen once TensorFlow is in use: {error}") from error


def _before_first_use(configure_device: Callable[[], None]) -> None:
    """Run a change that TensorFlow refuses once it is in use; whoever needs it to have worked looks afterwards."""
    try:
        configure_device()
    except RuntimeError:
        return


def _short_name(name: str) -> str:
    """Return ``CPU:0`` for ``/device:CPU:0``, ``/job:...:CPU:0``, ``cpu:0`` and the like."""
    return ":".join(name.upper().replace("/", ":").split(":")[-2:])
