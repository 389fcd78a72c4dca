"""Converts between messages and the evaluator's values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from understudy.evaluator.evaluation.bootstrap import MetricDifference
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.comparison import BootstrapOptions, ComparedVersion, Comparison
from understudy.evaluator.evaluation.example_queries import EvaluationTables, ExampleKind, ExampleList
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.metric_catalog import check_count
from understudy.evaluator.types import (
    Arrays,
    Batch,
    CheckpointInfo,
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationResult,
    GateCondition,
    Interval,
    MetricSpec,
    OutputTask,
    Prediction,
    SliceScore,
    TaskKind,
    TensorSpec,
    Version,
    VersionLabel,
    VersionState,
    VersionStatus,
)
from understudy.v1 import evaluation_pb2, model_pb2, prediction_pb2, tensor_pb2
from understudy.wire import Contents, data_type, decode_all, encode_all

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.replay_stream import ReplayStream

_OUTPUT_KINDS: Mapping[TaskKind, model_pb2.OutputKind.ValueType] = {
    "unknown": model_pb2.OUTPUT_KIND_UNSPECIFIED,
    "binary": model_pb2.OUTPUT_KIND_BINARY,
    "multilabel": model_pb2.OUTPUT_KIND_MULTI_LABEL,
    "categorical": model_pb2.OUTPUT_KIND_MULTI_CLASS,
    "sparse": model_pb2.OUTPUT_KIND_MULTI_CLASS,
    "regression": model_pb2.OUTPUT_KIND_REGRESSION,
}
_LABELS: Mapping[int, VersionLabel] = {
    tensor_pb2.VERSION_LABEL_SERVING: "serving",
    tensor_pb2.VERSION_LABEL_LATEST: "latest",
    tensor_pb2.VERSION_LABEL_BEST: "best",
}
_STATES: Mapping[VersionState, model_pb2.VersionState.ValueType] = {
    VersionState.START: model_pb2.VERSION_STATE_START,
    VersionState.LOADING: model_pb2.VERSION_STATE_LOADING,
    VersionState.AVAILABLE: model_pb2.VERSION_STATE_AVAILABLE,
    VersionState.UNLOADING: model_pb2.VERSION_STATE_UNLOADING,
    VersionState.END: model_pb2.VERSION_STATE_END,
}
_OUTCOMES: Mapping[EvaluationOutcome, evaluation_pb2.EvaluationOutcome.ValueType] = {
    EvaluationOutcome.SCORED: evaluation_pb2.EVALUATION_OUTCOME_SCORED,
    EvaluationOutcome.SKIPPED: evaluation_pb2.EVALUATION_OUTCOME_SKIPPED,
    EvaluationOutcome.FAILED: evaluation_pb2.EVALUATION_OUTCOME_FAILED,
    EvaluationOutcome.ACCEPTED: evaluation_pb2.EVALUATION_OUTCOME_ACCEPTED,
    EvaluationOutcome.REFUSED: evaluation_pb2.EVALUATION_OUTCOME_REFUSED,
    EvaluationOutcome.UNDECIDED: evaluation_pb2.EVALUATION_OUTCOME_UNDECIDED,
    EvaluationOutcome.ROLLOUT_STARTED: evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_STARTED,
    EvaluationOutcome.ROLLOUT_PROMOTED: evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_PROMOTED,
    EvaluationOutcome.ROLLOUT_ROLLED_BACK: evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_ROLLED_BACK,
    EvaluationOutcome.ROLLOUT_STOPPED: evaluation_pb2.EVALUATION_OUTCOME_ROLLOUT_STOPPED,
}
_EXAMPLE_KINDS: Mapping[int, ExampleKind] = {
    evaluation_pb2.EXAMPLE_KIND_HARDEST: "hardest",
    evaluation_pb2.EXAMPLE_KIND_NEWLY_WRONG: "newly_wrong",
    evaluation_pb2.EXAMPLE_KIND_NEWLY_RIGHT: "newly_right",
}
_OUTCOMES_BY_NUMBER: Mapping[int, EvaluationOutcome] = {number: outcome for outcome, number in _OUTCOMES.items()}

_ANY_LENGTH = -1
_NO_CONTENTS: Contents = MappingProxyType({})

MAX_BATCH_EXAMPLES = 65_536
"""The limit for one batch to score; a stream may have any number of batches."""

MAX_CONFIG_CHARACTERS = 65_536
"""The limit for the configuration of one metric."""


def version(selector: tensor_pb2.VersionSelector) -> Version:
    """Return the version a selector chooses; an empty one chooses the serving version.

    Raises:
        InvalidInputError: The step is negative, or the label is unknown.
    """
    kind = selector.WhichOneof("version")
    if kind is None:
        return "serving"
    if kind == "step":
        if selector.step < 0:
            raise InvalidInputError(f"version.step is {selector.step}; a step is a number from 0 up")
        return selector.step
    if selector.label not in _LABELS:
        raise InvalidInputError(f"version.label {selector.label} is unknown; give SERVING, LATEST or BEST")
    return _LABELS[selector.label]


def batch(message: evaluation_pb2.EvaluateBatch, contents: Contents = _NO_CONTENTS) -> Batch:
    """Return a batch to score.

    Args:
        message: The batch.
        contents: The contents of tensors that stand elsewhere; see `understudy.wire.decode`.

    Raises:
        WireError: A tensor is malformed.
        InvalidInputError: There are no inputs, too many examples, or a tensor without elements.
    """
    if not message.inputs:
        raise InvalidInputError("the batch has no inputs; send every input of the model by its name")
    found = Batch(
        inputs=decode_all(message.inputs, contents),
        targets=decode_all(message.targets, contents),
        sample_weights=decode_all(message.sample_weights, contents),
        features=decode_all(message.features, contents),
    )
    _check_lengths("input", found.inputs)
    _check_lengths("target", found.targets)
    _check_lengths("sample weight", found.sample_weights)
    _check_lengths("feature", found.features)
    return found


def replay_inputs(message: evaluation_pb2.ReplayBatch, contents: Contents = _NO_CONTENTS) -> Arrays:
    """Return a batch to answer; the arguments and errors are those of `batch`."""
    if not message.inputs:
        raise InvalidInputError("the batch has no inputs; send every input of the model by its name")
    inputs = decode_all(message.inputs, contents)
    _check_lengths("input", inputs)
    return inputs


def replay_model(name: str, stream: ReplayStream) -> evaluation_pb2.ReplayModel:
    """Return the description of the version that answers a stream."""
    return evaluation_pb2.ReplayModel(
        model_name=name,
        step=stream.step,
        inputs=map(tensor_spec, stream.signature.inputs),
        outputs=map(tensor_spec, stream.signature.outputs),
        output_tasks={output: output_task(task) for output, task in stream.output_tasks.items()},
    )


def replay_answer(prediction: Prediction) -> evaluation_pb2.ReplayResponse:
    """Return the response for one batch of a Replay stream."""
    answer = evaluation_pb2.ReplayAnswer(outputs=encode_all(prediction.outputs))
    return evaluation_pb2.ReplayResponse(answer=answer)


def metric_specs(messages: Sequence[evaluation_pb2.MetricSpec]) -> list[MetricSpec]:
    """Return the requested metrics.

    Raises:
        InvalidInputError: There are too many, a metric has no name, or its configuration is not a JSON object.
    """
    check_count(messages)
    return [MetricSpec(name=_metric_name(message), config=_metric_config(message)) for message in messages]


def outcome(number: int) -> EvaluationOutcome:
    """Return the outcome of an enum's number.

    Raises:
        InvalidInputError: There is no such outcome.
    """
    if number not in _OUTCOMES_BY_NUMBER:
        known = ", ".join(outcome.name for outcome in EvaluationOutcome)
        raise InvalidInputError(f"outcome {number} is unknown; give one of {known}, or none for all")
    return _OUTCOMES_BY_NUMBER[number]


def predict_response(prediction: Prediction) -> prediction_pb2.PredictResponse:
    """Return the response for a prediction."""
    return prediction_pb2.PredictResponse(outputs=encode_all(prediction.outputs), step=prediction.step)


def score(result: EvaluationResult) -> evaluation_pb2.Score:
    """Return the score of one version."""
    return evaluation_pb2.Score(
        metrics=result.metrics,
        examples=result.examples,
        step=result.step,
        waiting_seconds=result.waiting_seconds,
        computing_seconds=result.computing_seconds,
        batches=result.batches,
        notes=result.notes,
        intervals=_intervals(result.intervals),
        slices=[_slice(each) for each in result.slices],
        resamples=result.resamples,
        confidence=result.confidence,
        undefined=result.undefined,
    )


def _slice(part: SliceScore) -> evaluation_pb2.SliceScore:
    return evaluation_pb2.SliceScore(
        name=part.name,
        examples=part.examples,
        metrics=part.metrics,
        intervals=_intervals(part.intervals),
        notes=part.notes,
        undefined=part.undefined,
    )


def _intervals(intervals: Mapping[str, Interval]) -> dict[str, evaluation_pb2.Interval]:
    return {name: _interval(interval) for name, interval in intervals.items()}


def _interval(interval: Interval) -> evaluation_pb2.Interval:
    return evaluation_pb2.Interval(low=interval.low, high=interval.high)


def breakdown_options(options: evaluation_pb2.EvaluateOptions) -> BreakdownOptions:
    """Return which slices and intervals to compute, with defaults for absent fields.

    Raises:
        InvalidInputError: A slice cannot be used, or a value is out of range.
    """
    default = BreakdownOptions()
    return BreakdownOptions(
        slices=parse_slices(options.slices),
        slice_min_examples=options.slice_min_examples if options.HasField("slice_min_examples") else 1,
        resamples=options.resamples,
        confidence=options.confidence if options.HasField("confidence") else default.confidence,
    )


def bootstrap_options(options: evaluation_pb2.CompareOptions) -> BootstrapOptions:
    """Return the options of the bootstrap, with defaults for absent fields.

    Raises:
        InvalidInputError: A value is out of range.
    """
    default = BootstrapOptions()
    return BootstrapOptions(
        resamples=options.resamples if options.HasField("resamples") else default.resamples,
        confidence=options.confidence if options.HasField("confidence") else default.confidence,
        seed=options.seed if options.HasField("seed") else default.seed,
        slices=parse_slices(options.slices),
        slice_min_examples=options.slice_min_examples if options.HasField("slice_min_examples") else 1,
    )


def compare_response(comparison: Comparison) -> evaluation_pb2.CompareResponse:
    """Return the response for a comparison."""
    return evaluation_pb2.CompareResponse(
        versions=[_compared_version(version) for version in comparison.versions],
        resamples=comparison.bootstrap.resamples,
        confidence=comparison.bootstrap.confidence,
        seed=comparison.bootstrap.seed,
        notes=comparison.notes,
    )


def _compared_version(version: ComparedVersion) -> evaluation_pb2.ComparedVersion:
    apart = version.loss_difference
    paired = None if apart is None else evaluation_pb2.LossDifference(mean=apart.mean, low=apart.low, high=apart.high)
    return evaluation_pb2.ComparedVersion(
        score=score(version.score),
        differences=version.differences,
        loss_difference=paired,
        metric_differences=_differences(version.metric_differences),
        slice_differences=[
            evaluation_pb2.SliceDifference(
                name=each.name, examples=each.examples, differences=_differences(each.differences)
            )
            for each in version.slice_differences
        ],
    )


def _differences(differences: Mapping[str, MetricDifference]) -> dict[str, evaluation_pb2.MetricDifference]:
    return {
        name: evaluation_pb2.MetricDifference(value=each.value, low=each.low, high=each.high, p_value=each.p_value)
        for name, each in differences.items()
    }


def record(entry: EvaluationRecord) -> evaluation_pb2.EvaluationRecord:
    """Return one entry of the ledger."""
    return evaluation_pb2.EvaluationRecord(
        sequence=entry.sequence,
        step=entry.step,
        checkpoint_digest=entry.checkpoint_digest,
        dataset=entry.dataset,
        outcome=_OUTCOMES[entry.outcome],
        reason=entry.reason,
        metrics=entry.metrics,
        examples=entry.examples,
        duration_seconds=entry.duration_seconds,
        recorded_at=timestamp(entry.recorded_at),
        notes=entry.notes,
        intervals=_intervals(entry.intervals),
        slices=[_slice(each) for each in entry.slices],
        resamples=entry.resamples,
        confidence=entry.confidence,
        dataset_digest=entry.dataset_digest,
        metric_digest=entry.metric_digest,
        metric_digests=entry.metric_digests,
        undefined=entry.undefined,
        conditions=[_condition(each) for each in entry.conditions],
    )


def _condition(condition: GateCondition) -> evaluation_pb2.GateCondition:
    return evaluation_pb2.GateCondition(
        text=condition.text,
        outcome=_OUTCOMES[condition.outcome],
        value=condition.value,
        baseline_step=condition.baseline_step,
        baseline_value=condition.baseline_value,
        interval=None if condition.interval is None else _interval(condition.interval),
        reason=condition.reason,
    )


def example_kind(number: int) -> ExampleKind:
    """Return the kind of an enum's number.

    Raises:
        InvalidInputError: There is no such kind, or none is given.
    """
    if number not in _EXAMPLE_KINDS:
        raise InvalidInputError(f"kind {number} is unknown; give one of {', '.join(_EXAMPLE_KINDS.values())}")
    return _EXAMPLE_KINDS[number]


def evaluation_tables(tables: EvaluationTables) -> evaluation_pb2.GetEvaluationTablesResponse:
    """Return the tables of an evaluation."""
    return evaluation_pb2.GetEvaluationTablesResponse(
        evaluation=record(tables.record), content_json=json.dumps(tables.content, separators=(",", ":"))
    )


def example_list(found: ExampleList) -> evaluation_pb2.GetExamplesResponse:
    """Return examples of a dataset."""
    batch, changed = found.batch, found.flips
    return evaluation_pb2.GetExamplesResponse(
        evaluation=record(found.record),
        baseline=None if found.baseline is None else record(found.baseline),
        total=found.total,
        indices=found.indices,
        described_json=[json.dumps(one, separators=(",", ":")) for one in found.described],
        inputs={} if batch is None else encode_all(batch.inputs),
        targets={} if batch is None else encode_all(batch.targets),
        sample_weights={} if batch is None else encode_all(batch.sample_weights),
        flips=None
        if changed is None
        else evaluation_pb2.Flips(
            newly_wrong=len(changed.newly_wrong),
            newly_right=len(changed.newly_right),
            both_right=changed.both_right,
            both_wrong=changed.both_wrong,
            p_value=changed.p_value,
        ),
        notes=found.notes,
    )


def tensor_spec(spec: TensorSpec) -> tensor_pb2.TensorSpec:
    """Return one named input or output of a model."""
    shape = [_ANY_LENGTH if length is None else length for length in spec.shape]
    return tensor_pb2.TensorSpec(name=spec.name, dtype=data_type(spec.dtype), shape=shape, positional=spec.positional)


def output_task(task: OutputTask) -> model_pb2.OutputTask:
    """Return what an output is for."""
    threshold = task.threshold if task.kind in {"binary", "multilabel"} else 0.0
    return model_pb2.OutputTask(kind=_OUTPUT_KINDS[task.kind], threshold=threshold)


def version_status(status: VersionStatus) -> model_pb2.VersionStatus:
    """Return the state of one version."""
    return model_pb2.VersionStatus(
        step=status.step, state=_STATES[status.state], error=status.error, serving=status.serving
    )


def checkpoint(info: CheckpointInfo) -> model_pb2.Checkpoint:
    """Return one checkpoint."""
    return model_pb2.Checkpoint(
        step=info.step, created_at=timestamp(info.created_at), digest=info.digest, final=info.final
    )


def timestamp(seconds: float) -> Timestamp:
    """Return a point in time given in seconds since the epoch."""
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def _check_lengths(kind: str, arrays: Arrays) -> None:
    """Limit the examples of a batch: a tensor without elements could have any number without using a byte."""
    for name, array in arrays.items():
        if array.ndim and not array.size:
            raise InvalidInputError(
                f"{kind} {name!r} has shape {list(array.shape)}; every axis of a batch needs a length of at least 1"
            )
        if array.ndim and len(array) > MAX_BATCH_EXAMPLES:
            raise InvalidInputError(
                f"{kind} {name!r} has {len(array)} examples; a batch has at most {MAX_BATCH_EXAMPLES}: send several"
            )


def _metric_name(message: evaluation_pb2.MetricSpec) -> str:
    if not message.name:
        raise InvalidInputError("a metric has no name; give one that keras.metrics.get knows, such as 'accuracy'")
    return message.name


def _metric_config(message: evaluation_pb2.MetricSpec) -> dict[str, object]:
    if not message.config_json:
        return {}
    if len(message.config_json) > MAX_CONFIG_CHARACTERS:
        raise InvalidInputError(
            f"metric {message.name!r}: config_json has {len(message.config_json)} characters; at most "
            f"{MAX_CONFIG_CHARACTERS} are read"
        )
    try:
        config = json.loads(message.config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"metric {message.name!r}: config_json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInputError(
            f"metric {message.name!r}: config_json holds {type(config).__name__}; give an object of keyword arguments"
        )
    return config
