"""A small gRPC server that implements the protocol with NumPy functions, to test clients with every kind of answer.

Its one model maps ``image``, float32 ``[rows, width]``, to ``doubled``. Tests configure its behaviour.
"""

# ruff: noqa: N802 - the protocol names its methods

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from understudy.v1 import (
    evaluation_pb2,
    evaluation_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2,
    prediction_pb2_grpc,
    tensor_pb2,
)
from understudy.wire import data_type, decode, decode_all, encode

STEP = 120
PREVIOUS_STEP = 80
PATIENCE_SECONDS = 60
MAX_MESSAGE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a call should end."""

    code: grpc.StatusCode
    message: str = "told to fail"
    retry_after_seconds: float | None = None


@dataclass
class Script:
    """The tests' instructions for the peer, and its observations."""

    failures: deque[Failure | None] = field(default_factory=deque)
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    at_gate: threading.Event = field(default_factory=threading.Event)
    calls: Counter[str] = field(default_factory=Counter)
    requests: list[Any] = field(default_factory=list)
    metadata: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ledger: list[evaluation_pb2.EvaluationRecord] = field(default_factory=list)
    watch_breaks_after: deque[int] = field(default_factory=deque)
    input_names: tuple[str, ...] = ("image",)
    output_names: tuple[str, ...] = ("doubled",)
    positional: bool = False
    input_dtype: str = "float32"
    serving_step: int | None = STEP

    def __post_init__(self) -> None:
        self.gate.set()
        self.grown = threading.Condition()

    def record(self, step: int, **values: Any) -> None:
        """Add an entry to the ledger, by default a score on ``test``."""
        with self.grown:
            entry = {"dataset": "test", "outcome": evaluation_pb2.EVALUATION_OUTCOME_SCORED, **values}
            self.ledger.append(evaluation_pb2.EvaluationRecord(sequence=len(self.ledger) + 1, step=step, **entry))
            self.grown.notify_all()


def scored_inputs(script: Script) -> list[tensor_pb2.Tensor]:
    """Return the first input of each batch that was scored."""
    batches = [request.batch for request in script.requests if isinstance(request, evaluation_pb2.EvaluateRequest)]
    return [batch.inputs[script.input_names[0]] for batch in batches if batch.inputs]


