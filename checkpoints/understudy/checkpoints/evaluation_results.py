"""Reads the results that an evaluator publishes: ``results/<step, 12 digits>.json`` in its state folder.

Each file is replaced as a whole, so a reader sees all of one state or all of the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from understudy.checkpoints.checkpoint_errors import UnsupportedFormatError
from understudy.checkpoints.layout import RESULTS_DIR, parse_step, step_name

RESULTS_VERSION: Final = 1

_Stamp = tuple[int, int, int]


class MetricConfiguration(NamedTuple):
    """What identifies the configuration of a metric, and that of all metrics of its score; empty if not recorded."""

    own: str
    of_all: str

    def is_other_than(self, other: MetricConfiguration) -> bool:
        """Return whether values of the two cannot be compared. A score that does not say counts with any."""
        if self.own and other.own:
            return self.own != other.own
        return bool(self.of_all and other.of_all) and self.of_all != other.of_all


UNKNOWN_CONFIGURATION: Final = MetricConfiguration("", "")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The results of one checkpoint so far.

    Attributes:
        step: Its training step.
        settled: Whether the result is final: every dataset has a score or a recorded reason for having none.
        datasets: The datasets with a record.
        scores: The loss and metrics by dataset; values may be NaN or infinite.
        undefined: The metrics that are undefined on the examples, by dataset: they have no value in ``scores``.
        contents: The digests of the datasets' content that these scores are on, by dataset; empty texts in files of
            older evaluators.
        configurations: How each metric was configured, by dataset and metric.
        digests: The digests of the models that the records of this step refer to.
    """

    step: int
    settled: bool
    datasets: frozenset[str]
    scores: Mapping[str, Mapping[str, float]]
    digests: frozenset[str]
    undefined: Mapping[str, frozenset[str]] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    configurations: Mapping[str, Mapping[str, MetricConfiguration]] = field(default_factory=dict)


class EvaluationResults:
    """The results in an evaluator's state folder, which need not exist yet. For one thread at a time.

    Args:
        state_dir: The state folder, ``RUN/evaluator`` by default.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / RESULTS_DIR
        self._known: dict[int, tuple[_Stamp, StepResult]] = {}

    def read(self) -> list[StepResult]:
        """Return every result by ascending step. Files that have not changed since the last call are not read again.

        Raises:
            UnsupportedFormatError: A file has another version, or is not a result.
            OSError: The folder could not be read.
        """
        try:
            steps = [parse_step(file.stem) for file in self._directory.glob("*.json")]
        except FileNotFoundError:
            return []
        found = (self.of(step) for step in sorted(step for step in steps if step is not None))
        return [result for result in found if result is not None]

    def of(self, step: int) -> StepResult | None:
        """Return the result of one step, or None if there is none yet. Errors are as in `read`."""
        file = self._directory / f"{step_name(step)}.json"
        try:
            stat = file.stat()
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if step not in self._known or self._known[step][0] != stamp:
                self._known[step] = (stamp, _decode(file.read_bytes(), file))
        except FileNotFoundError:
            return None
        return self._known[step][1]


def _decode(content: bytes, file: Path) -> StepResult:
    try:
        fields: dict[str, Any] = json.loads(content)
        version = fields["format_version"]
        records = fields["records"]
        scores = [record for record in records if record["outcome"] == "scored"]
        result = StepResult(
            step=int(fields["step"]),
            settled=bool(fields["settled"]),
            datasets=frozenset(str(record["dataset"]) for record in records if record["dataset"]),
            scores={
                str(record["dataset"]): {name: float(value) for name, value in record["metrics"].items()}
                for record in scores
            },
            undefined={str(record["dataset"]): frozenset(record.get("undefined", ())) for record in scores},
            digests=frozenset(str(record["checkpoint_digest"]) for record in records),
            contents={str(record["dataset"]): str(record.get("dataset_digest", "")) for record in scores},
            configurations={str(record["dataset"]): _configurations(record) for record in scores},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedFormatError(f"{file} is not a result ({type(error).__name__}: {error})") from error
    if version != RESULTS_VERSION:
        raise UnsupportedFormatError(f"{file} has format version {version!r}; this program reads {RESULTS_VERSION}")
    return result


def _configurations(record: Mapping[str, Any]) -> dict[str, MetricConfiguration]:
    own, of_all = record.get("metric_digests", {}), str(record.get("metric_digest", ""))
    return {name: MetricConfiguration(str(own.get(name, "")), of_all) for name in record["metrics"]}
