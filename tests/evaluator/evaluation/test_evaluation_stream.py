"""Evaluation streams: one checkpoint, a state of their own, and a handle that is given back."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from testkit import sample_models
from testkit.engine_calls import predict_on
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluation.servable_stream import OpenStreams
from understudy.evaluator.evaluator_errors import CancelledError, InvalidInputError, StreamIdleError
from understudy.evaluator.model.scorer import CheckedBatch, Labels, Scorer, ScoreState
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.types import Batch

TIMEOUT = 30.0


@pytest.fixture(scope="module")
def model() -> Any:
    return sample_models.image_classifier()


@pytest.fixture(scope="module")
def slot(model: Any, logical_cpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Slot:
    path = tmp_path_factory.mktemp("stream") / "model.keras"
    model.save(path)
    return Slot(tf.distribute.MirroredStrategy(list(logical_cpus[:2])), Path(path), max_batch_size=16)


@pytest.fixture
def servable(slot: Slot) -> Servable:
    return Servable(step=120, digest="", slot=slot)


@pytest.fixture
def engine() -> Iterator[Engine]:
    built = Engine(EngineSettings(), SilentObserver())
    yield built
    built.close(TIMEOUT)


OpenStream = Callable[[], EvaluationStream]


@pytest.fixture
def open_stream(slot: Slot, servable: Servable, engine: Engine) -> OpenStream:
    return lambda: EvaluationStream(servable.borrow(), slot.scorer(), engine)


def rows(seed: int, count: int) -> tuple[Any, Any]:
    images, labels, _ = sample_models.image_data(np.random.default_rng(seed), count)
    return images, labels


def batch(images: Any, labels: Any) -> Batch:
    return Batch(inputs={"inputs": images}, targets={"targets": labels})


def test_a_stream_tells_its_score_its_step_and_its_times(open_stream: OpenStream, model: Any) -> None:
    batches = [rows(seed, count) for seed, count in enumerate((5, 40, 1))]
    with open_stream() as stream:
        for images, labels in batches:
            stream.add(batch(images, labels)).result(TIMEOUT)
        result = stream.finish()
    assert result.metrics == pytest.approx(sample_models.evaluate_on_one_device(model, batches), rel=1e-6)
    assert (result.examples, result.batches, result.step, result.notes) == (46, 3, 120, ())
    assert result.computing_seconds > 0
    assert result.waiting_seconds > 0


def test_a_loss_that_is_not_a_number_says_where_to_look(open_stream: OpenStream) -> None:
    images, labels = rows(3, 5)
    images[2] = np.nan
    with open_stream() as stream:
        stream.add(batch(images, labels)).result(TIMEOUT)
        result = stream.finish()
    assert np.isnan(result.metrics["loss"])
    (note,) = result.notes
    assert note.startswith("the loss of some examples is not a number")


def test_batches_may_be_added_without_waiting(open_stream: OpenStream, model: Any) -> None:
    batches = [rows(seed, 3) for seed in range(6)]
    with open_stream() as stream:
        futures = [stream.add(batch(*rows)) for rows in batches]
        for future in futures:
            future.result(TIMEOUT)
        result = stream.finish()
    assert result.metrics == pytest.approx(sample_models.evaluate_on_one_device(model, batches), rel=1e-6)


def test_streams_at_once_do_not_mix(open_stream: OpenStream, model: Any) -> None:
    results: dict[int, Any] = {}

    def run(seed: int) -> None:
        with open_stream() as stream:
            for turn in range(5):
                stream.add(batch(*rows(100 * seed + turn, 1 + (seed + turn) % 7))).result(TIMEOUT)
            results[seed] = stream.finish().metrics

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for seed in range(8):
        batches = [rows(100 * seed + turn, 1 + (seed + turn) % 7) for turn in range(5)]
        assert results[seed] == pytest.approx(sample_models.evaluate_on_one_device(model, batches), rel=1e-6)


def test_closing_gives_the_handle_back(open_stream: OpenStream, servable: Servable) -> None:
    stream = open_stream()
    stream.add(batch(*rows(0, 2))).result(TIMEOUT)
    assert servable.handles == 1
    stream.close()
    stream.close()
    assert servable.handles == 0
    with pytest.raises(CancelledError, match="closed"):
        stream.add(batch(*rows(0, 2)))


def test_a_stream_counts_how_long_its_caller_left_it_without_a_batch(open_stream: OpenStream) -> None:
    with open_stream() as stream:
        time.sleep(0.05)
        stream.add(batch(*rows(0, 2))).result(TIMEOUT)
        before = stream.silent_seconds
        assert 0.05 <= before <= stream.age_seconds
        stream.add(batch(*rows(0, 2))).result(TIMEOUT)
        assert before <= stream.silent_seconds <= stream.age_seconds


def test_a_stream_is_closed_for_a_reason(open_stream: OpenStream, servable: Servable) -> None:
    stream = open_stream()
    stream.close(StreamIdleError("its slot was needed"))
    stream.close()
    assert servable.handles == 0
    for use in (lambda: stream.add(batch(*rows(0, 2))), stream.finish):
        with pytest.raises(StreamIdleError, match="its slot was needed"):
            use()


def test_a_closed_stream_keeps_no_batch_that_it_refused(open_stream: OpenStream) -> None:
    stream = open_stream()
    stream.close(StreamIdleError("its slot was needed"))
    refused = batch(*rows(0, 2))
    kept = weakref.ref(next(iter(refused.inputs.values())))
    with pytest.raises(StreamIdleError):
        stream.add(refused)
    del refused
    assert kept() is None


def test_the_version_of_the_most_silent_streams_gives_its_slot_up(
    slot: Slot, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("understudy.evaluator.evaluation.evaluation_stream.time.monotonic", lambda: now)
    streams = OpenStreams()

    def opened(step: int, at: float) -> EvaluationStream:
        nonlocal now
        now = at
        stream = EvaluationStream(Servable(step=step, digest="", slot=slot).borrow(), slot.scorer(), engine)
        streams.add(stream)
        return stream

    def recall(at: float, *, waiting: float = 0.0, to_serve: bool = True) -> None:
        nonlocal now
        now = at
        streams.recall(40, waiting_seconds=waiting, to_serve=to_serve, serving_step=30)

    serving, silent, silent_too = opened(30, 0.0), opened(20, 1.0), opened(10, 2.0)
    beside = opened(20, 2.5)
    recall(11.5, to_serve=False)
    assert not any(stream.is_closed for stream in (serving, silent, silent_too, beside))
    recall(3.2)
    assert [stream.is_closed for stream in (serving, silent, silent_too, beside)] == [False, False, True, False]
    recall(3.4)
    assert [stream.is_closed for stream in (silent, beside)] == [False, False]
    recall(3.6)
    assert [stream.is_closed for stream in (serving, silent, beside)] == [False, True, True]
    silent_too = opened(10, 4.0)
    closed = []
    for at in (13.5, 14.5):
        recall(at, to_serve=False)
        closed.append(silent_too.is_closed)
    assert closed == [False, True]
    with pytest.raises(StreamIdleError, match="step 40 waited for a slot, and this stream on step 20 was closed"):
        silent.finish()
    busy = opened(10, 20.0)
    recall(20.5, waiting=40.0, to_serve=False)
    recall(20.5, waiting=20.0)
    assert [busy.is_closed, serving.is_closed] == [False, False]
    recall(20.5, waiting=40.0)
    assert [busy.is_closed, serving.is_closed] == [True, False]
    streams.close()
    assert [busy.is_closed, serving.is_closed] == [True, True]


class SlowScorer(Scorer):
    """Takes as long to score a batch as the test lets it."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def check(self, batch: Batch) -> CheckedBatch:
        return CheckedBatch(batch=batch, labels=Labels(targets=batch.targets, weights={}), structure=())

    def is_prepared(self, checked: CheckedBatch) -> bool:  # noqa: ARG002
        return True

    def update(
        self,
        state: ScoreState,
        batch: Batch | CheckedBatch,  # noqa: ARG002
        *,
        between_pieces: Callable[[], None] = lambda: None,  # noqa: ARG002
        keep_outputs: bool = False,  # noqa: ARG002
    ) -> ScoreState:
        self.began.set()
        assert self.go.wait(TIMEOUT)
        return state


