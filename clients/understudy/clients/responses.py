"""Converts response messages into the clients' types. Performs no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Literal, cast

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.timestamp_pb2 import Timestamp

from understudy.clients.client_errors import InternalError, UnderstudyError, error_from_message
from understudy.clients.evaluation_types import (
    ComparedVersion,
    CompareResult,
    EvaluateResult,
    Evaluation,
    EvaluationOutcome,
    EvaluationTables,
    ExampleList,
    Flips,
    GateCondition,
    Interval,
    LossDifference,
    MetricDifference,
    Progress,
    SliceDifference,
    SliceScore,
)
from understudy.clients.types import (
    Checkpoint,
    FleetServer,
    FleetStatus,
    ModelMetadata,
    ModelStatus,
    OutputTask,
    PredictResult,
    Promotion,
    ReplayedModel,
    Rollout,
    ServingDecision,
    ShadowCounts,
    TensorSpec,
    VersionState,
    VersionStatus,
)
from understudy.v1 import evaluation_pb2, fleet_pb2, model_pb2, prediction_pb2, tensor_pb2
from understudy.wire import decode_all, dtype_name

_STATE_PREFIX: Final = "VERSION_STATE_"
_OUTCOME_PREFIX: Final = "EVALUATION_OUTCOME_"


@contextmanager
def _readable() -> Iterator[None]:
    """Report a malformed tensor, or an enum value that a newer server may have added."""
    try:
        yield
    except ValueError as error:
        raise InternalError(f"the server sent what this client cannot read: {error}") from error


@_readable()
def prediction(response: prediction_pb2.PredictResponse) -> PredictResult:
    """Read a Predict response."""
    return PredictResult(outputs=decode_all(response.outputs), step=response.step)


def streamed_prediction(response: prediction_pb2.PredictStreamResponse) -> PredictResult | UnderstudyError:
    """Read one response of a PredictStream: the result, or why this one request failed."""
    if response.HasField("error"):
        return error_from_message(response.error)
    return prediction(response.response)


def score(message: evaluation_pb2.Score) -> EvaluateResult:
    """Read the score of one version."""
    return EvaluateResult(
        metrics=dict(message.metrics),
        examples=message.examples,
        batches=message.batches,
        step=message.step,
        waiting_seconds=message.waiting_seconds,
        computing_seconds=message.computing_seconds,
        notes=tuple(message.notes),
        intervals=_intervals(message.intervals),
        slices=tuple(_slice(each) for each in message.slices),
        resamples=message.resamples,
        confidence=message.confidence,
        undefined=dict(message.undefined),
    )


def _slice(message: evaluation_pb2.SliceScore) -> SliceScore:
    return SliceScore(
        name=message.name,
        examples=message.examples,
        metrics=dict(message.metrics),
        intervals=_intervals(message.intervals),
        notes=tuple(message.notes),
        undefined=dict(message.undefined),
    )


def _intervals(messages: Mapping[str, evaluation_pb2.Interval]) -> dict[str, Interval]:
    return {name: _interval(message) for name, message in messages.items()}


def _interval(message: evaluation_pb2.Interval) -> Interval:
    return Interval(low=message.low, high=message.high)


def comparison(response: evaluation_pb2.CompareResponse) -> CompareResult:
    """Read a Compare response."""
    return CompareResult(
        versions=tuple(_compared(version) for version in response.versions),
        resamples=response.resamples,
        confidence=response.confidence,
        seed=response.seed,
        notes=tuple(response.notes),
    )


def _compared(version: evaluation_pb2.ComparedVersion) -> ComparedVersion:
    paired = version.loss_difference
    return ComparedVersion(
        score=score(version.score),
        differences=dict(version.differences),
        loss_difference=LossDifference(mean=paired.mean, low=paired.low, high=paired.high)
        if version.HasField("loss_difference")
        else None,
        metric_differences=_differences(version.metric_differences),
        slice_differences=tuple(
            SliceDifference(name=each.name, examples=each.examples, differences=_differences(each.differences))
            for each in version.slice_differences
        ),
    )


def _differences(messages: Mapping[str, evaluation_pb2.MetricDifference]) -> dict[str, MetricDifference]:
    return {
        name: MetricDifference(value=message.value, low=message.low, high=message.high, p_value=message.p_value)
        for name, message in messages.items()
    }


@_readable()
def evaluation(record: evaluation_pb2.EvaluationRecord) -> Evaluation:
    """Read an entry of the ledger."""
    return Evaluation(
        sequence=record.sequence,
        step=record.step,
        checkpoint_digest=record.checkpoint_digest,
        dataset=record.dataset,
        outcome=_outcome(record.outcome),
        reason=record.reason,
        metrics=dict(record.metrics),
        examples=record.examples,
        duration_seconds=record.duration_seconds,
        recorded_at=_time(record.recorded_at),
        notes=tuple(record.notes),
        intervals=_intervals(record.intervals),
        slices=tuple(_slice(each) for each in record.slices),
        resamples=record.resamples,
        confidence=record.confidence,
        dataset_digest=record.dataset_digest,
        metric_digest=record.metric_digest,
        metric_digests=dict(record.metric_digests),
        undefined=dict(record.undefined),
        conditions=tuple(_condition(each) for each in record.conditions),
    )


def evaluation_tables(response: evaluation_pb2.GetEvaluationTablesResponse) -> EvaluationTables:
    """Read a GetEvaluationTables response."""
    with _readable():
        content = json.loads(response.content_json)
    return EvaluationTables(evaluation=evaluation(response.evaluation), content=content)


@_readable()
def example_list(response: evaluation_pb2.GetExamplesResponse) -> ExampleList:
    """Read a GetExamples response."""
    return ExampleList(
        evaluation=evaluation(response.evaluation),
        baseline=evaluation(response.baseline) if response.HasField("baseline") else None,
        total=response.total,
        indices=tuple(response.indices),
        described=tuple(json.loads(text) for text in response.described_json),
        inputs=decode_all(response.inputs),
        targets=decode_all(response.targets),
        sample_weights=decode_all(response.sample_weights),
        flips=_flips(response.flips) if response.HasField("flips") else None,
        notes=tuple(response.notes),
    )


def _flips(message: evaluation_pb2.Flips) -> Flips:
    return Flips(
        newly_wrong=message.newly_wrong,
        newly_right=message.newly_right,
        both_right=message.both_right,
        both_wrong=message.both_wrong,
        p_value=message.p_value,
    )


def _condition(message: evaluation_pb2.GateCondition) -> GateCondition:
    return GateCondition(
        text=message.text,
        outcome=_outcome(message.outcome),
        value=message.value,
        baseline_step=message.baseline_step if message.HasField("baseline_step") else None,
        baseline_value=message.baseline_value if message.HasField("baseline_value") else None,
        interval=_interval(message.interval) if message.HasField("interval") else None,
        reason=message.reason,
    )


def _name(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """Return the name of a value without the enum's prefix; a newer server may have values that this client lacks."""
    value = enum.values_by_number.get(number)
    return "UNKNOWN" if value is None else value.name.removeprefix(prefix)


