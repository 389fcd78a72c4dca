"""What can be wrong with the devices."""

from __future__ import annotations


class DeviceLayoutError(Exception):
    """The devices cannot be laid out as asked for. The text names what was asked for, what there is and the remedy."""


class NoGpuError(DeviceLayoutError):
    """GPUs are asked for or present, and TensorFlow finds none. The text says why."""


class DevicesFixedError(DeviceLayoutError):
    """TensorFlow already runs in this process with other devices."""
