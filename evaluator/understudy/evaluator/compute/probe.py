"""Finds out by running a model what its graph does not tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from understudy.checkpoints.signature import TensorSpec
from understudy.evaluator.compute.inputs import example_inputs
from understudy.evaluator.errors import InvalidInputError, LoadError
from understudy.evaluator.types import Array, Arrays

Run = Callable[[Arrays], dict[str, Any]]

_LENGTHS = (8, 64, 256)
_ROWS_PER_REPLICA = 4


def find_example_length(run: Run, specs: Sequence[TensorSpec]) -> int:
    """Return a length for axes of any length at which the model runs: a network of many poolings needs a large image.

    Raises:
        InvalidInputError: The model runs at no length that was tried.
    """
    lengths = _LENGTHS if any(None in spec.shape[1:] for spec in specs) else _LENGTHS[:1]
    for length in lengths[:-1]:
        try:
            run(example_inputs(specs, rows=1, length=length))
        except InvalidInputError:
            continue
        return length
    run(example_inputs(specs, rows=1, length=lengths[-1]))
    return lengths[-1]


def rows_depend_on_each_other(run: Run, specs: Sequence[TensorSpec], *, replicas: int, length: int) -> bool:
    """Whether a row's outputs change with the rows beside it, as with a BatchNorm that is not frozen at inference.

    Raises:
        LoadError: An output does not have one row for each row of input.
    """
    rows = _ROWS_PER_REPLICA * replicas
    batch = example_inputs(specs, rows=rows, length=length, seed=0)
    together = {name: tensor.numpy() for name, tensor in run(batch).items()}
    _check_batch_major(together, rows)
    alone = run({name: array[:1] for name, array in batch.items()})
    return not all(_close(array[:1], alone[name].numpy()) for name, array in together.items())


def _check_batch_major(outputs: Arrays, rows: int) -> None:
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise LoadError(
                f"output {name!r} has shape {list(array.shape)} for {rows} rows of input; a model whose outputs do not "
                f"have one row for each row of input, [{rows}, ...], cannot be split over replicas or batches"
            )


def _close(left: Array, right: Array) -> bool:
    """Whether two outputs differ by no more than the rounding of a long computation."""
    if left.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    return bool(np.allclose(left, right, rtol=1e-2, atol=1e-3, equal_nan=True))
