"""The exceptions of the device layout."""

from __future__ import annotations


class DeviceLayoutError(Exception):
    """The requested device layout is impossible. The text names the request, the existing devices and the remedy."""


class NoGpuError(DeviceLayoutError):
    """GPUs are requested or present, and TensorFlow finds none. The text gives the reason."""


class DevicesFixedError(DeviceLayoutError):
    """TensorFlow already runs in this process with other devices."""
