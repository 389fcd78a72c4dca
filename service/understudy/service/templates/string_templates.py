"""Templates of inferences whose raw contents are strings: always as many, of any length.

The contents end the message, as every library writes it. So a message with the same bytes before them, and contents
that reach to its end, differs from the template in its strings only.

A Predict request has its strings in a repeated field, which protobuf parses as fast as a template could.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import ArrayForm
from understudy.oip.inference_pb2 import ModelInferRequest
from understudy.service.calls.parsing import MalformedError, span_of, varint, varint_bytes
from understudy.service.calls.status import UnsupportedError
from understudy.service.handlers.infer_codec import InferCodec, InferMessage, ResponseSpec
from understudy.service.handlers.inference import (
    BYTES,
    MAX_ELEMENTS_AT_ONCE,
    Inference,
    elements_in,
    split_elements,
)
from understudy.wire import WireError, strings

_REMEMBERED: Final = 16
_LARGEST_BEFORE_BYTES: Final = 1 << 12
_PATH: Final = (ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A request of a template, without its strings.

    Attributes:
        name: The name of the input.
        shape: Its shape.
        count: The number of its strings.
        forms: The form of the input by its name.
        inference: The request without its input.
        spec: What the response depends on.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    forms: Mapping[str, ArrayForm]
    inference: Inference
    spec: ResponseSpec


class TemplatedStrings(NamedTuple):
    """An `InferRequest` that a template matched. Its strings are split when they are asked for."""

    known: _Known
    data: bytes
    begin: int
    strings_begin: int

    @property
    def model_name(self) -> str:
        """See `InferRequest`."""
        return self.known.inference.model_name

    @property
    def model_version(self) -> str:
        """See `InferRequest`."""
        return self.known.inference.model_version

    @property
    def spec(self) -> ResponseSpec:
        """See `InferRequest`."""
        return self.known.spec

    def forms_to_build(self) -> Mapping[str, ArrayForm] | None:
        """See `InferRequest`."""
        return self.known.forms

    def inference(self) -> Inference:
        """See `InferRequest`."""
        known = self.known
        elements = split_elements(self.data, self.strings_begin, known.count)
        if elements is None:
            return InferCodec().decode(self.data, self.begin).inference()  # raises, and says what is wrong
        array = strings(elements).reshape(known.shape)
        array.flags.writeable = False
        return known.inference._replace(inputs={known.name: array})


class StringTemplates:
    """The templates of a codec, at most a few. Belongs to one thread.

    Args:
        spec_of: Returns what the response to a request depends on, for all requests of its template.
    """

    def __init__(self, spec_of: Callable[[InferMessage], ResponseSpec]) -> None:
        self._spec_of = spec_of
        self._known: dict[bytes, _Known] = {}

    def match(self, data: bytes, begin: int) -> TemplatedStrings | None:
        """Return the request in ``data[begin:]``, or None if it differs from each template in more than the strings."""
        for before, known in self._known.items():
            if data.startswith(before, begin):
                try:
                    length, at = varint(data, begin + len(before), len(data))
                except MalformedError:
                    return None
                return TemplatedStrings(known, data, begin, at) if at + length == len(data) else None
        return None

    def learn(self, data: bytes, request: InferMessage) -> None:
        """Learn a template from a message with one input of strings, not too many; no string is built for it."""
        before = _bytes_before(data)
        if before is None or (known := self._known_of(request)) is None or not _is_all(before, request.message):
            return
        self._known[before] = known
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _known_of(self, request: InferMessage) -> _Known | None:
        message = request.message
        if message.id or len(message.inputs) != 1:  # ids are rarely equal
            return None
        (tensor,) = message.inputs
        if tensor.datatype != BYTES or tensor.parameters or tensor.HasField("contents"):
            return None
        try:
            forms, inference = request.forms_to_build(), request.without_inputs()
        except (WireError, InvalidInputError, UnsupportedError):
            return None
        if forms is None or not 0 < elements_in(forms) <= MAX_ELEMENTS_AT_ONCE:
            return None
        return _Known(
            name=tensor.name,
            shape=forms[tensor.name].shape,
            count=elements_in(forms),
            forms=forms,
            inference=inference,
            spec=self._spec_of(request),
        )


def _is_all(before: bytes, message: ModelInferRequest) -> bool:
    """Return whether a message with the same bytes before other contents differs from this one in nothing else."""
    contents = message.raw_input_contents[0] + b"\0"
    expected = ModelInferRequest()
    expected.CopyFrom(message)
    expected.raw_input_contents[0] = contents
    try:
        return ModelInferRequest.FromString(before + varint_bytes(len(contents)) + contents) == expected
    except DecodeError:
        return False


def _bytes_before(data: bytes) -> bytes | None:
    """Return the bytes before the length of the raw contents, if these occur once, at the end."""
    span = span_of(data, _PATH)
    if span is None or span[1] != len(data):
        return None
    before = data[: span[0] - len(varint_bytes(span[1] - span[0]))]
    return before if len(before) <= _LARGEST_BEFORE_BYTES else None
