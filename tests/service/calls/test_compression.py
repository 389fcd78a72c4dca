"""Decompressing requests within a bound."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable

import pytest

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls import compression
from understudy.service.calls.compression import MessageDecompressor, MessageTooLargeError
from understudy.service.services import LIGHT_SERVICES, tf_serving_services

LARGEST = 1 << 20
FIELD_OF_DEFLATE = 15
"""zlib's first byte read as the tag of a protobuf field."""


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("size", [0, 1000, LARGEST])
async def test_a_message_is_decompressed(compress: Callable[[bytes], bytes], size: int) -> None:
    message = bytes(range(250)) * (size // 250) + bytes(size % 250)
    assert await MessageDecompressor(LARGEST).decompress(compress(message)) == message


@pytest.mark.parametrize("size", [LARGEST + 1, 2 * LARGEST, 64 * LARGEST])
async def test_a_message_that_becomes_larger_than_the_largest_is_refused(size: int) -> None:
    with pytest.raises(
        MessageTooLargeError, match=rf"Received message larger than max \({LARGEST + 1} vs. {LARGEST}\)"
    ):
        await MessageDecompressor(LARGEST).decompress(gzip.compress(bytes(size)))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"abc", "not compressed with gzip or deflate, as it says"),
        (b"\x1f\x8b" * 2000, "not compressed with gzip or deflate, as it says"),
        (gzip.compress(b"abc", mtime=0)[:-4], "cut short"),
        (b"", "cut short"),
    ],
    ids=["text", "two bytes of a header, again and again", "without its end", "nothing"],
)
async def test_what_is_not_compressed_is_the_callers_error(message: bytes, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        await MessageDecompressor(LARGEST).decompress(message)


async def test_large_messages_are_decompressed_one_at_a_time_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    under_way, most = 0, 0

    def decompress(data: bytes, *, max_bytes: int) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        threads.append(threading.current_thread())
        content = real(data, max_bytes=max_bytes)
        under_way -= 1
        return content

    real = compression.decompressed
    monkeypatch.setattr(compression, "decompressed", decompress)
    decompressor = MessageDecompressor(4 * LARGEST)
    message = bytes(4 * LARGEST)
    found = await asyncio.gather(*(decompressor.decompress(gzip.compress(message)) for _ in range(4)))
    assert found == [message] * 4
    assert most == 1
    assert threading.current_thread() not in threads


def test_no_request_has_the_field_that_a_compressed_message_seems_to_begin_with() -> None:
    for service in (*LIGHT_SERVICES, *tf_serving_services()):
        for method in service.methods:
            assert FIELD_OF_DEFLATE not in method.input_type.fields_by_number, method.full_name