def _outcome(number: evaluation_pb2.EvaluationOutcome.ValueType) -> EvaluationOutcome:
    name = _name(evaluation_pb2.EvaluationOutcome.DESCRIPTOR, number, _OUTCOME_PREFIX).lower()
    return cast("EvaluationOutcome", name)


def dataset_event(event: evaluation_pb2.EvaluateDatasetResponse) -> Progress | Evaluation:
    """Read one event of an EvaluateDataset stream."""
    if event.HasField("record"):
        return evaluation(event.record)
    progress = event.progress
    return Progress(
        examples=progress.examples,
        total_examples=progress.total_examples if progress.HasField("total_examples") else None,
    )


@_readable()
def metadata(response: model_pb2.GetModelMetadataResponse) -> ModelMetadata:
    """Read a GetModelMetadata response."""
    return ModelMetadata(
        model_name=response.model_name,
        step=response.step,
        inputs=_specs(response.inputs),
        outputs=_specs(response.outputs),
        replicas=response.replicas,
        devices=tuple(response.devices),
        datasets=tuple(response.datasets),
        notes=tuple(response.notes),
        output_tasks=_output_tasks(response.output_tasks),
    )


def replayed_model(message: evaluation_pb2.ReplayModel) -> ReplayedModel:
    """Read the first response of a Replay stream."""
    return ReplayedModel(
        model_name=message.model_name,
        step=message.step,
        inputs=_specs(message.inputs),
        outputs=_specs(message.outputs),
        output_tasks=_output_tasks(message.output_tasks),
    )


def replayed(message: evaluation_pb2.ReplayAnswer, step: int) -> PredictResult:
    """Read an answer of a Replay stream."""
    return PredictResult(outputs=decode_all(message.outputs), step=step)


