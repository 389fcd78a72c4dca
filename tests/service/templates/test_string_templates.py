"""Strings that a template matches are those that parsing gives, and everything else is parsed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.oip.inference_pb2 import ModelInferRequest
from understudy.service.calls.methods import Codec
from understudy.service.calls.parsing import varint, varint_bytes
from understudy.service.handlers.infer_codec import InferMessage
from understudy.service.handlers.inference import MAX_ELEMENTS_AT_ONCE, encode_raw
from understudy.service.services import plain_codecs
from understudy.service.templates.codecs import template_codecs
from understudy.service.templates.string_templates import TemplatedStrings
from understudy.wire import WireError

METHODS = ("infer", "infer_stream")
STRINGS = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"\x22\x01", b"\x1a\x02\x08\x01", b"\x01\0\0\0", b"z" * 127, b"z" * 128, b"z" * 300]),
)
"""Some look like what is around them, some have lengths of two bytes."""


def message(strings: list[bytes], shape: list[int], *, model_name: str = "m") -> bytes:
    array = np.empty(len(strings), object)
    array[:] = strings
    request = ModelInferRequest(model_name=model_name, raw_input_contents=[encode_raw(array)])
    request.inputs.add(name="x", datatype="BYTES", shape=shape)
    return request.SerializeToString()


def taken_apart(codec: Codec[Any, Any], data: bytes) -> Any:
    """Return what a codec makes of a message, or that it refuses it."""
    try:
        request = codec.decode(b"....." + data, 5)
        inference = request.inference()
    except (DecodeError, WireError, InvalidInputError) as error:
        return type(error)
    arrays = {name: (array.dtype, array.shape, array.tolist()) for name, array in inference.inputs.items()}
    return tuple(request.spec), arrays, inference._replace(inputs={})


def damaged(data: bytes, place: int, byte: int | None) -> bytes:
    """Return a message with another byte in one place, or without the byte there."""
    place %= len(data) + 1
    return data[:place] + (b"" if byte is None else bytes([byte])) + data[place + 1 :]


@pytest.mark.parametrize("method", METHODS)
@given(
    shape=st.sampled_from([[1], [2], [1, 1], [3, 2], [4]]),
    chance=st.randoms(use_true_random=False),
    data=st.data(),
)
def test_what_is_matched_is_what_parsing_gives(method: str, shape: list[int], chance: Any, data: st.DataObject) -> None:
    codec, plain = getattr(template_codecs(), method), getattr(plain_codecs(), method)
    count = int(np.prod(shape))
    several = data.draw(st.lists(st.lists(STRINGS, min_size=count, max_size=count), min_size=1, max_size=4))
    for _ in range(2):  # so that it is learned
        codec.decode(message(several[0], shape))
    for strings in several:
        sent = message(strings, shape)
        assert taken_apart(codec, sent) == taken_apart(plain, sent)
        wrong = damaged(sent, chance.randrange(1 << 16), chance.choice([None, *range(256)]))
        assert taken_apart(codec, wrong) == taken_apart(plain, wrong)


@pytest.mark.parametrize("method", METHODS)
def test_strings_of_any_length_are_matched_once_one_size_came_twice(method: str) -> None:
    codec = getattr(template_codecs(), method)
    for strings in ([b"ab", b""], [b"c", b"d"]):
        assert isinstance(codec.decode(message(strings, [2, 1])), InferMessage)
    for strings in ([b"", b"a much longer one" * 100], [b"", b""], [b"x" * 127, b"y" * 128]):
        sent = message(strings, [2, 1])
        assert isinstance(codec.decode(sent), TemplatedStrings)
        arrays = taken_apart(codec, sent)[1]
        assert arrays == {"x": (np.dtype(object), (2, 1), [[string] for string in strings])}
    for sent in (message([b"ab"], [1, 1]), message([b"ab", b"c"], [2, 1], model_name="n")):
        assert isinstance(codec.decode(sent), InferMessage)


@pytest.mark.parametrize("by", [-1, 1])
def test_another_number_of_strings_is_refused_as_without_a_template(by: int) -> None:
    codec = template_codecs().infer
    for _ in range(3):
        matched = codec.decode(message([b"ab"] * 3, [3]))
    assert isinstance(matched, TemplatedStrings)
    wrong = message([b"ab"] * (3 + by), [3])
    assert taken_apart(codec, wrong) is WireError


def test_more_strings_than_the_event_loop_decodes_are_not_learned() -> None:
    for count, kind in ((MAX_ELEMENTS_AT_ONCE, TemplatedStrings), (MAX_ELEMENTS_AT_ONCE + 1, InferMessage)):
        codec = template_codecs().infer
        several = [codec.decode(message([b"a"] * count, [count])) for _ in range(3)]
        assert type(several[-1]) is kind


def test_strings_with_something_after_them_are_parsed() -> None:
    codec = template_codecs().infer
    sent = message([b"ab"], [1]) + ModelInferRequest(model_version="8").SerializeToString()
    assert [type(codec.decode(sent)) for _ in range(5)] == [InferMessage] * 5


def test_few_templates_of_strings_are_kept() -> None:
    codec = template_codecs().infer
    several = [message([b"ab"], [1], model_name="m" * number) for number in range(20)]
    for sent in several * 2:
        codec.decode(sent)
    assert [type(codec.decode(sent)) for sent in several[4:]] == [TemplatedStrings] * 16
    assert type(codec.decode(several[0])) is InferMessage


@given(st.integers(0, 1 << 62))
@example(127)
@example(128)
def test_a_varint_is_read_as_it_was_written(value: int) -> None:
    data = varint_bytes(value)
    assert varint(data, 0, len(data)) == (value, len(data))
