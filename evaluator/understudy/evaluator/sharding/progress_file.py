"""The file from which an evaluation goes on after the death of its process.

It holds the number of examples that were scored, the state of the loss, the metrics, the slices and the resamples after
them, and what all that is of. It is replaced as a whole, so it is always the state between two batches.
"""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.checkpoints.atomic import write_bytes
from understudy.evaluator.evaluator_errors import ConfigurationError, StorageError
from understudy.evaluator.sharding.pool import Facts
from understudy.evaluator.types import Array

INTERVAL_SECONDS = 5.0
"""How often the file is written."""

_SHARE = 0.05
"""The most of the time that writing takes; large states are written more rarely."""

_TREE = "tree"
_ARRAY = "array"
_ARRAY_KEYS = {_ARRAY, "dtype", "shape"}


class ProgressFile:
    """One file. For one thread.

    Args:
        file: The file. Its folder exists; the file need not.
        interval_seconds: How often it is written.
        clock: Returns seconds.
    """

    def __init__(
        self,
        file: Path,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._interval = interval_seconds
        self._clock = clock
        self._due = clock()
        self._job: Mapping[str, Any] = {}

    def begin(self, job: Mapping[str, Any]) -> StoredProgress | None:
        """Return what an earlier process has stored of this job; None if there is no file.

        Args:
            job: What is computed, of which the state depends: plain values.

        Raises:
            ConfigurationError: The file is of another job, or is no such file.
            StorageError: It cannot be read.
        """
        self._job = job
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self._file} cannot be read: {error}") from error
        try:
            stored = _decoded(content)
            found = dict(stored["job"])
            progress = StoredProgress(stored["examples"], stored["state"], stored["facts"])
        except (ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, EOFError) as error:
            raise ConfigurationError(
                f"{self._file} does not hold the progress of an evaluation; give another file, or delete this one"
            ) from error
        check_job(self._file, found, job)
        return progress

    def offer(self, examples: int, state: Callable[[], Mapping[str, Any] | None], facts: Sequence[Facts]) -> None:
        """Store the progress if it is time.

        Args:
            examples: The number of examples that were scored.
            state: Returns the state after them: plain values and arrays; or None if there is none to store now.
            facts: Those of the workers so far.

        Raises:
            StorageError: The file cannot be written.
        """
        began = self._clock()
        if began < self._due or (current := state()) is None:
            return
        try:
            write_bytes(
                self._file,
                _encoded({"job": self._job, "examples": examples, "state": current, "facts": list(facts)}),
            )
        except OSError as error:
            raise StorageError(f"{self._file} cannot be written: {error}; make room there, and start again") from error
        ended = self._clock()
        self._due = ended + max(self._interval, (ended - began) / _SHARE)

    def end(self) -> None:
        """Delete the file, as nothing is left to go on with."""
        self._file.unlink(missing_ok=True)


class StoredProgress:
    """What was stored: the number of scored examples, the state after them, and the facts of the workers."""

    def __init__(self, examples: int, state: Mapping[str, Any], facts: Sequence[Facts]) -> None:
        self.examples = examples
        self.state = state
        self.facts = facts


def check_job(file: Path, found: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Refuse a file of another job.

    Raises:
        ConfigurationError: The text names what differs.
    """
    differing = [name for name in job if found.get(name) != job[name]]
    if differing:
        values = ", ".join(f"{name}: {found.get(name)} there, {job[name]} now" for name in differing)
        raise ConfigurationError(f"{file} is of another job ({values}); give another one, or delete this one")


def _encoded(tree: Mapping[str, Any]) -> bytes:
    """Return a tree as an ``.npz`` file: its plain values as JSON, and the bytes of its arrays."""
    arrays: list[Array] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(np.frombuffer(value.tobytes(), np.uint8))
            return {_ARRAY: len(arrays) - 1, "dtype": value.dtype.name, "shape": list(value.shape)}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    text = json.dumps(plain(tree)).encode()
    content = io.BytesIO()
    parts = {str(index): array for index, array in enumerate(arrays)}
    np.savez(content, allow_pickle=False, **{_TREE: np.frombuffer(text, np.uint8), **parts})
    return content.getvalue()


def _decoded(content: bytes) -> Any:
    """Return the tree of `_encoded`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as parts:

        def whole(value: Any) -> Any:
            if isinstance(value, dict) and value.keys() == _ARRAY_KEYS:
                return parts[str(value[_ARRAY])].view(np.dtype(value["dtype"])).reshape(value["shape"])
            if isinstance(value, dict):
                return {key: whole(item) for key, item in value.items()}
            return [whole(item) for item in value] if isinstance(value, list) else value

        return whole(json.loads(parts[_TREE].tobytes()))
