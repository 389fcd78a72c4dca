"""Reads large JSON without stopping the other threads.

The decoder in C, the garbage collector and the release of a large list each hold Python's lock until they are done.
"""

from __future__ import annotations

import json
import json.scanner
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError

MAX_BYTES_AT_ONCE: Final = 32_768
"""As much is read in C, which takes some milliseconds at most."""
MAX_CONTAINERS: Final = 65_536
"""Of one body. The garbage collector visits every one of them, again and again."""

_PIECE: Final = 8192


class _YieldingDecoder(json.JSONDecoder):
    """Reads JSON in Python, between whose steps other threads run."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # the stubs forget it


def read_json(content: bytes) -> Any:
    """Return the value that bytes hold.

    Raises:
        InvalidInputError: They hold no JSON, or too many arrays and objects.
    """
    is_large = len(content) > MAX_BYTES_AT_ONCE
    if is_large:
        _check_containers(content)
    try:
        return json.loads(content, cls=_YieldingDecoder if is_large else None)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is no JSON: {error}") from None


def let_go(value: Any) -> None:
    """Empty the long arrays within a value, piece by piece."""
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
