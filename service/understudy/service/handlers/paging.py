"""Pages of the ledger, and their tokens: opaque to the caller, validated on return."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Iterable

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.v1 import evaluation_pb2

DEFAULT_PAGE_SIZE = 100
LARGEST_PAGE_SIZE = 1000
LARGEST_SEQUENCE = 2**63 - 1
"""The largest sequence that the ledger can hold."""

_TOKEN = struct.Struct(">QL")


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


def encode_token(after_sequence: int, filters: bytes) -> str:
    """Return a token for the page after a sequence, valid for these filters only."""
    return base64.urlsafe_b64encode(_TOKEN.pack(after_sequence, zlib.crc32(filters))).decode()


def decode_token(token: str, filters: bytes) -> int:
    """Return the sequence after which the page begins; 0 for an empty token.

    Raises:
        InvalidInputError: The token is not from this server, or belongs to other filters.
    """
    if not token:
        return 0
    try:
        after_sequence, checksum = _TOKEN.unpack(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, struct.error) as error:
        raise _foreign(token) from error
    if after_sequence > LARGEST_SEQUENCE:
        raise _foreign(token)
    if checksum != zlib.crc32(filters):
        raise InvalidInputError("page_token belongs to other filters; keep the filters of the first page")
    return int(after_sequence)


def _foreign(token: str) -> InvalidInputError:
    return InvalidInputError(
        f"page_token {token!r} is not from this server; give the next_page_token of the previous page, or nothing"
    )
