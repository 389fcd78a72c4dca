"""An inference request, for both forms of the protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays
from understudy.service.calls.status import UnsupportedError
from understudy.service.handlers.oip.tensors import dtype_of
from understudy.wire import check_shape

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]

MAX_ELEMENTS_AT_ONCE = 8192
"""Up to this many elements are decoded on the event loop; more on another thread."""

_MICROSECONDS = 1e6
_LARGEST = 2**64 - 1

_UNSUPPORTED: Mapping[str, str] = {
    "sequence_id": "sequences are not supported; leave sequence_id out",
    "shared_memory_region": "shared memory is not supported; send and take tensors in the message",
    "classification": "classification is not supported; sort the output on the client",
}


class Inference(NamedTuple):
    """An inference request.

    Attributes:
        model_name: The model's name.
        inputs: Every input by name, ``[examples, ...]``.
        model_version: A step or a label as text; empty for the serving version.
        id: The caller's id of the request.
        parameters: The checked parameters of the request.
        outputs: The names of the requested outputs, in order; empty for all.
    """

    model_name: str
    inputs: Arrays
    model_version: str = ""
    id: str = ""
    parameters: Parameters = MappingProxyType({})
    outputs: tuple[str, ...] = ()

    def deadline(self, callers: float | None) -> float | None:
        """Return the deadline: the earlier of the caller's and the request's own.

        Both are in seconds on the clock of `time.monotonic`; None for no deadline.
        """
        timeout = _whole_number(self.parameters, "timeout", "microseconds") if self.parameters else 0
        if not timeout:
            return callers
        own = time.monotonic() + timeout / _MICROSECONDS
        return own if callers is None else min(own, callers)


def check_parameters(parameters: Parameters) -> Parameters:
    """Check and return a request's parameters; ignore unknown ones.

    Raises:
        UnsupportedError: One requests an unsupported feature.
        InvalidInputError: The timeout or the priority is not a whole number of at least 0.
    """
    if not parameters:
        return parameters
    _refuse_unsupported("the request", parameters)
    _whole_number(parameters, "timeout", "microseconds")
    _whole_number(parameters, "priority", "a level")
    return parameters


def check_tensor_parameters(name: str, parameters: Parameters) -> None:
    """Raise UnsupportedError if a tensor's parameter requests an unsupported feature."""
    if parameters:
        _refuse_unsupported(f"tensor {name!r}", parameters)


def add_input(inputs: dict[str, Array], name: str, array: Array) -> None:
    """Add an input; raise InvalidInputError if its name is already present."""
    if name in inputs:
        raise InvalidInputError(f"input {name!r} is present twice; send it once")
    inputs[name] = array


def add_form(forms: dict[str, ArrayForm], name: str, datatype: str, shape: Sequence[int]) -> None:
    """Add the declared form of an input.

    Raises:
        WireError: The datatype is unknown, or the shape is impossible.
        InvalidInputError: Its name is already present.
    """
    if name in forms:
        raise InvalidInputError(f"input {name!r} is present twice; send it once")
    what = f"input {name!r}"
    forms[name] = ArrayForm(dtype_of(datatype, what), check_shape(shape, name=what))


def elements_in(forms: Mapping[str, ArrayForm]) -> int:
    """Return the total number of elements of the inputs."""
    return sum(math.prod(form.shape) for form in forms.values())


def _refuse_unsupported(what: str, parameters: Parameters) -> None:
    for name, remedy in _UNSUPPORTED.items():
        if parameters.get(name):
            raise UnsupportedError(f"{what} has the parameter {name!r}; {remedy}")


def _whole_number(parameters: Parameters, name: str, unit: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise InvalidInputError(f"parameter {name!r} is {value!r}; give {unit} as a whole number from 0 up")
    return value
