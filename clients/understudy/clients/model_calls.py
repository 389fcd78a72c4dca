"""The synchronous calls that describe the model and change what is served."""

from __future__ import annotations

import os
import queue
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

import grpc

from understudy.clients import requests, responses
from understudy.clients.call_options import CallDefaults, CallOptions, Metadata
from understudy.clients.channel import DEFAULT_MAX_MESSAGE_BYTES, Option, channel_options, channel_target
from understudy.clients.client_errors import client_closed, translated
from understudy.clients.evaluation_types import (
    Evaluation,
    EvaluationOutcome,
    EvaluationTables,
    ExampleKind,
    ExampleList,
)
from understudy.clients.token import BearerToken, check_plaintext
from understudy.clients.types import Checkpoint, FleetStatus, ModelMetadata, ModelStatus, Promotion, Version
from understudy.v1 import (
    evaluation_pb2_grpc,
    fleet_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2_grpc,
)

if TYPE_CHECKING:
    from understudy.clients.channel import Interceptor

Request = TypeVar("Request")
Response = TypeVar("Response")


class ModelCalls:
    """The connection, and every unary call about the model; see `Client`."""

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        model_name: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[Option] = (),
        interceptors: Sequence[Interceptor] = (),
        metadata: Metadata = (),
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        token_without_tls: bool = False,
        timeout_seconds: float = 30.0,
        stream_timeout_seconds: float = 3600.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        own_token = None if token is None and token_file is None else BearerToken(token, token_file)
        if own_token is not None and credentials is None:
            check_plaintext(targets, leaves_machine=token_without_tls)
        self._defaults = CallDefaults(
            timeout_seconds=timeout_seconds,
            stream_timeout_seconds=stream_timeout_seconds,
            metadata=metadata,
            is_secure=credentials is not None,
            token=own_token,
        )
        self._requests = requests.Requests(model_name=model_name)
        self._known_names = requests.KnownNames()
        self._closed = False
        target, all_options = channel_target(targets), channel_options(targets, max_message_bytes, options)
        channel = (
            grpc.insecure_channel(target, all_options)
            if credentials is None
            else grpc.secure_channel(target, credentials, all_options)
        )
        self._channel = grpc.intercept_channel(channel, *interceptors)
        self._predictions = prediction_pb2_grpc.PredictionServiceStub(self._channel)
        self._evaluations = evaluation_pb2_grpc.EvaluationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._fleet = fleet_pb2_grpc.FleetServiceStub(self._channel)
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel and cancel running calls."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise not_copied(self)

    def metadata(self, *, version: Version | None = None, **call_options: Unpack[CallOptions]) -> ModelMetadata:
        """Describe the inputs, outputs and devices of a version."""
        response = self._invoke(self._models.GetModelMetadata, self._requests.metadata(version), call_options)
        return responses.metadata(response)

    def status(self, **call_options: Unpack[CallOptions]) -> ModelStatus:
        """Return the state of every version."""
        return responses.status(self._invoke(self._models.GetModelStatus, self._requests.status(), call_options))

    def checkpoints(self, **call_options: Unpack[CallOptions]) -> tuple[Checkpoint, ...]:
        """List the checkpoints that the server sees, by ascending step."""
        return responses.checkpoints(
            self._invoke(self._models.ListCheckpoints, self._requests.checkpoints(), call_options)
        )

    def list_evaluations(
        self,
        *,
        dataset: str | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        outcome: EvaluationOutcome | None = None,
        **call_options: Unpack[CallOptions],
    ) -> Generator[Evaluation, None, None]:
        """Yield the entries of the server's ledger, oldest first, and request pages as needed."""
        token, more = "", True
        while more:
            request = self._requests.list_evaluations(
                page_token=token, dataset=dataset, min_step=min_step, max_step=max_step, outcome=outcome
            )
            page = self._invoke(self._evaluations.ListEvaluations, request, call_options)
            yield from map(responses.evaluation, page.evaluations)
            token = page.next_page_token
            more = bool(token)

    def evaluation_tables(
        self, dataset: str | None = None, *, version: Version | None = None, **call_options: Unpack[CallOptions]
    ) -> EvaluationTables:
        """Return the tables of the last evaluation of a version on a dataset, by default the server's first one."""
        request = self._requests.tables(dataset, version)
        return responses.evaluation_tables(self._invoke(self._evaluations.GetEvaluationTables, request, call_options))

    def examples(
        self,
        kind: ExampleKind,
        dataset: str | None = None,
        *,
        version: Version | None = None,
        baseline: Version | None = None,
        max_examples: int = 100,
        **call_options: Unpack[CallOptions],
    ) -> ExampleList:
        """Return the hardest examples of a dataset, or those that only a version or its baseline decided rightly."""
        request = self._requests.examples(kind, dataset, version=version, baseline=baseline, max_examples=max_examples)
        return responses.example_list(self._invoke(self._evaluations.GetExamples, request, call_options))

    def promote(self, version: Version, **call_options: Unpack[CallOptions]) -> Promotion:
        """Serve this version until `unpin`; load it if necessary."""
        return self._promoted(self._requests.pin(version), call_options)

    def unpin(self, **call_options: Unpack[CallOptions]) -> Promotion:
        """Remove the pin and follow the version policy again."""
        return self._promoted(self._requests.unpin(), call_options)

    def roll_back(self, **call_options: Unpack[CallOptions]) -> Promotion:
        """Serve and pin the version that served before. The next rollback goes further back."""
        return self._promoted(self._requests.roll_back(), call_options)

    def _promoted(self, request: model_pb2.PromoteRequest, call_options: CallOptions) -> Promotion:
        return responses.promotion(self._invoke(self._models.Promote, request, call_options))

    def fleet(self, **call_options: Unpack[CallOptions]) -> FleetStatus:
        """Return which servers follow this evaluator, and what each serves."""
        return responses.fleet(self._invoke(self._fleet.GetFleet, self._requests.fleet(), call_options))

    def metrics(self, **call_options: Unpack[CallOptions]) -> str:
        """Return the server's metrics as Prometheus text."""
        response = self._invoke(self._metrics.GetMetrics, metrics_pb2.GetMetricsRequest(), call_options)
        return response.exposition.decode()

    def is_serving(self, service: str = "", **call_options: Unpack[CallOptions]) -> bool:
        """Ask ``grpc.health.v1`` whether the server, or one service of it, serves."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(self._channel)
        response = self._invoke(stub.Check, health_pb2.HealthCheckRequest(service=service), call_options)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _invoke(
        self, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request, call_options: CallOptions
    ) -> Response:
        with self._calling():
            return method(request, **self._defaults.unary(call_options))

    def _begun(
        self,
        method: grpc.UnaryStreamMultiCallable[Request, Response] | grpc.StreamStreamMultiCallable[Request, Response],
        request: Any,
        call_options: CallOptions,
    ) -> grpc.CallIterator[Response]:
        """Start a call that answers with a stream; ``request`` is an iterator if it sends one, too."""
        with self._calling():
            return method(request, **self._defaults.stream(call_options))

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Raise the errors of `understudy.clients.client_errors`, for a closed client as well."""
        try:
            with translated():
                yield
        except ValueError:  # grpcio's own for a closed channel
            if not self._closed:
                raise
            raise client_closed() from None


def not_copied(client: object) -> TypeError:
    """Return the error of an attempt to pickle or copy a client."""
    return TypeError(
        f"{type(client).__name__} holds connections and cannot be pickled or copied; create one in each process, such "
        "as in the initializer of a pool"
    )


@contextmanager
def ended(call: grpc.RpcContext) -> Iterator[None]:
    """Cancel a streaming call when the caller leaves the block, at its end or before."""
    try:
        yield
    finally:
        call.cancel()  # type: ignore[no-untyped-call]


def wait_for(call: Any) -> None:
    """Wait until a call with one response has ended.

    An interrupt while the call itself waits may leave its lock locked for good, and with it the channel.
    """
    over: queue.SimpleQueue[object] = queue.SimpleQueue()
    call.add_done_callback(over.put)
    over.get()
