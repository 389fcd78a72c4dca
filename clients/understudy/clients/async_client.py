"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from grpc import aio

from understudy.clients import requests, responses
from understudy.clients.async_status import CallEnd
from understudy.clients.async_streams import drawn, outcomes, write_all
from understudy.clients.channel import DEFAULT_MAX_MESSAGE_BYTES, channel_options, channel_target
from understudy.clients.errors import InvalidArgumentError, UnavailableError, UnderstudyError, translated
from understudy.clients.pipelining import Outcome, ended_early
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


class AsyncClient:
    """What `understudy.clients.Client` is, for asyncio: the same methods, arguments, results and errors.

    To be made and used in one running event loop, by any number of its tasks at once. Looking up the names of several
    targets blocks the loop for a moment.

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
        self._channel = aio.insecure_channel(channel_target(targets), options=channel_options(max_message_bytes))
        self._predictions = prediction_pb2_grpc.PredictionServiceStub(self._channel)
        self._evaluations = evaluation_pb2_grpc.EvaluationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(self._channel)

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def predict(
        self, inputs: Tensors, *, version: Version | None = None, timeout_seconds: float | None = None
    ) -> PredictResult:
        """Predict one batch; see `Client.predict`."""
        request = requests.predict(inputs, version, await self._lone_name(inputs))
        try:
            response = await self._ask(self._predictions.Predict, request, timeout_seconds)
        except InvalidArgumentError:
            self._lone_input.forget()
            raise
        return responses.prediction(response)

    async def predict_many(
        self,
        items: Iterable[Tensors] | AsyncIterable[Tensors],
        *,
        version: Version | None = None,
        in_flight: int = 16,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[Outcome]:
        """Predict many batches; see `Client.predict_many`. Items that come synchronously do so on a thread."""

        async def build(item: Tensors) -> prediction_pb2.PredictStreamRequest:
            name = await self._lone_name(item)
            return prediction_pb2.PredictStreamRequest(request=requests.predict(item, version, name))

        call = self._predictions.PredictStream(None, timeout=self._stream_timeout(timeout_seconds))
        async with _ended(call), aclosing(outcomes(call, drawn(items), build, in_flight=in_flight)) as results:
            async for outcome in results:
                yield outcome

    async def evaluate(
        self,
        batches: Iterable[Any] | AsyncIterable[Any],
        *,
        version: Version | None = None,
        metrics: Sequence[str | Metric] = (),
        timeout_seconds: float | None = None,
    ) -> EvaluateResult:
        """Score a version on batches; see `Client.evaluate`. Batches that come synchronously do so on a thread."""
        messages = self._evaluate_messages(batches, version, metrics)
        call = self._evaluations.Evaluate(None, timeout=self._stream_timeout(timeout_seconds))
        try:
            async with _ended(call), aclosing(messages), CallEnd(call).translated():
                await write_all(call, messages)
                response = await call
        except UnderstudyError:
            self._lone_input.forget()
            raise
        return responses.score(response)

    async def _evaluate_messages(
        self, batches: Iterable[Any] | AsyncIterable[Any], version: Version | None, metrics: Sequence[str | Metric]
    ) -> AsyncGenerator[evaluation_pb2.EvaluateRequest]:
        yield requests.evaluate_options(version, metrics)
        async with aclosing(drawn(batches)) as source:
            async for batch in source:
                inputs, *_ = requests.batch_parts(batch)
                yield requests.evaluate_batch(batch, await self._lone_name(inputs))

    async def evaluate_dataset(
        self,
        dataset: str,
        *,
        version: Version | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        timeout_seconds: float | None = None,
    ) -> Evaluation:
        """Score a version on a dataset that the server has; the result is also recorded in its ledger."""
        request = requests.evaluate_dataset(dataset, version)
        call = self._evaluations.EvaluateDataset(request, timeout=self._stream_timeout(timeout_seconds))
        async with _ended(call):
            with translated():
                async for message in call:
                    event = responses.dataset_event(message)
                    if isinstance(event, Evaluation):
                        return event
                    on_progress(event)
        raise ended_early()

    async def list_evaluations(
        self,
        *,
        dataset: str | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        outcome: EvaluationOutcome | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[Evaluation]:
        """Yield the entries of the server's ledger, oldest first, asking for pages as they are needed."""
        token, more = "", True
        while more:
            request = requests.list_evaluations(
                page_token=token, dataset=dataset, min_step=min_step, max_step=max_step, outcome=outcome
            )
            page = await self._ask(self._evaluations.ListEvaluations, request, timeout_seconds)
            for record in page.evaluations:
                yield responses.evaluation(record)
            token = page.next_page_token
            more = bool(token)

    async def watch_evaluations(
        self, *, after: int = 0, give_up_after_seconds: float = 300.0
    ) -> AsyncGenerator[Evaluation]:
        """Yield every entry of the ledger after a sequence number, for ever; see `Client.watch_evaluations`."""
        reconnection = Reconnection(give_up_after_seconds)
        while True:
            try:
                async with aclosing(self._watched_once(after)) as evaluations:
                    async for evaluation in evaluations:
                        reconnection.connected()
                        after = evaluation.sequence
                        yield evaluation
                    error: UnderstudyError = UnavailableError("the server ended the stream")
            except UnderstudyError as broken:
                error = broken
            await asyncio.sleep(reconnection.pause_after(error))

    async def _watched_once(self, after: int) -> AsyncGenerator[Evaluation]:
        request = evaluation_pb2.WatchEvaluationsRequest(after_sequence=after)
        call = self._evaluations.WatchEvaluations(request, timeout=self._stream_timeout_seconds)
        async with _ended(call):
            with translated():
                async for message in call:
                    yield responses.evaluation(message.evaluation)

    async def metadata(self, *, version: Version | None = None, timeout_seconds: float | None = None) -> ModelMetadata:
        """Describe the inputs and outputs of a version, and what it runs on."""
        response = await self._ask(self._models.GetModelMetadata, requests.metadata(version), timeout_seconds)
        return responses.metadata(response)

    async def status(self, *, timeout_seconds: float | None = None) -> ModelStatus:
        """Tell the state of every version."""
        request = model_pb2.GetModelStatusRequest()
        return responses.status(await self._ask(self._models.GetModelStatus, request, timeout_seconds))

    async def checkpoints(self, *, timeout_seconds: float | None = None) -> tuple[Checkpoint, ...]:
        """List the checkpoints the server sees, in the order of their steps."""
        request = model_pb2.ListCheckpointsRequest()
        return responses.checkpoints(await self._ask(self._models.ListCheckpoints, request, timeout_seconds))

    async def promote(self, version: Version, *, timeout_seconds: float | None = None) -> Promotion:
        """Serve this version, loading it if need be, until `unpin`."""
        return await self._promoted(requests.pin(version), timeout_seconds)

    async def unpin(self, *, timeout_seconds: float | None = None) -> Promotion:
        """Follow the serving policy again."""
        return await self._promoted(model_pb2.PromoteRequest(unpin=True), timeout_seconds)

    async def roll_back(self, *, timeout_seconds: float | None = None) -> Promotion:
        """Serve and pin the version that was on stage before the present one."""
        return await self._promoted(model_pb2.PromoteRequest(roll_back=True), timeout_seconds)

    async def _promoted(self, request: model_pb2.PromoteRequest, timeout_seconds: float | None) -> Promotion:
        return responses.promotion(await self._ask(self._models.Promote, request, timeout_seconds))

    async def metrics(self, *, timeout_seconds: float | None = None) -> str:
        """Return the server's metrics as Prometheus text."""
        response = await self._ask(self._metrics.GetMetrics, metrics_pb2.GetMetricsRequest(), timeout_seconds)
        return response.exposition.decode()

    async def is_serving(self, service: str = "", *, timeout_seconds: float | None = None) -> bool:
        """Ask ``grpc.health.v1`` whether the server, or one service of it, serves."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(self._channel)
        response = await self._ask(stub.Check, health_pb2.HealthCheckRequest(service=service), timeout_seconds)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _lone_name(self, inputs: Tensors) -> str:
        """Return the name a lone array goes by; nothing needs one where arrays come by name."""
        if isinstance(inputs, Mapping):
            return ""
        return self._lone_input.name or self._lone_input.learn(await self.metadata())

    async def _ask(
        self, method: aio.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout_seconds: float | None
    ) -> Response:
        with translated():
            return await method(request, timeout=self._timeout_seconds if timeout_seconds is None else timeout_seconds)

    def _stream_timeout(self, timeout_seconds: float | None) -> float:
        return self._stream_timeout_seconds if timeout_seconds is None else timeout_seconds


@asynccontextmanager
async def _ended(call: aio.Call) -> AsyncIterator[None]:
    """End a streaming call when the caller is done with it, at its end or before."""
    try:
        yield
    finally:
        call.cancel()