def _output_tasks(messages: Mapping[str, model_pb2.OutputTask]) -> dict[str, OutputTask]:
    return {
        name: OutputTask(kind=_KINDS.get(task.kind, "unknown"), threshold=task.threshold)
        for name, task in messages.items()
    }


_KINDS: Mapping[int, Literal["binary", "multilabel", "multiclass", "regression"]] = {
    model_pb2.OUTPUT_KIND_BINARY: "binary",
    model_pb2.OUTPUT_KIND_MULTI_LABEL: "multilabel",
    model_pb2.OUTPUT_KIND_MULTI_CLASS: "multiclass",
    model_pb2.OUTPUT_KIND_REGRESSION: "regression",
}


@_readable()
def status(response: model_pb2.GetModelStatusResponse) -> ModelStatus:
    """Read a GetModelStatus response."""
    return ModelStatus(
        model_name=response.model_name,
        versions=tuple(_version(version) for version in response.versions),
        serving_step=response.serving_step if response.HasField("serving_step") else None,
        latest_step=response.latest_step if response.HasField("latest_step") else None,
        best_step=response.best_step if response.HasField("best_step") else None,
        pinned_step=response.pinned_step if response.HasField("pinned_step") else None,
        problem=response.problem,
    )


def checkpoints(response: model_pb2.ListCheckpointsResponse) -> tuple[Checkpoint, ...]:
    """Read a ListCheckpoints response."""
    return tuple(
        Checkpoint(step=each.step, created_at=_time(each.created_at), digest=each.digest, final=each.final)
        for each in response.checkpoints
    )


def promotion(response: model_pb2.PromoteResponse) -> Promotion:
    """Read a Promote response."""
    return Promotion(
        serving_step=response.serving_step,
        previous_step=response.previous_step if response.HasField("previous_step") else None,
        pinned_step=response.pinned_step if response.HasField("pinned_step") else None,
    )


def fleet(response: fleet_pb2.GetFleetResponse) -> FleetStatus:
    """Read a GetFleet response."""
    decided = response.decision
    return FleetStatus(
        decision=ServingDecision(step=decided.step, digest=decided.digest, sequence=decided.sequence)
        if response.HasField("decision")
        else None,
        servers=tuple(_fleet_server(each) for each in response.servers),
        rollout=_rollout(response.rollout) if response.HasField("rollout") else None,
    )


def _rollout(rollout: fleet_pb2.Rollout) -> Rollout:
    return Rollout(
        step=rollout.step,
        digest=rollout.digest,
        servers=tuple(rollout.servers),
        elapsed_seconds=rollout.elapsed_seconds,
        after_seconds=rollout.after_seconds,
        shadow=_shadow_counts(rollout.shadow) if rollout.HasField("shadow") else None,
        least_requests=rollout.least_requests,
    )


def _shadow_counts(counts: fleet_pb2.ShadowCounts) -> ShadowCounts:
    return ShadowCounts(
        compared=counts.compared,
        disagreeing=counts.disagreeing,
        not_finite=counts.not_finite,
        errors=counts.errors,
        dropped=counts.dropped,
        largest_difference=counts.largest_difference,
        seconds=counts.seconds,
        serving_seconds=counts.serving_seconds,
    )


def _fleet_server(server: fleet_pb2.FleetServer) -> FleetServer:
    return FleetServer(
        name=server.name,
        address=server.address,
        software_version=server.software_version,
        connected=server.connected,
        current=server.current,
        serving_step=server.serving_step if server.HasField("serving_step") else None,
        serving_digest=server.serving_digest,
        serving_seconds=server.serving_seconds if server.HasField("serving_seconds") else None,
        lag_seconds=server.lag_seconds if server.HasField("lag_seconds") else None,
        reason=server.reason,
        canary=server.canary,
    )


def _version(version: model_pb2.VersionStatus) -> VersionStatus:
    state = _name(model_pb2.VersionState.DESCRIPTOR, version.state, _STATE_PREFIX)
    return VersionStatus(
        step=version.step, state=cast("VersionState", state), error=version.error, serving=version.serving
    )


def _specs(specs: Iterable[tensor_pb2.TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=spec.name,
            dtype=dtype_name(spec.dtype),
            shape=tuple(None if length < 0 else length for length in spec.shape),
            positional=spec.positional,
        )
        for spec in specs
    )


def _time(timestamp: Timestamp) -> datetime:
    return timestamp.ToDatetime(tzinfo=UTC)
