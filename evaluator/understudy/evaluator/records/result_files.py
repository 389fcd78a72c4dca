"""Files that are derived from the ledger's entries: results of a step for the trainer, tables of an evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.checkpoints.atomic import write_bytes, write_json
from understudy.checkpoints.evaluation_results import RESULTS_VERSION
from understudy.checkpoints.layout import parse_step, step_name
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.entries import details_of
from understudy.evaluator.types import EvaluationRecord

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


class ResultFiles:
    """One file per step, replaced atomically, so that a reader sees the old content or the new. For one thread.

    A file holds ``format_version``, ``step``, ``settled`` (whether the result is final: every dataset has a score or a
    recorded reason for having none) and ``records``: the ledger's entries of the step in the order of writing. Values
    without a JSON number are ``"nan"``, ``"inf"`` or ``"-inf"``; intervals are ``[low, high]``.

    Args:
        directory: The folder; created if missing.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def path(self, step: int) -> Path:
        """Return the file of a step, whether or not it exists."""
        return self._directory / f"{step_name(step)}{_SUFFIX}"

    def steps(self) -> set[int]:
        """Return the steps that have a file."""
        names = (
            entry.name.removesuffix(_SUFFIX) for entry in os.scandir(self._directory) if entry.name.endswith(_SUFFIX)
        )
        return {step for step in map(parse_step, names) if step is not None}

    def publish(self, step: int, records: Sequence[EvaluationRecord], *, settled: bool) -> None:
        """Write the file of a step durably; raise OSError if that fails."""
        write_json(
            self.path(step),
            {
                "format_version": RESULTS_VERSION,
                "step": step,
                "settled": settled,
                "records": [_as_json(record) for record in records],
            },
        )


def _as_json(record: EvaluationRecord) -> dict[str, Any]:
    return {
        "sequence": record.sequence,
        "checkpoint_digest": record.checkpoint_digest,
        "dataset": record.dataset,
        "outcome": record.outcome.value,
        "reason": record.reason,
        "metrics": dict(record.metrics),
        "examples": record.examples,
        "duration_seconds": record.duration_seconds,
        "recorded_at": record.recorded_at,
        "notes": list(record.notes),
        "dataset_digest": record.dataset_digest,
        **details_of(record),
    }
