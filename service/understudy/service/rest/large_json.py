"""Parses large JSON without blocking the other threads.

The decoder in C, the garbage collector and the release of a large list each hold the GIL until they finish.
"""

from __future__ import annotations

import json
import json.scanner
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError

MAX_BYTES_AT_ONCE: Final = 32_768
"""JSON up to this size is parsed in C, which takes a few milliseconds at most."""
MAX_CONTAINERS: Final = 65_536
"""The limit of arrays and objects in one body, since the garbage collector visits each of them repeatedly."""

_PIECE: Final = 8192


class _YieldingDecoder(json.JSONDecoder):
    """Parses JSON in Python, so that other threads run in between."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # missing in the stubs


def read_json(content: bytes) -> Any:
    """Parse bytes as JSON.

    Raises:
        InvalidInputError: They are not JSON, or hold too many arrays and objects.
    """
    is_large = len(content) > MAX_BYTES_AT_ONCE
    if is_large:
        _check_containers(content)
    try:
        return json.loads(content, cls=_YieldingDecoder if is_large else None)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None


def let_go(value: Any) -> None:
    """Release the long arrays in a value, piece by piece."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        elements = container.values() if isinstance(container, dict) else container
        waiting.extend(element for element in elements if isinstance(element, dict | list))
        if isinstance(container, list):
            while len(container) > _PIECE:
                del container[-_PIECE:]


def _check_containers(content: bytes) -> None:
    containers = content.count(b"[") + content.count(b"{")
    if containers > MAX_CONTAINERS:
        raise InvalidInputError(
            f"the JSON has {containers} arrays and objects; at most {MAX_CONTAINERS} are taken: send data flat, or as "
            "binary data"
        )
