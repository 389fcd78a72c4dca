"""One request to infer and its answer, whichever form of the protocol they came in."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays
from understudy.service.handlers.oip.datatypes import dtype_of
from understudy.service.handlers.request_errors import UnsupportedError
from understudy.wire import check_shape

Parameter = bool | int | float | str
Parameters = Mapping[str, Parameter]

MAX_ELEMENTS_AT_ONCE = 8192
"""As many elements are built on the event loop; more on another thread."""

_MICROSECONDS = 1e6
_LARGEST = 2**64 - 1

_UNSUPPORTED: Mapping[str, str] = {
    "sequence_id": "sequences are not supported; every request stands for itself: leave sequence_id out",
    "shared_memory_region": "shared memory is not supported; send and take tensors in the message",
    "classification": "classification is not supported; take the output as it is and sort it",
}


class Inference(NamedTuple):
    """A request to infer.

    Attributes:
        model_name: The model's name.
        inputs: Every input by name, ``[examples, ...]``.
        model_version: A step or a label as text; empty for the serving version.
        id: What the caller calls the request.
        parameters: Settings of the request, already checked.
        outputs: The names of the outputs wanted, in order; empty for all.
    """

    model_name: str
    inputs: Arrays
    model_version: str = ""
    id: str = ""
    parameters: Parameters = MappingProxyType({})
    outputs: tuple[str, ...] = ()

    def deadline(self, callers: float | None) -> float | None:
        """Return when the answer is no longer wanted: the caller's deadline, or the request's own if it is earlier.

        Both are on `time.monotonic`'s clock, in seconds; None is never.
        """
        timeout = _whole_number(self.parameters, "timeout", "microseconds") if self.parameters else 0
        if not timeout:
            return callers
        own = time.monotonic() + timeout / _MICROSECONDS
        return own if callers is None else min(own, callers)


def check_parameters(parameters: Parameters) -> Parameters:
    """Return a request's parameters; those that are unknown are passed over.

    Raises:
        UnsupportedError: One asks for what this server does not do.
        InvalidInputError: The timeout or the priority is no whole number from 0 up.
    """
    if not parameters:
        return parameters
    _refuse_unsupported("the request", parameters)
    _whole_number(parameters, "timeout", "microseconds")
    _whole_number(parameters, "priority", "a level")
    return parameters


def check_tensor_parameters(name: str, parameters: Parameters) -> None:
    """Raise UnsupportedError if a tensor's parameter asks for what this server does not do."""
    if parameters:
        _refuse_unsupported(f"tensor {name!r}", parameters)


def add_input(inputs: dict[str, Array], name: str, array: Array) -> None:
    """Add an input; raise InvalidInputError if there is one of its name."""
    if name in inputs:
        raise InvalidInputError(f"input {name!r} came twice; send each once")
    inputs[name] = array


def add_form(forms: dict[str, ArrayForm], name: str, datatype: str, shape: Sequence[int]) -> None:
    """Add what an input claims to be.

    Raises:
        WireError: The datatype is unknown, or no array can have the shape.
        InvalidInputError: There is an input of its name.
    """
    if name in forms:
        raise InvalidInputError(f"input {name!r} came twice; send each once")
    what = f"input {name!r}"
    forms[name] = ArrayForm(dtype_of(datatype, what), check_shape(shape, name=what))


def elements_in(forms: Mapping[str, ArrayForm]) -> int:
    """Return how many elements inputs have, in all."""
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
