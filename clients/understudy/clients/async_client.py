"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import Any, Unpack

from grpc import aio

from understudy.clients import requests, responses
from understudy.clients.async_model_calls import AsyncModelCalls, Request, Response
from understudy.clients.async_streams import CallEnd, drawn, outcomes, write_all
from understudy.clients.call_options import CallOptions, without_timeout
from understudy.clients.client_errors import (
    InvalidArgumentError,
    UnavailableError,
    UnderstudyError,
    client_closed,
)
from understudy.clients.evaluation_types import CompareResult, EvaluateResult, Evaluation, Metric, Progress
from understudy.clients.pipelining import Outcome, check_items, ended_early
from understudy.clients.reconnection import Reconnection
from understudy.clients.replaying import AsyncReplay, Exchange
from understudy.clients.types import PredictResult, Tensors, Version
from understudy.v1 import evaluation_pb2, prediction_pb2


class AsyncClient(AsyncModelCalls):
    """The asyncio counterpart of `understudy.clients.Client`: the same methods, arguments, results and errors.

    It connects in the event loop of its first call, and anew in another once that one is closed. Any number of tasks of
    the loop may share it. Resolving several targets blocks briefly.

    Args:
        targets: ``HOST:PORT``, any other gRPC target, or several ``HOST:PORT``.
        model_name: The model to call, by its name on the servers; their only one by default.
        credentials: Channel credentials, such as ``grpc.ssl_channel_credentials()``, which may be composed with call
            credentials; without TLS by default. Several servers share the name of the option
            ``grpc.ssl_target_name_override`` then.
        options: Channel options of gRPC. They replace the client's own of the same name, ``grpc.service_config`` too.
        interceptors: Client interceptors of grpc.aio, the first outermost.
        metadata: Sent with every call.
        token: A bearer token, sent with every call.
        token_file: Instead of ``token``, the file that holds it; read again when it changes.
        token_without_tls: Whether to send the token to other machines without channel credentials, which is refused
            otherwise: for a proxy or a service mesh that has TLS.
        timeout_seconds: The default timeout of a call with one response.
        stream_timeout_seconds: The default timeout of a streaming call.
        max_message_bytes: The largest message to send or receive. The server has its own limit.
    """

    async def predict(
        self, inputs: Tensors, *, version: Version | None = None, **call_options: Unpack[CallOptions]
    ) -> PredictResult:
        """Predict one batch; see `Client.predict`."""
        request = self._requests.predict(
            inputs, version, await self._names(call_options, version, unless=requests.is_described(inputs))
        )
        try:
            response = await self._invoke(self._stubs.predictions.Predict, request, call_options)
        except InvalidArgumentError:
            self._known_names.forget()
            raise
        return responses.prediction(response)

    async def predict_many(
        self,
        items: Iterable[Tensors] | AsyncIterable[Tensors],
        *,
        version: Version | None = None,
        in_flight: int = 16,
        **call_options: Unpack[CallOptions],
    ) -> AsyncGenerator[Outcome]:
        """Predict many batches; see `Client.predict_many`. A synchronous iterable is iterated on a thread."""

        async def build(item: Tensors) -> prediction_pb2.PredictStreamRequest:
            names = await self._names(call_options, version, unless=requests.is_described(item))
            return prediction_pb2.PredictStreamRequest(request=self._requests.predict(item, version, names))

        check_items(items, in_flight)
        call = self._stubs.predictions.PredictStream(None, **self._defaults.stream(call_options))
        with self._calling():
            async with _ended(call), aclosing(outcomes(call, drawn(items), build, in_flight=in_flight)) as results:
                async for outcome in results:
                    yield outcome

    async def evaluate(
        self,
        batches: Iterable[Any] | AsyncIterable[Any],
        *,
        version: Version | None = None,
        metrics: Sequence[str | Metric] = (),
        slices: Sequence[str] = (),
        slice_min_examples: int = 1,
        resamples: int = 0,
        confidence: float = 0.95,
        **call_options: Unpack[CallOptions],
    ) -> EvaluateResult:
        """Score a version on batches; see `Client.evaluate`. A synchronous iterable is iterated on a thread."""
        options = self._requests.evaluate_options(
            version,
            metrics,
            slices=slices,
            slice_min_examples=slice_min_examples,
            resamples=resamples,
            confidence=confidence,
        )
        call = self._stubs.evaluations.Evaluate(None, **self._defaults.stream(call_options))
        messages = self._evaluate_messages(options, batches, call_options, version)
        return responses.score((await self._sent(call, messages)).score)

    async def _evaluate_messages(
        self,
        options: evaluation_pb2.EvaluateRequest,
        batches: Iterable[Any] | AsyncIterable[Any],
        call_options: CallOptions,
        version: Version | None,
    ) -> AsyncGenerator[evaluation_pb2.EvaluateRequest]:
        yield options
        async with aclosing(drawn(batches)) as source:
            async for batch in source:
                names = await self._names(call_options, version, unless=requests.is_described_batch(batch))
                yield requests.evaluate_batch(batch, names)

    async def compare(
        self,
        batches: Iterable[Any] | AsyncIterable[Any] | None = None,
        *,
        versions: Sequence[Version],
        dataset: str | None = None,
        metrics: Sequence[str | Metric] = (),
        resamples: int = 1000,
        confidence: float = 0.95,
        seed: int = 0,
        slices: Sequence[str] = (),
        slice_min_examples: int = 1,
        **call_options: Unpack[CallOptions],
    ) -> CompareResult:
        """Score versions on the same batches and compare each with the first; see `Client.compare`."""
        options = self._requests.compare_options(
            versions,
            metrics,
            dataset=dataset,
            resamples=resamples,
            confidence=confidence,
            seed=seed,
            slices=slices,
            slice_min_examples=slice_min_examples,
        )
        call = self._stubs.evaluations.Compare(None, **self._defaults.stream(call_options))
        messages = self._compare_messages(options, batches, call_options, versions[0])
        return responses.comparison(await self._sent(call, messages))

    async def _compare_messages(
        self,
        options: evaluation_pb2.CompareRequest,
        batches: Iterable[Any] | AsyncIterable[Any] | None,
        call_options: CallOptions,
        version: Version,
    ) -> AsyncGenerator[evaluation_pb2.CompareRequest]:
        yield options
        async with aclosing(drawn(batches if batches is not None else ())) as source:
            async for batch in source:
                names = await self._names(call_options, version, unless=requests.is_described_batch(batch))
                yield requests.compare_batch(batch, names)

    @asynccontextmanager
    async def replay(
        self, *, version: Version | None = None, **call_options: Unpack[CallOptions]
    ) -> AsyncGenerator[AsyncReplay]:
        """Have one version answer batches apart from live requests; see `Client.replay`."""
        call = self._stubs.evaluations.Replay(None, **self._defaults.stream(call_options))
        with self._calling():
            async with _ended(call):
                exchange = Exchange(call)
                opened = await exchange.answer_to(self._requests.replay_options(version))
                yield AsyncReplay(exchange, responses.replayed_model(opened.model))
                await exchange.finish()

    async def evaluate_dataset(
        self,
        dataset: str,
        *,
        version: Version | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        rescore: bool = False,
        **call_options: Unpack[CallOptions],
    ) -> Evaluation:
        """Score a version on a dataset of the server; see `Client.evaluate_dataset`."""
        request = self._requests.evaluate_dataset(dataset, version, rescore=rescore)
        call = self._stubs.evaluations.EvaluateDataset(request, **self._defaults.stream(call_options))
        async with _ended(call):
            with self._calling():
                async for message in call:
                    event = responses.dataset_event(message)
                    if isinstance(event, Evaluation):
                        return event
                    on_progress(event)
        raise ended_early()

    async def watch_evaluations(
        self, *, after: int = 0, give_up_after_seconds: float = 300.0, **call_options: Unpack[CallOptions]
    ) -> AsyncGenerator[Evaluation]:
        """Yield every entry of the ledger after a sequence number, without end; see `Client.watch_evaluations`."""
        reconnection = Reconnection(give_up_after_seconds)
        place: int | evaluation_pb2.EvaluationRecord = after
        while True:
            try:
                async with aclosing(self._watched_once(place, call_options)) as records:
                    async for place in records:
                        reconnection.connected()
                        yield responses.evaluation(place)
                    error: UnderstudyError = UnavailableError("the server ended the stream")
            except UnderstudyError as broken:
                error = broken
            if self._connection.closed:
                raise client_closed()
            await asyncio.sleep(reconnection.pause_after(error))

    async def _watched_once(
        self, after: int | evaluation_pb2.EvaluationRecord, call_options: CallOptions
    ) -> AsyncGenerator[evaluation_pb2.EvaluationRecord]:
        request = self._requests.watch_evaluations(after)
        call = self._stubs.evaluations.WatchEvaluations(request, **self._defaults.stream(call_options))
        async with _ended(call):
            with self._calling():
                async for message in call:
                    yield message.evaluation

    async def _sent(self, call: aio.StreamUnaryCall[Request, Response], messages: AsyncGenerator[Request]) -> Response:
        """Send messages and return the one response."""
        try:
            with self._calling():
                async with _ended(call), aclosing(messages), CallEnd(call).translated():
                    await write_all(call, messages)
                    return await call
        except UnderstudyError:
            self._known_names.forget()
            raise

    async def _names(self, call_options: CallOptions, version: Version | None, *, unless: bool) -> requests.Names:
        """Return the names and dtypes for inputs that lack them; empty if none does."""
        if unless:
            return requests.Names()
        if self._known_names.names is not None:
            return self._known_names.names
        options = without_timeout(call_options)
        try:
            described = await self.metadata(**options)
        except UnavailableError:
            if version is None:
                raise
            described = await self.metadata(version=version, **options)
        return self._known_names.learn(described)


@asynccontextmanager
async def _ended(call: aio.Call) -> AsyncIterator[None]:
    """Cancel a streaming call when the caller leaves the block, at its end or before."""
    try:
        yield
    finally:
        call.cancel()
