"""Avoids serializing responses that differ from an earlier one in their examples only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

import numpy as np

from understudy.evaluator.types import Array, Prediction
from understudy.service.templates.request_templates import COMPLEMENT, LARGEST_BYTES, may_have_any_content

_REMEMBERED: Final = 512


class _Known(NamedTuple):
    """The bytes of responses: identical except for the elements of the tensor."""

    before: bytes
    after: bytes


class ResponseTemplateCache:
    """Builds the responses to similar requests. Belongs to one thread.

    Args:
        encode: Returns the bytes of the response for a prediction. They must depend on the prediction only.
    """

    def __init__(self, encode: Callable[[Prediction], bytes]) -> None:
        self._encode = encode
        self._known: dict[Hashable, _Known | None] = {}

    def bytes_of(self, prediction: Prediction) -> bytes:
        """Return the bytes of the response for a prediction; raise what ``encode`` raises."""
        outputs, step = prediction
        if len(outputs) != 1:
            return self._encode(prediction)
        ((name, array),) = outputs.items()
        key = (name, array.dtype, array.shape, step)
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = self._learned(name, array, step)
        known = self._known[key]
        if known is None:
            return self._encode(prediction)
        return known.before + array.tobytes() + known.after

    def _learned(self, name: str, array: Array, step: int) -> _Known | None:
        """Return the bytes of responses after verifying that other elements change one span and nothing else."""
        content = array.tobytes()
        if not (content and may_have_any_content(array.dtype)) or len(content) > LARGEST_BYTES:
            return None
        data = self._encode_one(name, array, step)
        before, found, after = data.rpartition(content)
        other = content.translate(COMPLEMENT)
        other_array = np.ndarray(array.shape, array.dtype, other)
        is_all = bool(found) and self._encode_one(name, other_array, step) == before + other + after
        return _Known(before, after) if is_all else None

    def _encode_one(self, name: str, array: Array, step: int) -> bytes:
        return self._encode(Prediction(outputs={name: array}, step=step))
