"""How much the content of a checkpoint may exceed its files."""

from __future__ import annotations

from understudy.checkpoints.atomic import decode_json

EXPANSION = 20
LARGEST_SMALL_BYTES = 2**28
"""Compression and shapes may expand a file to `EXPANSION` times its size, and any file to this size."""

LARGEST_CONFIG_BYTES = 2**25
MAX_DEPTH = 200
MAX_VALUES = 2_000_000
"""The bounds for ``config.json`` and for the configurations in HDF5 attributes."""

MAX_MEMBERS = 10_000
MAX_OBJECTS = 1_000_000


def largest_content(file_bytes: int) -> int:
    """Return how many bytes a file of this size may hold once decompressed."""
    return max(LARGEST_SMALL_BYTES, EXPANSION * file_bytes)


def parse_json(text: bytes, what: str) -> None:
    """Parse a configuration, to check that it may be parsed.

    Raises:
        ValueError: It is no JSON of Unicode texts, too long, nested too deeply, or has too many values.
        RecursionError: It is nested far too deeply.
    """
    if len(text) > LARGEST_CONFIG_BYTES:
        raise ValueError(f"{what} has {len(text)} bytes; at most {LARGEST_CONFIG_BYTES} were expected")
    too_many = f"{what} holds more than {MAX_VALUES} values"
    if sum(map(text.count, (b",", b"[", b"{"))) > 2 * MAX_VALUES:  # before parsing, which takes seconds
        raise ValueError(too_many)
    count, level, depth = 0, [decode_json(text)], 0
    while level:
        depth += 1
        count += len(level)
        if depth > MAX_DEPTH:
            raise ValueError(f"{what} is nested more than {MAX_DEPTH} levels deep")
        if count > MAX_VALUES:
            raise ValueError(too_many)
        level = [item for container in level for item in _items(container)]


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
