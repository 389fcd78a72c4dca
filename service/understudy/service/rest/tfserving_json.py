"""The JSON of TensorFlow Serving's REST API: https://www.tensorflow.org/tfx/serving/api_rest.

It has no dtypes, so values become arrays of the model's. Text stands for bytes, and ``{"b64": ...}`` for those that are
no UTF-8.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, ArrayForm, Arrays, TensorSpec
from understudy.service.handlers.inference import DATATYPES
from understudy.service.rest.json_values import (
    check_length,
    compact,
    decode_data,
    encode_data,
    let_go,
    optional_text,
    parse_json,
)
from understudy.wire import WireError, from_elements, strings

_ROWS: Final = "instances"
_COLUMNS: Final = "inputs"
_BASE64: Final = "b64"
_BYTES_SUFFIX: Final = "_bytes"
"""How the names of outputs end whose values are bytes in base64."""
_STRING: Final = "string"
_AT_ONCE: Final = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictValues:
    """A request to predict.

    Attributes:
        inputs: Arrays ``[examples, ...]`` by name.
        signature_name: The name of the signature; empty for the default one.
        by_example: Whether the response lists the outputs of each example, rather than one array for each output.
    """

    inputs: Arrays
    signature_name: str
    by_example: bool


def parse_predict(
    body: bytes, specs: Sequence[TensorSpec], check_forms: Callable[[Mapping[str, ArrayForm]], None]
) -> PredictValues:
    """Parse a body.

    Args:
        body: The JSON.
        specs: The inputs of the version.
        check_forms: Raises InvalidInputError if the inputs, before they are built, do not fit the version.

    Raises:
        InvalidInputError: The JSON is malformed, is not such a request, or its values do not fit the model.
        WireError: Values are of another type than the model's, or their arrays differ in length.
    """
    request = parse_json(body)
    try:
        return _parsed(request, specs, check_forms)
    finally:
        let_go(request)


def _parsed(
    request: Mapping[str, Any], specs: Sequence[TensorSpec], check_forms: Callable[[Mapping[str, ArrayForm]], None]
) -> PredictValues:
    by_example = _ROWS in request
    if by_example == (_COLUMNS in request):
        came = "both" if by_example else "neither"
        raise InvalidInputError(
            f"a request has either {_ROWS}, the examples, or {_COLUMNS}, an array for each input; got {came}"
        )
    values = _of_examples(request[_ROWS], specs) if by_example else _by_name(request[_COLUMNS], specs, _COLUMNS)
    _check_names(values)
    flat = {name: _flattened(value, f"input {name!r}") for name, value in values.items()}
    dtypes = {spec.name: spec.dtype for spec in specs}
    try:
        check_forms({name: ArrayForm(dtypes.get(name, _STRING), shape) for name, (shape, _) in flat.items()})
        return PredictValues(
            inputs={name: _array(each, dtypes[name], shape, f"input {name!r}") for name, (shape, each) in flat.items()},
            signature_name=_signature_name(request),
            by_example=by_example,
        )
    finally:
        let_go([elements for _, elements in flat.values()])


def _signature_name(request: Mapping[str, Any]) -> str:
    name = optional_text(request, "signature_name", "the request")
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a pair, which no message can hold
        raise InvalidInputError(f"the request: signature_name is {name!r}; text was expected") from None
    return name


def _of_examples(rows: Any, specs: Sequence[TensorSpec]) -> Mapping[str, Any]:
    """Return the values of examples, each a value or an object with one for each input, by the names of inputs."""
    if not isinstance(rows, list) or not rows:
        raise InvalidInputError(f"{_ROWS} must be an array of at least one example")
    if not _has_names(rows[0]):
        return _by_name(rows, specs, f"an example of {_ROWS}")
    names = rows[0].keys()
    _check_names(names)
    for number, row in enumerate(rows):
        if not _has_names(row) or row.keys() != names:
            raise InvalidInputError(
                f"example {number} of {_ROWS} must be an object with the members of the first one, "
                f"{', '.join(map(repr, names))}"
            )
    return {name: [row[name] for row in rows] for name in names}


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        check_length(name, "the name of an input")


def _by_name(value: Any, specs: Sequence[TensorSpec], what: str) -> Mapping[str, Any]:
    if _has_names(value):
        named: Mapping[str, Any] = value
        return named
    if len(specs) != 1:
        names = ", ".join(repr(spec.name) for spec in specs)
        raise InvalidInputError(f"{what} must be an object with a member for each input of the model, {names}")
    return {specs[0].name: value}


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() != {_BASE64}


def _flattened(value: Any, name: str) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of nested arrays, and their elements."""
    shape: list[int] = []
    level = [value]
    while any(isinstance(each, list) for each in level):
        lengths = {len(each) if isinstance(each, list) else None for each in level}
        if len(lengths) > 1:
            raise WireError(f"{name}: its arrays differ in length on axis {len(shape)}; all must have the same")
        shape.append(len(level[0]))
        level = [element for each in level for element in each]
    return tuple(shape), level


def _array(elements: list[Any], dtype: str, shape: tuple[int, ...], name: str) -> Array:
    if dtype != _STRING:
        return decode_data(elements, DATATYPES[dtype], shape, name=name)
    return from_elements(strings([_bytes_of(each, name) for each in elements]), shape, noun="elements", name=name)


def _bytes_of(value: Any, name: str) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict) and isinstance(text := value.get(_BASE64), str):
            return base64.b64decode(text, validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise WireError(f"{name}: an element cannot be decoded: {error}") from None
    raise WireError(f'{name}: an element is neither text nor {{"{_BASE64}": TEXT}}')


def render_predict(outputs: Arrays, *, by_example: bool) -> bytes:
    """Return the body of a response.

    Args:
        outputs: Arrays ``[examples, ...]`` by name.
        by_example: Whether to list the outputs of each example.

    Raises:
        InvalidInputError: An output holds bytes that are not UTF-8, and its name does not end in ``_bytes``.
    """
    if not by_example:
        return (
            f'{{"outputs":{_alone_or_named({name: _json(array, name) for name, array in outputs.items()})}}}'.encode()
        )
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        return f'{{"predictions":{_json(array, name)}}}'.encode()
    examples = range(len(next(iter(outputs.values()))))
    rows = (
        _alone_or_named({name: _json(array[each, ...], name) for name, array in outputs.items()}) for each in examples
    )
    return f'{{"predictions":[{",".join(rows)}]}}'.encode()


def _alone_or_named(values: Mapping[str, str]) -> str:
    if len(values) == 1:
        return next(iter(values.values()))
    return f"{{{','.join(f'{compact(name)}:{value}' for name, value in values.items())}}}"


def _json(array: Array, name: str) -> str:
    """Return an array as nested JSON arrays, built in pieces, so that other threads run in between."""
    if array.dtype.kind == "O" and name.endswith(_BYTES_SUFFIX):
        return compact(_in_base64(array))
    if array.ndim == 0:
        return encode_data(array, name=name)[1:-1]
    if array.ndim == 1:
        return encode_data(array, name=name)
    if array.size <= _AT_ONCE and array.dtype.kind in "biuf":
        return compact(array.tolist())
    return f"[{','.join(_json(row, name) for row in array)}]"


def _in_base64(array: Array) -> Any:
    if array.ndim == 0:
        return {_BASE64: base64.b64encode(array.item()).decode()}
    return (
        [_in_base64(row) for row in array]
        if array.ndim > 1
        else [{_BASE64: base64.b64encode(element).decode()} for element in array]
    )
