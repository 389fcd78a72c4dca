"""Percentile intervals of resamples, some of which may have no value."""

from __future__ import annotations

import math

import numpy as np

from understudy.evaluator.types import Array


def bounds(resampled: Array, tail: float) -> tuple[float, float] | None:
    """Return bounds that hold whatever the values are that are not finite; None if these are too many.

    Args:
        resampled: The values of the resamples, ``[resamples]``.
        tail: The share of values beyond each bound. Those that are not finite count as beyond both.
    """
    known = np.isfinite(resampled)
    if int((~known).sum()) > math.floor(tail * (len(resampled) - 1)):
        return None
    values = resampled.astype(np.float64)
    low = np.quantile(np.where(known, values, -np.inf), tail)
    high = np.quantile(np.where(known, values, np.inf), 1.0 - tail)
    return float(low), float(high)
