from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from understudy.service.handlers.tfserving_handler import decode_tensor, encode_tensor
from understudy.wire import WireError

MAX_BYTES = 4096

ARRAYS = {
    **{name: np.array([[0, 1, 100]], name) for name in ("uint8", "uint16", "uint32", "uint64")},
    **{name: np.array([[0, -1, 100]], name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.array([[-0.0, np.inf, 1.5]], name) for name in ("float16", "float32", "float64")},
    "bfloat16": np.array([[-0.0, np.inf, 1.5]], ml_dtypes.bfloat16),
    "bool": np.array([[True, False, True]]),
    "string": np.array([[b"", b"\0a", b"\xff" * 300]], dtype=object),
}


def typed(array: Any) -> tensor_pb2.TensorProto:
    """Return a tensor whose elements are in the field of their type, as other languages' clients send them."""
    elements = [tf.make_tensor_proto(element, dtype=tf.as_dtype(array.dtype)) for element in array.ravel()]
    merged = tensor_pb2.TensorProto(dtype=elements[0].dtype, tensor_shape=tf.TensorShape(array.shape).as_proto())
    for element in elements:
        element.ClearField("dtype")
        element.ClearField("tensor_shape")
        merged.MergeFrom(element)
    return merged


def tensor(*shape: int, kind: Any = types_pb2.DT_FLOAT, **fields: Any) -> tensor_pb2.TensorProto:
    made = tensor_pb2.TensorProto(dtype=kind, **fields)
    for length in shape:
        made.tensor_shape.dim.add(size=length)
    return made


@pytest.mark.parametrize("dtype", ARRAYS)
def test_every_datatype_is_encoded_as_tensorflow_reads_it(dtype: str) -> None:
    array = ARRAYS[dtype]
    read = tf.make_ndarray(encode_tensor(array))
    assert read.dtype == array.dtype
    assert read.tolist() == array.tolist()


@pytest.mark.parametrize("dtype", ARRAYS)
@pytest.mark.parametrize(
    "form", [tf.make_tensor_proto, typed, encode_tensor], ids=["made by TensorFlow", "typed", "ours"]
)
def test_every_datatype_is_decoded_in_whichever_form_it_comes(dtype: str, form: Any) -> None:
    array = ARRAYS[dtype]
    decoded = decode_tensor(form(array), max_bytes=MAX_BYTES, name="x")
    assert decoded.dtype == array.dtype
    assert decoded.tolist() == array.tolist()
    assert not decoded.flags.writeable


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, [0.0] * 4), ({"float_val": [3.0]}, [3.0] * 4), ({"float_val": [1, 2]}, [1, 2, 2, 2])]
)
def test_elements_that_are_left_out_are_the_last_one_or_zero(fields: Any, expected: list[float]) -> None:
    assert decode_tensor(tensor(2, 2, **fields), max_bytes=MAX_BYTES, name="x").ravel().tolist() == expected


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (tensor(1, kind=types_pb2.DT_COMPLEX64), "x: data type number 8 cannot be served; expected one of DT_BOOL"),
        (tensor(1, kind=types_pb2.DT_FLOAT_REF), "x: data type number 101 cannot be served"),
        (tensor(2, tensor_content=b"1234567"), r"x: float32 of shape \[2\] needs 8 bytes of content, but got 7"),
        (tensor(1, float_val=[1, 2]), r"x: shape \[1\] needs 1 elements in float_val, but got 2"),
        (tensor(1, int_val=[1]), "x: DT_FLOAT elements belong in float_val, but got int_val"),
        (tensor(1, float_val=[1], tensor_content=b"1234"), "x: got both tensor_content and float_val"),
        (tensor(1, kind=types_pb2.DT_STRING, tensor_content=b"a"), "x: DT_STRING elements belong in string_val"),
        (tensor(1, kind=types_pb2.DT_UINT8, int_val=[256]), "x: an element does not fit DT_UINT8"),
        (tensor(1, kind=types_pb2.DT_HALF, half_val=[-1]), "x: an element does not fit DT_HALF"),
        (tensor(-1, float_val=[1]), r"x: shape \[-1\] has a negative length"),
        (tensor(*[1] * 65, float_val=[1]), "x: a shape of 65 axes is impossible"),
        (tensor(2**40, 2**40, float_val=[1]), r"x: shape .* needs \d+ bytes; at most 4096 are taken"),
        (tensor(2**40), "x: shape .* at most 4096 are taken"),
    ],
)
def test_malformed_tensors_are_refused_with_a_sentence(message: Any, sentence: str) -> None:
    with pytest.raises(WireError, match=f"^{sentence}"):
        decode_tensor(message, max_bytes=MAX_BYTES, name="x")


def test_a_shape_of_unknown_rank_is_refused() -> None:
    message = tensor(float_val=[1])
    message.tensor_shape.unknown_rank = True
    with pytest.raises(WireError, match="x: the shape is of unknown rank"):
        decode_tensor(message, max_bytes=MAX_BYTES, name="x")
