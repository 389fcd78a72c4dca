"""The RPCs of the Open Inference Protocol, and its descriptions of a model, its versions and its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from importlib import metadata

from understudy.evaluator.evaluator_errors import NotReadyError, VersionNotFoundError
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import ArrayForm, ModelDescription, Prediction, TensorSpec, VersionState, VersionStatus
from understudy.oip import inference_pb2, model_config_pb2
from understudy.service.calls.methods import CallContext
from understudy.service.calls.metrics import InferenceStatistics, StepStatistics, Times
from understudy.service.handlers.infer_codec import InferFailure, InferRequest, InferResponse, ResponseSpec
from understudy.service.handlers.inference import (
    DATATYPES,
    MAX_ELEMENTS_AT_ONCE,
    Inference,
    check_kept,
    config_type,
    elements_in,
)
from understudy.service.handlers.prediction_handler import Predictor, StreamProtocol, predict_in_order
from understudy.service.readiness import Readiness, ReadinessState
from understudy.service.served_model import ServedModel, version_of, wanted_outputs

SERVER_NAME = "understudy"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")

_LOADING = "the evaluator decides what is loaded; see understudy.v1.ModelService.Promote and --version-policy"
_SHARED_MEMORY = "shared memory is not supported; send and take tensors in messages"
UNSUPPORTED: Mapping[str, str] = {
    "RepositoryModelLoad": _LOADING,
    "RepositoryModelUnload": _LOADING,
    "SystemSharedMemoryStatus": _SHARED_MEMORY,
    "SystemSharedMemoryRegister": _SHARED_MEMORY,
    "SystemSharedMemoryUnregister": _SHARED_MEMORY,
    "CudaSharedMemoryStatus": _SHARED_MEMORY,
    "CudaSharedMemoryRegister": _SHARED_MEMORY,
    "CudaSharedMemoryUnregister": _SHARED_MEMORY,
    "TraceSetting": "tracing is not supported; /metrics shows where time is spent",
    "LogSettings": "log settings are fixed when the server starts; see --log-level and --log-format",
}
"""The protocol's calls that this server does not support, and what to do instead."""


