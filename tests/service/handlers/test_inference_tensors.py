from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.oip import inference_pb2
from understudy.service.handlers.inference import (
    CONTENTS_FIELDS,
    DATATYPES,
    config_type,
    decode_raw,
    decode_typed,
    encode_raw,
    encode_typed,
)
from understudy.wire import WireError

Contents = inference_pb2.InferTensorContents


def some(dtype: str) -> Any:
    """Return an array ``[2, 3]`` with the extremes of its dtype in it."""
    if dtype == "string":
        return np.array([[b"", b"\0", b"\xff" * 300], [b"a", b"bc", b""]], dtype=object)
    if dtype == "bool":
        return np.array([[True, False, True], [False, False, True]])
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if "float" in dtype:
        return np.array([[np.inf, -np.inf, -0.0], [np.nan, 1.5, ml_dtypes.finfo(kind).tiny]], kind)
    whole = np.iinfo(kind)
    return np.array([[whole.min, whole.max, 0], [1, 2, 3]], kind)


@pytest.mark.parametrize("dtype", DATATYPES)
def test_raw_bytes_carry_every_datatype(dtype: str) -> None:
    array = some(dtype)
    decoded = decode_raw(encode_raw(array), DATATYPES[dtype], array.shape, name="x")
    assert decoded.dtype == array.dtype
    assert decoded.tobytes() == array.tobytes() or decoded.tolist() == array.tolist()
    assert not decoded.flags.writeable


@pytest.mark.parametrize("datatype", CONTENTS_FIELDS)
def test_typed_contents_carry_every_datatype_that_has_them(datatype: str) -> None:
    array = some({name: dtype for dtype, name in DATATYPES.items()}[datatype])
    contents = inference_pb2.InferTensorContents()
    encode_typed(array, datatype, contents)
    decoded = decode_typed(contents, datatype, array.shape, name="x")
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("dtype", DATATYPES)
def test_a_model_configuration_has_a_number_for_every_datatype(dtype: str) -> None:
    assert config_type(dtype) > 0


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=8))
def test_bytes_elements_come_apart_as_they_were_put_together(elements: list[bytes]) -> None:
    array = np.array([*elements, None], dtype=object)[:-1]
    assert decode_raw(encode_raw(array), "BYTES", [len(elements)], name="x").tolist() == elements


@pytest.mark.parametrize(
    ("content", "datatype", "shape", "sentence"),
    [
        (b"1234", "FP31", [1], "x: datatype 'FP31' is unknown; expected one of BOOL, UINT8"),
        (b"1234567", "FP32", [2], r"x: float32 of shape \[2\] needs 8 bytes of content, but got 7"),
        (b"12345678", "FP32", [-2, -1], r"x: shape \[-2, -1\] has a negative length"),
        (b"12345678", "FP32", [2**62, 2**62], "x: float32 of shape .* needs .* bytes of content, but got 8"),
        (b"1", "INT8", [1] * 70, "x: a shape of 70 axes is impossible"),
        (b"\2", "BOOL", [1], "x: a bool is one byte, 0 or 1, but got byte 2"),
        (b"\1\0\0", "BYTES", [1], "x: BYTES element 0 is cut short: expected 4 bytes of its length, got 3"),
        (b"\1\0\0\0a\5\0\0\0ab", "BYTES", [2], "x: BYTES element 1 is cut short: expected 5 bytes, got 2"),
        (b"\0\0\0\0" * 3, "BYTES", [2], r"x: shape \[2\] needs 2 BYTES elements, but got 3"),
        (b"", "BYTES", [2], r"x: shape \[2\] needs 2 BYTES elements, but got at most 0"),
    ],
)
def test_malformed_raw_bytes_are_refused_with_a_sentence(
    content: bytes, datatype: str, shape: list[int], sentence: str
) -> None:
    with pytest.raises(WireError, match=f"^{sentence}"):
        decode_raw(content, datatype, shape, name="x")


@pytest.mark.parametrize(
    ("contents", "datatype", "shape", "sentence"),
    [
        (Contents(), "FP32", [2], r"x: shape \[2\] needs 2 elements in fp32_contents, but got 0"),
        (Contents(int_contents=[1, 2]), "FP32", [2], "x: FP32 elements belong in fp32_contents, but got int_contents"),
        (Contents(int_contents=[128]), "INT8", [1], "x: an element does not fit int8"),
        (Contents(uint_contents=[65536]), "UINT16", [1], "x: an element does not fit uint16"),
        (Contents(fp32_contents=[1.0]), "FP16", [1], "x: FP16 elements are supported as raw contents only"),
        (Contents(), "BF16", [0], "x: BF16 elements are supported as raw contents only"),
        (Contents(bool_contents=[True]), "BOOL", [-1], r"x: shape \[-1\] has a negative length"),
    ],
)
def test_malformed_typed_contents_are_refused_with_a_sentence(
    contents: Contents, datatype: str, shape: list[int], sentence: str
) -> None:
    with pytest.raises(WireError, match=f"^{sentence}"):
        decode_typed(contents, datatype, shape, name="x")
