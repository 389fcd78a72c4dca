"""Slices and resamples of losses and metrics of every kind score as Keras scores their examples alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from scipy import stats

from testkit import exactness, more_sample_models, sample_models
from understudy.evaluator.evaluation import part_scores
from understudy.evaluator.evaluation.bootstrap import draw
from understudy.evaluator.evaluation.breakdown import SEED, BreakdownOptions, BrokenDown
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch

SIZES = (5, 3, 17, 2)
RESAMPLES = 3
HORIZONS = 4

MakeSlot = Callable[..., Slot]
Built = Callable[[Callable[[], Any]], tuple[Any, Slot]]
Rows = tuple[Any, ...]

pytestmark = pytest.mark.timeout(600)


@keras.saving.register_keras_serializable("test_part_scores")
class Quantile(keras.losses.Loss):  # type: ignore[misc]
    """The pinball loss of the 0.9 quantile."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        apart = y_true - y_pred
        return ops.mean(ops.maximum(0.9 * apart, -0.1 * apart), axis=-1)


@keras.saving.register_keras_serializable("test_part_scores")
class ByHorizon(keras.metrics.Metric):  # type: ignore[misc]
    """The weighted mean absolute error of each step of a forecast, ``[horizons]``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.errors = self.add_weight(shape=(HORIZONS,), initializer="zeros", name="errors")
        self.weights_seen = self.add_weight(initializer="zeros", name="weights_seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        weights = ops.ones(ops.shape(y_pred)[:1]) if sample_weight is None else ops.reshape(sample_weight, [-1])
        self.errors.assign_add(ops.sum(ops.abs(y_true - y_pred) * weights[:, None], axis=0))
        self.weights_seen.assign_add(ops.sum(weights))

    def result(self) -> Any:
        return self.errors / self.weights_seen


def forecaster() -> Any:
    inputs = keras.Input((6,), name="past")
    model = keras.Model(inputs, layers.Dense(HORIZONS)(inputs))
    model.compile("sgd", Quantile(), weighted_metrics=[ByHorizon(name="by_horizon")])
    return model


def forecasts(rng: np.random.Generator, rows: int) -> Rows:
    return (_normal(rng, rows, 6), _normal(rng, rows, HORIZONS), rng.uniform(0, 2, rows).astype("f4"))


def tagger(reduction: str) -> Any:
    """Two outputs of tokens, of which one is masked, with weights for each token."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    embedded = layers.Embedding(11, 4, mask_zero=True)(tokens)
    tags = layers.Dense(3, activation="softmax", name="tags")(embedded)
    lengths = layers.Dense(1, name="lengths")(layers.GlobalAveragePooling1D()(embedded))
    model = keras.Model(tokens, [tags, lengths])
    losses = [keras.losses.SparseCategoricalCrossentropy(reduction=reduction), "mse"]
    right, weighted = (keras.metrics.SparseCategoricalAccuracy(name=name) for name in ("right", "weighted"))
    model.compile("sgd", losses, metrics=[[right], []], weighted_metrics=[[weighted], []], loss_weights=[1.0, 0.5])
    return model


def tags(rng: np.random.Generator, rows: int) -> Rows:
    tokens = rng.integers(1, 11, (rows, 6)).astype("i4")
    tokens[np.arange(6) >= rng.integers(1, 7, (rows, 1))] = 0
    weights = [rng.uniform(0.5, 2, (rows, 6)).astype("f4"), np.ones(rows, np.float32)]
    return tokens, [rng.integers(0, 3, (rows, 6)), _normal(rng, rows, 1)], weights


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.normal(size=shape).astype("f4")


def masked_tagger(reduction: str) -> Any:
    """One masked output, and no weights."""
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    embedded = layers.Embedding(11, 4, mask_zero=True)(tokens)
    model = keras.Model(tokens, layers.Dense(3, activation="softmax")(embedded))
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    model.compile("sgd", loss, metrics=[keras.metrics.SparseCategoricalAccuracy(name="right")])
    return model


averaging_tagger = functools.partial(masked_tagger, "sum_over_batch_size")


