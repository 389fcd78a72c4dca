"""One batch over several replicas: the same examples in the same order, whatever the number of either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit import sample_models
from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.evaluator_errors import InvalidInputError, LoadError
from understudy.evaluator.model.inputs import check_inputs
from understudy.evaluator.model.slot import Slot

LARGEST = 257


@pytest.fixture(scope="module")
def model() -> Any:
    return sample_models.image_classifier()


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def slot(request: pytest.FixtureRequest, model: Any, make_slot: Callable[..., Slot]) -> Slot:
    return make_slot(model, replicas=request.param, max_batch_size=LARGEST)


def test_every_number_of_examples_gives_the_same_examples_in_the_same_order(slot: Slot, model: Any) -> None:
    images = np.random.default_rng(0).normal(size=(LARGEST, 6, 6, 1)).astype(np.float32)
    expected = model(images, training=False).numpy()
    for rows in range(1, LARGEST + 1):
        outputs = slot.forward({"inputs": images[:rows]})["outputs"]
        np.testing.assert_allclose(outputs, expected[:rows], rtol=0, atol=1e-5)
    assert slot.traces == 1


def test_more_examples_than_one_pass_takes_go_forward_in_pieces(model: Any, make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(model, replicas=3, max_batch_size=10)
    images = np.random.default_rng(0).normal(size=(41, 6, 6, 1)).astype(np.float32)
    outputs = slot.forward({"inputs": images})["outputs"]
    np.testing.assert_allclose(outputs, model(images, training=False), rtol=0, atol=1e-5)


def test_nested_structures_keep_their_names(make_slot: Callable[..., Slot]) -> None:
    model = sample_models.two_by_two()
    slot = make_slot(model, replicas=2)
    inputs, _, _ = sample_models.two_by_two_data(np.random.default_rng(0), 5)
    outputs = slot.forward(inputs)
    expected = model(inputs, training=False)
    assert outputs.keys() == {"odds", "value"}
    for name, array in outputs.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-6)


@keras.saving.register_keras_serializable("test_forward")
class Uneven(keras.Model):  # type: ignore[misc]
    """Gives tensors that are not dense."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self._kind = kind
        self._dense = keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        y = self._dense(x)
        return {"y": tf.RaggedTensor.from_tensor(y) if self._kind == "ragged" else tf.sparse.from_dense(y), "x": x}

    def get_config(self) -> dict[str, Any]:
        return {"kind": self._kind}


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_with_an_output_that_is_not_dense_is_refused(
    make_slot: Callable[..., Slot], kind: str, replicas: int
) -> None:
    model = Uneven(kind)
    model(np.zeros((2, 3), np.float32))
    with pytest.raises(LoadError, match=f"output 'y' of the model is {kind}: float32.*a dense tensor was expected"):
        make_slot(model, replicas=replicas)


def test_sequences_of_any_length_run_without_another_trace(make_slot: Callable[..., Slot]) -> None:
    model = sample_models.tagger()
    slot = make_slot(model, replicas=2)
    for length in (1, 5, 9, 40):
        tokens = np.random.default_rng(length).integers(0, 11, (3, length)).astype(np.int32)
        outputs = slot.forward({"tokens": tokens})["outputs"]
        np.testing.assert_allclose(outputs, model(tokens, training=False), rtol=0, atol=1e-6)
    assert slot.traces == 1


def test_threads_that_share_a_slot_get_their_own_examples(slot: Slot, model: Any) -> None:
    images = np.random.default_rng(0).normal(size=(8, 16, 6, 6, 1)).astype(np.float32)
    wrong: list[int] = []

    def run(index: int) -> None:
        expected = model(images[index], training=False).numpy()
        for _ in range(20):
            outputs = slot.forward({"inputs": images[index]})["outputs"]
            if not np.allclose(outputs, expected, rtol=0, atol=1e-5):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_value_the_model_refuses_is_the_callers_fault(make_slot: Callable[..., Slot]) -> None:
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    slot = make_slot(keras.Model(tokens, keras.layers.Embedding(11, 4)(keras.ops.abs(tokens))))
    with pytest.raises(InvalidInputError, match="refused the values"):
        slot.forward({"tokens": np.full((1, 3), -99, np.int32)})


def test_a_model_whose_output_is_not_batch_major_is_refused(make_slot: Callable[..., Slot]) -> None:
    inputs = keras.Input((4,))
    total = keras.ops.sum(inputs, axis=0, keepdims=True)
    with pytest.raises(LoadError, match="one example for each example of input"):
        make_slot(keras.Model(inputs, total), replicas=2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image": np.zeros((2, 6, 6, 1), np.float32)}, "got the inputs 'image'; expected 'inputs'"),
        (
            {"keras_tensor": np.zeros((2, 6, 6, 1), np.float32)},
            "one input, here called 'inputs', because Keras generated",
        ),
        ({"inputs": np.zeros((2, 6, 6, 1))}, "dtype float64; float32 was expected: convert the values first"),
        ({"inputs": np.zeros((2, 6, 5, 1), np.float32)}, r"shape \[2, 6, 5, 1\]; \[examples, 6, 6, 1\] was expected"),
        ({"inputs": np.zeros((6,), np.float32)}, r"shape \[6\]; \[examples, 6, 6, 1\] was expected"),
        ({"inputs": np.zeros((0, 6, 6, 1), np.float32)}, "has no examples"),
        ({}, "got the inputs none"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(slot: Slot, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        slot.check_inputs(inputs)


def test_names_that_stand_for_places_are_told_from_given_ones() -> None:
    specs = [
        TensorSpec(name="left", dtype="float32", shape=(None, 3)),
        TensorSpec(name="1", dtype="float32", shape=(None, 2), positional=True),
    ]
    message = r"expected 'left', '1'\. Keras generated the names of '1', which are positions in the model's order$"
    with pytest.raises(InvalidInputError, match=message):
        check_inputs({"left": np.zeros((2, 3), np.float32), "right": np.zeros((2, 2), np.float32)}, specs)
    with pytest.raises(InvalidInputError, match=r"'left'$"):
        check_inputs({"right": np.zeros((2, 3), np.float32)}, specs[:1])


def test_inputs_must_have_equally_many_examples(make_slot: Callable[..., Slot]) -> None:
    slot = make_slot(sample_models.two_by_two())
    inputs = {"left": np.zeros((3, 3), np.float32), "right": np.zeros((2, 2), np.float32)}
    with pytest.raises(InvalidInputError, match="'right' has 2 examples; 3 were expected"):
        slot.check_inputs(inputs)
    assert slot.check_inputs({**inputs, "right": np.zeros((3, 2), np.float32)}) == 3
