"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import grpc

from understudy.clients import requests, responses
from understudy.clients.client_errors import InvalidArgumentError, UnavailableError, UnderstudyError, translated
from understudy.clients.feed import Feed
from understudy.clients.model_calls import ModelCalls, Request, Response
from understudy.clients.pipelining import Outcome, Pipeline, ended_early
from understudy.clients.reconnection import Reconnection
from understudy.clients.types import (
    CompareResult,
    EvaluateResult,
    Evaluation,
    Metric,
    PredictResult,
    Progress,
    Tensors,
    Version,
)
from understudy.v1 import evaluation_pb2, prediction_pb2


class Client(ModelCalls):
    """Asks one or several servers of the same model. Safe for use by many threads at once.

    Unavailable servers are tried again where a call may be repeated, and several take turns. Every method raises an
    `understudy.clients.client_errors.UnderstudyError`; see that module for which.

    Args:
        targets: ``HOST:PORT``, any other gRPC target, or several ``HOST:PORT``.
        timeout_seconds: How long a call that gets one answer may take, unless the call says otherwise.
        stream_timeout_seconds: The same for a call that streams.
        max_message_bytes: The largest message to send or take. The server has a limit of its own.
    """

    def predict(
        self, inputs: Tensors, *, version: Version | None = None, timeout_seconds: float | None = None
    ) -> PredictResult:
        """Predict one batch.

        Args:
            inputs: Every input by name, each ``[examples, ...]``; or, without names, the one input of the model, or a
                list of several in the model's order. The names are then asked for once. dtypes must be the model's.
                Text and bytes make string tensors.
            version: A step that is loaded, or a label; the serving version by default.
            timeout_seconds: Instead of the client's own.
        """
        request = requests.predict(inputs, version, self._names(unless=isinstance(inputs, Mapping)))
        try:
            response = self._ask(self._predictions.Predict, request, timeout_seconds)
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
            return prediction_pb2.PredictStreamRequest(
                request=requests.predict(item, version, self._names(unless=isinstance(item, Mapping)))
            )

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
                ``[examples, ...]``, arrays by name, or, of several inputs or targets, a list in the model's order.
                Sample weights are one array or arrays by name. Drawn on another thread; what it raises is raised here.
            version: A step or a label; one that is not loaded is loaded for the purpose. The serving version by
                default.
            metrics: Keras metrics; the compiled ones by default.
            timeout_seconds: For the whole stream, instead of the client's own.
        """
        messages = self._evaluate_messages(batches, version, metrics)
        return responses.score(self._sent(self._evaluations.Evaluate, messages, timeout_seconds))

    def _evaluate_messages(
        self, batches: Iterable[Any], version: Version | None, metrics: Sequence[str | Metric]
    ) -> Iterator[evaluation_pb2.EvaluateRequest]:
        yield requests.evaluate_options(version, metrics)
        for batch in batches:
            yield requests.evaluate_batch(batch, self._names(unless=requests.goes_by_name(batch)))

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
        timeout_seconds: float | None = None,
    ) -> CompareResult:
        """Score versions on the same batches, and hold them against the first.

        Args:
            batches: As for `evaluate`; None with ``dataset``.
            versions: From 2 to 16 steps or labels. Those that are not loaded take turns on the same batches.
            dataset: The dataset of the server to score on instead.
            metrics: Keras metrics; the compiled ones by default.
            resamples: How many times the examples are resampled for the intervals.
            confidence: The part of the resampled differences that an interval holds.
            seed: The same examples in the same order with the same seed give the same intervals.
            timeout_seconds: For the whole stream, instead of the client's own.
        """
        options = requests.compare_options(
            versions, metrics, dataset=dataset, resamples=resamples, confidence=confidence, seed=seed
        )
        messages = self._compare_messages(options, batches)
        return responses.comparison(self._sent(self._evaluations.Compare, messages, timeout_seconds))

    def _compare_messages(
        self, options: evaluation_pb2.CompareRequest, batches: Iterable[Any] | None
    ) -> Iterator[evaluation_pb2.CompareRequest]:
        yield options
        for batch in batches if batches is not None else ():
            yield requests.compare_batch(batch, self._names(unless=requests.goes_by_name(batch)))

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

    def watch_evaluations(
        self, *, after: int = 0, give_up_after_seconds: float = 300.0
    ) -> Generator[Evaluation, None, None]:
        """Yield every entry of the ledger after a sequence number, those there are and then those to come, for ever.

        A broken connection resumes where it broke off, so that nothing is missed and nothing comes twice.

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

    def _sent(
        self,
        method: grpc.StreamUnaryMultiCallable[Request, Response],
        messages: Iterator[Request],
        timeout_seconds: float | None,
    ) -> Response:
        """Send messages that are drawn on another thread; what drawing them raises is raised here."""
        feed = Feed(messages)
        try:
            with translated():
                response = method(feed, timeout=self._stream_timeout(timeout_seconds))
        except UnderstudyError:
            self._known_names.forget()
            feed.check()
            raise
        feed.check()
        return response

    def _names(self, *, unless: bool) -> requests.Names:
        """Return the names that arrays without names go by; none where arrays come by name."""
        if unless:
            return requests.Names()
        return self._known_names.names or self._known_names.learn(self.metadata())

    def _stream_timeout(self, timeout_seconds: float | None) -> float:
        return self._stream_timeout_seconds if timeout_seconds is None else timeout_seconds


@contextmanager
def _ended(call: grpc.RpcContext) -> Iterator[None]:
    """End a streaming call when the caller is done with it, at its end or before."""
    try:
        yield
    finally:
        call.cancel()  # type: ignore[no-untyped-call]
