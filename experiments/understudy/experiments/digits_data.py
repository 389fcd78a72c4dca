"""The data of the digits experiment: 1,797 real images of 8 x 8 pixels that come with scikit-learn.

They are the test part of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998. Importing this module imports neither TensorFlow nor scikit-learn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from understudy.experiments.experiment_errors import ExperimentError

Split = Literal["train", "validation", "test"]

_SPLIT_SEED = 1998
_VALIDATION_SIZE = 297
_TEST_SIZE = 300
_LARGEST_PIXEL = 16.0


@dataclass(frozen=True, kw_only=True)
class Images:
    """One part of the data.

    Attributes:
        x: Images, float32 ``[n, 8, 8, 1]`` from 0 to 1.
        y: Labels, int64 ``[n]`` from 0 to 9.
        indices: Their places in scikit-learn's order, int64 ``[n]``.
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


def load_split(split: Split) -> Images:
    """Return one part of the data. The parts are disjoint and cover all images.

    Raises:
        ExperimentError: scikit-learn is not installed.
    """
    return _load_splits()[split]


@cache
def _load_splits() -> Mapping[Split, Images]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ExperimentError(
            "the digits come with scikit-learn, which is not installed; pip install 'understudy[examples]'",
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    order = _shuffled(len(labels))
    held_out = _TEST_SIZE + _VALIDATION_SIZE
    parts: Mapping[Split, npt.NDArray[np.int64]] = {
        "test": order[:_TEST_SIZE],
        "validation": order[_TEST_SIZE:held_out],
        "train": order[held_out:],
    }
    return {split: _select(pixels, labels, indices) for split, indices in parts.items()}


def _shuffled(size: int) -> npt.NDArray[np.int64]:
    """Return 0 to ``size`` - 1 in an order that does not depend on a random number generator."""
    return np.array(sorted(range(size), key=lambda index: hashlib.sha256(f"{_SPLIT_SEED}/{index}".encode()).digest()))


def _select(
    pixels: npt.NDArray[np.float64],
    labels: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int64],
) -> Images:
    x = (pixels[indices] / _LARGEST_PIXEL).astype(np.float32).reshape(-1, 8, 8, 1)
    return Images(x=x, y=labels[indices].astype(np.int64), indices=indices)