def test_the_handle_stays_out_while_a_batch_is_under_way(servable: Servable, engine: Engine) -> None:
    scorer = SlowScorer()
    stream = EvaluationStream(servable.borrow(), scorer, engine)
    running, waiting = stream.add(batch(*rows(0, 2))), stream.add(batch(*rows(1, 2)))
    assert scorer.began.wait(TIMEOUT)
    stream.close()
    assert waiting.cancelled()
    assert servable.handles == 1
    released = threading.Event()
    running.add_done_callback(lambda _: released.set())
    scorer.go.set()
    assert released.wait(TIMEOUT)
    assert servable.handles == 0


def test_a_bad_batch_is_refused_and_the_stream_goes_on(open_stream: OpenStream) -> None:
    with open_stream() as stream:
        images, labels = rows(0, 3)
        with pytest.raises(InvalidInputError, match="target 'targets' has 2 examples"):
            stream.add(batch(images, labels[:2]))
        stream.add(batch(images, labels)).result(TIMEOUT)
        assert stream.finish().batches == 1


def test_a_batch_that_fails_on_the_device_fails_the_stream(open_stream: OpenStream) -> None:
    with open_stream() as stream:
        images, labels = rows(0, 3)
        stream.add(batch(images, labels)).result(TIMEOUT)
        with pytest.raises(InvalidInputError, match="do not fit"):
            stream.add(batch(images, np.zeros((3, 9), np.float32))).result(TIMEOUT)
        with pytest.raises(InvalidInputError, match="do not fit"):
            stream.finish()


