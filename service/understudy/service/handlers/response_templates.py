"""Avoids serializing responses that differ from an earlier one in their examples only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, Protocol

import numpy as np

from understudy.evaluator.types import Array, Prediction
from understudy.service.handlers.request_templates import COMPLEMENT, LARGEST_BYTES, may_have_any_content

_REMEMBERED: Final = 512


class Serializable(Protocol):
    """A protobuf message, or one that is already serialized."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return its bytes."""


class Serialized(NamedTuple):
    """A serialized message."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return its bytes."""
        return self.data


class _Known(NamedTuple):
    """The bytes of responses: identical except for the elements of the tensor."""

    before: bytes
    after: bytes


class ResponseTemplateCache:
    """Builds the responses to similar requests. Belongs to one thread.

    Args:
        message_of: Returns the message for a prediction. It must depend on the prediction only.
    """

    def __init__(self, message_of: Callable[[Prediction], Serializable]) -> None:
        self._message_of = message_of
        self._known: dict[Hashable, _Known | None] = {}

    def of(self, prediction: Prediction) -> Serializable:
        """Return the response for a prediction; raise what ``message_of`` raises."""
        outputs, step = prediction
        if len(outputs) != 1:
            return self._message_of(prediction)
        ((name, array),) = outputs.items()
        key = (name, array.dtype, array.shape, step)
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = self._learned(name, array, step)
        known = self._known[key]
        if known is None:
            return self._message_of(prediction)
        return Serialized(known.before + array.tobytes() + known.after)

    def _learned(self, name: str, array: Array, step: int) -> _Known | None:
        """Return the bytes of responses after verifying that other elements change one span and nothing else."""
        content = array.tobytes()
        if not (content and may_have_any_content(array.dtype)) or len(content) > LARGEST_BYTES:
            return None
        data = self._bytes_of(name, array, step)
        before, found, after = data.rpartition(content)
        other = content.translate(COMPLEMENT)
        other_array = np.ndarray(array.shape, array.dtype, other)
        is_all = bool(found) and self._bytes_of(name, other_array, step) == before + other + after
        return _Known(before, after) if is_all else None

    def _bytes_of(self, name: str, array: Array, step: int) -> bytes:
        return self._message_of(Prediction(outputs={name: array}, step=step)).SerializeToString()
