"""The devices of this process."""

from __future__ import annotations

import logging

import tensorflow as tf

from understudy.devices import layout
from understudy.devices.errors import DeviceLayoutError, DevicesFixedError
from understudy.trainer.settings import TrainSettings
from understudy.trainer.trainer_errors import StrategyError

_log = logging.getLogger(__name__)


def configure(settings: TrainSettings) -> tuple[str, ...]:
    """Find the devices, hide the GPUs that are not used, and let the memory of the others grow as needed.

    Call it before anything uses TensorFlow, the user's module included. A second call changes nothing.

    Returns:
        The devices to train on, by TensorFlow's names.

    Raises:
        StrategyError: Such a device does not exist, a GPU is expected and not found, or TensorFlow already runs with
            other devices.
    """
    if settings.strategy == "tpu":
        return ()
    try:
        planned = layout.plan(settings.devices, settings.logical_cpus)
        layout.apply(planned)
    except DevicesFixedError as error:
        _check_usable(settings, planned)
        _log.warning("%s", error)
    except DeviceLayoutError as error:
        raise StrategyError(str(error)) from error
    return planned.selection.names


def describe(settings: TrainSettings) -> tuple[str, ...]:
    """Return a description of each device that `configure` chose: name and memory; for a GPU, the driver too."""
    if settings.strategy == "tpu":
        return ()
    described = layout.describe(layout.plan(settings.devices, settings.logical_cpus))
    return tuple(" ".join(f"{key}={value}" for key, value in facts.items()) for facts in described)


def _check_usable(settings: TrainSettings, planned: layout.Layout) -> None:
    """Raise StrategyError unless TensorFlow, which already runs, has the requested devices."""
    present = len(tf.config.list_logical_devices("CPU"))
    if settings.logical_cpus is not None and present < settings.logical_cpus:
        raise StrategyError(
            f"{settings.logical_cpus} logical CPUs were asked for, but TensorFlow runs with {present} in this process "
            "already; ask for them before anything else uses TensorFlow",
        )
    if settings.devices and any(planned.selection.asked[name] != name for name in planned.selection.names):
        raise StrategyError(
            f"{', '.join(settings.devices)} cannot be chosen once TensorFlow is in use; start the training before "
            "anything else uses TensorFlow"
        )
