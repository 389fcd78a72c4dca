"""gRPC's bytes and headers, as the envoy front end reads and writes them."""

from __future__ import annotations

import gzip
import struct
import zlib
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.compression import MessageTooLargeError, decompressed
from understudy.service.calls.status import Code, Failure, UnsupportedError
from understudy.service.envoy.grpc_wire import (
    Unframer,
    failure_trailers,
    is_whole,
    percent_encoded,
    prefix,
    seconds_of,
)

LARGEST = 1000


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(message)) + message


def unframed(chunks: list[bytes], encoding: bytes | None = None) -> list[bytes]:
    unframer = Unframer(encoding, max_bytes=LARGEST)
    found = []
    for chunk in chunks:
        unframer.feed(chunk)
        while (message := unframer.next()) is not None:
            data, is_compressed = message
            found.append(decompressed(data, max_bytes=LARGEST) if is_compressed else data)
    unframer.check_end()
    return found


@given(st.lists(st.binary(max_size=50), max_size=6), st.lists(st.integers(1, 40), max_size=20))
def test_messages_come_out_however_the_body_was_cut(messages: list[bytes], cuts: list[int]) -> None:
    body = b"".join(prefix(len(message)) + message for message in messages)
    chunks = []
    for cut in cuts:
        chunks.append(body[:cut])
        body = body[cut:]
    assert unframed([*chunks, body]) == messages


@given(st.binary(max_size=100))
def test_a_body_that_is_one_message_is_taken_as_it_is(message: bytes) -> None:
    assert is_whole(framed(message), max_bytes=LARGEST)


@pytest.mark.parametrize("body", [b"", b"\0\0\0", framed(b"abc")[:-1], framed(b"a") * 2, framed(b"a", compressed=True)])
def test_a_body_that_is_not_one_plain_message_is_not(body: bytes) -> None:
    assert not is_whole(body, max_bytes=LARGEST)


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compressed_and_plain_messages_may_be_mixed(encoding: bytes, compress: object) -> None:
    assert callable(compress)
    body = framed(compress(b"x" * LARGEST), compressed=True) + framed(b"plain")
    assert unframed([body], encoding) == [b"x" * LARGEST, b"plain"]


def test_a_large_message_is_refused_before_it_has_come() -> None:
    with pytest.raises(MessageTooLargeError, match=rf"\({LARGEST + 1} vs. {LARGEST}\)"):
        unframed([prefix(LARGEST + 1)])


def test_an_unknown_encoding_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'br'.*identity, deflate, gzip"):
        Unframer(b"br", max_bytes=LARGEST)


@pytest.mark.parametrize(
    ("body", "encoding", "words"),
    [
        (framed(b"abc")[:-1], None, "ended within a message"),
        (framed(b"abc", compressed=True), None, "names nothing"),
    ],
)
def test_what_is_no_message_is_the_callers_error(body: bytes, encoding: bytes | None, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        unframed([body], encoding)


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(b"2H", 7200), (b"3M", 180), (b"4S", 4), (b"250m", 0.25), (b"99999999u", 99.999999), (b"5n", 5e-9)],
)
def test_a_timeout_is_read_in_every_unit(timeout: bytes, seconds: float) -> None:
    assert seconds_of(timeout) == pytest.approx(seconds)


@pytest.mark.parametrize("timeout", [b"", b"S", b"1", b"-1S", b"1.5S", b"123456789S", b"1s", b"1S "])
def test_what_is_no_timeout_is_the_callers_error(timeout: bytes) -> None:
    with pytest.raises(InvalidInputError, match="grpc-timeout"):
        seconds_of(timeout)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_sentence_can_be_told_in_ascii(sentence: str) -> None:
    encoded = percent_encoded(sentence)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote(encoded.decode()) == sentence


def test_a_failure_without_a_time_to_try_again_has_no_details() -> None:
    trailers = dict(failure_trailers(Failure(code=Code.NOT_FOUND, message="no 100 %"), "id"))
    assert trailers == {b"grpc-status": b"5", b"grpc-message": b"no 100 %25", b"x-request-id": b"id"}
