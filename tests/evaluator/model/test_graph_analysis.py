"""Ids outside a table and labels outside the classes are refused on the host, as a GPU would not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from testkit import sample_models
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.graph_analysis import ValueRange, find_value_ranges, may_overlap
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch

MakeSlot = Callable[..., Slot]


def two_tables() -> Any:
    """Looks ids up in tables of two sizes, by columns in one input and in a nested model in another."""
    ids = keras.Input((2,), dtype="int64", name="ids")
    words = keras.Input((None,), dtype="int32", name="words")
    text = keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(7, 3)])
    columns = [layers.Embedding(5, 3)(ids[:, 0]), layers.Embedding(500, 3)(ids[:, 1])]
    model = keras.Model([ids, words], layers.Dense(2)(ops.mean(text(words), axis=1) + columns[0] + columns[1]))
    model.compile("sgd", "mse")
    return model


def segmentation(*, ignore_class: int | None) -> Any:
    inputs = keras.Input((4, 3), name="x")
    model = keras.Model(inputs, layers.Dense(3)(inputs))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignore_class))
    return model


def two_heads() -> Any:
    inputs = keras.Input((4,), name="x")
    heads = {
        "animal": layers.Dense(3, activation="softmax", name="animal")(inputs),
        "size": layers.Dense(1, name="size")(inputs),
        "colour": layers.Dense(5, activation="softmax", name="colour")(inputs),
    }
    model = keras.Model(inputs, heads)
    sparse = "sparse_categorical_crossentropy"
    model.compile("sgd", {"animal": sparse, "size": "mse", "colour": sparse})
    return model


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("build", "name"), [(sample_models.tagger, "tokens"), (sample_models.text, "inputs")])
def test_an_id_outside_the_table_is_refused_by_name_example_and_value(
    build: Callable[[], Any], name: str, replicas: int, make_slot: MakeSlot
) -> None:
    slot = make_slot(build(), replicas=replicas)
    tokens = np.full((5, 4), 10, np.int32)
    slot.forward({name: tokens})
    for value in (11, -12, 2**31 - 1):
        tokens[3, 2] = value
        with pytest.raises(
            InvalidInputError, match=f"input '{name}' has {value} in example 3; a value from 0 to 10 was"
        ):
            slot.forward({name: tokens})


def test_an_id_counted_from_the_end_of_the_table_is_what_keras_makes_of_it(make_slot: MakeSlot) -> None:
    model = sample_models.tagger()
    tokens = np.full((2, 3), -1, np.int32)
    np.testing.assert_allclose(
        make_slot(model, replicas=2).forward({"tokens": tokens})["outputs"], model(tokens, training=False), atol=1e-6
    )


def test_only_what_is_looked_up_as_it_comes_has_a_range(make_slot: MakeSlot) -> None:
    slot = make_slot(two_tables(), replicas=2)
    assert slot._pass.input_ranges == {"words": ValueRange(low=-7, high=6)}
    slot.forward({"ids": np.array([[4, 499]]), "words": np.array([[6]], np.int32)})


def test_tables_that_plain_tensorflow_looks_up_have_a_range() -> None:
    table = tf.Variable(tf.zeros([9, 2]))

    def look_up(ids: Any, places: Any, bounded: Any) -> Any:
        bounded = tf.where(bounded < 9, bounded, 0)
        rows = [tf.gather(table, tf.cast(index, tf.int32)) for index in (tf.squeeze(ids, 1), places, bounded)]
        return tf.add_n(rows)

    specs = [tf.TensorSpec([None, 1], tf.uint8), tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)]
    function = tf.function(look_up).get_concrete_function(*specs)
    assert find_value_ranges(function) == {0: ValueRange(low=0, high=8), 1: ValueRange(low=0, high=8)}


def test_ids_in_floats_are_cut_as_a_cast_cuts_them() -> None:
    ids = ValueRange(low=0, high=4)
    ids.check("input 'x'", np.array([[-0.9, 4.9]], np.float32))
    for value in (-1.0, 5.0, np.nan):
        with pytest.raises(InvalidInputError, match="in example 1"):
            ids.check("input 'x'", np.array([[0.0], [value]], np.float32))


def test_an_evaluation_refuses_ids_as_a_prediction_does(make_slot: MakeSlot) -> None:
    slot = make_slot(sample_models.tagger(), replicas=2)
    inputs, targets, _ = sample_models.tagger_data(np.random.default_rng(0), 4)
    inputs[2, 1] = 11
    scorer = slot.scorer()
    with pytest.raises(
        InvalidInputError, match="input 'tokens' has 11 in example 2; a value from 0 to 10 was expected"
    ):
        scorer.update(scorer.start(), Batch(inputs={"tokens": inputs}, targets={"targets": targets}))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_a_label_outside_the_classes_is_refused(dtype: str, make_slot: MakeSlot) -> None:
    slot = make_slot(sample_models.image_classifier(), replicas=2)
    images, labels, _ = sample_models.image_data(np.random.default_rng(0), 6)
    scorer = slot.scorer()
    labels = labels.astype(dtype)
    batch = Batch(inputs={"inputs": images}, targets={"targets": labels})
    scorer.update(scorer.start(), batch)
    labels[4] = 5
    with pytest.raises(InvalidInputError, match=r"target 'outputs' has 5(\.0)? in example 4; a value from 0 to 4 was"):
        scorer.update(scorer.start(), batch)


def test_the_class_that_a_loss_ignores_is_let_pass(make_slot: MakeSlot) -> None:
    x, labels = np.zeros((2, 4, 3), np.float32), np.full((2, 4), -1)
    ignoring = make_slot(segmentation(ignore_class=-1)).scorer()
    ignoring.update(ignoring.start(), Batch(inputs={"x": x}, targets={"targets": labels}))
    labels[1, 3] = -2
    with pytest.raises(InvalidInputError, match="has -2 in example 1"):
        ignoring.update(ignoring.start(), Batch(inputs={"x": x}, targets={"targets": labels}))
    strict = make_slot(segmentation(ignore_class=None)).scorer()
    with pytest.raises(InvalidInputError, match="has -1 in example 0; a value from 0 to 2 was expected"):
        strict.update(strict.start(), Batch(inputs={"x": x}, targets={"targets": labels}))


def test_each_of_several_outputs_has_classes_of_its_own(make_slot: MakeSlot) -> None:
    scorer = make_slot(two_heads(), replicas=2).scorer()
    inputs = {"x": np.zeros((3, 4), np.float32)}
    targets = {"animal": np.full(3, 2), "size": np.full((3, 1), 99.0, np.float32), "colour": np.full(3, 4)}
    scorer.update(scorer.start(), Batch(inputs=inputs, targets=targets))
    for name, value in (("animal", 3), ("colour", 5)):
        wrong = {**targets, name: np.array([0, value, 0])}
        with pytest.raises(InvalidInputError, match=f"target '{name}' has {value} in example 1"):
            scorer.update(scorer.start(), Batch(inputs=inputs, targets=wrong))


def test_a_model_that_must_see_whole_batches_is_checked_too(strategy: Callable[[int], Any], tmp_path: Path) -> None:
    inputs = keras.Input((3,), dtype="int32", name="tokens")
    outputs = layers.Dense(2, activation="softmax")(
        sample_models.AddsLoss()(layers.Flatten()(layers.Embedding(4, 2)(inputs)))
    )
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.save(tmp_path / "model.keras")
    slot = Slot(strategy(2), tmp_path / "model.keras", max_batch_size=8)
    assert "adds losses" in slot.notes[0]
    scorer = slot.scorer()
    tokens, labels = np.zeros((2, 3), np.int32), np.array([0, 2])
    with pytest.raises(InvalidInputError, match="target 'outputs' has 2 in example 1"):
        scorer.update(scorer.start(), Batch(inputs={"tokens": tokens}, targets={"targets": labels}))
    with pytest.raises(InvalidInputError, match="input 'tokens' has 4 in example 0"):
        scorer.update(scorer.start(), Batch(inputs={"tokens": tokens + 4}, targets={"targets": labels}))


def traced(function: Callable[[Any], Any]) -> Any:
    return tf.function(function, input_signature=[tf.TensorSpec([None], tf.float32)]).get_concrete_function()


def test_calls_may_overlap_unless_they_change_a_variable_or_run_python() -> None:
    variable = tf.Variable(1.0)

    def repeated(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * variable), (0, x))[1]

    def in_a_loop(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * variable.assign_add(1.0)), (0, x))[1]

    assert may_overlap(traced(repeated))
    assert not may_overlap(traced(lambda x: x * variable.assign_add(1.0)))
    assert not may_overlap(traced(in_a_loop))
    assert not may_overlap(traced(lambda x: tf.numpy_function(np.sin, [x], tf.float32)))
    assert not may_overlap(traced(lambda x: tf.py_function(ops.sin, [x], tf.float32)))


def test_a_model_with_weights_and_lookups_may_overlap_and_one_that_draws_random_numbers_may_not(
    make_slot: MakeSlot,
) -> None:
    assert make_slot(two_tables()).may_overlap
    inputs = keras.Input((3,))
    noisy = keras.Model(inputs, sample_models.Noise()(inputs))
    assert not make_slot(noisy).may_overlap
