"""Logged requests as TFRecord examples, which `understudy.evaluator.datasets.dataset_files` reads as a dataset.

A request of n examples becomes n records. A record holds the example's inputs under their names, what was answered
under the outputs' names (as targets), and what is known of the request under names that begin with ``request/``:

- ``request/step``, ``request/time`` (microseconds since the epoch), ``request/method``, ``request/caller`` (empty if it
  is not known);
- ``request/redacted``, the names of the inputs whose values were replaced, if there are any;
- ``request/answer/NAME``, each output exactly as it was answered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from understudy.compat.error_texts import first_line
from understudy.evaluator.datasets.dataset_files import REQUEST_PREFIX, read_records, value_of
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.types import Array, Arrays, Signature
from understudy.experiments.file_sizes import check_filled

STEP, TIME, METHOD, CALLER, REDACTED = (
    REQUEST_PREFIX + name for name in ("step", "time", "method", "caller", "redacted")
)
ANSWER_PREFIX = f"{REQUEST_PREFIX}answer/"

_MICROSECONDS = 1e6


class LoggedRequest(NamedTuple):
    """One answered request.

    Attributes:
        inputs: Every input by name, ``[examples, ...]``.
        outputs: Every output by name, ``[examples, ...]``.
        step: The step that answered.
        recorded_at: When, in seconds since the epoch.
        method: The path of the method, such as ``/understudy.v1.PredictionService/Predict``.
        caller: The caller's name, or empty.
    """

    inputs: Arrays
    outputs: Arrays
    step: int
    recorded_at: float
    method: str
    caller: str


@dataclass(frozen=True, kw_only=True)
class LoggedExample:
    """One example of a logged request, as it is read back; arrays are without the axis of examples."""

    inputs: Arrays
    answers: Arrays
    step: int
    recorded_at: float
    method: str
    caller: str
    redacted: tuple[str, ...] = field(default=())


def redacted(inputs: Arrays, names: Sequence[str]) -> dict[str, Array]:
    """Return the inputs with the values of some replaced: numbers by 0, strings by empty ones. Shapes stay.

    Raises:
        KeyError: There is no input of a name.
    """
    replaced = {name: _blank(inputs[name]) for name in names}
    return {**inputs, **replaced}


def _blank(array: Array) -> Array:
    return np.full(array.shape, b"", object) if array.dtype.kind == "O" else np.zeros_like(array)


def encode_request(
    request: LoggedRequest, *, targets: Arrays | None = None, redacted_names: Sequence[str] = ()
) -> list[bytes]:
    """Return one serialized `tf.train.Example` for each example of a request, whose inputs are redacted already.

    Args:
        request: The request.
        targets: The targets by the names of outputs, ``[examples, ...]``; the answers by default.
        redacted_names: The names of the inputs whose values were replaced.
    """
    import tensorflow as tf

    shared = tf.train.Example()
    known = shared.features.feature
    known[STEP].int64_list.value.append(request.step)
    known[TIME].int64_list.value.append(round(request.recorded_at * _MICROSECONDS))
    known[METHOD].bytes_list.value.append(request.method.encode())
    known[CALLER].bytes_list.value.append(request.caller.encode())
    if redacted_names:
        known[REDACTED].bytes_list.value.extend(name.encode() for name in redacted_names)
    head = shared.SerializeToString()
    columns: dict[str, Sequence[Sequence[bytes]]] = {}
    for name, array in request.outputs.items():
        answers = [[content] for content in serialized_tensors(array)]
        columns[ANSWER_PREFIX + name] = answers
    columns |= {name: _column(array) for name, array in (request.outputs if targets is None else targets).items()}
    columns |= {name: _column(array) for name, array in request.inputs.items()}
    # As for tensors, below.
    return [
        head + _example({name: column[index] for name, column in columns.items()})
        for index in range(len(next(iter(request.inputs.values()))))
    ]


def read_logged(paths: Sequence[Path], signature: Signature) -> Iterator[LoggedExample]:
    """Yield the examples of a request log in their order, with inputs shaped by the model's signature.

    Raises:
        ConfigurationError: A file is damaged, or holds records of something else.
    """
    for record in read_records("request log", paths):
        try:
            example = _logged(record, signature)
        except (DecodeError, IndexError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"a record of the request log cannot be read ({first_line(error)}); give files that --request-log wrote"
            ) from error
        yield example


def _logged(record: bytes, signature: Signature) -> LoggedExample:
    """Return the example of a record; raise ConfigurationError, DecodeError, IndexError, TypeError or ValueError."""
    import tensorflow as tf

    features = tf.train.Example.FromString(record).features.feature
    if STEP not in features:
        raise ConfigurationError(
            f"a record without {STEP!r} is no logged request; give a folder that --request-log wrote"
        )
    names = [spec.name for spec in signature.inputs]
    missing = [name for name in names if name not in features]
    if missing:
        raise ConfigurationError(
            f"a logged request has no input {missing[0]!r}, which the model takes; it has "
            f"{sorted(name for name in features if not name.startswith(REQUEST_PREFIX))}"
        )
    return LoggedExample(
        inputs={name: value_of(features[name], name, signature) for name in names},
        answers={
            name.removeprefix(ANSWER_PREFIX): _read_tensor(feature, name)
            for name, feature in features.items()
            if name.startswith(ANSWER_PREFIX)
        },
        step=features[STEP].int64_list.value[0],
        recorded_at=features[TIME].int64_list.value[0] / _MICROSECONDS,
        method=features[METHOD].bytes_list.value[0].decode(),
        caller=features[CALLER].bytes_list.value[0].decode(),
        redacted=redacted_inputs(features),
    )


def serialized_tensors(array: Array) -> list[bytes]:
    """Return each example of an array ``[examples, ...]`` as `tf.io.serialize_tensor` writes it."""
    import tensorflow as tf

    if array.dtype.kind == "O":
        rows = (array[index : index + 1].reshape(array.shape[1:]) for index in range(len(array)))
        return [tf.make_tensor_proto(row).SerializeToString() for row in rows]
    # The bytes of two messages after one another are those of both merged.
    head = _form(array.dtype, array.shape[1:])
    numbers = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return [head + _content(row.tobytes()) for row in numbers]


@functools.lru_cache(maxsize=256)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a TensorProto without its content."""
    import tensorflow as tf

    message = tf.make_tensor_proto(0)
    message.Clear()
    message.dtype = tf.as_dtype(dtype).as_datatype_enum
    message.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
    content: bytes = message.SerializeToString()
    return content


