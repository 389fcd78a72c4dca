"""The synchronous calls that describe the model and change what is served."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from understudy.clients import requests, responses
from understudy.clients.channel import DEFAULT_MAX_MESSAGE_BYTES, channel_options, channel_target
from understudy.clients.client_errors import translated
from understudy.clients.types import (
    Checkpoint,
    Evaluation,
    EvaluationOutcome,
    ModelMetadata,
    ModelStatus,
    Promotion,
    Version,
)
from understudy.v1 import (
    evaluation_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2_grpc,
)

Request = TypeVar("Request")
Response = TypeVar("Response")


class ModelCalls:
    """The connection, and every unary call about the model; see `Client`."""

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        model_name: str = "",
        timeout_seconds: float = 30.0,
        stream_timeout_seconds: float = 3600.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._stream_timeout_seconds = stream_timeout_seconds
        self._requests = requests.Requests(model_name=model_name)
        self._known_names = requests.KnownNames()
        self._channel = grpc.insecure_channel(channel_target(targets), options=channel_options(max_message_bytes))
        self._predictions = prediction_pb2_grpc.PredictionServiceStub(self._channel)
        self._evaluations = evaluation_pb2_grpc.EvaluationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel and cancel running calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def metadata(self, *, version: Version | None = None, timeout_seconds: float | None = None) -> ModelMetadata:
        """Describe the inputs, outputs and devices of a version."""
        response = self._ask(self._models.GetModelMetadata, self._requests.metadata(version), timeout_seconds)
        return responses.metadata(response)

    def status(self, *, timeout_seconds: float | None = None) -> ModelStatus:
        """Return the state of every version."""
        return responses.status(self._ask(self._models.GetModelStatus, self._requests.status(), timeout_seconds))

    def checkpoints(self, *, timeout_seconds: float | None = None) -> tuple[Checkpoint, ...]:
        """List the checkpoints that the server sees, by ascending step."""
        return responses.checkpoints(
            self._ask(self._models.ListCheckpoints, self._requests.checkpoints(), timeout_seconds)
        )

    def list_evaluations(
        self,
        *,
        dataset: str | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        outcome: EvaluationOutcome | None = None,
        timeout_seconds: float | None = None,
    ) -> Generator[Evaluation, None, None]:
        """Yield the entries of the server's ledger, oldest first, and request pages as needed."""
        token, more = "", True
        while more:
            request = self._requests.list_evaluations(
                page_token=token, dataset=dataset, min_step=min_step, max_step=max_step, outcome=outcome
            )
            page = self._ask(self._evaluations.ListEvaluations, request, timeout_seconds)
            yield from map(responses.evaluation, page.evaluations)
            token = page.next_page_token
            more = bool(token)

    def promote(self, version: Version, *, timeout_seconds: float | None = None) -> Promotion:
        """Serve this version until `unpin`; load it if necessary."""
        return self._promoted(self._requests.pin(version), timeout_seconds)

    def unpin(self, *, timeout_seconds: float | None = None) -> Promotion:
        """Remove the pin and follow the version policy again."""
        return self._promoted(self._requests.unpin(), timeout_seconds)

    def roll_back(self, *, timeout_seconds: float | None = None) -> Promotion:
        """Serve and pin the previous serving version."""
        return self._promoted(self._requests.roll_back(), timeout_seconds)

    def _promoted(self, request: model_pb2.PromoteRequest, timeout_seconds: float | None) -> Promotion:
        return responses.promotion(self._ask(self._models.Promote, request, timeout_seconds))

    def metrics(self, *, timeout_seconds: float | None = None) -> str:
        """Return the server's metrics as Prometheus text."""
        response = self._ask(self._metrics.GetMetrics, metrics_pb2.GetMetricsRequest(), timeout_seconds)
        return response.exposition.decode()

    def is_serving(self, service: str = "", *, timeout_seconds: float | None = None) -> bool:
        """Ask ``grpc.health.v1`` whether the server, or one service of it, serves."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(self._channel)
        response = self._ask(stub.Check, health_pb2.HealthCheckRequest(service=service), timeout_seconds)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout_seconds: float | None
    ) -> Response:
        with translated():
            return method(request, timeout=self._timeout_seconds if timeout_seconds is None else timeout_seconds)
