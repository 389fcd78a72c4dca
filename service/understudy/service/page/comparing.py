"""Two versions beside each other: as recorded in the ledger, or as a comparison computed just now."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from markupsafe import Markup

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import NotEvaluableError, VersionNotFoundError
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, EvaluationResult, Interval
from understudy.service.figures import output_sections
from understudy.v1 import evaluation_pb2

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.example_outcomes import Flips


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The second value minus the first, with its interval and its corrected p-value if they are known."""

    value: float
    interval: Interval | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedMetric:
    """One metric of two versions; None where a version has no value, with the reason if it is undefined, else empty."""

    name: str
    values: tuple[float | None, float | None]
    undefined: tuple[str, str]
    intervals: tuple[Interval | None, Interval | None]
    difference: Difference | None


@dataclass(frozen=True, kw_only=True)
class ComparedPart:
    """All examples (with an empty name), or a slice of them."""

    name: str
    examples: int
    metrics: Sequence[ComparedMetric]


@dataclass(frozen=True, kw_only=True)
class ComparedDataset:
    """Two versions on one dataset.

    Attributes:
        dataset: Its name.
        parts: All examples, then the slices.
        confidence: The confidence level of the intervals; 0 without any.
        resamples: How many times the examples were resampled.
        flips: How their decisions differ; None if that is not recorded.
        notes: Why something is missing.
    """

    dataset: str
    parts: Sequence[ComparedPart]
    confidence: float
    resamples: int
    flips: Flips | None = None
    notes: Sequence[str] = ()


def recorded(evaluator: Evaluator, first: int, second: int) -> list[ComparedDataset]:
    """Return what the ledger says about two steps, on each dataset that either has a score on. Blocks.

    Raises:
        VersionNotFoundError: A step has no score.
        LedgerError: The ledger cannot be read.
    """
    scores = [_newest_scores(evaluator, step) for step in (first, second)]
    for step, found in zip((first, second), scores, strict=True):
        if not found:
            raise VersionNotFoundError(f"step {step} has no score in the ledger, so there is nothing to compare")
    both = [_recorded(evaluator, scores[0][name], scores[1][name]) for name in scores[0] if name in scores[1]]
    of_one = [_of_one(name, first, second) for name in scores[0] if name not in scores[1]]
    of_one += [_of_one(name, second, first) for name in scores[1] if name not in scores[0]]
    return [*both, *of_one]


def recorded_tables(evaluator: Evaluator, dataset: str, steps: Sequence[int]) -> dict[str, object]:
    """Return the sections of what was recorded with the evaluations of steps on a dataset, the title and notes. Blocks.

    Raises:
        VersionNotFoundError: A step has no such evaluation, or none with tables.
        DatasetNotFoundError: There is no such dataset, and no evaluation on one of that name.
        LedgerError: The tables cannot be read.
    """
    contents = [(f"step {step}", evaluator.tables(dataset, version=step).content) for step in steps]
    outputs = dict.fromkeys(name for _, content in contents for name in content["outputs"])
    return {
        "title": f"{' beside '.join(version for version, _ in contents)} on {dataset}",
        "sections": [Markup("".join(output_sections(name, contents))) for name in outputs],  # noqa: S704 - it escapes
        "notes": list(dict.fromkeys(note for _, content in contents for note in content["notes"])),
    }


def _newest_scores(evaluator: Evaluator, step: int) -> dict[str, EvaluationRecord]:
    entries = evaluator.ledger.of_step(step)
    return {entry.dataset: entry for entry in entries if entry.outcome is EvaluationOutcome.SCORED}


def _of_one(dataset: str, having: int, lacking: int) -> ComparedDataset:
    note = f"Step {having} has a score on this dataset and step {lacking} has none, so there is nothing to compare."
    return ComparedDataset(dataset=dataset, parts=(), confidence=0.0, resamples=0, notes=(note,))


def _recorded(evaluator: Evaluator, first: EvaluationRecord, second: EvaluationRecord) -> ComparedDataset:
    from understudy.evaluator.evaluation.bootstrap import lacking_slices

    notes = []
    same = first.dataset_digest == second.dataset_digest
    if not same:
        notes.append("The content of the dataset changed between the two evaluations, so their scores do not compare.")
    metrics: Mapping[str, _MetricDifference] = {}
    slices: Mapping[str, Mapping[str, _MetricDifference]] = {}
    if same and first.resamples and first.resamples == second.resamples:
        metrics, slices = _differences(evaluator, first, second)
    elif same:
        notes.append("There are no intervals of the differences, as the evaluations were not resampled alike.")
        notes += dict.fromkeys(note for entry in (first, second) for note in entry.notes if "interval" in note)
    others = {
        name for name in first.metrics if first.configuration(name).is_other_than(second.configuration(name))
    } & second.metrics.keys()
    if others:
        notes.append(f"Configured otherwise in the two evaluations, so not compared: {', '.join(sorted(others))}.")
    notes += lacking_slices(first, second)
    compared = second.metrics.keys() - others if same else frozenset[str]()
    flips, reason = _flips(evaluator, first, second) if same else (None, "")
    base = {part.name: part for part in first.slices}
    parts = [_part("", second.examples, first, second, metrics, compared=compared)]
    parts += [
        _part(part.name, part.examples, base[part.name], part, slices.get(part.name, {}), compared=compared)
        for part in second.slices
        if part.name in base
    ]
    return ComparedDataset(
        dataset=first.dataset,
        parts=parts,
        confidence=second.confidence if metrics else 0.0,
        resamples=second.resamples if metrics else 0,
        flips=flips,
        notes=[*notes, *([reason] if reason else [])],
    )


