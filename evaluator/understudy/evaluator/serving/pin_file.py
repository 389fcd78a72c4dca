"""The pin that an operator sets at run time, kept on disk."""

from __future__ import annotations

import json
from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.evaluator.evaluator_errors import ConfigurationError, StorageError

PIN_FILE = "pin.json"


class PinFile:
    """A file that holds the pinned step or null. For one thread at a time.

    Args:
        directory: The state folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / PIN_FILE

    def read(self) -> int | None:
        """Return the pinned step.

        Raises:
            ConfigurationError: The file is damaged.
        """
        try:
            step = json.loads(self._path.read_bytes())["step"]
            return None if step is None else int(step)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self._path} is damaged ({error}); delete it to serve without a pin") from error

    def write(self, step: int | None) -> None:
        """Replace the pin durably.

        Raises:
            StorageError: The file cannot be written, for example on a full disk. The old pin stays.
        """
        try:
            write_json(self._path, {"step": step})
        except OSError as error:
            raise StorageError(f"the pin {self._path} cannot be written: {error}; check the disk's space") from error
