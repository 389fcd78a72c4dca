"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from understudy.clients import requests, responses
from understudy.clients.channel import DEFAULT_MAX_MESSAGE_BYTES, channel_options, channel_target
from understudy.clients.errors import InvalidArgumentError, UnavailableError, UnderstudyError, translated
from understudy.clients.feed import Feed
from understudy.clients.pipelining import Outcome, Pipeline, ended_early
from understudy.clients.reconnection import Reconnection
from understudy.clients.types import (
    Checkpoint,
    EvaluateResult,
    Evaluation,
    EvaluationOutcome,
    Metric,
    ModelMetadata,
    ModelStatus,
    PredictResult,
    Progress,
    Promotion,
    Tensors,
    Version,
)
from understudy.v1 import (
    evaluation_pb2,
    evaluation_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2,
    prediction_pb2_grpc,
)

Request = TypeVar("Request")
Response = TypeVar("Response")


class Client:
    """Asks one or several servers of the same model. Safe for use by many threads at once.

    Unavailable servers are tried again where a call may be repeated, and several take turns. Every method raises an
    `understudy.clients.errors.UnderstudyError`; see that module for which.

    Args:
        targets: ``HOST:PORT``, any other gRPC target, or several ``HOST:PORT``.
        timeout_seconds: How long a call that gets one answer may take, unless the call says otherwise.
        stream_timeout_seconds: The same for a call that streams.
        max_message_bytes: The largest message to send or take. The server has a limit of its own.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        timeout_seconds: float = 30.0,
        stream_timeout_seconds: float = 3600.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._stream_timeout_seconds = stream_timeout_seconds
        self._lone_input = requests.LoneInput()
        self._channel = grpc.insecure_channel(channel_target(targets), options=channel_options(max_message_bytes))
        self._predictions = prediction_pb2_grpc.PredictionServiceStub(self._channel)
        self._evaluations = evaluation_pb2_grpc.EvaluationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def predict(
        self, inputs: Tensors, *, version: Version | None = None, timeout_seconds: float | None = None
    ) -> PredictResult:
        """Predict one batch.

        Args:
            inputs: Every input by name, each ``[rows, ...]``; or the one input of the model, whose name is asked for
                once. dtypes must be the model's. Text and bytes make string tensors.
            version: A step that is loaded, or a label; the version on stage by default.
            timeout_seconds: Instead of the client's own.
        """
        request = requests.predict(inputs, version, self._lone_name(inputs))
        try:
            response = self._ask(self._predictions.Predict, request, timeout_seconds)
        except InvalidArgumentError:
            self._lone_input.forget()
            raise
        return responses.prediction(response)

    def predict_many(
        self,
        items: Iterable[Tensors],
        *,
        version: Version | None = None,
        in_flight: int = 16,
        timeout_seconds: float | None = None,
    ) -> Generator[Outcome, None, None]:
        """Predict many batches over one stream.

        Args:
            items: Batches as `predict` takes them. Drawn on another thread, at most ``in_flight`` ahead of the results.
            version: As for `predict`.
            in_flight: How many batches may be unanswered at once.
            timeout_seconds: For the whole stream, instead of the client's own.

        Yields:
            For each item, in order, its result, or the error that it alone failed with.
        """

        def build(item: Tensors) -> prediction_pb2.PredictStreamRequest:
            return prediction_pb2.PredictStreamRequest(request=requests.predict(item, version, self._lone_name(item)))

        pipeline = Pipeline(items, build, in_flight=in_flight)
        call = self._predictions.PredictStream(pipeline.requests(), timeout=self._stream_timeout(timeout_seconds))
        if not call.add_callback(pipeline.look):  # it is over already
            pipeline.look()
        with closing(pipeline), _ended(call):
            yield from pipeline.outcomes(iter(call))

    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        version: Version | None = None,
        metrics: Sequence[str | Metric] = (),
        timeout_seconds: float | None = None,
    ) -> EvaluateResult:
        """Score a version on batches, which stream to the server as fast as it takes them.

        Args:
            batches: Any iterable, a ``tf.data.Dataset`` too, of ``(x, y)`` or ``(x, y, sample_weight)``, each an array
                ``[rows, ...]`` or arrays by name. Drawn on another thread; what it raises is raised here.
            version: A step or a label; one that is not loaded is loaded for the purpose. The one on stage by default.
            metrics: Keras metrics; the compiled ones by default.
            timeout_seconds: For the whole stream, instead of the client's own.
        """
        feed = Feed(self._evaluate_messages(batches, version, metrics))
        try:
            with translated():
                response = self._evaluations.Evaluate(feed, timeout=self._stream_timeout(timeout_seconds))
        except UnderstudyError:
            self._lone_input.forget()
            feed.check()
            raise
        feed.check()
        return responses.score(response)

    def _evaluate_messages(
        self, batches: Iterable[Any], version: Version | None, metrics: Sequence[str | Metric]
    ) -> Iterator[evaluation_pb2.EvaluateRequest]:
        yield requests.evaluate_options(version, metrics)
        for batch in batches:
            inputs, *_ = requests.batch_parts(batch)
            yield requests.evaluate_batch(batch, self._lone_name(inputs))

    def evaluate_dataset(
        self,
        dataset: str,
        *,
        version: Version | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        timeout_seconds: float | None = None,
    ) -> Evaluation:
        """Score a version on a dataset that the server has; the result is also recorded in its ledger."""
        call = self._evaluations.EvaluateDataset(
            requests.evaluate_dataset(dataset, version), timeout=self._stream_timeout(timeout_seconds)
        )
        with _ended(call), translated():
            for message in call:
                event = responses.dataset_event(message)
                if isinstance(event, Evaluation):
                    return event
                on_progress(event)
        raise ended_early()

    def list_evaluations(
        self,
        *,
        dataset: str | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        outcome: EvaluationOutcome | None = None,
        timeout_seconds: float | None = None,
    ) -> Generator[Evaluation, None, None]:
        """Yield the entries of the server's ledger, oldest first, asking for pages as they are needed."""
        token, more = "", True
        while more:
            request = requests.list_evaluations(
                page_token=token, dataset=dataset, min_step=min_step, max_step=max_step, outcome=outcome
            )
            page = self._ask(self._evaluations.ListEvaluations, request, timeout_seconds)
            yield from map(responses.evaluation, page.evaluations)
            token = page.next_page_token
            more = bool(token)

    def watch_evaluations(
        self, *, after: int = 0, give_up_after_seconds: float = 300.0
    ) -> Generator[Evaluation, None, None]:
        """Yield every entry of the ledger after a sequence number, those there are and then those to come, for ever.

        A broken connection is taken up again where it broke off, so that nothing is missed and nothing comes twice.

        Raises:
            UnavailableError: No server could be reached for ``give_up_after_seconds``.
        """
        reconnection = Reconnection(give_up_after_seconds)
        while True:
            try:
                with closing(self._watched_once(after)) as evaluations:
                    for evaluation in evaluations:
                        reconnection.connected()
                        after = evaluation.sequence
                        yield evaluation
                    error: UnderstudyError = UnavailableError("the server ended the stream")
            except UnderstudyError as broken:
                error = broken
            time.sleep(reconnection.pause_after(error))

    def _watched_once(self, after: int) -> Generator[Evaluation, None, None]:
        request = evaluation_pb2.WatchEvaluationsRequest(after_sequence=after)
        call = self._evaluations.WatchEvaluations(request, timeout=self._stream_timeout_seconds)
        with _ended(call), translated():
            for message in call:
                yield responses.evaluation(message.evaluation)

    def metadata(self, *, version: Version | None = None, timeout_seconds: float | None = None) -> ModelMetadata:
        """Describe the inputs and outputs of a version, and what it runs on."""
        response = self._ask(self._models.GetModelMetadata, requests.metadata(version), timeout_seconds)
        return responses.metadata(response)

    def status(self, *, timeout_seconds: float | None = None) -> ModelStatus:
        """Tell the state of every version."""
        request = model_pb2.GetModelStatusRequest()
        return responses.status(self._ask(self._models.GetModelStatus, request, timeout_seconds))

    def checkpoints(self, *, timeout_seconds: float | None = None) -> tuple[Checkpoint, ...]:
        """List the checkpoints the server sees, in the order of their steps."""
        request = model_pb2.ListCheckpointsRequest()
        return responses.checkpoints(self._ask(self._models.ListCheckpoints, request, timeout_seconds))

    def promote(self, version: Version, *, timeout_seconds: float | None = None) -> Promotion:
        """Serve this version, loading it if need be, until `unpin`."""
        return self._promoted(requests.pin(version), timeout_seconds)

    def unpin(self, *, timeout_seconds: float | None = None) -> Promotion:
        """Follow the serving policy again."""
        return self._promoted(model_pb2.PromoteRequest(unpin=True), timeout_seconds)

    def roll_back(self, *, timeout_seconds: float | None = None) -> Promotion:
        """Serve and pin the version that was on stage before the present one."""
        return self._promoted(model_pb2.PromoteRequest(roll_back=True), timeout_seconds)

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

    def _lone_name(self, inputs: Tensors) -> str:
        """Return the name a lone array goes by; nothing needs one where arrays come by name."""
        if isinstance(inputs, Mapping):
            return ""
        return self._lone_input.name or self._lone_input.learn(self.metadata())

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout_seconds: float | None
    ) -> Response:
        with translated():
            return method(request, timeout=self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def _stream_timeout(self, timeout_seconds: float | None) -> float:
        return self._stream_timeout_seconds if timeout_seconds is None else timeout_seconds


@contextmanager
def _ended(call: grpc.RpcContext) -> Iterator[None]:
    """End a streaming call when the caller is done with it, at its end or before."""
    try:
        yield
    finally:
        call.cancel()  # type: ignore[no-untyped-call]
