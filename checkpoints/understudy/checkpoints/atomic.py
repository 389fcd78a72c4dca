"""Atomic, durable writes: a reader, or a restart after a power cut, sees the old content or the new, never a mix."""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from understudy.checkpoints.layout import TEMPORARY_PREFIX

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def write_json(path: Path, value: Any) -> None:
    """Replace a file's content by a JSON document, durably.

    Numbers that JSON lacks are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which `float` reads.

    Args:
        path: The file; its folder exists.
        value: Mappings with string keys, sequences, strings, numbers, booleans and None.

    Raises:
        OSError: The file could not be written; the old one is untouched and no temporary file remains.
        TypeError: The value holds another type.
    """
    write_bytes(path, encode_json(value))


def encode_json(value: Any) -> bytes:
    """Return what `write_json` writes: UTF-8, keys sorted, so that equal values give equal bytes."""
    return (json.dumps(_finite(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def decode_json(content: bytes) -> Any:
    """Return the value of a JSON document in UTF-8 whose texts are all Unicode; half of a surrogate pair is none.

    Raises:
        ValueError: It is no such document.
        RecursionError: It is nested too deeply.
    """
    text = content.decode()
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content durably. Errors are as in `write_json`."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    """Return a JSON value with its non-finite floats turned into strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
