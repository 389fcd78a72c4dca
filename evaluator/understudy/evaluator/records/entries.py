"""Encodes the entries of the ledger: as rows, as JSON, and the resampled values as bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.evaluator.records.ledger_file import SUPERSEDED
from understudy.evaluator.types import Arrays, EvaluationOutcome, EvaluationRecord, GateCondition, Interval, SliceScore

COLUMNS = (
    "sequence, step, checkpoint_digest, dataset, dataset_digest, outcome, reason, metrics, examples, duration_seconds, "
    "recorded_at, notes, details"
)
"""The columns that `read_row` reads."""

_HEADER_LENGTH_BYTES = 4


def read_row(row: Sequence[Any]) -> EvaluationRecord:
    """Return the entry of a row with `COLUMNS`."""
    sequence, step, digest, dataset, content, outcome, reason, metrics, examples, duration, recorded_at, *rest = row
    notes, details = rest
    return EvaluationRecord(
        sequence=sequence,
        step=step,
        checkpoint_digest=digest,
        dataset=dataset,
        outcome=EvaluationOutcome(outcome),
        reason=reason,
        metrics={name: float(value) for name, value in json.loads(metrics).items()},
        examples=examples,
        duration_seconds=duration,
        recorded_at=recorded_at,
        notes=tuple(json.loads(notes)),
        dataset_digest="" if content.startswith(SUPERSEDED) else content,
        **decode_details(details),
    )


def encode_metrics(metrics: Mapping[str, float]) -> str:
    """Return a JSON object with each value as a string of its shortest exact decimal, which allows NaN and infinity."""
    return json.dumps({name: repr(float(value)) for name, value in metrics.items()})


def details_of(record: EvaluationRecord) -> dict[str, Any]:
    """Return the details of an entry as JSON values, except that numbers may be NaN or infinite."""
    return {
        "intervals": _intervals(record.intervals),
        "slices": [
            {
                "name": each.name,
                "examples": each.examples,
                "metrics": dict(each.metrics),
                "intervals": _intervals(each.intervals),
                "notes": list(each.notes),
                "undefined": dict(each.undefined),
            }
            for each in record.slices
        ],
        "resamples": record.resamples,
        "confidence": record.confidence,
        "metric_digest": record.metric_digest,
        "metric_digests": dict(record.metric_digests),
        "undefined": dict(record.undefined),
        "conditions": [
            {
                "text": each.text,
                "outcome": each.outcome.value,
                "value": each.value,
                "baseline_step": each.baseline_step,
                "baseline_value": each.baseline_value,
                "interval": None if each.interval is None else [each.interval.low, each.interval.high],
                "reason": each.reason,
            }
            for each in record.conditions
        ],
    }


def encode_details(record: EvaluationRecord) -> str:
    """Return the details as JSON, in which each float is a string of its shortest exact decimal, and may be NaN."""
    return json.dumps(_exact(details_of(record)), separators=(",", ":"))


def decode_details(text: str) -> dict[str, Any]:
    """Return the details as arguments of `EvaluationRecord`; absent ones have their defaults."""
    details = json.loads(text)
    if not details:
        return {}
    return {
        "intervals": _read_intervals(details["intervals"]),
        "slices": tuple(
            SliceScore(
                name=each["name"],
                examples=each["examples"],
                metrics=_floats(each["metrics"]),
                intervals=_read_intervals(each["intervals"]),
                notes=tuple(each["notes"]),
                undefined=each.get("undefined", {}),
            )
            for each in details["slices"]
        ),
        "resamples": details["resamples"],
        "confidence": float(details["confidence"]),
        "metric_digest": details["metric_digest"],
        "metric_digests": details.get("metric_digests", {}),
        "undefined": details.get("undefined", {}),
        "conditions": tuple(_read_condition(each) for each in details["conditions"]),
    }


def encode_resampled(values: Arrays) -> bytes:
    """Return resampled values, ``[resamples]`` each, as float32 with their names."""
    header = json.dumps(list(values)).encode()
    matrix = np.stack([np.asarray(array, np.float32) for array in values.values()])
    return len(header).to_bytes(_HEADER_LENGTH_BYTES, "little") + header + zlib.compress(matrix.tobytes(), level=1)


def decode_resampled(content: bytes) -> Arrays:
    """Return the values that `encode_resampled` encoded."""
    start = _HEADER_LENGTH_BYTES + int.from_bytes(content[:_HEADER_LENGTH_BYTES], "little")
    names = json.loads(content[_HEADER_LENGTH_BYTES:start])
    matrix = np.frombuffer(zlib.decompress(content[start:]), np.float32).reshape(len(names), -1)
    return dict(zip(names, matrix, strict=True))


def _intervals(intervals: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: [interval.low, interval.high] for name, interval in intervals.items()}


def _read_intervals(intervals: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: _read_interval(bounds) for name, bounds in intervals.items()}


def _read_interval(bounds: Any) -> Interval:
    low, high = bounds
    return Interval(low=float(low), high=float(high))


def _read_condition(condition: Mapping[str, Any]) -> GateCondition:
    bounds, baseline = condition["interval"], condition["baseline_value"]
    return GateCondition(
        text=condition["text"],
        outcome=EvaluationOutcome(condition["outcome"]),
        value=float(condition["value"]),
        baseline_step=condition["baseline_step"],
        baseline_value=None if baseline is None else float(baseline),
        interval=None if bounds is None else _read_interval(bounds),
        reason=condition["reason"],
    )


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, Mapping):
        return {key: _exact(item) for key, item in value.items()}
    return [_exact(item) for item in value] if isinstance(value, list) else value


def _floats(values: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
