"""Calling a traced function as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from understudy.evaluator.model.forward import DirectCall

ARRAYS = {
    "float64": np.array([[1.5], [-2.0]]),
    "bfloat16": np.array([[1.5], [-2.0]], ml_dtypes.bfloat16),
    "uint8": np.array([[0], [255]], np.uint8),
    "bool": np.array([[True], [False]]),
    "string": np.array([[b"a\0"], ["é".encode()]], object),
}


def traced(dtype: Any) -> Any:
    def both_ways(x: Any) -> list[Any]:
        return [x, tf.reverse(x, [0])]

    return tf.function(both_ways, input_signature=[tf.TensorSpec([None, 1], dtype)]).get_concrete_function()


@pytest.mark.parametrize("devices", [["/device:CPU:0"], ["/device:GPU:0"], ["/device:CPU:0", "/device:CPU:1"]])
@pytest.mark.parametrize("name", ARRAYS)
def test_it_gives_what_the_function_gives(name: str, devices: list[str], logical_cpus: tuple[str, ...]) -> None:
    del logical_cpus
    function = traced(tf.as_dtype(name))
    direct = DirectCall(function, devices)(ARRAYS[name])
    for came, expected in zip(direct, function(tf.constant(ARRAYS[name])), strict=True):
        assert came.dtype == expected.dtype
        np.testing.assert_array_equal(came.numpy(), expected.numpy())


def test_it_reads_variables_when_it_is_called(strategy: Callable[[int], Any]) -> None:
    with strategy(1).scope():
        variable = tf.Variable([[2.0]])
    function = tf.function(lambda x: [x @ variable], input_signature=[tf.TensorSpec([None, 1])])
    direct = DirectCall(function.get_concrete_function(), ["CPU:0"])
    assert direct(np.ones((1, 1), np.float32))[0].numpy() == 2.0
    variable.assign([[3.0]])
    assert direct(np.ones((1, 1), np.float32))[0].numpy() == 3.0


def test_what_the_function_refuses_is_refused_alike() -> None:
    function = tf.function(
        lambda x: [tf.gather([1.0], x)], input_signature=[tf.TensorSpec([None], tf.int32)]
    ).get_concrete_function()
    with pytest.raises(tf.errors.InvalidArgumentError):
        DirectCall(function, ["CPU:0"])(np.ones(1, np.int32))