@pytest.fixture(scope="module")
def built(make_slot: MakeSlot) -> Built:
    """Return a model and a slot that holds it on two replicas, each built and traced once for all tests."""

    @functools.cache
    def build(function: Callable[[], Any]) -> tuple[Any, Slot]:
        keras.utils.clear_session(free_memory=False)
        model = function()
        return model, make_slot(model, replicas=2)

    return build


def check_parts(
    model: Any,
    slot: Slot,
    batches: Sequence[Rows],
    *,
    with_resamples: bool = True,
    missing: frozenset[str] = frozenset(),
) -> BrokenDown:
    """Compare two slices, and two resamples of all and of a slice, with Keras's score of their examples."""
    sizes = [len(keras.tree.flatten(rows[0])[0]) for rows in batches]
    rng = np.random.default_rng(1)
    groups = [rng.integers(0, 2, size) for size in sizes]
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=RESAMPLES)
    found = exactness.score_parts(slot, batches, groups, options)
    counts = [np.split(each, np.cumsum(sizes)[:-1]) for each in draw(SEED, RESAMPLES, 0, sum(sizes))]
    parts = [(part.metrics, [group == int(part.name[-1]) for group in groups]) for part in found.slices]
    for number in (0, RESAMPLES - 1) if with_resamples else ():
        for name in ("", "[group=1]"):
            values = {
                metric.removesuffix(name): float(each[number])
                for metric, each in found.resampled.items()
                if metric.endswith(name) and (name or "[" not in metric)
            }
            members = [group == 1 if name else np.ones_like(group) for group in groups]
            parts.append((values, [each * held for each, held in zip(counts[number], members, strict=True)]))
    undefined = [check_part(model, slot, metrics, chosen(batches, taken), missing) for metrics, taken in parts]
    assert [part.undefined for part in found.slices] == undefined[: len(found.slices)]
    return found


def chosen(batches: Sequence[Rows], taken: Sequence[Any]) -> list[Rows]:
    return exactness.chosen(batches, [np.int64(counts) for counts in taken])


