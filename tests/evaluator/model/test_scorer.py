"""What a scorer accepts, refuses and reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from testkit import sample_models
from understudy.evaluator.evaluator_errors import InvalidInputError, NotEvaluableError
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch, MetricSpec


@pytest.fixture(scope="module")
def classifier(make_slot: Callable[..., Slot]) -> Slot:
    return make_slot(sample_models.image_classifier(), replicas=2)


@pytest.fixture(scope="module")
def two_by_two(make_slot: Callable[..., Slot]) -> Slot:
    return make_slot(sample_models.two_by_two(), replicas=2)


def image_batch(rows: int, **changes: Any) -> Batch:
    images, labels, _ = sample_models.image_data(np.random.default_rng(rows), rows)
    return Batch(**{"inputs": {"inputs": images}, "targets": {"targets": labels}, **changes})


def two_by_two_batch(rows: int, **changes: Any) -> Batch:
    inputs, targets, _ = sample_models.two_by_two_data(np.random.default_rng(rows), rows)
    return Batch(**{"inputs": inputs, "targets": targets, **changes})


def score(slot: Slot, *batches: Batch, metrics: tuple[MetricSpec, ...] = ()) -> dict[str, float]:
    scorer = slot.scorer(metrics)
    state = scorer.start()
    for batch in batches:
        state = scorer.update(state, batch)
    return scorer.result(state)


def test_named_metrics_take_the_place_of_the_compiled_ones(classifier: Slot) -> None:
    compiled = score(classifier, image_batch(9))
    metrics = (
        MetricSpec(name="accuracy"),
        MetricSpec(name="SparseTopKCategoricalAccuracy", config={"k": 2, "name": "second"}),
        MetricSpec(name="sparse_categorical_crossentropy"),
    )
    named = score(classifier, image_batch(9), metrics=metrics)
    assert named.keys() == {"loss", "accuracy", "second", "sparse_categorical_crossentropy"}
    assert named["loss"] == compiled["loss"]
    assert named["accuracy"] == compiled["accuracy"]
    assert named["second"] == compiled["top2"]


def test_named_metrics_apply_to_every_output(two_by_two: Slot) -> None:
    named = score(two_by_two, two_by_two_batch(9), metrics=(MetricSpec(name="mae"),))
    compiled = score(two_by_two, two_by_two_batch(9))
    assert named.keys() == {"loss", "odds_loss", "value_loss", "odds_mae", "value_mae"}
    assert named["value_mae"] == compiled["value_mae"]


def test_a_named_metric_may_be_of_one_output(two_by_two: Slot) -> None:
    named = (MetricSpec(name="odds/AUC", config={"name": "area"}), MetricSpec(name="value/mae"))
    found = score(two_by_two, two_by_two_batch(9), metrics=named)
    everywhere = score(two_by_two, two_by_two_batch(9), metrics=(MetricSpec(name="mae"),))
    assert found.keys() == {"loss", "odds_loss", "value_loss", "odds_area", "value_mae"}
    assert found["value_mae"] == everywhere["value_mae"]
    with pytest.raises(InvalidInputError, match=r"metric 'size/mae' is of no output; there are \['odds', 'value'\]"):
        two_by_two.scorer([MetricSpec(name="size/mae")])


@keras.saving.register_keras_serializable(package="tests")
class OwnCompile(keras.Sequential):  # type: ignore[misc]
    """Compiled in a way of its own, as tasks of KerasHub are."""

    def compile(self, loss: Any = "mse", **options: Any) -> None:
        super().compile(loss=loss, **options)


def test_a_model_with_a_compile_method_of_its_own_needs_named_metrics_or_a_way_to_restore_it(
    make_slot: Callable[..., Slot],
) -> None:
    model = OwnCompile([keras.Input((4,), name="x"), layers.Dense(2)])
    model.compile(metrics=["mae"])
    slot = make_slot(model)

    with pytest.raises(NotEvaluableError, match="OwnCompile has a compile method of its own, so Keras restores"):
        slot.scorer([])
    batch = Batch(inputs={"x": np.ones((3, 4), np.float32)}, targets={"targets": np.ones((3, 2), np.float32)})
    assert score(slot, batch, metrics=(MetricSpec(name="mae"),)).keys() == {"mae"}


def test_a_model_that_was_not_compiled_needs_named_metrics(make_slot: Callable[..., Slot]) -> None:
    inputs = keras.Input((4,))
    slot = make_slot(keras.Model(inputs, layers.Dense(2)(inputs)))
    with pytest.raises(NotEvaluableError, match="name the metrics"):
        slot.scorer()
    batch = Batch(inputs={"inputs": np.ones((3, 4), np.float32)}, targets={"targets": np.ones((3, 2), np.float32)})
    assert score(slot, batch, metrics=(MetricSpec(name="mae"),)).keys() == {"mae"}


def unregistered_loss(targets: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(targets - outputs), axis=-1) / 2


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
@pytest.mark.parametrize(
    ("compiled", "named"),
    [
        ({"metrics": ["mae", 3]}, r"metrics\[1\]=3, which is no metric"),
        ({"metrics": [True]}, r"metrics\[0\]=True"),
        ({"metrics": {"y": ["function"]}}, r"metrics\['y'\]\[0\]='function'"),
        ({"weighted_metrics": ["3"]}, r"weighted_metrics\[0\]='3'"),
        ({"metrics": [lambda *values: values[1]]}, r"metrics\[0\]='__lambda__'"),
    ],
)
def test_a_compiled_metric_that_is_none_is_named_and_the_targets_are_not_blamed(
    make_slot: Callable[..., Slot], compiled: dict[str, Any], named: str
) -> None:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2, name="y")(inputs))
    model.compile(loss="mse", **compiled)
    slot = make_slot(model)
    batch = Batch(inputs={"x": np.ones((3, 4), np.float32)}, targets={"targets": np.ones((3, 2), np.float32)})
    with pytest.raises(NotEvaluableError, match=f"compiled with {named}"):
        score(slot, batch)
    assert score(slot, batch, metrics=(MetricSpec(name="mae"),)).keys() == {"loss", "mae"}


@pytest.mark.parametrize(("loss", "place"), [(unregistered_loss, "loss"), ({"y": unregistered_loss}, r"loss\['y'\]")])
def test_a_compiled_loss_that_is_not_registered_is_named_and_the_targets_are_not_blamed(
    make_slot: Callable[..., Slot], loss: Any, place: str
) -> None:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2, name="y")(inputs))
    model.compile(loss=loss, metrics=["mae"])
    slot = make_slot(model)
    batch = Batch(inputs={"x": np.ones((3, 4), np.float32)}, targets={"targets": np.ones((3, 2), np.float32)})
    for metrics in ((), (MetricSpec(name="mae"),)):
        with pytest.raises(NotEvaluableError, match=rf"compiled with {place}='unregistered_loss'.*register"):
            score(slot, batch, metrics=metrics)


def test_a_model_that_makes_its_own_loss_needs_no_targets(make_slot: Callable[..., Slot]) -> None:
    inputs = keras.Input((4,), name="x")
    model = keras.Model(inputs, layers.Dense(2)(sample_models.AddsLoss()(inputs)))
    model.compile("sgd")
    x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    expected = model.evaluate(x, batch_size=5, verbose=0, return_dict=True)
    result = score(make_slot(model, replicas=2), *(Batch(inputs={"x": x[i : i + 5]}, targets={}) for i in (0, 5)))
    assert result == pytest.approx(expected, rel=1e-6)


def test_named_metrics_reach_the_outputs_of_a_subclassed_model(make_slot: Callable[..., Slot]) -> None:
    model = sample_models.TwoHeads()
    model(np.zeros((2, 4), np.float32))
    slot = make_slot(model, replicas=2)
    x, y, _ = sample_models.regression_data(np.random.default_rng(0), 7)
    batch = Batch(inputs={"inputs": x}, targets={"heads/0": y, "heads/1": y})
    result = score(slot, batch, metrics=(MetricSpec(name="mae"),))
    expected = [float(np.abs(head - y).mean()) for head in model(x)["heads"]]
    assert list(result.values()) == pytest.approx(expected, rel=1e-6)


def test_named_metrics_work_beside_a_test_step_of_its_own(make_slot: Callable[..., Slot]) -> None:
    model = sample_models.own_test_step()
    slot = make_slot(model, replicas=2)
    x, y, _ = sample_models.regression_data(np.random.default_rng(0), 7)
    result = score(slot, Batch(inputs={"x": x}, targets={"targets": y}), metrics=(MetricSpec(name="mae"),))
    assert result["mae"] == pytest.approx(float(np.abs(model(x) - y).mean()), rel=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        MetricSpec(name="NoSuchMetric"),
        MetricSpec(name="AUC", config={"no_such_argument": 1}),
        MetricSpec(name="MeanIoU"),
    ],
)
def test_a_metric_that_keras_cannot_make_is_refused(classifier: Slot, spec: MetricSpec) -> None:
    with pytest.raises(InvalidInputError, match=spec.name):
        classifier.scorer([spec])


def test_a_stream_without_a_batch_is_refused(classifier: Slot) -> None:
    scorer = classifier.scorer()
    with pytest.raises(InvalidInputError, match="without a batch"):
        scorer.result(scorer.start())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": {"digit": np.zeros(3)}}, "got the targets 'digit'; expected 'outputs', 'targets'"),
        ({"targets": {"digit": np.zeros(3)}}, "one output, here called 'outputs', because Keras generated its name"),
        ({"targets": {"targets": np.zeros(2)}}, "target 'targets' has 2 examples; 3 were expected"),
        ({"targets": {"targets": np.float32(1)}}, "is a scalar"),
        ({"targets": {}}, "there are no targets of .*, which the model's loss and metrics need"),
        ({"targets": {"targets": np.zeros((3, 7), np.float32)}}, "targets do not fit the model's loss"),
        ({"sample_weights": {"other": np.ones(3)}}, "got the sample weights 'other'"),
        ({"sample_weights": {"sample_weights": np.ones(4)}}, "sample weight 'sample_weights' has 4 examples"),
        ({"sample_weights": {"sample_weights": np.array(["a"] * 3)}}, "numbers were expected"),
        ({"inputs": {"inputs": np.zeros((3, 5, 6, 1), np.float32)}}, "input 'inputs' has shape"),
        (
            {"inputs": {"inputs": np.zeros((3, 6, 6, 1), np.float32), "age": np.zeros(3)}},
            "got the inputs 'inputs', 'age'; expected 'inputs'.*; 'age' is a feature of the batch if slices need it",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(classifier: Slot, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        score(classifier, image_batch(3, **changes))


def test_targets_whose_names_the_inputs_of_a_file_have_are_missed_by_their_places(
    make_slot: Callable[..., Slot],
) -> None:
    left, right = keras.Input((2,)), keras.Input((3,))
    model = keras.Model((left, right), [layers.Dense(1)(left), layers.Dense(1)(right)])
    model.compile("sgd", ["mse", "mse"])
    slot = make_slot(model)
    batch = Batch(inputs={"0": np.zeros((2, 2), np.float32), "1": np.zeros((2, 3), np.float32)}, targets={})
    with pytest.raises(InvalidInputError, match=r"no targets of '0', '1', .*; in a file, .*, as 'arr_2', 'arr_3'$"):
        score(slot, batch)


@pytest.fixture(scope="module")
def of_kinds(make_slot: Callable[..., Slot]) -> Callable[[str, int], Slot]:
    """Return a classifier with a loss on so many replicas, each loaded once."""

    @functools.cache
    def slot(loss: str, replicas: int) -> Slot:
        inputs = keras.Input((3,), name="x")
        model = keras.Model(inputs, layers.Dense(3, activation="softmax", name="kind")(inputs))
        model.compile("sgd", loss)
        return make_slot(model, replicas=replicas)

    return slot


CLASS_NUMBERS, ONE_HOT = np.array([0, 2, 1, 1]), np.eye(3, dtype=np.float32)[[0, 2, 1, 1]]


@pytest.mark.parametrize(
    ("metric", "targets", "words"),
    [
        *(
            (
                name,
                CLASS_NUMBERS,
                r"int64\[examples\]; outputs: float32\[examples, 3\].* shape \[examples, 3\]; for class numbers",
            )
            for name in ("AUC", "precision", "mae", "BinaryIoU", "PrecisionAtRecall")
        ),
        ("BinaryCrossentropy", CLASS_NUMBERS, "for class numbers, give one-hot"),
        ("AUC", CLASS_NUMBERS.astype(np.float32), "for class numbers, give one-hot"),
        ("AUC", CLASS_NUMBERS[:, np.newaxis], r"int64\[examples, 1\].*for class numbers, give one-hot"),
        ("F1Score", np.array([b"a", b"b", b"c", b"a"], object), r"string\[examples\].*numbers, and these are text"),
        ("F1Score", CLASS_NUMBERS, "for class numbers, give one-hot"),
        ("SparseCategoricalAccuracy", ONE_HOT, r"class numbers of the shape \[examples\]; for one-hot targets, use"),
    ],
)
def test_a_metric_that_the_targets_do_not_fit_is_named_with_the_shapes_and_what_helps(
    of_kinds: Callable[[str, int], Slot], metric: str, targets: Any, words: str
) -> None:
    loss = "categorical_crossentropy" if targets is ONE_HOT else "sparse_categorical_crossentropy"
    config = {"recall": 0.5} if metric == "PrecisionAtRecall" else {}
    batch = Batch(inputs={"x": np.ones((4, 3), np.float32)}, targets={"targets": targets})
    for replicas in (1, 2):
        with pytest.raises(InvalidInputError, match=f"targets of 'kind' do not fit the metric '{metric}' .*{words}"):
            score(of_kinds(loss, replicas), batch, metrics=(MetricSpec(name=metric, config=config),))


def test_a_metric_that_the_targets_of_a_sequence_do_not_fit_is_named_without_the_numbers_of_a_trial(
    make_slot: Callable[..., Slot],
) -> None:
    inputs = keras.Input((5, 3), name="x")
    model = keras.Model(inputs, layers.Dense(3, activation="softmax", name="tags")(inputs))
    model.compile("sgd", "sparse_categorical_crossentropy")
    batch = Batch(inputs={"x": np.ones((2, 5, 3), np.float32)}, targets={"targets": np.zeros((2, 5), np.int64)})
    said = r"targets: int64\[examples, 5\]; outputs: float32\[examples, 5, 3\]\); it takes"
    with pytest.raises(InvalidInputError, match=said):
        score(make_slot(model), batch, metrics=(MetricSpec(name="AUC"),))


def test_the_output_of_a_sequential_model_is_named_too(make_slot: Callable[..., Slot]) -> None:
    model = keras.Sequential([keras.Input((3,), name="x"), layers.Dense(3, activation="softmax", name="kind")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    batch = Batch(inputs={"x": np.ones((4, 3), np.float32)}, targets={"targets": CLASS_NUMBERS})
    with pytest.raises(InvalidInputError, match="the targets of 'kind' do not fit the metric 'AUC'"):
        score(make_slot(model), batch, metrics=(MetricSpec(name="AUC"),))


def test_the_output_whose_targets_do_not_fit_a_metric_is_named(two_by_two: Slot) -> None:
    batch = two_by_two_batch(4)
    batch = Batch(inputs=batch.inputs, targets={**batch.targets, "odds": np.array([0, 1, 1, 0])})
    with pytest.raises(
        InvalidInputError, match=r"the targets of 'odds' do not fit the metric 'F1Score' .*\[examples, 1\]$"
    ):
        score(two_by_two, batch, metrics=(MetricSpec(name="F1Score", config={"threshold": 0.5}),))


@pytest.mark.parametrize(
    ("loss", "targets", "said"),
    [
        (
            "sparse_categorical_crossentropy",
            ONE_HOT,
            r"float32\[examples, 3\]\); it takes class numbers of .* \[examples\]",
        ),
        (
            keras.losses.SparseCategoricalCrossentropy(),
            ONE_HOT,
            r"\); it takes class numbers of the shape \[examples\]",
        ),
        ("categorical_crossentropy", CLASS_NUMBERS, r"; it takes targets of the outputs' shape \[examples, 3\]"),
    ],
)
def test_a_loss_that_the_targets_do_not_fit_is_named_with_what_it_takes(
    make_slot: Callable[..., Slot], loss: Any, targets: Any, said: str
) -> None:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, layers.Dense(3, activation="softmax", name="kind")(inputs))
    model.compile("sgd", loss)
    batch = Batch(inputs={"x": np.ones((4, 3), np.float32)}, targets={"targets": targets})
    with pytest.raises(InvalidInputError, match=f"fit the model's loss '{getattr(loss, 'name', loss)}' .*{said}"):
        score(make_slot(model), batch)


def test_a_loss_that_the_targets_do_not_fit_is_blamed_with_the_shapes(make_slot: Callable[..., Slot]) -> None:
    x, _, _ = sample_models.regression_data(np.random.default_rng(0), 4)
    batch = Batch(inputs={"x": x}, targets={"targets": np.ones(4, np.float32)})
    with pytest.raises(
        InvalidInputError,
        match=r"fit the model's loss 'huber_loss' \(targets: float32\[examples\]; outputs: float32\[examples, 2\]\)",
    ):
        score(make_slot(sample_models.regression(), replicas=2), batch)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: with_layer(sample_models.AddsLoss()), "the targets do not fit the model's loss 'mse'"),
        (lambda: with_layer(sample_models.BatchStatistics()), "the targets do not fit the model's loss 'mse'"),
        (lambda: with_layer(kind=sample_models.OwnLoss), "the model's own compute_loss cannot score the batch"),
        (lambda: with_layer(kind=sample_models.OwnTestStep), "the model's own test_step cannot score the batch"),
    ],
)
def test_a_model_that_runs_whole_says_the_shapes_that_do_not_fit(
    make_slot: Callable[..., Slot], build: Callable[[], Any], said: str
) -> None:
    slot = make_slot(build())
    inputs = {"x": np.ones((4, 3), np.float32)}
    for targets in (np.ones((4, 7), np.float32), np.ones(4, np.float32)):  # found when it is traced, and when it runs
        with pytest.raises(InvalidInputError) as refused:
            score(slot, Batch(inputs=inputs, targets={"targets": targets}))
        shape = "examples, 7" if targets.ndim == 2 else "examples"
        assert str(refused.value).startswith(f"{said} (targets: float32[{shape}]; outputs: float32[examples, 2])")
        assert "node" not in str(refused.value)
    with pytest.raises(InvalidInputError, match=r"targets: none|no targets of"):
        score(slot, Batch(inputs=inputs, targets={}))


def with_layer(layer: Any = None, kind: Any = keras.Model) -> Any:
    inputs = keras.Input((3,), name="x")
    model = kind(inputs, layers.Dense(2, name="y")(inputs if layer is None else layer(inputs)))
    model.compile("sgd", "mse")
    return model


def test_a_test_step_that_leaves_out_the_compiled_metrics_is_refused_with_what_to_do(
    make_slot: Callable[..., Slot],
) -> None:
    model = with_layer(kind=sample_models.OwnTestStep)
    model.compile("sgd", "mse", metrics=["mae"])
    batch = Batch(inputs={"x": np.ones((4, 3), np.float32)}, targets={"targets": np.ones((4, 2), np.float32)})
    with pytest.raises(ValueError, match="Cannot get result"):
        model.evaluate(batch.inputs["x"], batch.targets["targets"], verbose=0)
    with pytest.raises(NotEvaluableError, match=r"has to update the metrics .*; or compile it without metrics"):
        score(make_slot(model), batch)


def test_outputs_without_targets_are_named(make_slot: Callable[..., Slot]) -> None:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in ("a", "b", "c")})
    model.compile("sgd", dict.fromkeys(("a", "b", "c"), "mse"))
    batch = Batch(inputs={"x": np.ones((2, 3), np.float32)}, targets={"a": np.ones((2, 1), np.float32)})
    with pytest.raises(InvalidInputError, match=r"the targets do not fit .*; there are none of 'b', 'c'\)"):
        score(make_slot(model), batch)


@pytest.mark.parametrize("loss", ["mse", "binary_crossentropy", "sparse_categorical_crossentropy", "hinge"])
def test_targets_of_text_are_refused(make_slot: Callable[..., Slot], loss: str) -> None:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid", name="y")(inputs))
    model.compile("sgd", loss, metrics=["accuracy"])
    batch = Batch(inputs={"x": np.ones((2, 3), np.float32)}, targets={"targets": np.array([[b"a"], [b"b"]], object)})
    with pytest.raises(InvalidInputError, match=r"'y' hold text|the targets do not fit .*string\[2, 1\]"):
        score(make_slot(model), batch)


@pytest.fixture(scope="module")
def of_sequences(make_slot: Callable[..., Slot]) -> Slot:
    inputs = keras.Input((7, 3), name="x")
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    model.compile("sgd", "mse", weighted_metrics=["mae"])
    return make_slot(model)


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 7, 2, 1)])
def test_an_error_about_weights_says_what_came(of_sequences: Slot, shape: tuple[int, ...]) -> None:
    batch = Batch(
        inputs={"x": np.ones((5, 7, 3), np.float32)},
        targets={"targets": np.ones((5, 7, 2), np.float32)},
        sample_weights={"sample_weights": np.ones(shape, np.float32)},
    )
    with pytest.raises(InvalidInputError) as refused:
        score(of_sequences, batch)
    came = f"sample weights: float32[{', '.join(map(str, ('examples', *shape[1:])))}])"
    assert f"(targets: float32[examples, 7, 2]; outputs: float32[examples, 7, 2]; {came}" in str(refused.value)
    assert str(refused.value).startswith("the sample weights do not fit the model's loss")
    assert "node" not in str(refused.value)


def test_the_targets_of_one_stream_are_of_one_kind(classifier: Slot) -> None:
    column = image_batch(2, targets={"targets": np.zeros((2, 1), np.int64)})
    came = r"the first had targets outputs: int64\[examples\] and sample weights none, this one has .*\[examples, 1\]"
    with pytest.raises(InvalidInputError, match=f"of the same kind; {came}"):
        score(classifier, image_batch(3), column)


def test_a_target_is_called_by_its_output_too(classifier: Slot) -> None:
    batch = image_batch(5)
    named = Batch(inputs=batch.inputs, targets={"outputs": batch.targets["targets"]})
    assert score(classifier, named) == score(classifier, batch)


def test_one_weight_for_all_outputs_weighs_each_of_them(two_by_two: Slot) -> None:
    weights = np.array([0.0, 1.0, 3.0], np.float32)
    shared = score(two_by_two, two_by_two_batch(3, sample_weights={"sample_weights": weights}))
    each = score(two_by_two, two_by_two_batch(3, sample_weights={"odds": weights, "value": weights}))
    assert shared == each


def test_an_output_without_a_weight_of_its_own_weighs_one(two_by_two: Slot) -> None:
    weights = np.array([0.0, 1.0, 3.0], np.float32)
    partly = score(two_by_two, two_by_two_batch(3, sample_weights={"odds": weights}))
    fully = score(two_by_two, two_by_two_batch(3, sample_weights={"odds": weights, "value": np.ones(3, np.float32)}))
    assert partly == fully


def test_a_loss_that_is_not_a_number_is_reported_as_such(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(sample_models.regression())
    batch = Batch(inputs={"x": np.full((2, 4), np.nan, np.float32)}, targets={"targets": np.zeros((2, 2), np.float32)})
    assert np.isnan(score(slot, batch)["loss"])


def test_a_program_is_traced_once_for_batches_of_any_size(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(sample_models.regression(), replicas=2)
    scorer = slot.scorer()
    x, y, _ = sample_models.regression_data(np.random.default_rng(0), 30)
    state = scorer.start()
    for rows in (1, 7, 30):
        batch = Batch(inputs={"x": x[:rows]}, targets={"targets": y[:rows]})
        checked = scorer.check(batch)
        assert scorer.is_prepared(checked) == (rows > 1)
        state = scorer.update(state, checked)
    assert slot.traces == 2
    assert slot.scorer() is scorer


def digests(slot: Slot, batch: Batch, metrics: tuple[MetricSpec, ...] = ()) -> dict[str, str]:
    scorer = slot.scorer(metrics)
    state = scorer.update(scorer.start(), batch)
    found = scorer.metric_digests(state, scorer.result(state))
    assert found.keys() == scorer.result(state).keys()
    assert all(len(digest) == 64 for digest in found.values())
    return found


def test_each_metric_of_each_output_has_a_digest_of_its_configuration(
    make_slot: Callable[..., Slot], two_by_two: Slot
) -> None:
    before = digests(two_by_two, two_by_two_batch(5))
    assert digests(make_slot(sample_models.two_by_two()), two_by_two_batch(3)) == before, "names that Keras numbers"
    model = sample_models.two_by_two()
    model.compile(
        "adam",
        {"odds": "binary_crossentropy", "value": "mse"},
        loss_weights={"odds": 1.0, "value": 0.4},
        metrics={
            "odds": [keras.metrics.AUC(curve="PR"), keras.metrics.Precision(thresholds=0.7), keras.metrics.Recall()],
            "value": ["mae"],
        },
        weighted_metrics={"odds": ["accuracy"]},
    )
    after = digests(make_slot(model), two_by_two_batch(5))
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    assert {name.rstrip("_0123456789") for name in changed} == {
        "loss",
        "odds_loss",
        "value_loss",
        "odds_auc",
        "odds_precision",
    }
    assert {"value_mae", "odds_accuracy"} <= before.keys() - changed


def test_metrics_of_several_values_and_those_of_a_models_own_way_have_digests_too(
    make_slot: Callable[..., Slot],
) -> None:
    x, y, _ = sample_models.one_hot_data(np.random.default_rng(0), 6)
    several = digests(make_slot(sample_models.subclassed()), Batch(inputs={"inputs": x}, targets={"targets": y}))
    assert several["f1_score/0"] == several["f1_score/2"] != several["accuracy"]
    x, y, _ = sample_models.regression_data(np.random.default_rng(0), 6)
    batch = Batch(inputs={"x": x}, targets={"targets": y})
    own = make_slot(sample_models.own_test_step())
    assert digests(own, batch)["last"] != digests(own, batch)["seen"], "the former is that of the whole configuration"
    named = [MetricSpec(name="BinaryAccuracy", config={"threshold": threshold}) for threshold in (0.5, 0.6, 0.5)]
    first, second, third = (digests(own, batch, (spec,))["BinaryAccuracy"] for spec in named)
    assert first == third != second


@keras.saving.register_keras_serializable(package="test_scorer")
class PenalizedByInputs(keras.Model):  # type: ignore[misc]
    """A loss of its own, which depends on the inputs."""

    def compute_loss(self, x: Any = None, *others: Any, **options: Any) -> Any:
        return super().compute_loss(x, *others, **options) + keras.ops.mean(x)


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_scored_batch_keeps_its_inputs_only_if_the_score_depends_on_them(
    *, own_loss: bool, make_slot: Callable[..., Slot]
) -> None:
    """Batches wait until they are added to their slices, and inputs are often larger than all else."""
    inputs = keras.Input((4096,))
    model = (PenalizedByInputs if own_loss else keras.Model)(inputs, layers.Dense(2)(inputs))
    model.compile(loss="mse", metrics=["mae"])
    scorer = make_slot(model).scorer((), increments=True)
    x = np.ones((50, 4096), np.float32)
    batch = Batch(inputs={"inputs": x}, targets={"targets": np.ones((50, 2), np.float32)})
    state = scorer.update(scorer.start(), batch)
    assert state.scored is not None
    assert (state.scored.data.bytes > x.nbytes) is own_loss
    rows = np.arange(10)
    part = state.scored.program.update_with(state.scored.program.initial, state.scored.data, rows)
    alone = Batch(inputs={"inputs": x[rows]}, targets={"targets": np.ones((10, 2), np.float32)})
    expected = scorer.result(scorer.update(scorer.start(), alone))
    assert state.scored.program.result(part) == pytest.approx(expected, rel=1e-6)
