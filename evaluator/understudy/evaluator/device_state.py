"""How the devices do. Imports no TensorFlow, so that who listens need not either."""

from __future__ import annotations

import enum
from collections.abc import Callable

END_AFTER = 2
"""The devices have failed for good after this many times as many failures as make them count as failing."""


class DeviceState(enum.Enum):
    """How the devices do."""

    WORKING = "working"
    FAILING = "failing"
    FAILED = "failed"


DeviceListener = Callable[[DeviceState, str], None]
"""Called with the new state and the last error; must be quick and must not raise."""