def _differences(
    evaluator: Evaluator, first: EvaluationRecord, second: EvaluationRecord
) -> tuple[Mapping[str, _MetricDifference], Mapping[str, Mapping[str, _MetricDifference]]]:
    from understudy.evaluator.evaluation.bootstrap import metric_differences, slice_differences

    results = [_result(evaluator, entry) for entry in (first, second)]
    confidence = second.confidence
    (metrics,) = metric_differences(results[0], results[1:], confidence=confidence)
    (slices,) = slice_differences(results[0], results[1:], confidence=confidence)
    return metrics, {part.name: part.differences for part in slices}


def _result(evaluator: Evaluator, entry: EvaluationRecord) -> EvaluationResult:
    return EvaluationResult(
        metrics=entry.metrics,
        examples=entry.examples,
        batches=0,
        step=entry.step,
        waiting_seconds=0.0,
        computing_seconds=entry.duration_seconds,
        slices=entry.slices,
        resampled=evaluator.ledger.resampled(entry.sequence),
    )


def _flips(evaluator: Evaluator, first: EvaluationRecord, second: EvaluationRecord) -> tuple[Flips | None, str]:
    try:
        return evaluator.flips(second.dataset, version=second.step, baseline=first.step), ""
    except (VersionNotFoundError, NotEvaluableError) as error:
        return None, f"Which examples changed is not known: {error}"


class _MetricDifference(Protocol):
    """The difference of a metric, as the evaluator or the wire has it."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def p_value(self) -> float: ...


class _Bounds(Protocol):
    """An interval, as the evaluator or the wire has it."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class _Scored(Protocol):
    """A score of all examples or of a slice, as the evaluator or the wire has it."""

    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def intervals(self) -> Mapping[str, _Bounds]: ...
    @property
    def undefined(self) -> Mapping[str, str]: ...


def _part(
    name: str,
    examples: int,
    first: _Scored,
    second: _Scored,
    differences: Mapping[str, _MetricDifference],
    *,
    compared: Collection[str],
) -> ComparedPart:
    metrics = dict.fromkeys(name for each in (first, second) for name in (*each.metrics, *each.undefined))
    return ComparedPart(
        name=name,
        examples=examples,
        metrics=[
            ComparedMetric(
                name=metric,
                values=(
                    first.metrics.get(metric),
                    second.metrics.get(metric),
                ),
                undefined=(first.undefined.get(metric, ""), second.undefined.get(metric, "")),
                intervals=(_interval(first, metric), _interval(second, metric)),
                difference=_difference(first, second, metric, differences) if metric in compared else None,
            )
            for metric in sorted(metrics, key=lambda metric: (metric != "loss", metric))
        ],
    )


def _interval(score: _Scored, metric: str) -> Interval | None:
    if metric not in score.intervals:  # looking a name up would add it to a message
        return None
    bounds = score.intervals[metric]
    return Interval(low=bounds.low, high=bounds.high)


def _difference(
    first: _Scored, second: _Scored, metric: str, differences: Mapping[str, _MetricDifference]
) -> Difference | None:
    if metric in differences:
        found = differences[metric]
        return Difference(value=found.value, interval=Interval(low=found.low, high=found.high), p_value=found.p_value)
    if metric not in first.metrics or metric not in second.metrics:
        return None
    return Difference(value=second.metrics[metric] - first.metrics[metric])


def of_response(dataset: str, response: evaluation_pb2.CompareResponse) -> ComparedDataset:
    """Return a comparison of two versions that was computed on a dataset."""
    first, second = response.versions
    base = {part.name: part for part in first.score.slices}
    slices = {part.name: part.differences for part in second.slice_differences}
    compared = {name for name, value in second.differences.items() if not math.isnan(value)}
    parts = [
        _part("", second.score.examples, first.score, second.score, second.metric_differences, compared=compared),
        *(
            _part(part.name, part.examples, base[part.name], part, slices[part.name], compared=compared)
            for part in second.score.slices
            if part.name in base and part.name in slices
        ),
    ]
    return ComparedDataset(
        dataset=dataset,
        parts=parts,
        confidence=response.confidence if second.metric_differences else 0.0,
        resamples=response.resamples,
        notes=list(response.notes),
    )
