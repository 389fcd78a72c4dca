"""Requests that differ from an earlier one in their rows only are not parsed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from understudy.evaluator.types import Array
from understudy.service.dataplane.wire_span import span_of

_REMEMBERED: Final = 512
LARGEST_BYTES: Final = 1 << 22
"""Nothing larger is learned: that takes doing everything once more."""

_LARGEST_AROUND_BYTES: Final = 1 << 12
"""What is around the elements is kept, so it may not be larger."""

COMPLEMENT: Final = bytes(range(255, -1, -1))
"""Translates bytes into others, each of which is different."""

_Message = TypeVar("_Message")
_Request = TypeVar("_Request")


@dataclass(frozen=True, kw_only=True)
class Form(Generic[_Request]):
    """A request whose one tensor may have other elements, whichever they are; see `form_with`.

    Attributes:
        content: The elements as they are in the message.
        others: All else that is in the request.
        array: The elements as they are in the request.
        with_array: Returns the request with other elements, of the same dtype and shape.
    """

    content: bytes
    others: object
    array: Array
    with_array: Callable[[Array], _Request]


def form_with(
    content: bytes, array: Array, with_array: Callable[[Array], _Request], *, others: object
) -> Form[_Request] | None:
    """Return a form, or None for a dtype of which not every content is valid; the arguments are a `Form`'s."""
    if not may_have_any_content(array.dtype):
        return None
    return Form(content=content, others=others, array=array, with_array=with_array)


def may_have_any_content(dtype: np.dtype[Any]) -> bool:
    """Return whether any bytes are elements of a dtype, if there are as many as it takes."""
    return dtype.kind not in "OSUb"


@dataclass(frozen=True, kw_only=True)
class _Known(Generic[_Request]):
    """What the bytes of a form are: all the same, but for the elements of the tensor."""

    before: bytes
    after: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    with_array: Callable[[Array], _Request]


class Recognizer(Generic[_Message, _Request]):
    """Recognizes requests by their bytes: the same as of one before, but for the elements of the tensor.

    What is recognized is neither parsed nor copied. Learning a form takes parsing a message once more, so it waits for
    the second, fourth, eighth, ... message of a size that was not recognized.

    Belongs to one thread.

    Args:
        parse: Returns the message that bytes are; raises DecodeError if they are none.
        form_of: Returns the form of a message, or None if it has none.
        path: The numbers of the fields that lead to the elements; see `understudy.service.dataplane.wire_span.span_of`.
    """

    def __init__(
        self,
        parse: Callable[[bytes], _Message],
        form_of: Callable[[_Message], Form[_Request] | None],
        path: Sequence[int],
    ) -> None:
        self._path = path
        self._parse = parse
        self._form_of = form_of
        self._known: dict[int, _Known[_Request]] = {}
        self._strangers: dict[int, int] = {}

    def recognize(self, data: bytes, begin: int) -> _Request | None:
        """Return the request that bytes are from there on, or None if it is not like one that was learned."""
        known = self._known.get(len(data) - begin)
        if known is None or not (data.startswith(known.before, begin) and data.endswith(known.after)):
            return None
        array = np.ndarray(known.shape, known.dtype, data, begin + len(known.before))
        return known.with_array(array)

    def learn(self, data: bytes, message: _Message) -> None:
        """Take note of a message that was not recognized, and of its bytes."""
        size = len(data)
        times = self._strangers.get(size, 0) + 1
        if len(self._strangers) >= _REMEMBERED:
            self._strangers.clear()
            self._known.clear()
        self._strangers[size] = times
        if times == 1 or times & (times - 1) or size > LARGEST_BYTES:
            return
        form = self._form_of(message)
        known = None if form is None else self._known_by(data, form)
        if known is not None:
            self._known[size] = known

    def _known_by(self, data: bytes, form: Form[_Request]) -> _Known[_Request] | None:
        """Return the bytes of a form, having found its elements on the wire.

        Beside that, a message with other elements in that place must differ in them and in nothing else.
        """
        content, array = form.content, form.array
        if not content or len(data) - len(content) > _LARGEST_AROUND_BYTES:
            return None
        span = span_of(data, self._path)
        if span is None or data[slice(*span)] != content:
            return None
        before, after = data[: span[0]], data[span[1] :]
        other = content.translate(COMPLEMENT)
        try:
            other_form = self._form_of(self._parse(before + other + after))
        except DecodeError:
            return None
        if other_form is None or other_form.content != other or other_form.others != form.others:
            return None
        if (other_form.array.dtype, other_form.array.shape) != (array.dtype, array.shape):
            return None
        return _Known(before=before, after=after, dtype=array.dtype, shape=array.shape, with_array=form.with_array)
