"""Arrays survive the wire bit for bit, and what is no tensor is refused with the reason."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from understudy.v1 import tensor_pb2
from understudy.wire import WireError, decode, decode_all, encode, encode_all

FIXED_SIZE = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


class OfAnotherLibrary:
    """A tensor that its library does not make a NumPy array of."""

    def __array__(self, *_: object, **__: object) -> npt.NDArray[np.generic]:
        raise RuntimeError("it requires grad; use .detach()")


SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(hnp.arrays(st.sampled_from(FIXED_SIZE).map(np.dtype), SHAPES))
def test_every_fixed_size_array_survives_bit_for_bit(array: npt.NDArray[np.generic]) -> None:
    decoded = decode(encode(array))

    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@given(hnp.arrays(np.uint16, SHAPES))
def test_bfloat16_survives_bit_for_bit(bits: npt.NDArray[np.uint16]) -> None:
    array = bits.view(ml_dtypes.bfloat16)

    decoded = decode(encode(array))

    assert decoded.dtype == array.dtype
    assert decoded.tobytes() == array.tobytes()


@given(st.lists(st.binary()))
def test_byte_strings_survive_with_their_trailing_nuls(values: list[bytes]) -> None:
    decoded = decode(encode(np.array(values, dtype=object)))

    assert decoded.tolist() == values


@pytest.mark.parametrize(
    "text",
    [
        ["äh", "b"],
        np.array(["äh", "b"]),
        np.array(["äh", "b"], dtype=object),
        np.array(["äh", "b"], dtype=np.dtypes.StringDType()),
    ],
    ids=["list", "fixed width", "object", "variable width"],
)
def test_text_travels_as_utf_8(text: npt.ArrayLike) -> None:
    assert decode(encode(text)).tolist() == ["äh".encode(), b"b"]


def test_byte_order_and_strides_do_not_matter() -> None:
    array = np.arange(24, dtype=">i4").reshape(4, 6)[::2, ::-1].T

    decoded = decode(encode(array))

    np.testing.assert_array_equal(decoded, array)
    assert decoded.dtype == np.dtype("<i4")


def test_a_masked_array_without_masked_values_travels() -> None:
    array = np.ma.masked_array([[1.0, 2.0]], mask=False)

    np.testing.assert_array_equal(decode(encode(array)), array)


def test_a_decoded_array_cannot_be_written_to() -> None:
    for array in (np.ones(3), np.array([b"a"], dtype=object), np.empty(0)):
        assert not decode(encode(array)).flags.writeable


def test_maps_keep_their_names() -> None:
    arrays = {"image": np.ones((2, 3), np.float32), "label": np.array([1, 2])}

    decoded = decode_all(encode_all(arrays))

    assert list(decoded) == ["image", "label"]
    np.testing.assert_array_equal(decoded["label"], arrays["label"])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.ones(2, np.complex64), "image: dtype complex64 cannot be sent; expected one of bool, uint8"),
        (np.array([1, None], dtype=object), "image: an array of objects may hold str and bytes only, but holds int"),
        (["\udc00"], "image: '\\udc00' cannot be encoded as UTF-8"),
        ([[1, 2], [3]], "image: expected an array or evenly nested lists"),
        (np.array(["2026-01-01"], dtype="datetime64[D]"), "image: dtype datetime64"),
        (
            np.ma.masked_greater([1.0, 2.0, 3.0], 2.0),
            "image: 1 of 3 values are masked; fill them, such as with .filled(0)",
        ),
        (iter([1.0]), "image: expected an array or evenly nested lists, but got a list_iterator; make a dense array"),
        (
            OfAnotherLibrary(),
            "image: expected an array or evenly nested lists, but NumPy says: it requires grad; use .detach()",
        ),
        (
            np.array([["a", 1.5]], dtype=object),
            "image: an array of objects may hold str and bytes only, but holds float; give numbers an array of their",
        ),
    ],
    ids=["complex", "objects", "surrogate", "ragged", "dates", "masked", "an iterator", "a tensor", "a table"],
)
def test_what_cannot_travel_is_refused_with_its_name(value: npt.ArrayLike, complaint: str) -> None:
    with pytest.raises(WireError) as refusal:
        encode(value, name="image")

    assert str(refusal.value).startswith(complaint)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (tensor_pb2.Tensor(), "data type number 0 is unknown; expected one of 1 (bool), 2 (uint8)"),
        (
            tensor_pb2.Tensor(dtype=99),  # type: ignore[arg-type]
            "data type number 99 is unknown",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2, 2], content=b"\0" * 12),
            "float32 of shape [2, 2] needs 16 bytes of content, but got 12",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[-1, 2]),
            "shape [-1, 2] has a negative length",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2**62, 2**62], content=b"\0" * 8),
            "float32 of shape",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[0, 2**62, 2**62]),
            "shape [0, 4611686018427387904, 4611686018427387904] is impossible",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_BOOL, shape=[1] * 65, content=b"\0"),
            "a shape of 65 axes is impossible",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_BOOL, shape=[2], content=b"\1\2"),
            "a bool is one byte, 0 or 1, but got byte 2",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT8, shape=[1], content=b"\1", strings=[b"a"]),
            "int8 values belong in content, but got strings",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_STRING, shape=[1], content=b"abc"),
            "a string tensor's values belong in strings, but got 3 bytes",
        ),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_STRING, shape=[3], strings=[b"a"]),
            "shape [3] needs 3 strings, but got 1",
        ),
    ],
)
def test_a_malformed_tensor_is_refused_with_what_came_and_what_was_expected(
    tensor: tensor_pb2.Tensor, complaint: str
) -> None:
    with pytest.raises(WireError) as refusal:
        decode(tensor, name="image")

    assert str(refusal.value).startswith(f"image: {complaint}")


@given(
    dtype=st.integers(0, 16),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=4),
    content=st.binary(max_size=40),
    strings=st.lists(st.binary(max_size=4), max_size=4),
)
def test_no_message_makes_the_decoder_raise_anything_else(
    dtype: int, shape: list[int], content: bytes, strings: list[bytes]
) -> None:
    tensor = tensor_pb2.Tensor(shape=shape, content=content, strings=strings)
    tensor.dtype = dtype  # type: ignore[assignment]

    try:
        array = decode(tensor)
    except WireError:
        return
    assert list(array.shape) == shape