def test_a_cancelled_batch_fails_the_stream(open_stream: OpenStream, engine: Engine) -> None:
    go = threading.Event()
    engine.run(lambda: go.wait(TIMEOUT), examples=1)
    with open_stream() as stream:
        future = stream.add(batch(*rows(0, 3)))
        assert future.cancel()
        go.set()
        with pytest.raises(CancelledError, match="not be whole"):
            stream.finish()


def test_finishing_with_a_batch_under_way_is_a_mistake(open_stream: OpenStream, engine: Engine) -> None:
    go = threading.Event()
    engine.run(lambda: go.wait(TIMEOUT), examples=1)
    with open_stream() as stream:
        future = stream.add(batch(*rows(0, 3)))
        with pytest.raises(RuntimeError, match="1 batches are under way"):
            stream.finish()
        assert stream.idle_seconds == 0.0
        go.set()
        future.result(TIMEOUT)


def test_predict_gets_in_between_the_pieces_of_a_large_batch(
    open_stream: OpenStream, servable: Servable, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    go = threading.Event()
    engine.run(lambda: go.wait(TIMEOUT), examples=1)
    with open_stream() as stream:
        stream._scorer.prepare(stream._scorer.check(batch(*rows(0, 2))))
        original = engine.yield_to_predict

        def yield_to_predict() -> None:
            if not order:
                order.append("first piece")
                inputs = {"inputs": rows(1, 2)[0]}
                predict_on(engine, inputs, borrow=servable.borrow, key=1).add_done_callback(
                    lambda _: order.append("predict")
                )
            original()

        monkeypatch.setattr(engine, "yield_to_predict", yield_to_predict)
        future = stream.add(batch(*rows(0, 40)))
        future.add_done_callback(lambda _: order.append("evaluate"))
        go.set()
        future.result(TIMEOUT)
    assert order == ["first piece", "predict", "evaluate"]


def test_closing_stops_a_large_batch_between_two_pieces(
    open_stream: OpenStream, servable: Servable, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream()
    stream._scorer.prepare(stream._scorer.check(batch(*rows(0, 2))))
    pieces = []

    def yield_to_predict() -> None:
        pieces.append("piece")
        stream.close()

    monkeypatch.setattr(engine, "yield_to_predict", yield_to_predict)
    with pytest.raises(CancelledError, match="the stream was closed"):
        stream.add(batch(*rows(0, 160))).result(TIMEOUT)
    assert pieces == ["piece"]
    until_idle = engine.run(lambda: None, examples=1)
    until_idle.result(TIMEOUT)
    assert servable.handles == 0


def test_a_stream_without_a_batch_is_refused(open_stream: OpenStream) -> None:
    with open_stream() as stream, pytest.raises(InvalidInputError, match="without a batch"):
        stream.finish()
