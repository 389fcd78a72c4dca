"""Models are tried, and warmed up, on inputs that are valid: tokens in range, padding at the end."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from testkit import sample_models
from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model.graph_analysis import ValueRange
from understudy.evaluator.model.probe import example_inputs, kinds_of
from understudy.evaluator.model.slot import Slot

rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")  # the package has a function of the same name
MakeSlot = Callable[..., Slot]

TOKENS = TensorSpec(name="tokens", dtype="int32", shape=(None, None))
MASK = TensorSpec(name="mask", dtype="bool", shape=(None, None))
SERIES = TensorSpec(name="series", dtype="float32", shape=(None, 12, 3))
TEXT = TensorSpec(name="text", dtype="string", shape=(None,))
WORDS = TensorSpec(name="words", dtype="string", shape=(None, 5))
IMAGE = TensorSpec(name="image", dtype="float32", shape=(None, 4, 4, 1))


@pytest.fixture
def cudnn_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have recurrent layers hold masks against what cuDNN takes, with the check that Keras makes where a GPU is."""

    def checked(*args: Any) -> None:
        mask = next((argument for argument in args if getattr(argument, "dtype", None) == tf.bool), None)
        if mask is not None:
            rnn._assert_valid_mask(mask)
        raise NotImplementedError  # and Keras goes on without cuDNN

    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(rnn, "_cudnn_lstm", checked)
    monkeypatch.setattr(rnn, "_cudnn_gru", checked)


def masked(layer: Any) -> Any:
    inputs = keras.Input((None,), dtype="int32", name="tokens")
    hidden = layer(layers.Embedding(11, 4, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))


def masked_series() -> Any:
    inputs = keras.Input((None, 3), name="series")
    return keras.Model(inputs, layers.LSTM(3)(layers.Masking()(inputs)))


def explicit_mask() -> Any:
    inputs, mask = keras.Input((None, 3), name="series"), keras.Input((None,), dtype="bool", name="mask")
    return keras.Model([inputs, mask], layers.GRU(3)(inputs, mask=mask))


@pytest.mark.parametrize(
    "build",
    [
        lambda: masked(layers.LSTM(3)),
        lambda: masked(layers.GRU(3)),
        lambda: masked(layers.Bidirectional(layers.LSTM(3))),
        masked_series,
        explicit_mask,
    ],
    ids=["lstm", "gru", "bidirectional", "masking", "mask as input"],
)
@pytest.mark.usefixtures("cudnn_masks")
def test_masked_recurrent_models_load_and_warm_up_under_cudnns_law(
    build: Callable[[], Any], make_slot: MakeSlot
) -> None:
    slot = make_slot(build(), replicas=2, max_batch_size=8)
    slot.warm_up()
    assert slot.notes == ()


@pytest.mark.usefixtures("cudnn_masks")
def test_cudnns_law_is_in_force(make_slot: MakeSlot) -> None:
    slot = make_slot(masked(layers.LSTM(3)))
    for row in ([0, 0, 0], [0, 1, 1], [1, 0, 1]):
        with pytest.raises(Exception, match="right-padded"):
            slot.forward({"tokens": np.array([row], np.int32)})


def test_a_kind_that_fails_is_logged_and_the_others_do(make_slot: MakeSlot, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        slot = make_slot(keras.Model(*unpadded_only()))
        slot.warm_up()
    assert {record.kind for record in caplog.records if hasattr(record, "kind")} == {"padded"}


def test_a_model_that_runs_on_zeros_alone_is_loaded(make_slot: MakeSlot) -> None:
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    slot = make_slot(keras.Model(tokens, layers.Embedding(1, 4)(keras.ops.abs(tokens))))
    slot.warm_up()
    (output,) = slot.forward({"tokens": np.zeros((2, 3), np.int32)}).values()
    assert output.shape == (2, 3, 4)


def test_a_model_that_runs_on_no_kind_is_refused(make_slot: MakeSlot) -> None:
    tokens = keras.Input((3,), dtype="int32")
    with pytest.raises(LoadError, match="is not in"):
        make_slot(keras.Model(tokens, layers.Embedding(2, 4)(tokens + 5)))


def test_examples_that_influence_each_other_are_found_among_tokens_too(make_slot: MakeSlot) -> None:
    tokens = keras.Input((None,), dtype="int32")
    coupled = keras.Model(
        tokens, sample_models.BatchStatistics()(layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(tokens)))
    )
    coupled.compile("sgd", "mse")
    assert "influence each other" in make_slot(coupled, replicas=2).notes[0]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_padding_is_at_the_end_and_never_all_there_is(rows: int) -> None:
    specs = [TOKENS, MASK, SERIES, TEXT, WORDS]
    made = example_inputs(specs, "padded", examples=rows, length=12, ranges={"tokens": ValueRange(low=0, high=30)})
    steps = made["tokens"] != 0
    assert steps[:, 0].all()
    assert (np.diff(steps.astype(int), axis=1) <= 0).all()
    np.testing.assert_array_equal(made["mask"], steps)
    np.testing.assert_array_equal((made["series"] != 0).any(axis=2), steps)
    assert all(text.split() for text in made["text"])
    assert (made["words"][:, 0] == b"a").all()
    assert rows == 1 or (made["words"][:, -1] == b"").any()


def test_tokens_are_in_range_and_full_examples_hold_no_padding() -> None:
    for high in (1, 2, 30, 10**6):
        made = example_inputs([TOKENS], "full", examples=64, length=9, ranges={"tokens": ValueRange(low=-1, high=high)})
        assert made["tokens"].min() >= 1
        assert made["tokens"].max() <= high
    made = example_inputs([TOKENS], "full", examples=4, length=9, ranges={"tokens": ValueRange(low=-1, high=0)})
    assert not made["tokens"].any()


def test_only_what_may_be_a_sequence_is_padded() -> None:
    assert kinds_of([IMAGE]) == ("full",)
    assert kinds_of([IMAGE, TOKENS]) == ("padded", "full")
    made = example_inputs([IMAGE], "padded", examples=8, length=1)
    assert made["image"].all()


def unpadded_only() -> tuple[Any, Any]:
    """Look tokens up, less one: there is no example for padding."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    padding = keras.ops.cast(keras.ops.equal(tokens, 0), "int32")
    return tokens, layers.Embedding(4, 2)(tokens - 1 - 9 * padding)