def check_part(
    model: Any,
    slot: Slot,
    values: Mapping[str, float],
    examples: Sequence[Rows],
    missing: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """Compare a part with Keras's score of its examples, and return why values are undefined."""
    expected = sample_models.evaluate_on_one_device(model, examples)
    undefined = exactness.reasons(slot, examples)
    kept = {name: value for name, value in expected.items() if name not in {*missing, *undefined}}
    defined = exactness.defined(values, undefined)
    assert exactness.deviation(defined, kept) <= exactness.ROUNDING, (values, expected)
    return {name: reason for name, reason in undefined.items() if name not in missing}


def drawn(data: Callable[[np.random.Generator, int], Rows], *, weighted: bool = True) -> list[Rows]:
    rng = np.random.default_rng(5)
    return [data(rng, size)[: 3 if weighted else 2] for size in SIZES]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_losses_of_masked_tokens_are_those_of_the_slice_or_resample(reduction: str, built: Built) -> None:
    is_average = reduction == "sum_over_batch_size"
    model, slot = built(averaging_tagger if is_average else functools.partial(masked_tagger, reduction))
    batches = [(tokens, targets[0]) for tokens, targets in drawn(tags, weighted=False)]
    assert not check_parts(model, slot, batches).notes
    weighted = [(tokens, targets[0], weights[0]) for tokens, targets, weights in drawn(tags)]
    assert not check_parts(model, slot, weighted).notes


def test_a_form_of_a_loss_that_gives_the_same_for_a_batch_by_chance_is_told_from_its_own(make_slot: MakeSlot) -> None:
    values = keras.Input((4, 1), name="values")
    model = keras.Model(values, layers.Activation("linear")(layers.Masking()(values)))
    model.compile("sgd", "mse")
    kept = np.array([3, 1, 2, 2])
    examples = np.where(np.arange(4) < kept[:, np.newaxis], [[1.0], [1.0], [2.0], [3.0]], 0.0)[..., np.newaxis]
    batch = (examples.astype("f4"), np.zeros((4, 4, 1), np.float32))
    whole = sample_models.evaluate_on_one_device(model, [batch])["loss"]
    assert whole == np.mean([1, 1, 4, 9]), "the mean over the elements is that over the examples, too"
    assert not check_parts(model, make_slot(model), [batch]).notes


@keras.saving.register_keras_serializable("test_part_scores")
class MeanByWeights(keras.metrics.Metric):  # type: ignore[misc]
    """Adds the weighted mean of each batch, times its examples, which is no sum over the examples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.summed = self.add_weight(name="summed", initializer="zeros")
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = ops.mean(ops.square(y_true - y_pred), axis=-1)
        weights = ops.ones_like(values) if sample_weight is None else ops.cast(sample_weight, "float32")
        examples = ops.cast(ops.shape(values)[0], "float32")
        self.summed.assign_add(ops.sum(values * weights) / ops.sum(weights) * examples)
        self.seen.assign_add(examples)

    def result(self) -> Any:
        return self.summed / self.seen


def test_a_metric_that_adds_up_in_a_batch_by_chance_is_no_sum(make_slot: MakeSlot) -> None:
    inputs = keras.Input((1,), name="x")
    model = keras.Model(inputs, layers.Activation("linear")(inputs))
    model.compile("sgd", "mse", weighted_metrics=[MeanByWeights(name="by_weights")])
    examples = np.sqrt(np.array([[1.0], [1.0], [4.0], [9.0]], np.float32))
    batch = (examples, np.zeros((4, 1), np.float32), np.array([3, 1, 2, 2], np.float32))
    whole = sample_models.evaluate_on_one_device(model, [batch])["by_weights"]
    assert whole == np.mean([1, 1, 4, 9]), "the weighted mean is that over the examples, too"
    check_parts(model, make_slot(model), [batch])


def test_outputs_with_masks_and_weights_of_their_own_have_slices_and_intervals(make_slot: MakeSlot) -> None:
    model = tagger("mean_with_sample_weight")
    slot = make_slot(model, replicas=2)
    assert not check_parts(model, slot, drawn(tags)).notes


def test_weighted_quantile_and_horizon_errors_have_slices_and_intervals(make_slot: MakeSlot) -> None:
    model = forecaster()
    slot = make_slot(model, replicas=2)
    batches = drawn(forecasts)
    found = check_parts(model, slot, batches)
    assert set(found.intervals) == {"loss", *(f"by_horizon/{horizon}" for horizon in range(HORIZONS))}
    past, goals, weights = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    kernel, bias = model.get_weights()
    counts = draw(SEED, RESAMPLES, 0, len(past))[0] * weights
    errors = np.average(np.abs(past @ kernel + bias - goals), axis=0, weights=counts)
    resampled = [found.resampled[f"by_horizon/{horizon}"][0] for horizon in range(HORIZONS)]
    np.testing.assert_allclose(resampled, errors, rtol=1e-5)


def test_metrics_of_several_labels_have_slices_and_intervals(make_slot: MakeSlot) -> None:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, layers.Activation("sigmoid")(inputs))
    area = keras.metrics.AUC(num_thresholds=10, multi_label=True, num_labels=3, name="area")
    model.compile("sgd", "binary_crossentropy", weighted_metrics=[area, keras.metrics.F1Score(name="f1")])
    rng = np.random.default_rng(0)
    batches = [
        (_normal(rng, size, 3), rng.integers(0, 2, (size, 3)).astype("f4"), rng.uniform(0, 2, size).astype("f4"))
        for size in SIZES
    ]
    assert not check_parts(model, make_slot(model), batches).notes


def test_metrics_that_are_no_sums_are_updated_for_each_slice_and_resample(built: Built) -> None:
    kind = more_sample_models.KINDS["value metrics"]
    model, slot = built(kind.build)
    found = check_parts(model, slot, exactness.draw(kind, 11, SIZES, weighted=True))
    assert not found.notes
    assert {"spread", "loss"} <= found.intervals.keys() == found.slices[0].metrics.keys()


@pytest.mark.parametrize("name", ["regression", "value metrics"])
def test_a_batch_of_one_example_does_not_pass_for_proof_that_a_metric_is_a_sum(name: str, built: Built) -> None:
    kind = more_sample_models.KINDS[name]
    model, slot = built(kind.build)
    assert not check_parts(model, slot, exactness.draw(kind, 11, (1, 5, 2), weighted=True)).notes
    (alone,) = exactness.draw(kind, 11, (1,), weighted=False)
    found = exactness.score_parts(slot, [alone], [np.zeros(1)], BreakdownOptions(resamples=RESAMPLES))
    counts = draw(SEED, RESAMPLES, 0, 1)[:, 0]
    assert counts.max() > 1
    for number in np.flatnonzero(counts):
        resampled = {metric: float(values[number]) for metric, values in found.resampled.items()}
        check_part(model, slot, resampled, chosen([alone], [counts[number : number + 1]]))


@pytest.mark.parametrize("name", ["compute_metrics of its own", "test_step of its own", "metric with a plain variable"])
def test_models_that_score_in_their_own_way_have_slices_and_say_why_there_are_no_intervals(
    name: str, make_slot: MakeSlot
) -> None:
    kind = more_sample_models.KINDS[name]
    model = exactness.build(kind)
    slot = make_slot(model, replicas=2)
    found = check_parts(model, slot, exactness.draw(kind, 11, SIZES, weighted=False), with_resamples=False)
    assert not found.intervals
    (note,) = found.notes
    assert note.startswith("there are no intervals, because ")


def test_resamples_that_would_take_too_many_updates_are_left_out_with_a_note(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_scores, "MAX_UPDATES", RESAMPLES + 3)
    kind = more_sample_models.KINDS["value metrics"]
    model, slot = built(kind.build)
    found = check_parts(model, slot, exactness.draw(kind, 11, SIZES, weighted=False), with_resamples=False)
    assert "spread" in found.intervals
    assert "spread" not in found.slices[0].intervals
    assert "loss" in found.slices[0].intervals
    assert f"3 parts with {RESAMPLES} resamples take more than {RESAMPLES + 3} updates for a batch" in found.notes[0]


def test_the_interval_of_a_masked_accuracy_is_scipys_bootstrap_of_ratios(built: Built) -> None:
    model, slot = built(averaging_tagger)
    tokens, (targets, _) = tags(np.random.default_rng(3), 300)[:2]
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=1000)
    found = exactness.score_parts(slot, [(tokens, targets)], [np.zeros(300, np.int64)], options).intervals["right"]
    right = (np.argmax(model.predict(tokens, verbose=0), axis=-1) == targets) & (tokens != 0)

    def statistic(places: Any) -> float:
        return float(right[places].sum() / (tokens[places] != 0).sum())

    expected = stats.bootstrap(
        [np.arange(300)], statistic, n_resamples=1000, method="percentile", vectorized=False, rng=1
    ).confidence_interval
    width = expected.high - expected.low
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=0.1 * width)


def test_joining_batches_changes_no_score(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    _, slot = built(averaging_tagger)
    batches = [(tokens, targets[0]) for tokens, targets in drawn(tags, weighted=False)]

    def scores() -> Iterator[Any]:
        groups = [np.arange(size) % 2 for size in SIZES]
        options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=20)
        found = exactness.score_parts(slot, batches, groups, options)
        yield from ({**part.metrics} for part in found.slices)
        yield {name: float(values.sum()) for name, values in found.resampled.items()}

    together = list(scores())
    monkeypatch.setattr("understudy.evaluator.evaluation.breakdown._WAITING_EXAMPLES", 1)
    for one, other in zip(together, scores(), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_top_k_is_computed_for_all_examples_at_once(make_slot: MakeSlot) -> None:
    inputs = keras.Input((5,), name="x")
    model = keras.Model(inputs, layers.Activation("softmax")(inputs))
    best = keras.metrics.SparseTopKCategoricalAccuracy(2, name="best")
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[best])
    slot = make_slot(model)
    rng = np.random.default_rng(0)
    batches = [(_normal(rng, size, 5), rng.integers(0, 5, size)) for size in SIZES]
    check_parts(model, slot, batches)
    scorer = slot.scorer((), increments=True)
    program = scorer.prepare(scorer.check(Batch(inputs={"x": batches[0][0]}, targets={"targets": batches[0][1]})))
    assert program.increments is not None
    operations = {node.op for node in program.increments._add.function.graph.as_graph_def().node}
    assert not operations & {"While", "StatelessWhile"}
    assert tf.executing_eagerly()
