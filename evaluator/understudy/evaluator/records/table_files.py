"""Files with the tables of single evaluations, beside the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from understudy.checkpoints.atomic import write_bytes
from understudy.evaluator.evaluator_errors import LedgerError

_SUFFIX = ".json"


class TableFiles:
    """One JSON file per entry of the ledger that has tables, written atomically. Thread-safe.

    Numbers that JSON lacks are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.

    Args:
        directory: The folder; created when the first file is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, sequence: int) -> Path:
        """Return the file of an entry, whether or not it exists."""
        return self._directory / f"{sequence:012d}{_SUFFIX}"

    def write(self, sequence: int, document: Mapping[str, Any]) -> None:
        """Write the tables of an entry durably; raise OSError if that fails."""
        self._directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_plain(document), separators=(",", ":"), allow_nan=False)
        write_bytes(self.path(sequence), text.encode())

    def read(self, sequence: int) -> dict[str, Any] | None:
        """Return the tables of an entry, or None if it has none.

        Raises:
            LedgerError: The file cannot be read.
        """
        try:
            found = json.loads(self.path(sequence).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LedgerError(f"the tables of entry {sequence} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise LedgerError(f"the tables of entry {sequence} cannot be read: they are no JSON object")
        return found

    def remove_all_but(self, is_kept: Callable[[int], bool]) -> None:
        """Remove the files of the entries that are not kept; raise OSError if that fails."""
        for file in self._directory.glob(f"*{_SUFFIX}"):
            if file.stem.isdecimal() and not is_kept(int(file.stem)):
                file.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
