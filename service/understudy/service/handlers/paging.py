"""Pages of the ledger, and their tokens: opaque to the caller, validated on return."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.v1 import evaluation_pb2

DEFAULT_PAGE_SIZE = 100
LARGEST_PAGE_SIZE = 1000
LARGEST_SEQUENCE = 2**63 - 1
"""The largest sequence that the ledger can hold."""

_TOKEN = struct.Struct(">QqLL")


@dataclass(frozen=True, kw_only=True)
class Place:
    """An entry of the ledger after which a reader goes on.

    Attributes:
        sequence: Its number.
        recorded_at: When it was recorded; an entry with its number in another ledger has another time.
    """

    sequence: int
    recorded_at: Timestamp


def page_size(requested: int | None) -> int:
    """Return the number of entries of a page: the default for None, and at most the largest size.

    Raises:
        InvalidInputError: The size is less than 1.
    """
    if requested is None:
        return DEFAULT_PAGE_SIZE
    if requested < 1:
        raise InvalidInputError(
            f"page_size is {requested}; give 1 to {LARGEST_PAGE_SIZE}, or leave it out for {DEFAULT_PAGE_SIZE}"
        )
    return min(requested, LARGEST_PAGE_SIZE)


PAGE_BYTES = 4 * 2**20
"""The size of a page, about: a record of a thousand slices takes hundreds of kilobytes."""


def fitting(records: Iterable[evaluation_pb2.EvaluationRecord]) -> list[evaluation_pb2.EvaluationRecord]:
    """Return the first records that fit on a page, at least one."""
    page: list[evaluation_pb2.EvaluationRecord] = []
    size = 0
    for record in records:
        size += record.ByteSize()
        if page and size > PAGE_BYTES:
            break
        page.append(record)
    return page


def encode_token(place: Place, filters: bytes) -> str:
    """Return a token for the page after a place, valid for these filters only."""
    time = place.recorded_at
    packed = _TOKEN.pack(place.sequence, time.seconds, time.nanos, zlib.crc32(filters))
    return base64.urlsafe_b64encode(packed).decode()


def decode_token(token: str, filters: bytes) -> Place | None:
    """Return the place after which the page begins; None for an empty token: it is the first page.

    Raises:
        InvalidInputError: The token is not from this server, or belongs to other filters.
    """
    if not token:
        return None
    try:
        sequence, seconds, nanos, checksum = _TOKEN.unpack(base64.b64decode(token, altchars=b"-_", validate=True))
        place = Place(sequence=sequence, recorded_at=Timestamp(seconds=seconds, nanos=nanos))
    except (binascii.Error, ValueError, struct.error) as error:
        raise _foreign(token) from error
    if sequence > LARGEST_SEQUENCE:
        raise _foreign(token)
    if checksum != zlib.crc32(filters):
        raise InvalidInputError("page_token belongs to other filters; keep the filters of the first page")
    return place


def _foreign(token: str) -> InvalidInputError:
    return InvalidInputError(
        f"page_token {token!r} is not from this server; give the next_page_token of the previous page, or nothing"
    )
