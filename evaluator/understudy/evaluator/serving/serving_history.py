"""The versions that served, in a file, so that each rollback goes further back, also after a restart."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from understudy.checkpoints.atomic import write_json
from understudy.evaluator.evaluator_errors import ConfigurationError, StorageError
from understudy.evaluator.types import CheckpointKey

HISTORY_FILE: Final = "serving_history.json"

_MOST_KEPT: Final = 32

_MOST_NAMED: Final = 10

_log = logging.getLogger(__name__)


class ServingHistory:
    """The newest 32 versions that served, each once, where it served last. Thread-safe.

    A rollback removes the version that it leaves, until that is promoted or pinned again.

    Args:
        directory: The state folder.
        is_used: Whether there is a history; otherwise nothing is noted, read or written.

    Raises:
        ConfigurationError: The file is damaged.
    """

    def __init__(self, directory: Path, *, is_used: bool = True) -> None:
        self._path = directory / HISTORY_FILE
        self._is_used = is_used
        self._lock = threading.Lock()
        self._keys = self._written = _read(self._path) if is_used else ()
        self._rollback: tuple[CheckpointKey, CheckpointKey] | None = None
        self._failed = False

    def note(self, serving: Callable[[], CheckpointKey | None]) -> None:
        """Take in what serves now. Does not write.

        Args:
            serving: Returns it, or None. It is called under a lock, so that of several threads the last one is right.
        """
        with self._lock:
            key = serving()
            if key is None or not self._is_used:
                return
            removed = {key}
            if self._rollback is not None and self._rollback[1] == key:
                removed.add(self._rollback[0])
                self._rollback = None
            self._keys = (*(each for each in self._keys if each not in removed), key)[-_MOST_KEPT:]

    def newest_first(self) -> Sequence[CheckpointKey]:
        """Return the versions, the one that served last first."""
        return self._keys[::-1]

    def expect(self, rollback: tuple[CheckpointKey, CheckpointKey] | None) -> None:
        """Set the version that a rollback leaves once the other one serves; None for another decision."""
        with self._lock:
            self._rollback = rollback

    def write(self) -> None:
        """Write the history durably, if it has changed.

        Raises:
            StorageError: It cannot be written, for example on a full disk.
        """
        with self._lock:
            if self._keys == self._written:
                return
            try:
                write_json(self._path, {"served": self._keys})
            except OSError as error:
                raise StorageError(
                    f"{self._path}, from which rollbacks know what served before, cannot be written: {error}; "
                    "check the disk's space"
                ) from error
            self._written, self._failed = self._keys, False

    def try_to_write(self) -> None:
        """Write the history, or log once why that cannot be done. Call it again later."""
        try:
            self.write()
        except StorageError as error:
            if not self._failed:
                _log.warning("%s", error)
            self._failed = True


def why_no_earlier(serving: int | None, known: Sequence[int]) -> str:
    """Return why there is no version to roll back to, and which can be pinned.

    Args:
        serving: The serving step, or None.
        known: The steps of all checkpoints, ascending.
    """
    others = [step for step in known if step != serving]
    named = ", ".join(map(str, others[-_MOST_NAMED:]))
    more = f" (the newest {_MOST_NAMED} of {len(others)})" if len(others) > _MOST_NAMED else ""
    advice = f"pin one of the steps {named}{more}" if others else "wait for another checkpoint"
    if serving is None:
        return f"nothing is serving, so there is nothing to roll back from; {advice}"
    return f"no version that may serve again is known to have served before step {serving}; {advice}"


def _read(path: Path) -> tuple[CheckpointKey, ...]:
    try:
        served = json.loads(path.read_bytes())["served"]
        return tuple((int(step), str(digest)) for step, digest in served)[-_MOST_KEPT:]
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is damaged ({error}); delete it to start without knowing what served before"
        ) from error
