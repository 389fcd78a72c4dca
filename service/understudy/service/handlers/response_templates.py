"""Replies that differ from an earlier one in their examples only are not put together again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, Protocol

import numpy as np

from understudy.evaluator.types import Array, Prediction
from understudy.service.handlers.request_templates import COMPLEMENT, LARGEST_BYTES, may_have_any_content

_REMEMBERED: Final = 512


class Serializable(Protocol):
    """A message of protobuf's, or what is one already."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return its bytes."""


class Serialized(NamedTuple):
    """The bytes of a message."""

    data: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return its bytes."""
        return self.data


class _Known(NamedTuple):
    """What the bytes of replies are: all the same, but for the elements of the tensor."""

    before: bytes
    after: bytes


class ResponseTemplateCache:
    """Makes the replies to requests that are alike. Belongs to one thread.

    Args:
        message_of: Returns the message that tells a prediction. Nothing but the prediction makes a difference.
    """

    def __init__(self, message_of: Callable[[Prediction], Serializable]) -> None:
        self._message_of = message_of
        self._known: dict[Hashable, _Known | None] = {}

    def of(self, prediction: Prediction) -> Serializable:
        """Return the reply that tells a prediction; raise what ``message_of`` raises."""
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
        """Return the bytes of replies, having seen that other elements change those in one place and nothing else."""
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
