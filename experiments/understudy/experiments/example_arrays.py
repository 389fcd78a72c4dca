"""Reads arrays from files, and finds a model's inputs and targets among them.

The evaluator's ``--eval-data`` and the commands that send examples share these rules. The keys of an ``.npz`` file are
the names of the model's inputs and, for scoring, of those outputs that have targets. A single input may also be ``x``,
a single target ``y`` or ``targets``. Any may be `numpy.savez`'s ``arr_0``, ``arr_1`` and so on, the inputs first, in
the model's order. ``sample_weight`` holds a weight for each example, and ``key`` its name in lists of examples. Other
arrays are features that the model does not take, with one value for each example; they have to be named to be read. A
``.npy`` file holds one array, ``arr_0``.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from understudy.experiments.experiment_errors import ExampleError
from understudy.experiments.file_sizes import check_arrays, check_regular

Array = npt.NDArray[Any]

WEIGHT_KEY = "sample_weight"
"""The key of the weights of the examples."""

EXAMPLE_KEY = "key"
"""The key of the names of the examples."""

_INPUT_ALIASES = ("x",)
_TARGET_ALIASES = ("y", "targets")
_POSITIONAL = re.compile(r"arr_\d+")
_TEXT = "OSU"
_TIMES = "mM"


class Tensor(Protocol):
    """An input or output of a model."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """NumPy's name of its dtype, ``string`` for bytes."""


TensorT = TypeVar("TensorT", bound=Tensor)


@dataclass(frozen=True, kw_only=True)
class FoundExamples:
    """Arrays ``[examples, ...]`` by the names of inputs, outputs and features; weights ``[examples]``."""

    inputs: Mapping[str, Array]
    targets: Mapping[str, Array]
    sample_weight: Array | None
    features: Mapping[str, Array]


