"""The protocol's descriptions of a model: tensors, configuration, versions, statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import ModelDescription, TensorSpec, VersionState, VersionStatus
from understudy.oip import inference_pb2, model_config_pb2
from understudy.service.evaluator_metrics import StepStatistics, Times
from understudy.service.handlers.oip.tensors import DATATYPES, config_type

PLATFORM = "keras"
BACKEND = "tensorflow"

_ANY_LENGTH = -1
_NANOSECONDS = 1e9
_MILLISECONDS = 1e3
_MICROSECONDS_PER_MILLISECOND = 1e3

_STATES: Mapping[VersionState, str] = {
    VersionState.START: "UNAVAILABLE",
    VersionState.LOADING: "LOADING",
    VersionState.AVAILABLE: "READY",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.END: "UNAVAILABLE",
}

_Tensor = inference_pb2.ModelMetadataResponse.TensorMetadata


def model_metadata(name: str, steps: Sequence[int], described: ModelDescription) -> inference_pb2.ModelMetadataResponse:
    """Return the inputs and outputs of a model."""
    return inference_pb2.ModelMetadataResponse(
        name=name,
        versions=[str(step) for step in steps],
        platform=PLATFORM,
        inputs=[_tensor(spec) for spec in described.signature.inputs],
        outputs=[_tensor(spec) for spec in described.signature.outputs],
    )


def model_config(name: str, described: ModelDescription, settings: EvaluatorSettings) -> model_config_pb2.ModelConfig:
    """Return the configuration of a version."""
    kinds = model_config_pb2.ModelInstanceGroup
    on_gpus = any("GPU" in device for device in described.devices)
    return model_config_pb2.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=BACKEND,
        version_policy=model_config_pb2.ModelVersionPolicy(
            latest=model_config_pb2.ModelVersionPolicy.Latest(num_versions=settings.slots)
        ),
        max_batch_size=settings.max_batch_size,
        input=[
            model_config_pb2.ModelInput(name=spec.name, data_type=config_type(spec.dtype), dims=_shape(spec)[1:])
            for spec in described.signature.inputs
        ],
        output=[
            model_config_pb2.ModelOutput(name=spec.name, data_type=config_type(spec.dtype), dims=_shape(spec)[1:])
            for spec in described.signature.outputs
        ],
        instance_group=[
            kinds(name="replicas", count=described.replicas, kind=kinds.KIND_GPU if on_gpus else kinds.KIND_CPU)
        ],
        dynamic_batching=model_config_pb2.ModelDynamicBatching(
            max_queue_delay_microseconds=round(settings.max_batch_delay_ms * _MICROSECONDS_PER_MILLISECOND),
            preserve_ordering=True,
        ),
    )


def index_entry(name: str, status: VersionStatus) -> inference_pb2.RepositoryIndexResponse.ModelIndex:
    """Return the state of one version."""
    return inference_pb2.RepositoryIndexResponse.ModelIndex(
        name=name, version=str(status.step), state=_STATES[status.state], reason=status.error
    )


def model_statistics(name: str, step: int, statistics: StepStatistics) -> inference_pb2.ModelStatistics:
    """Return the statistics of one version."""
    done = statistics.succeeded.count
    return inference_pb2.ModelStatistics(
        name=name,
        version=str(step),
        last_inference=round(statistics.last_at * _MILLISECONDS),
        inference_count=statistics.examples,
        execution_count=sum(batches.count for batches in statistics.batches.values()),
        inference_stats=inference_pb2.InferStatistics(
            success=_duration(statistics.succeeded),
            fail=_duration(statistics.failed),
            queue=_duration(statistics.queued),
            compute_input=_no_time(done),
            compute_infer=_duration(statistics.computed),
            compute_output=_no_time(done),
            cache_hit=_no_time(0),
            cache_miss=_no_time(0),
        ),
        batch_stats=[
            _batch_statistics(examples, statistics.batches[examples]) for examples in sorted(statistics.batches)
        ],
    )


def _batch_statistics(examples: int, batches: Times) -> inference_pb2.InferBatchStatistics:
    return inference_pb2.InferBatchStatistics(
        batch_size=examples,
        compute_input=_no_time(batches.count),
        compute_infer=_duration(batches),
        compute_output=_no_time(batches.count),
    )


def _duration(times: Times) -> inference_pb2.StatisticDuration:
    return inference_pb2.StatisticDuration(count=times.count, ns=round(times.seconds * _NANOSECONDS))


def _no_time(count: int) -> inference_pb2.StatisticDuration:
    return inference_pb2.StatisticDuration(count=count, ns=0)


def _tensor(spec: TensorSpec) -> _Tensor:
    return _Tensor(name=spec.name, datatype=DATATYPES[spec.dtype], shape=_shape(spec))


def _shape(spec: TensorSpec) -> list[int]:
    return [_ANY_LENGTH if length is None else length for length in spec.shape]