class Peer(
    prediction_pb2_grpc.PredictionServiceServicer,
    evaluation_pb2_grpc.EvaluationServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    metrics_pb2_grpc.MetricsServiceServicer,
):
    """The server; a context manager. Port 0 selects a free one; with credentials it speaks TLS."""

    def __init__(
        self, script: Script | None = None, *, port: int = 0, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self.script = script or Script()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=8),
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
        )
        self._health = health.HealthServicer()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        prediction_pb2_grpc.add_PredictionServiceServicer_to_server(self, self._server)
        evaluation_pb2_grpc.add_EvaluationServiceServicer_to_server(self, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        address = f"127.0.0.1:{port}"
        self.port = (
            self._server.add_insecure_port(address)
            if credentials is None
            else self._server.add_secure_port(address, credentials)
        )
        self.target = f"127.0.0.1:{self.port}"

    def stop_serving(self) -> None:
        """Answer NOT_SERVING to health checks from now on."""
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.script.gate.set()
        self._server.stop(grace=0).wait(PATIENCE_SECONDS)

    def Predict(self, request: prediction_pb2.PredictRequest, context: Any) -> prediction_pb2.PredictResponse:
        self._enter("Predict", request, context)
        self._wait_at_gate(context)
        complaint = self._complaint(request)
        if complaint is not None:
            _abort(context, complaint)
        return self._predicted(request)

    def PredictStream(self, request_iterator: Any, context: Any) -> Iterator[prediction_pb2.PredictStreamResponse]:
        self._enter("PredictStream", None, context)
        for message in request_iterator:
            self._wait_at_gate(context)
            self.script.requests.append(message)
            complaint = self._complaint(message.request)
            if complaint is None:
                yield prediction_pb2.PredictStreamResponse(response=self._predicted(message.request))
            else:
                yield prediction_pb2.PredictStreamResponse(error=_status(complaint))

    def Evaluate(self, request_iterator: Any, context: Any) -> evaluation_pb2.EvaluateResponse:
        """Return the weighted mean squared error of the doubled inputs."""
        self._enter("Evaluate", None, context)
        loss = weight = 0.0
        examples = batches = 0
        for message in request_iterator:
            self._wait_at_gate(context)
            self.script.requests.append(message)
            if message.HasField("options"):
                continue
            if not message.batch.targets:
                _abort(context, Failure(code=grpc.StatusCode.INVALID_ARGUMENT, message="there are no targets"))
            x = decode(message.batch.inputs[self.script.input_names[0]])
            lone = len(self.script.output_names) == 1
            y = decode(message.batch.targets["targets" if lone else self.script.output_names[0]])
            weights = message.batch.sample_weights
            w = decode(weights["sample_weights"]) if weights else np.ones(len(x))
            loss += float(np.sum(w * np.mean((2 * x - y) ** 2, axis=1)))
            weight += float(np.sum(w))
            examples, batches = examples + len(x), batches + 1
        if not batches:
            _abort(context, Failure(code=grpc.StatusCode.INVALID_ARGUMENT, message="a stream without a batch"))
        score = evaluation_pb2.Score(
            metrics={"loss": loss / weight}, examples=examples, batches=batches, step=STEP, notes=["by NumPy"]
        )
        return evaluation_pb2.EvaluateResponse(score=score)

    def Compare(self, request_iterator: Any, context: Any) -> evaluation_pb2.CompareResponse:
        """Refuse: comparisons are tested on the real server."""
        self._enter("Compare", next(request_iterator), context)
        self._wait_at_gate(context)
        _abort(context, Failure(code=grpc.StatusCode.UNIMPLEMENTED, message="no comparing here"))

    def Replay(self, request_iterator: Any, context: Any) -> Iterator[evaluation_pb2.ReplayResponse]:
        self._enter("Replay", next(request_iterator), context)
        described = self._metadata()
        model = evaluation_pb2.ReplayModel(step=STEP, inputs=described.inputs, outputs=described.outputs)
        yield evaluation_pb2.ReplayResponse(model=model)
        for message in request_iterator:
            self._wait_at_gate(context)
            answer = self._predicted(prediction_pb2.PredictRequest(inputs=message.batch.inputs))
            yield evaluation_pb2.ReplayResponse(answer=evaluation_pb2.ReplayAnswer(outputs=answer.outputs))

    def EvaluateDataset(
        self, request: evaluation_pb2.EvaluateDatasetRequest, context: Any
    ) -> Iterator[evaluation_pb2.EvaluateDatasetResponse]:
        self._enter("EvaluateDataset", request, context)
        for done in (10, 20):
            progress = evaluation_pb2.EvaluationProgress(examples=done, total_examples=20)
            yield evaluation_pb2.EvaluateDatasetResponse(progress=progress)
        self.script.record(_step_of(request), dataset=request.dataset, metrics={"loss": 0.5}, examples=20)
        yield evaluation_pb2.EvaluateDatasetResponse(record=self.script.ledger[-1])

    def ListEvaluations(
        self, request: evaluation_pb2.ListEvaluationsRequest, context: Any
    ) -> evaluation_pb2.ListEvaluationsResponse:
        """Return pages of two."""
        self._enter("ListEvaluations", request, context)
        start = int(request.page_token or 0)
        page = self.script.ledger[start : start + 2]
        more = start + 2 < len(self.script.ledger)
        return evaluation_pb2.ListEvaluationsResponse(evaluations=page, next_page_token=str(start + 2) if more else "")

    def GetEvaluationTables(
        self, request: evaluation_pb2.GetEvaluationTablesRequest, context: Any
    ) -> evaluation_pb2.GetEvaluationTablesResponse:
        """Return tables that hold only their number of examples."""
        self._enter("GetEvaluationTables", request, context)
        return evaluation_pb2.GetEvaluationTablesResponse(evaluation=_scored(request), content_json='{"examples": 20}')

    def GetExamples(
        self, request: evaluation_pb2.GetExamplesRequest, context: Any
    ) -> evaluation_pb2.GetExamplesResponse:
        """Return one example."""
        self._enter("GetExamples", request, context)
        return evaluation_pb2.GetExamplesResponse(
            evaluation=_scored(request), total=1, indices=[7], described_json=['{"loss": 0.5}']
        )

    def WatchEvaluations(
        self, request: evaluation_pb2.WatchEvaluationsRequest, context: Any
    ) -> Iterator[evaluation_pb2.WatchEvaluationsResponse]:
        """Yield entries until the test breaks the stream off."""
        self._enter("WatchEvaluations", request, context)
        script = self.script
        context.add_callback(self._wake)
        remaining = script.watch_breaks_after.popleft() if script.watch_breaks_after else None
        sequence = request.after_sequence
        while context.is_active():
            if remaining == 0:
                _abort(context, Failure(code=grpc.StatusCode.UNAVAILABLE, message="the watch broke off"))
            with script.grown:
                while len(script.ledger) <= sequence:
                    if not script.grown.wait(PATIENCE_SECONDS) or not context.is_active():
                        return
                record = script.ledger[sequence]
            yield evaluation_pb2.WatchEvaluationsResponse(evaluation=record)
            sequence += 1
            remaining = None if remaining is None else remaining - 1

    def GetModelMetadata(
        self, request: model_pb2.GetModelMetadataRequest, context: Any
    ) -> model_pb2.GetModelMetadataResponse:
        self._enter("GetModelMetadata", request, context)
        return self._metadata()

    def _metadata(self) -> model_pb2.GetModelMetadataResponse:
        float32 = tensor_pb2.DATA_TYPE_FLOAT32
        return model_pb2.GetModelMetadataResponse(
            model_name="doubler",
            step=STEP,
            inputs=[
                tensor_pb2.TensorSpec(
                    name=name,
                    dtype=data_type(self.script.input_dtype),
                    shape=[-1, 4],
                    positional=self.script.positional,
                )
                for name in self.script.input_names
            ],
            outputs=[
                tensor_pb2.TensorSpec(name=name, dtype=float32, shape=[-1, 4]) for name in self.script.output_names
            ],
            replicas=2,
            devices=["CPU:0", "CPU:1"],
            datasets=["test"],
        )

    def GetModelStatus(
        self, request: model_pb2.GetModelStatusRequest, context: Any
    ) -> model_pb2.GetModelStatusResponse:
        self._enter("GetModelStatus", request, context)
        if self.script.serving_step is None:
            return model_pb2.GetModelStatusResponse(model_name="doubler")
        available, end = model_pb2.VERSION_STATE_AVAILABLE, model_pb2.VERSION_STATE_END
        return model_pb2.GetModelStatusResponse(
            model_name="doubler",
            versions=[
                model_pb2.VersionStatus(step=STEP, state=available, serving=True),
                model_pb2.VersionStatus(step=PREVIOUS_STEP, state=end, error="step 80: model.keras is cut short"),
            ],
            serving_step=self.script.serving_step,
            latest_step=STEP,
        )

    def ListCheckpoints(
        self, request: model_pb2.ListCheckpointsRequest, context: Any
    ) -> model_pb2.ListCheckpointsResponse:
        self._enter("ListCheckpoints", request, context)
        checkpoint = model_pb2.Checkpoint(step=STEP, digest="d" * 64, final=True)
        checkpoint.created_at.FromSeconds(1_000_000)
        return model_pb2.ListCheckpointsResponse(checkpoints=[checkpoint])

    def Promote(self, request: model_pb2.PromoteRequest, context: Any) -> model_pb2.PromoteResponse:
        self._enter("Promote", request, context)
        match request.action:
            case model_pb2.PROMOTE_ACTION_PIN:
                step = _step_of(request)
                return model_pb2.PromoteResponse(serving_step=step, previous_step=STEP, pinned_step=step)
            case model_pb2.PROMOTE_ACTION_ROLL_BACK:
                return model_pb2.PromoteResponse(
                    serving_step=PREVIOUS_STEP, previous_step=STEP, pinned_step=PREVIOUS_STEP
                )
            case _:
                return model_pb2.PromoteResponse(serving_step=STEP)

    def GetMetrics(self, request: metrics_pb2.GetMetricsRequest, context: Any) -> metrics_pb2.GetMetricsResponse:
        self._enter("GetMetrics", request, context)
        return metrics_pb2.GetMetricsResponse(exposition=b"understudy_replicas 2\n", content_type="text/plain")

    def _enter(self, method: str, request: Any, context: Any) -> None:
        self.script.calls[method] += 1
        self.script.metadata.append((method, dict(context.invocation_metadata())))
        self.script.entered.set()
        if request is not None:
            self.script.requests.append(request)
        failure = self.script.failures.popleft() if self.script.failures else None
        if failure is not None:
            _abort(context, failure)

    def _wait_at_gate(self, context: Any) -> None:
        """Wait until the test opens the gate or the caller disconnects."""
        context.add_callback(self.script.gate.set)
        self.script.at_gate.set()
        self.script.gate.wait(PATIENCE_SECONDS)

    def _wake(self) -> None:
        with self.script.grown:
            self.script.grown.notify_all()

    def _complaint(self, request: prediction_pb2.PredictRequest) -> Failure | None:
        if set(request.inputs) != set(self.script.input_names):
            message = f"got {', '.join(request.inputs)}; expected {', '.join(self.script.input_names)}"
            return Failure(code=grpc.StatusCode.INVALID_ARGUMENT, message=message)
        if request.version.step == 404:
            return Failure(code=grpc.StatusCode.NOT_FOUND, message=f"no step 404; there are {PREVIOUS_STEP}, {STEP}")
        if request.version.step == 429:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            return Failure(code=code, message="the queue is full", retry_after_seconds=0.25)
        return None

    def _predicted(self, request: prediction_pb2.PredictRequest) -> prediction_pb2.PredictResponse:
        arrays = decode_all(request.inputs)
        outputs = {_output_name(name): encode(_doubled(array)) for name, array in arrays.items()}
        return prediction_pb2.PredictResponse(outputs=outputs, step=_step_of(request))


def _step_of(request: Any) -> int:
    step: int = request.version.step if request.version.HasField("step") else STEP
    return step


def _scored(request: Any) -> evaluation_pb2.EvaluationRecord:
    return evaluation_pb2.EvaluationRecord(
        sequence=1, step=_step_of(request), outcome=evaluation_pb2.EVALUATION_OUTCOME_SCORED
    )


def _output_name(name: str) -> str:
    return "doubled" if name == "image" else f"doubled_{name}"


def _doubled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    twice: npt.NDArray[Any] = array + array  # strings too
    return twice


def _abort(context: Any, failure: Failure) -> NoReturn:
    if failure.retry_after_seconds is not None:
        context.set_trailing_metadata([("grpc-status-details-bin", _status(failure).SerializeToString())])
    context.abort(failure.code, failure.message)
    raise AssertionError("abort raises")


def _status(failure: Failure) -> Any:
    status = status_pb2.Status(code=failure.code.value[0], message=failure.message)
    if failure.retry_after_seconds is not None:
        delay = duration_pb2.Duration(nanos=int(failure.retry_after_seconds * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status