def _content(values: bytes) -> bytes:
    """Return the content of a TensorProto."""
    import tensorflow as tf

    message = tf.make_tensor_proto(0)
    message.Clear()
    message.tensor_content = values
    content: bytes = message.SerializeToString()
    return content


def _column(array: Array) -> Sequence[Sequence[bytes]]:
    """Return the values of each example's feature: the strings of a string tensor, and any other tensor serialized."""
    if array.dtype.kind == "O":
        return [row.ravel().tolist() for row in array.reshape(len(array), -1)]
    return [[content] for content in serialized_tensors(array)]


def _example(features: Mapping[str, Sequence[bytes]]) -> bytes:
    import tensorflow as tf

    example = tf.train.Example()
    for name, values in features.items():
        example.features.feature[name].bytes_list.value.extend(values)
    content: bytes = example.SerializeToString()
    return content


def _read_tensor(feature: Any, name: str) -> Array:
    import tensorflow as tf

    content = feature.bytes_list.value[0]
    message = tf.make_tensor_proto(0).FromString(content)
    check_filled(message, len(content), name)
    array: Array = tf.make_ndarray(message)
    return array


def redacted_inputs(features: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the inputs of a record whose values were replaced."""
    return tuple(name.decode() for name in features[REDACTED].bytes_list.value) if REDACTED in features else ()
