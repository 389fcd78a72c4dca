"""How often each example is drawn in each resample of the Poisson bootstrap.

Resampling n examples with replacement draws each example a number of times that is Poisson(1) distributed, except for
the constraint that the numbers add up to n. Without the constraint the numbers are independent, so that each example
can be weighted as it arrives (Hanley and MacGibbon, "Creating non-parametric bootstrap samples using Poisson
frequencies", 2006; Chamandy et al., "Estimating uncertainty for massive data streams", 2012).

A draw is a function of the seed, the number of the resample and the place of the example in its dataset, computed by a
counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). It depends neither on the
sizes of the batches nor on what is scored, so that all versions, metrics and slices are resampled alike, on whatever
day they are scored.
"""

from __future__ import annotations

import math

import numpy as np

from understudy.evaluator.types import Array

_DRAWS_OF_COUNTER = 16
"""One value of the counter gives 256 random bits: 16 bits for the draw of each of 16 resamples."""

_CHOICES = 2**16


def _table() -> Array:
    """Return the draw for each number of 16 bits, the inverse of Poisson(1)'s distribution function."""
    chances = [math.exp(-1) / math.factorial(draws) for draws in range(12)]
    limits = np.round(np.cumsum(chances) * _CHOICES)
    return np.searchsorted(limits, np.arange(_CHOICES), side="right").astype(np.uint8)


_TABLE = _table()


def draw(seed: int, resamples: int, first: int, examples: int) -> Array:
    """Return how often each example is drawn in each resample, uint8 ``[resamples, examples]``.

    Args:
        seed: The seed, at least 0.
        resamples: The number of resamples.
        first: The place of the first example in its dataset, from 0.
        examples: The number of examples.
    """
    blocks = [np.zeros((examples, 0), np.uint8)]
    for block in range(-(-resamples // _DRAWS_OF_COUNTER)):
        generator = np.random.Philox(key=[seed, block], counter=first)
        bits = generator.random_raw(4 * examples).astype("<u8", copy=False)
        blocks.append(_TABLE[bits.view("<u2")].reshape(examples, _DRAWS_OF_COUNTER))
    return np.concatenate(blocks, axis=1)[:, :resamples].T
