"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Unpack

import grpc

from understudy.clients import requests, responses
from understudy.clients.call_options import CallOptions, without_timeout
from understudy.clients.client_errors import (
    InvalidArgumentError,
    UnavailableError,
    UnderstudyError,
    client_closed,
    translated,
)
from understudy.clients.evaluation_types import CompareResult, EvaluateResult, Evaluation, Metric, Progress
from understudy.clients.model_calls import ModelCalls, Request, Response, ended, wait_for
from understudy.clients.pipelining import Feed, Outcome, Pipeline, check_items, ended_early
from understudy.clients.reconnection import Reconnection
from understudy.clients.replaying import Replay, Sending
from understudy.clients.types import PredictResult, Tensors, Version
from understudy.v1 import evaluation_pb2, prediction_pb2


class Client(ModelCalls):
    """Calls one or several servers of the same model. Thread-safe.

    Calls that are safe to repeat are retried if a server is unavailable. Several servers are called round-robin. Every
    method raises an `understudy.clients.client_errors.UnderstudyError`; see that module for its subclasses.

    Args:
        targets: ``HOST:PORT``, any other gRPC target, or several ``HOST:PORT``.
        model_name: The model to call, by its name on the servers; their only one by default.
        credentials: Channel credentials, such as ``grpc.ssl_channel_credentials()``, which may be composed with call
            credentials; without TLS by default. Several servers share the name of the option
            ``grpc.ssl_target_name_override`` then.
        options: Channel options of gRPC. They replace the client's own of the same name, ``grpc.service_config`` too.
        interceptors: Client interceptors of grpcio, the first outermost.
        metadata: Sent with every call.
        token: A bearer token, sent with every call.
        token_file: Instead of ``token``, the file that holds it; read again when it changes.
        token_without_tls: Whether to send the token to other machines without channel credentials, which is refused
            otherwise: for a proxy or a service mesh that has TLS.
        timeout_seconds: The default timeout of a call with one response.
        stream_timeout_seconds: The default timeout of a streaming call.
        max_message_bytes: The largest message to send or receive. The server has its own limit.
    """

    def predict(
        self, inputs: Tensors, *, version: Version | None = None, **call_options: Unpack[CallOptions]
    ) -> PredictResult:
        """Predict one batch.

        Args:
            inputs: Every input by name, each ``[examples, ...]``; or, without names, the one input of the model, or a
                list of several in the model's order. The client then requests the names once. Arrays must have the
                model's dtypes; lists of numbers get them, if the values fit. Text and bytes become string tensors.
            version: A step that is loaded, or a label; the serving version by default.
            call_options: See `understudy.clients.CallOptions`.
        """
        request = self._requests.predict(
            inputs, version, self._names(call_options, version, unless=requests.is_described(inputs))
        )
        try:
            response = self._invoke(self._predictions.Predict, request, call_options)
        except InvalidArgumentError:
            self._known_names.forget()
            raise
        return responses.prediction(response)

    def predict_many(
        self,
        items: Iterable[Tensors],
        *,
        version: Version | None = None,
        in_flight: int = 16,
        **call_options: Unpack[CallOptions],
    ) -> Generator[Outcome, None, None]:
        """Predict many batches over one stream.

        Args:
            items: Batches as for `predict`. Iterated on another thread, at most ``in_flight`` ahead of the results.
            version: As for `predict`.
            in_flight: The largest number of unanswered batches.
            call_options: See `understudy.clients.CallOptions`.

        Yields:
            For each item, in order, its result or the error of this item.
        """

        def build(item: Tensors) -> prediction_pb2.PredictStreamRequest:
            return prediction_pb2.PredictStreamRequest(
                request=self._requests.predict(
                    item, version, self._names(call_options, version, unless=requests.is_described(item))
                )
            )

        check_items(items, in_flight)
        pipeline = Pipeline(items, build, in_flight=in_flight)
        call = self._begun(self._predictions.PredictStream, pipeline.requests(), call_options)
        if not call.add_callback(pipeline.wake):  # it is over already
            pipeline.wake()
        with closing(pipeline), ended(call):
            yield from pipeline.outcomes(iter(call))

    def evaluate(
        self,
        batches: Iterable[Any],
        *,
        version: Version | None = None,
        metrics: Sequence[str | Metric] = (),
        slices: Sequence[str] = (),
        slice_min_examples: int = 1,
        resamples: int = 0,
        confidence: float = 0.95,
        **call_options: Unpack[CallOptions],
    ) -> EvaluateResult:
        """Score a version on batches, streamed to the server as fast as it accepts them.

        Args:
            batches: Any iterable, a ``tf.data.Dataset`` too, of ``(x, y)`` or ``(x, y, sample_weight)``, each an array
                ``[examples, ...]``, arrays by name, or, of several inputs or targets, a list in the model's order.
                Sample weights are one array or arrays by name. ``(x,)`` is enough for a model whose loss needs no
                targets, and targets by name for those outputs that have a loss. Iterated on another thread; its errors
                are raised here.
            version: A step or a label; a version that is not loaded is loaded for this call. The serving version by
                default.
            metrics: Keras metrics; the compiled ones by default.
            slices: Parts of the examples to score, too, such as ``label``, ``age:18,30,65`` or ``country*label``. For
                features that the model does not take, batches are ``(x, y, sample_weight, features)``, where the third
                may be None and the last are arrays ``[examples]`` by name.
            slice_min_examples: Slices with fewer examples have no metrics.
            resamples: How many times the examples are resampled for the intervals; 0 for no intervals.
            confidence: The confidence level of the intervals, between 0 and 1.
            call_options: See `understudy.clients.CallOptions`.
        """
        options = self._requests.evaluate_options(
            version,
            metrics,
            slices=slices,
            slice_min_examples=slice_min_examples,
            resamples=resamples,
            confidence=confidence,
        )
        messages = self._evaluate_messages(options, batches, call_options, version)
        return responses.score(self._sent(self._evaluations.Evaluate, messages, call_options).score)

    def _evaluate_messages(
        self,
        options: evaluation_pb2.EvaluateRequest,
        batches: Iterable[Any],
        call_options: CallOptions,
        version: Version | None,
    ) -> Iterator[evaluation_pb2.EvaluateRequest]:
        yield options
        for batch in batches:
            names = self._names(call_options, version, unless=requests.is_described_batch(batch))
            yield requests.evaluate_batch(batch, names)

    def compare(
        self,
        batches: Iterable[Any] | None = None,
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
        """Score versions on the same batches and compare each with the first.

        Args:
            batches: As for `evaluate`; None with ``dataset``.
            versions: From 2 to 16 steps or labels. Versions that are not loaded are loaded one after another.
            dataset: The dataset of the server to score on instead of batches.
            metrics: Keras metrics; the compiled ones by default.
            resamples: How many times the examples are resampled for the intervals.
            confidence: The confidence level of the intervals, between 0 and 1.
            seed: The same examples in the same order with the same seed give the same intervals.
            slices: Parts of the examples to compare, too; see `evaluate`.
            slice_min_examples: Slices with fewer examples have no metrics.
            call_options: See `understudy.clients.CallOptions`.
        """
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
        messages = self._compare_messages(options, batches, call_options, versions[0])
        return responses.comparison(self._sent(self._evaluations.Compare, messages, call_options))

    def _compare_messages(
        self,
        options: evaluation_pb2.CompareRequest,
        batches: Iterable[Any] | None,
        call_options: CallOptions,
        version: Version,
    ) -> Iterator[evaluation_pb2.CompareRequest]:
        yield options
        for batch in batches if batches is not None else ():
            names = self._names(call_options, version, unless=requests.is_described_batch(batch))
            yield requests.compare_batch(batch, names)

    @contextmanager
    def replay(self, *, version: Version | None = None, **call_options: Unpack[CallOptions]) -> Iterator[Replay]:
        """Have one version answer batches apart from live requests, as ``understudy replay`` does, in a ``with`` block.

        Predictions of others go first, and the answers are neither in the request log nor part of live drift.

        Args:
            version: A step or a label; a version that is not loaded is loaded for this call. The serving version by
                default.
            call_options: See `understudy.clients.CallOptions`; the timeout is that of the whole block.
        """
        sending = Sending()
        sending.put(self._requests.replay_options(version))
        try:
            call = self._begun(self._evaluations.Replay, iter(sending), call_options)
            with ended(call):
                replay = Replay(sending, call)
                yield replay
                replay.finish()
        finally:
            sending.end()

    def evaluate_dataset(
        self,
        dataset: str,
        *,
        version: Version | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        rescore: bool = False,
        **call_options: Unpack[CallOptions],
    ) -> Evaluation:
        """Score a version on a dataset of the server; a server that is not read-only also records the result.

        A recorded score of the same checkpoint and examples is returned; with ``rescore`` only if it was scored with
        the same metrics, slices and resampling.
        """
        request = self._requests.evaluate_dataset(dataset, version, rescore=rescore)
        call = self._begun(self._evaluations.EvaluateDataset, request, call_options)
        with ended(call), translated():
            for message in call:
                event = responses.dataset_event(message)
                if isinstance(event, Evaluation):
                    return event
                on_progress(event)
        raise ended_early()

    def watch_evaluations(
        self, *, after: int = 0, give_up_after_seconds: float = 300.0, **call_options: Unpack[CallOptions]
    ) -> Generator[Evaluation, None, None]:
        """Yield every entry of the ledger after a sequence number: the existing ones, then new ones, without end.

        A broken stream is resumed after the last entry, so that no entry is missed or repeated. Each server has its own
        ledger and sequence numbers, so watch one server with a client of its own.

        Raises:
            UnavailableError: No server could be reached for ``give_up_after_seconds``.
            InvalidArgumentError: The ledger has fewer entries, or another one in the place of the last one seen, as it
                was restored from a backup or begun anew.
        """
        reconnection = Reconnection(give_up_after_seconds)
        place: int | evaluation_pb2.EvaluationRecord = after
        while True:
            try:
                with closing(self._watched_once(place, call_options)) as records:
                    for place in records:
                        reconnection.connected()
                        yield responses.evaluation(place)
                    error: UnderstudyError = UnavailableError("the server ended the stream")
            except UnderstudyError as broken:
                error = broken
            if self._closed:
                raise client_closed()
            time.sleep(reconnection.pause_after(error))

    def _watched_once(
        self, after: int | evaluation_pb2.EvaluationRecord, call_options: CallOptions
    ) -> Generator[evaluation_pb2.EvaluationRecord, None, None]:
        request = self._requests.watch_evaluations(after)
        call = self._begun(self._evaluations.WatchEvaluations, request, call_options)
        with ended(call), translated():
            for message in call:
                yield message.evaluation

    def _sent(
        self,
        method: grpc.StreamUnaryMultiCallable[Request, Response],
        messages: Iterator[Request],
        call_options: CallOptions,
    ) -> Response:
        """Send messages, which are iterated on another thread; raise the iterator's error here."""
        feed = Feed(messages)
        try:
            with self._calling():
                call = method.future(feed, **self._defaults.stream(call_options))
                with ended(call):
                    feed.open()
                    wait_for(call)
                    response = call.result()
        except UnderstudyError:
            self._known_names.forget()
            feed.check()
            raise
        finally:
            feed.close()
        feed.check()
        return response

    def _names(self, call_options: CallOptions, version: Version | None, *, unless: bool) -> requests.Names:
        """Return the names and dtypes for inputs that lack them; empty if none does."""
        if unless:
            return requests.Names()
        if self._known_names.names is not None:
            return self._known_names.names
        options = without_timeout(call_options)
        try:
            described = self.metadata(**options)
        except UnavailableError:
            if version is None:
                raise
            described = self.metadata(version=version, **options)
        return self._known_names.learn(described)