def read_arrays(file: Path, *, name: str | None = None) -> dict[str, Array]:
    """Read all arrays of a ``.npy`` or ``.npz`` file into memory, by their keys. Dates and times become text.

    Args:
        file: The file.
        name: Its name in errors; its path if None.

    Raises:
        FileNotFoundError: There is no such file.
        ExampleError: It is damaged, holds Python objects, has another format, or does not fit into memory.
    """
    try:
        check_regular(file.stat())
        with file.open("rb") as stream:
            check_arrays(stream)
            content = np.load(stream, allow_pickle=False)
            arrays = {"arr_0": content} if isinstance(content, np.ndarray) else {key: content[key] for key in content}
            return {key: array.astype(str) if array.dtype.kind in _TIMES else array for key, array in arrays.items()}
    except FileNotFoundError:
        raise
    except (
        ExampleError,
        OSError,
        EOFError,
        ValueError,
        TypeError,
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ExampleError(
            f"{name or file} is not a readable .npy or .npz file ({error}); write it with numpy.save or numpy.savez, "
            "without Python objects"
        ) from error


def portable(array: Array) -> Array:
    """Return an array of a dtype that these files have: bfloat16 becomes float32, and bytes have a fixed width."""
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return array.astype("S") if array.dtype.kind == "O" else array


def input_keys(inputs: Sequence[Tensor]) -> list[tuple[str, ...]]:
    """Return the keys under which each input is looked up, the preferred one first."""
    return _keys(inputs, _INPUT_ALIASES, first=0)


def target_keys(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[tuple[str, ...]]:
    """Return the keys under which the target of each output is looked up, the preferred one first."""
    return _keys(outputs, _TARGET_ALIASES, first=len(inputs))


def is_renamed(key: str) -> bool:
    """Return whether arrays under a key have the name of an input or output of the model, which may be another."""
    return key in (*_INPUT_ALIASES, *_TARGET_ALIASES) or _POSITIONAL.fullmatch(key) is not None


def tensor_of(key: str, tensors: Sequence[TensorT], keys: Sequence[tuple[str, ...]]) -> TensorT | None:
    """Return the tensor that an array of this key belongs to, or None."""
    return next((tensor for tensor, accepted in zip(tensors, keys, strict=True) if key in accepted), None)


def find_inputs(origin: str, arrays: Mapping[str, Array], inputs: Sequence[Tensor]) -> dict[str, Array]:
    """Return the model's inputs in its dtypes, by name; other arrays are ignored.

    Args:
        origin: What holds the arrays, for errors.
        arrays: Arrays ``[examples, ...]`` by key.
        inputs: The inputs of the model, in its order.

    Raises:
        ExampleError: An input is missing or has another kind of dtype, or the inputs differ in length.
    """
    had = f"{origin} has the arrays {sorted(arrays)}"
    found = cast_inputs(origin, _take(had, dict(arrays), inputs, input_keys(inputs)), inputs)
    common_length(origin, found)
    return found


def find_examples(
    origin: str,
    arrays: Mapping[str, Array],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    features: Collection[str] = (),
) -> FoundExamples:
    """Return the model's inputs, and the targets, weights and features if there are any.

    Which outputs need targets depends on what the model is compiled with.

    Args:
        origin: What holds the arrays, for errors.
        arrays: Arrays ``[examples, ...]`` by key.
        inputs: The inputs of the model, in its order.
        outputs: The outputs of the model, in its order.
        features: The names of features that the model does not take.

    Raises:
        ExampleError: An input is missing, an array is unknown to the model or of another kind of dtype, or they differ
            in length.
    """
    left = dict(arrays)
    had = f"{origin} has the arrays {sorted(arrays)}"
    weight = left.pop(WEIGHT_KEY, None)
    accepted = input_keys(inputs), target_keys(inputs, outputs)
    found = _take(had, left, inputs, accepted[0])
    with_targets = [
        (output, keys) for output, keys in zip(outputs, accepted[1], strict=True) if left.keys() & set(keys)
    ]
    targets = _take(had, left, *zip(*with_targets, strict=True)) if with_targets else {}
    named = {key: left.pop(key) for key in sorted(left.keys() & {*features, EXAMPLE_KEY})}
    if left:
        raise ExampleError(
            f"{origin} has arrays that are unknown to the model: {sorted(left)}; it takes "
            f"{'; '.join(map(_either, [*accepted[0], *accepted[1]]))}; optionally {WEIGHT_KEY!r}, "
            f"{EXAMPLE_KEY!r}, and features that --slice names; leave out the others"
        )
    common_length(origin, arrays)
    return FoundExamples(
        inputs=cast_inputs(origin, found, inputs), targets=targets, sample_weight=weight, features=named
    )


def common_length(origin: str, arrays: Mapping[str, Array]) -> int:
    """Return the length of axis 0 of all arrays.

    Raises:
        ExampleError: They differ in it, or it is 0.
    """
    lengths = {key: int(array.shape[0]) if array.ndim else 0 for key, array in arrays.items()}
    length = next(iter(lengths.values()), 0)
    if not length or any(other != length for other in lengths.values()):
        raise ExampleError(
            f"{origin} has arrays with these numbers of examples: {lengths}; all need the same, at least 1"
        )
    return length


def cast_inputs(origin: str, inputs: Mapping[str, Array], tensors: Sequence[Tensor]) -> dict[str, Array]:
    """Return inputs in the model's dtypes, cast within a kind or to a wider kind, as Keras does; text is not cast.

    Raises:
        ExampleError: A cast would change the kind of values, such as float32 to int64.
    """
    return {tensor.name: _cast(origin, tensor, inputs[tensor.name]) for tensor in tensors}


def _keys(tensors: Sequence[Tensor], aliases: Sequence[str], *, first: int) -> list[tuple[str, ...]]:
    more = aliases if len(tensors) == 1 else ()
    return [
        tuple(dict.fromkeys((tensor.name, *more, f"arr_{place}"))) for place, tensor in enumerate(tensors, start=first)
    ]


def _take(
    had: str, left: dict[str, Array], tensors: Sequence[Tensor], keys: Sequence[tuple[str, ...]]
) -> dict[str, Array]:
    """Remove the arrays of these tensors from ``left``, and return them by the tensors' names."""
    taken = {}
    for tensor, accepted in zip(tensors, keys, strict=True):
        key = next((key for key in accepted if key in left), None)
        if key is None:
            raise ExampleError(f"{had}; the model also needs {_either(accepted)}")
        taken[tensor.name] = left.pop(key)
    return taken


def _cast(origin: str, tensor: Tensor, array: Array) -> Array:
    if tensor.dtype == "string" or array.dtype.kind in _TEXT or array.dtype.name == tensor.dtype:
        return array
    expected = _dtype(tensor.dtype)
    if not np.can_cast(array.dtype, expected, casting="same_kind"):
        raise ExampleError(f"{origin}: input {tensor.name!r} is {array.dtype.name}, the model takes {tensor.dtype}")
    return array.astype(expected)


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def _either(keys: Sequence[str]) -> str:
    *first, last = map(repr, keys)
    return f"{', '.join(first)} or {last}" if first else last
