"""The health of the devices. Does not import TensorFlow, so that listeners need not."""

from __future__ import annotations

import enum
from collections.abc import Callable

END_AFTER = 2
"""The devices have failed permanently after this multiple of the failures that make them ``FAILING``."""


class DeviceState(enum.Enum):
    """The health of the devices."""

    WORKING = "working"
    FAILING = "failing"
    FAILED = "failed"


DeviceListener = Callable[[DeviceState, str], None]
"""Called with the new state and the last error; must be quick and must not raise."""
