"""Examples of every datatype, the same in every environment. Needs NumPy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
}
"""The Open Inference Protocol's name by NumPy's."""

HALVES = ("float16", "bfloat16")
"""Datatypes without typed contents, and without JSON in tritonclient."""

WIDTH = 3

EVERY = "every"
"""The model with an input ``in_DTYPE`` and an output ``out_DTYPE`` for every dtype, each output its input."""
EVERY_STEP = 7

PLAIN = "plain"
"""The model with one input ``x`` and one output ``y``, float32, which is the input times the step."""
PLAIN_STEPS = (1, 2, 3)
"""All of them are loaded; the last is serving."""


def values(dtype: str, *, rows: int = 5, seed: int = 0) -> Any:
    """Return examples ``[examples, 3]``: extremes and random values."""
    random = np.random.default_rng([seed, list(DTYPES).index(dtype)])
    shape = (rows, WIDTH)
    if dtype == "string":
        texts = [b"", b"\0", "grüße".encode(), b"x" * 300]
        return random.choice(np.array(texts, dtype=object), shape)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if "float" in dtype:
        return _with_extremes(random.normal(size=shape).astype(kind))
    whole = np.iinfo(kind)
    array = random.integers(whole.min, whole.max, shape, dtype=kind, endpoint=True)
    array[0, :2] = whole.min, whole.max
    return array


def packed(array: Any) -> list[str]:
    """Return the bits of an array's elements as text, for comparison with other environments."""
    flat = np.asarray(array).ravel()
    if flat.dtype.kind in "OS":
        return [bytes(element).hex() for element in flat]
    return [element.tobytes().hex() for element in flat]


def _with_extremes(array: Any) -> Any:
    array[0] = [np.inf, -np.inf, -0.0]
    array[1, 0] = np.nan
    return array
