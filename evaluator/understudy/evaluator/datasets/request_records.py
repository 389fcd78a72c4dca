"""Logged requests as TFRecord examples, which `understudy.evaluator.datasets.dataset_files` reads as a dataset.

A request of n examples becomes n records. A record holds the example's inputs under their names, what was answered
under the outputs' names (as targets), and what is known of the request under names that begin with ``request/``:

- ``request/step``, ``request/time`` (seconds since the epoch), ``request/method``, ``request/caller`` (empty if it is
  not known);
- ``request/redacted``, the names of the inputs whose values were replaced, if there are any;
- ``request/answer/NAME``, each output exactly as it was answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from understudy.evaluator.datasets.dataset_files import REQUEST_PREFIX, read_records, value_of
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.types import Array, Arrays, Signature

STEP, TIME, METHOD, CALLER, REDACTED = (
    REQUEST_PREFIX + name for name in ("step", "time", "method", "caller", "redacted")
)
ANSWER_PREFIX = f"{REQUEST_PREFIX}answer/"

LoggedTargets = Literal["answers", "classes"]
"""What the targets are: the answers themselves, or the index of the largest value along their last axis."""


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
    request: LoggedRequest, *, targets: LoggedTargets = "answers", redacted_names: Sequence[str] = ()
) -> list[bytes]:
    """Return one serialized `tf.train.Example` for each example of a request, whose inputs are redacted already.

    Args:
        request: The request.
        targets: What the targets are.
        redacted_names: The names of the inputs whose values were replaced.
    """
    import tensorflow as tf

    common = {
        STEP: _tensor(np.asarray(request.step, np.int64)),
        TIME: _tensor(np.asarray(request.recorded_at, np.float64)),
        METHOD: _text(request.method),
        CALLER: _text(request.caller),
        **({REDACTED: _text(*redacted_names)} if redacted_names else {}),
    }
    records = []
    for index in range(len(next(iter(request.inputs.values())))):
        features = dict(common)
        for name, array in request.outputs.items():
            answer = _example(array, index)
            features[ANSWER_PREFIX + name] = _tensor(answer)
            features[name] = _feature(_target(answer, targets))
        for name, array in request.inputs.items():
            features[name] = _feature(_example(array, index))
        records.append(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return records


def read_logged(paths: Sequence[Path], signature: Signature) -> Iterator[LoggedExample]:
    """Yield the examples of a request log in their order, with inputs shaped by the model's signature.

    Raises:
        ConfigurationError: A file is damaged, or holds records of something else.
    """
    import tensorflow as tf

    for record in read_records("request log", paths):
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
        yield LoggedExample(
            inputs={name: value_of(features[name], name, signature) for name in names},
            answers={
                name.removeprefix(ANSWER_PREFIX): _read_tensor(feature)
                for name, feature in features.items()
                if name.startswith(ANSWER_PREFIX)
            },
            step=int(_read_tensor(features[STEP])),
            recorded_at=float(_read_tensor(features[TIME])),
            method=read_text(features[METHOD])[0],
            caller=read_text(features[CALLER])[0],
            redacted=read_text(features[REDACTED]) if REDACTED in features else (),
        )


def _example(array: Array, index: int) -> Array:
    """Return one example as an array, also where it is a scalar."""
    return array[index : index + 1].reshape(array.shape[1:])


def _target(answer: Array, targets: LoggedTargets) -> Array:
    if targets == "answers" or answer.ndim == 0 or answer.dtype.kind not in "fV":
        return answer
    return np.asarray(np.argmax(answer.astype(np.float32), axis=-1), np.int64)


def _feature(value: Array) -> Any:
    """Return the strings of a string tensor, and any other tensor serialized."""
    import tensorflow as tf

    if value.dtype.kind != "O":
        return _tensor(value)
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=value.ravel().tolist()))


def _tensor(value: Array) -> Any:
    import tensorflow as tf

    content = tf.make_tensor_proto(value).SerializeToString()
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))


def _text(*values: str) -> Any:
    return _tensor(np.array([value.encode() for value in values], object))


def _read_tensor(feature: Any) -> Array:
    import tensorflow as tf

    array: Array = tf.make_ndarray(tf.make_tensor_proto(0).FromString(feature.bytes_list.value[0]))
    return array


def read_text(feature: Any) -> tuple[str, ...]:
    """Return the strings of a feature such as `REDACTED`."""
    return tuple(value.decode() for value in _read_tensor(feature).ravel().tolist())
