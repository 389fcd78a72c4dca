"""Results as files that the trainer and callbacks read, by `understudy.checkpoints.evaluation_results`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.evaluation_results import RESULTS_VERSION
from understudy.checkpoints.layout import step_name
from understudy.evaluator.types import EvaluationRecord


class ResultFiles:
    """One file per step, replaced atomically, so that a reader sees the old content or the new. For one thread.

    A file holds ``format_version``, ``step``, ``settled`` (whether the result is final: every dataset has a score or a
    recorded reason for having none) and ``records``: the ledger's entries of the step in the order of writing. Metric
    values without a JSON number are ``"nan"``, ``"inf"`` or ``"-inf"``.

    Args:
        directory: The folder; created if missing.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def path(self, step: int) -> Path:
        """Return the file of a step, whether or not it exists."""
        return self._directory / f"{step_name(step)}.json"

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
    }