class InferenceHandler:
    """Runs and describes the model over the protocol. Belongs to the event loop's thread.

    Args:
        model: The model.
        predictor: Starts its predictions.
        settings: The settings of the evaluator.
        statistics: The statistics of inferences.
        readiness: The state of the service.
        stream_depth: The largest number of unanswered requests of one stream.
        executor: Decodes the arrays of large requests, with one thread.
    """

    def __init__(
        self,
        model: ServedModel,
        predictor: Predictor,
        *,
        settings: EvaluatorSettings,
        statistics: InferenceStatistics,
        readiness: Readiness,
        stream_depth: int,
        executor: Executor,
    ) -> None:
        self._model = model
        self._predictor = predictor
        self._settings = settings
        self._statistics = statistics
        self._readiness = readiness
        self._stream_depth = stream_depth
        self._executor = executor

    async def server_live(
        self, request: inference_pb2.ServerLiveRequest, call: CallContext
    ) -> inference_pb2.ServerLiveResponse:
        """Report that the process responds."""
        del request, call
        return inference_pb2.ServerLiveResponse(live=True)

    async def server_ready(
        self, request: inference_pb2.ServerReadyRequest, call: CallContext
    ) -> inference_pb2.ServerReadyResponse:
        """Report whether a version is serving."""
        del request, call
        return inference_pb2.ServerReadyResponse(ready=self._readiness.state is ReadinessState.READY)

    async def model_ready(
        self, request: inference_pb2.ModelReadyRequest, call: CallContext
    ) -> inference_pb2.ModelReadyResponse:
        """Report whether a version is loaded."""
        del call
        self._model.check_name(request.name)
        version = version_of(request.version)
        try:
            self._model.evaluator.metadata(version)
        except (NotReadyError, VersionNotFoundError):
            return inference_pb2.ModelReadyResponse(ready=False)
        return inference_pb2.ModelReadyResponse(ready=True)

    async def server_metadata(
        self, request: inference_pb2.ServerMetadataRequest, call: CallContext
    ) -> inference_pb2.ServerMetadataResponse:
        """Describe the server."""
        del request, call
        return inference_pb2.ServerMetadataResponse(
            name=SERVER_NAME, version=metadata.version(SERVER_NAME), extensions=EXTENSIONS
        )

    async def model_metadata(
        self, request: inference_pb2.ModelMetadataRequest, call: CallContext
    ) -> inference_pb2.ModelMetadataResponse:
        """Describe the inputs and outputs of a version."""
        del call
        self._model.check_name(request.name)
        described = self._model.evaluator.metadata(version_of(request.version))
        return _metadata_of(request.name, self._model.loaded_steps(), described)

    async def model_config(
        self, request: inference_pb2.ModelConfigRequest, call: CallContext
    ) -> inference_pb2.ModelConfigResponse:
        """Return the configuration of a version."""
        del call
        self._model.check_name(request.name)
        described = self._model.evaluator.metadata(version_of(request.version))
        config = _config_of(
            request.name, described, self._settings, max_batch_size=self._model.evaluator.max_batch_size
        )
        return inference_pb2.ModelConfigResponse(config=config)

    async def model_statistics(
        self, request: inference_pb2.ModelStatisticsRequest, call: CallContext
    ) -> inference_pb2.ModelStatisticsResponse:
        """Return the statistics of one version, or of each loaded version."""
        del call
        if request.name:
            self._model.check_name(request.name)
        steps = (
            [self._model.evaluator.metadata(version_of(request.version)).step]
            if request.version
            else self._newest_first()
        )
        return inference_pb2.ModelStatisticsResponse(
            model_stats=[_statistics_of(self._model.name, step, self._statistics.of(step)) for step in steps]
        )

    async def repository_index(
        self, request: inference_pb2.RepositoryIndexRequest, call: CallContext
    ) -> inference_pb2.RepositoryIndexResponse:
        """List every version."""
        del call
        return inference_pb2.RepositoryIndexResponse(
            models=[
                _index_entry(self._model.name, status)
                for status in self._model.evaluator.status()
                if status.state is VersionState.AVAILABLE or not request.ready
            ]
        )

    async def model_infer(self, request: InferRequest, call: CallContext) -> InferResponse:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        spec, begun = request.spec, self._begin(request, call)
        del request  # its message does not wait with the call
        return _response(spec, await begun)

    def model_stream_infer(
        self, requests: AsyncIterator[InferRequest], call: CallContext
    ) -> AsyncGenerator[InferResponse | InferFailure, None]:
        """Predict every request of a stream; responses are in order, and a failure ends its own request only."""
        protocol = StreamProtocol[InferRequest, ResponseSpec, InferResponse | InferFailure](
            note=lambda request: request.spec,
            begin=lambda request: self._begin_next(request, call),
            answer=_response,
            fail=InferFailure,
        )
        return predict_in_order(requests, protocol, depth=self._stream_depth)

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Evaluator.check_admission`."""
        self._model.evaluator.check_admission(call.deadline, caller=call.caller_key)

    def check_model(self, name: str) -> None:
        """Raise UnknownModelError unless this is the model's name."""
        self._model.check_name(name)

    def check_forms(self, forms: Mapping[str, ArrayForm], model_version: str) -> None:
        """Refuse inputs that do not fit, before decoding; raise as `Evaluator.check_forms`. Thread-safe."""
        self._model.evaluator.check_forms(forms, version=version_of(model_version))

    def infer(self, inference: Inference, call: CallContext) -> asyncio.Future[Prediction]:
        """Start a prediction; raise what `Predictor.begin` raises, and InvalidInputError for long names."""
        if inference.id or inference.outputs:
            check_kept(inference.id, inference.outputs)
        return self._predictor.begin(
            inference.inputs,
            call,
            version=version_of(inference.model_version),
            deadline=inference.deadline(call.deadline),
        )

    def _begin_next(self, request: InferRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_admission(call)  # each message of a stream is a request
        return self._begin(request, call)

    def _begin(self, request: InferRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_model(request.model_name)
        forms = request.forms_to_build()
        if forms is None:
            return self.infer(request.inference(), call)
        self.check_forms(forms, request.model_version)
        if elements_in(forms) <= MAX_ELEMENTS_AT_ONCE:
            return self.infer(request.inference(), call)
        return asyncio.ensure_future(self._begin_on_a_thread(request, call))

    async def _begin_on_a_thread(self, request: InferRequest, call: CallContext) -> Prediction:
        loop = asyncio.get_running_loop()
        inference = await loop.run_in_executor(self._executor, request.inference)
        del request
        begun = self.infer(inference, call)
        del inference
        return await begun

    def _newest_first(self) -> list[int]:
        return self._model.loaded_steps()[::-1]


def _response(spec: ResponseSpec, prediction: Prediction) -> InferResponse:
    """Return the response with the requested outputs; raise InvalidInputError if one does not exist."""
    if spec.outputs:
        prediction = prediction._replace(outputs=wanted_outputs(prediction, spec.outputs))
    return InferResponse(spec, prediction)


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


def _metadata_of(name: str, steps: Sequence[int], described: ModelDescription) -> inference_pb2.ModelMetadataResponse:
    """Return the inputs and outputs of a model."""
    return inference_pb2.ModelMetadataResponse(
        name=name,
        versions=[str(step) for step in steps],
        platform=PLATFORM,
        inputs=[_tensor(spec) for spec in described.signature.inputs],
        outputs=[_tensor(spec) for spec in described.signature.outputs],
    )


def _config_of(
    name: str, described: ModelDescription, settings: EvaluatorSettings, *, max_batch_size: int
) -> model_config_pb2.ModelConfig:
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
        max_batch_size=max_batch_size,
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
            max_queue_delay_microseconds=round((settings.max_batch_delay_ms or 0.0) * _MICROSECONDS_PER_MILLISECOND),
            preserve_ordering=True,
        ),
    )


def _index_entry(name: str, status: VersionStatus) -> inference_pb2.RepositoryIndexResponse.ModelIndex:
    """Return the state of one version."""
    return inference_pb2.RepositoryIndexResponse.ModelIndex(
        name=name, version=str(status.step), state=_STATES[status.state], reason=status.error
    )


def _statistics_of(name: str, step: int, statistics: StepStatistics) -> inference_pb2.ModelStatistics:
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
